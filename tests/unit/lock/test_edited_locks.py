"""A lock that was edited is refused, unless the edit makes it another lock that holds together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.common.errors import LockError
from builder.debian.os_lock import OS_LOCKS, OsLock, OsRequest
from builder.lock.lockfile import GROUP_LOCKS, Lock
from builder.matrix.project import Project
from tests.fakes import locks
from tests.paths import UNIT

GROUP = "em-1.10-cu1210-py311"
REQUEST = OsRequest(debian="newbird", packages=("python3", "tini"))
HINTS = ("Resolve it again: builder lock '", "Restore it with git, or make it again: builder lock --os")


@dataclass(frozen=True)
class Kind:
    """A kind of locks, with the text of one."""

    text: str
    parse: Callable[[str], Any]
    dump: Callable[[Any], str]
    contradictions: Callable[[Any], list[str]]
    entries: str


def of_wheels(lock: Lock) -> list[str]:
    names = [wheel.name for wheel in lock.wheels]
    contradictions = [*([] if names == sorted(set(names)) else ["order"]), *([] if lock.group == GROUP else ["group"])]
    needed = {name for part in lock.components.values() for name in part.wheels}
    contradictions += sorted(needed ^ set(names))
    contradictions += sorted(set(lock.held) - set(names))
    for wheel in lock.wheels:
        name, version, *_ = wheel.file.split("-")
        if (canonicalize_name(name), Version(version)) != (
            wheel.name,
            Version(wheel.version),
        ) or not wheel.file.endswith(("any.whl", "x86_64.whl")):
            contradictions.append(wheel.file)
    return contradictions


def of_packages(lock: OsLock) -> list[str]:
    names = [package.name for package in lock.packages]
    missing = {*REQUEST.packages} - set(names)
    is_asked = (lock.debian, lock.requested) == (REQUEST.debian, REQUEST.packages)
    others = [package.file for package in lock.packages if package.architecture == "arm64"]
    return [
        *others,
        *sorted(missing),
        *([] if names == sorted(set(names)) else ["order"]),
        *([] if is_asked else ["request"]),
    ]


TINY = Project(UNIT / "tiny")
KINDS = {
    "wheels": Kind(
        text=GROUP_LOCKS.dump(locks.lock_of(TINY, TINY.groups[GROUP])),
        parse=lambda text: GROUP_LOCKS.parse(text, GROUP),
        dump=GROUP_LOCKS.dump,
        contradictions=of_wheels,
        entries="wheels",
    ),
    "packages": Kind(
        text=OS_LOCKS.dump(locks.os_lock_of(REQUEST)),
        parse=lambda text: OS_LOCKS.parse(text, REQUEST),
        dump=OS_LOCKS.dump,
        contradictions=of_packages,
        entries="packages",
    ),
}


def refusal(kind: Kind, text: str) -> str:
    """The message; empty if the lock is not refused."""
    try:
        kind.parse(text)
    except LockError as error:
        caught = error
    else:
        return ""
    assert str(caught).startswith("locks/")
    assert caught.hint.startswith(HINTS)
    assert len(str(caught)) < 500
    return str(caught)


@st.composite
def edited_lines(draw: st.DrawFn, lines: Sequence[str]) -> list[str]:
    """Lines, one of which is removed, repeated, exchanged with the next, or edited."""
    at = draw(st.integers(0, len(lines) - 2))
    before, line, rest = lines[:at], lines[at], lines[at + 1 :]
    how = draw(st.sampled_from(["remove", "repeat", "exchange", "edit"]))
    if how == "edit":
        start = draw(st.integers(0, len(line)))
        end = draw(st.integers(start, min(len(line), start + 3)))
        line = line[:start] + draw(st.text('"{}[],: \r\n0aA-./\\', max_size=3)) + line[end:]
        return [*before, line, *rest]
    if how == "exchange":
        return [*before, rest[0], line, *rest[1:]]
    return [*before, *([line, line] if how == "repeat" else []), *rest]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@settings(max_examples=300)
@given(data=st.data())
def test_an_edited_lock_is_refused_or_holds_together(kind: Kind, data: st.DataObject) -> None:
    text = "\n".join(data.draw(edited_lines(kind.text.split("\n"))))
    if not refusal(kind, text):
        lock = kind.parse(text)
        assert kind.dump(lock) == text, "its text is not the one that builder writes"
        assert kind.contradictions(lock) == []


HOSTILE = ("", "--pip", "../x", "x\n--index-url y", "x y", "1.0\u0665", "x;id", "\x1b[2J", "x" * 300)


@pytest.mark.parametrize("hostile", HOSTILE, ids=ascii)
@pytest.mark.parametrize("field", ["name", "version", "file", "sha256", "architecture"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_no_field_of_an_entry_takes_a_hostile_text(kind: Kind, field: str, hostile: str) -> None:
    [entry, *_] = json.loads(kind.text)[kind.entries]
    if field in entry:
        edited = json.dumps(entry | {field: hostile})
        message = refusal(kind, kind.text.replace(json.dumps(entry), edited))
        assert f"is damaged: {kind.entries}.0.{field}: " in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "board2"),
        ("version", "9.9.9"),
        ("file", "board-9.9.9-py3-none-any.whl"),
        ("file", "bored-2.0-py3-none-any.whl"),
        ("file", "board-x-py3-none-any.whl"),
        ("file", "board-2.0.whl"),
    ],
)
def test_a_wheel_has_the_name_and_the_version_of_its_file(field: str, value: str) -> None:
    """`version: 9.9.9` reached the constraints of the image, since the layer was cached by the hash alone."""
    kind = KINDS["wheels"]
    [entry, *_] = json.loads(kind.text)[kind.entries]
    assert entry["name"] == "board"
    message = refusal(kind, kind.text.replace(json.dumps(entry), json.dumps(entry | {field: value})))
    assert re.search(r"was edited by hand: \S+\.whl is not \S+ \S+$", message)


@pytest.mark.parametrize(("wheels", "fault"), [(["board", "zinc"], "missing wheel zinc"), ([], "unused wheel board")])
def test_wheels_that_are_missing_or_unused_are_named(wheels: list[str], fault: str) -> None:
    kind = KINDS["wheels"]
    lock = kind.parse(kind.text)
    part = replace(lock.components["board"], wheels=wheels)
    edited = kind.dump(replace(lock, components={**lock.components, "board": part}))
    assert refusal(kind, edited).endswith(f"was edited by hand: {fault}")


def test_a_wheel_is_for_the_platform_of_the_lock() -> None:
    kind = KINDS["wheels"]
    message = refusal(kind, kind.text.replace('"platform": "x86_64"', '"platform": "aarch64"'))
    assert re.search(r"was edited by hand: nvidia_cuda_runtime\S+x86_64\.whl is not for aarch64$", message)


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", None, [], {}], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_the_size_of_an_entry_is_a_number_of_bytes(kind: Kind, value: object) -> None:
    [entry, *_] = json.loads(kind.text)[kind.entries]
    edited = json.dumps(entry | {"size": value})
    assert f"is damaged: {kind.entries}.0.size: " in refusal(kind, kind.text.replace(json.dumps(entry), edited))


@pytest.mark.parametrize("text", ["", "[]\n", "[" * 2000, '{"format": 1}'], ids=ascii)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_text_that_is_no_lock_is_refused(kind: Kind, text: str) -> None:
    assert refusal(kind, text)
    assert refusal(kind, kind.text.replace("\n", "\r\n"))
