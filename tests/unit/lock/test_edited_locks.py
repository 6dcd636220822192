"""Lock files are read as they were written. A damaged or edited one is refused, and one of a newer builder is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import FileError, LockError
from builder.common.lock_text import KNOWN_LAYERS, LockFiles
from builder.debian.os_lock import OS_LOCKS, OsRequest
from builder.layers.known_layers import KnownLayers
from builder.lock.lockfile import GROUP_LOCKS
from builder.lock.python_lock import PYTHON_LOCKS
from builder.matrix.project import Project
from tests.fakes import locks
from tests.paths import UNIT

GROUP = "em-1.10-cu1210-py311"
REQUEST = OsRequest(debian="newbird", packages=("python3", "tini"))
TINY = Project(UNIT / "tiny")


@dataclass(frozen=True)
class Kind:
    """A kind of locks, with one of them; `entries` is the field with its wheels or packages."""

    files: LockFiles[Any, Any]
    key: Any
    lock: Any
    hint: str
    entries: str = ""

    @property
    def text(self) -> str:
        return self.files.dump(self.lock)

    def refusal(self, text: str) -> str:
        """The message for a lock with this text."""
        with pytest.raises(LockError) as caught:
            self.files.parse(text, self.key)
        assert caught.value.hint.startswith(self.hint)
        message = str(caught.value)
        assert message.startswith(self.files.path(self.key))
        assert message.isprintable()
        assert len(message) < 500
        return message


KINDS = {
    "wheels": Kind(
        GROUP_LOCKS, GROUP, locks.lock_of(TINY, TINY.groups[GROUP]), "Resolve it again: builder lock '", "wheels"
    ),
    "packages": Kind(
        OS_LOCKS, REQUEST, locks.os_lock_of(REQUEST), "Restore it with git, or make it again: builder lock", "packages"
    ),
    "python": Kind(PYTHON_LOCKS, "3.12.1", locks.python_lock_of("3.12.1"), "Restore it with git, or delete it"),
}
LISTS = {name: kind for name, kind in KINDS.items() if kind.entries}
of_every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
of_every_list = pytest.mark.parametrize("kind", LISTS.values(), ids=LISTS.keys())


@of_every_kind
def test_read_gives_what_was_written(tmp_path: Path, kind: Kind) -> None:
    (tmp_path / "locks").mkdir()
    path = kind.files.path(kind.key)
    assert kind.files.read(tmp_path, kind.key) is None
    assert kind.files.check(tmp_path, kind.key) == [f"{path}: missing"]
    assert kind.files.write(tmp_path, kind.key, kind.lock) is True
    assert kind.files.write(tmp_path, kind.key, kind.lock) is False, "it has this text already"
    assert kind.files.read(tmp_path, kind.key) == kind.lock
    assert kind.files.check(tmp_path, kind.key) == []
    (tmp_path / path).write_bytes(b"\xff")
    [line] = kind.files.check(tmp_path, kind.key)
    assert line.startswith(f"{Path(path).name}: 'utf-8' codec can't decode")
    assert kind.files.find(tmp_path, kind.key) is None
    (tmp_path / path).unlink()
    (tmp_path / path).mkdir()
    with pytest.raises(LockError):
        kind.files.read(tmp_path, kind.key)


@of_every_kind
def test_a_text_that_is_not_the_builders(kind: Kind) -> None:
    lines = kind.text.splitlines(keepends=True)
    damaged = ["", "[]\n", "[" * 2000, '{"format": "99"}', '{"format": "\\u001b[2J"}', '{"format": [9]}']
    formatted = [kind.text.replace("\n", "\r\n"), kind.text + " ", "".join([*lines[:1], " ", *lines[1:]])]
    shorter = ["".join(lines[:-1]), "".join(lines[1:])]
    for text in (*damaged, *formatted, *shorter):
        assert kind.refusal(text)
    # As in an older revision, where nothing is damaged.
    assert "has lock format 0; this builder reads format" in kind.refusal('{"format": 0}')
    assert "is damaged" in kind.refusal('{"format": true}')


NEWER: dict[str, Callable[[Path], object]] = {
    **{kind.files.path(kind.key): lambda root, kind=kind: kind.files.read(root, kind.key) for kind in KINDS.values()},  # type: ignore[misc]
    KNOWN_LAYERS: KnownLayers,
}


@pytest.mark.parametrize(("name", "read"), NEWER.items(), ids=[*KINDS, "layers"])
def test_a_file_of_a_newer_builder(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    """No LockError: a damaged lock is made again, and this one must not be."""
    (tmp_path / "locks").mkdir()
    (tmp_path / name).write_text('{"format": 99, "unknown": {}}')
    with pytest.raises(FileError, match=r" has lock format 99; this builder reads format \d$") as caught:
        read(tmp_path)
    assert str(caught.value).startswith(name)
    assert caught.value.hint == "A newer builder wrote this file: update this builder."


def with_entry(kind: str, **changes: Any) -> Callable[[Any], Any]:
    """Edits the first wheel or package, which is `board` or `libc6`."""
    entries = KINDS[kind].entries

    def edit(lock: Any) -> Any:
        first, *others = getattr(lock, entries)
        return replace(lock, **{entries: (replace(first, **changes), *others)})

    return edit


def with_wheels_of_board(*names: str) -> Callable[[Any], Any]:
    return lambda lock: replace(
        lock, components={**lock.components, "board": replace(lock.components["board"], wheels=list(names))}
    )


ORDER = "sorted, or one is duplicated"
EDITED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "another group": ("wheels", lambda lock: replace(lock, group="other"), "it is the lock of other"),
    "wheels in another order": ("wheels", lambda lock: replace(lock, wheels=lock.wheels[::-1]), ORDER),
    "a wheel twice": ("wheels", lambda lock: replace(lock, wheels=(lock.wheels[0], *lock.wheels)), ORDER),
    # `version: 9.9.9` reached the constraints of the image, since the layer was cached by the hash alone.
    "another version": (
        "wheels",
        with_entry("wheels", version="9.9.9"),
        "board-2.0-py3-none-any.whl is not board 9.9.9",
    ),
    "another name": ("wheels", with_entry("wheels", name="board2"), "board-2.0-py3-none-any.whl is not board2 2.0"),
    "a file of another version": ("wheels", with_entry("wheels", file="board-x-py3-none-any.whl"), "is not board 2.0"),
    "a file without tags": ("wheels", with_entry("wheels", file="board-2.0.whl"), "board-2.0.whl is not board 2.0"),
    "another platform": (
        "wheels",
        lambda lock: replace(lock, basis=replace(lock.basis, platform="aarch64")),
        "x86_64.whl is not for aarch64",
    ),
    "a held package without a wheel": ("wheels", lambda lock: replace(lock, held=["zinc"]), "or one has no wheel"),
    "a missing wheel": ("wheels", with_wheels_of_board("board", "zinc"), "missing wheel zinc"),
    "an unused wheel": ("wheels", with_wheels_of_board(), "unused wheel board"),
    "another request": ("packages", lambda lock: replace(lock, debian="oldbird"), "it is the lock of another request"),
    "packages in another order": ("packages", lambda lock: replace(lock, packages=lock.packages[::-1]), ORDER),
    "another architecture": ("packages", with_entry("packages", architecture="arm64"), "_arm64.deb is not for amd64"),
    "a missing package": (
        "packages",
        lambda lock: replace(lock, packages=tuple(package for package in lock.packages if package.name != "tini")),
        "missing package tini",
    ),
    "another release": ("python", lambda lock: replace(lock, release="3.12.2"), "it is not the build of 3.12.1"),
    "another build": (
        "python",
        lambda lock: replace(lock, file=lock.file.replace("3.12.1", "3.12.0")),
        "it is not the build of 3.12.1",
    ),
}


@pytest.mark.parametrize(("name", "edit", "fault"), EDITED.values(), ids=EDITED.keys())
def test_a_lock_that_contradicts_itself(name: str, edit: Callable[[Any], Any], fault: str) -> None:
    kind = KINDS[name]
    message = kind.refusal(kind.files.dump(edit(kind.lock)))
    assert " was edited by hand: " in message
    assert message.endswith(fault)


def edited_entry(kind: Kind, field: str, value: object) -> str:
    """The text of the lock with another value of the first entry that has this field."""
    entry = json.loads(kind.text)[kind.entries][0]
    return kind.text.replace(json.dumps(entry), json.dumps(entry | {field: value}))


HOSTILE = ("", "--pip", "../x", "x\n--index-url y", "x y", "1.0\u0665", "x;id", "\x1b[2J", "x" * 300)


@pytest.mark.parametrize("hostile", HOSTILE, ids=ascii)
@of_every_list
def test_no_field_of_an_entry_takes_a_hostile_text(kind: Kind, hostile: str) -> None:
    for field in json.loads(kind.text)[kind.entries][0].keys() & {"name", "version", "file", "sha256", "architecture"}:
        assert f"is damaged: {kind.entries}.0.{field}: " in kind.refusal(edited_entry(kind, field, hostile))
    if kind.entries == "wheels":
        assert kind.refusal(edited_entry(kind, "index", hostile))


@of_every_list
def test_the_size_of_an_entry_is_a_number_of_bytes(kind: Kind) -> None:
    values: list[object] = [-1, 1.5, True, "1", None, [], {}]
    for value in values:
        assert f"is damaged: {kind.entries}.0.size: " in kind.refusal(edited_entry(kind, "size", value))


def test_a_time_that_does_not_exist() -> None:
    """`builder doctor` and `builder status` compute the age of a lock."""
    kind = KINDS["packages"]
    kind.refusal(kind.text.replace(locks.TIME, "20261399T999999Z"))


def test_the_file_of_a_python_is_one_of_uvs() -> None:
    kind = KINDS["python"]
    assert "is damaged: file: " in kind.refusal(kind.text.replace(kind.lock.file, f"../{kind.lock.file}"))
    assert "is damaged: sha256: " in kind.refusal(kind.text.replace(kind.lock.sha256, kind.lock.sha256[:-1]))
