"""Faults of the index during resolution: the message has package and cell, and no lock changes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import wheels
from tests.integration.checkout import EXTRA, PLAIN, Checkout
from tests.integration.conftest import NewCheckout
from tests.integration.index import Fault, Index
from tests.integration.wheels import Distribution

IMPATIENT = {"UV_HTTP_TIMEOUT": "2", "UV_HTTP_RETRIES": "0"}


@pytest.fixture(scope="module")
def project(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with locks and short timeouts."""
    checkout = new_checkout(tmp_path_factory.mktemp("locked"), fresh=True)
    checkout.lock()
    checkout.environ |= IMPATIENT
    return checkout


@pytest.fixture
def locked(project: Checkout, index: Index) -> Iterator[Checkout]:
    """The checkout; checks that the test has not changed its locks."""
    matrix, locks = project.files("matrix.yaml"), project.files("locks")
    yield project
    assert project.files("locks") == locks
    assert list((project.root.parent / "tmp").iterdir()) == []
    (project.root / "matrix.yaml").write_bytes(matrix["matrix.yaml"])


def upgrade(checkout: Checkout, index: Index, code: int = 4) -> str:
    """Runs a resolution without a cache, which must fail; returns its output, without the address of the index."""
    address = index.url.replace("://", "://someone:a-secret@")
    output = checkout.builder("lock", "--upgrade", code=code, UV_NO_CACHE="1", UV_DEFAULT_INDEX=address)
    assert PLAIN in output
    for hidden in ("127.0.0.1", "someone", "a-secret"):
        assert hidden not in output
    return output


def test_a_fault_of_the_index_names_the_package(locked: Checkout, index: Index) -> None:
    """Other faults, as uv words them: tests/unit/lock/test_resolve.py."""
    index.faults["tinyframe"] = Fault.PAGE_STALLS
    assert "tinyframe" in upgrade(locked, index, 13)


def test_a_yanked_release_is_named_with_the_reason(locked: Checkout, index: Index) -> None:
    """One without a wheel: tests/local/test_wheel_folder.py."""
    other = "1.0.9999"
    index.publish(wheels.framework(other), yanked="it eats data")
    locked.edit("matrix.yaml", f"release: {locked.release}", f"release: {other}")
    output = upgrade(locked, index)
    index.withdraw("tinyframe", other)
    for word in ("tinyframe", "yanked", "it eats data"):
        assert word in output


@pytest.fixture
def newer(index: Index) -> Iterator[str]:
    """A release of a package that the test does not pin, until its end."""
    release = "98.0"
    for version in ("1.0", release):
        index.publish(_loose(version))
    yield release
    index.withdraw("tinyloose", release)


def _loose(version: str) -> Distribution:
    return wheels.wheel("tinyloose", version, {"tinyloose.py": b""})


def test_a_yanked_wheel_installs_and_a_deleted_one_is_replaced_as_the_hint_says(
    checkout: Checkout, index: Index, seed: Path, newer: str
) -> None:
    checkout.edit("matrix.yaml", f"[tinyextra=={checkout.extra}]", f"[tinyextra=={checkout.extra}, tinyloose]")
    checkout.lock_and_render()
    before = versions(checkout)
    assert before["tinyloose"] == newer

    index.publish(_loose(newer), yanked="it lies")
    assert f"tinyloose-{newer}-py3-none-any.whl is yanked on the index: it lies" in checkout.builder("build", EXTRA)
    assert checkout.builder("lock", "--check")

    index.withdraw("tinyloose", newer)
    checkout.take_store(like=seed)
    output = checkout.builder("build", EXTRA, code=13)
    assert f"{EXTRA}: tinyloose-{newer}-py3-none-any.whl: not listed by the index" in output
    command = "builder lock --upgrade-package PACKAGE CELLS && builder render"
    assert f"Choose another version: {command}" in output
    command = command.replace("PACKAGE", "tinyloose").replace("CELLS", EXTRA)
    for part in command.split(" && "):
        checkout.builder(*shlex.split(part)[1:])
    after = versions(checkout)
    assert {name for name in after if after[name] != before.get(name)} == {"tinyloose"}
    checkout.builder("build", EXTRA)


def versions(checkout: Checkout) -> dict[str, str]:
    """The locked wheels of the framework."""
    lock = json.loads((checkout.root / f"locks/{PLAIN}.json").read_text(encoding="utf-8"))
    return {wheel["name"]: wheel["version"] for wheel in lock["wheels"]}
