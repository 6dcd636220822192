"""Faults of the index during resolution: the message has package and cell, and no lock changes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from tests.integration import wheels
from tests.integration.checkout import PLAIN, Checkout
from tests.integration.conftest import NewCheckout
from tests.integration.index import Fault, Index

IMPATIENT = {"UV_HTTP_TIMEOUT": "2", "UV_HTTP_RETRIES": "0"}


@pytest.fixture(scope="module")
def project(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with locks and short timeouts."""
    checkout = new_checkout(tmp_path_factory.mktemp("locked"), fresh=True)
    checkout.builder("lock")
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


def upgrade(checkout: Checkout, **environ: str) -> str:
    """Runs a resolution without a cache, which must fail; returns its output."""
    output = checkout.builder("lock", "--upgrade", code=4, UV_NO_CACHE="1", **environ)
    assert PLAIN in output
    assert "127.0.0.1" not in output
    return output


@pytest.mark.parametrize(
    "fault", [Fault.PAGE_404, Fault.PAGE_500, Fault.PAGE_STALLS, Fault.FILE_404, Fault.FILE_500, Fault.FILE_TRUNCATED]
)
def test_a_fault_of_the_index_names_the_package(locked: Checkout, index: Index, fault: Fault) -> None:
    index.faults["tinyframe"] = fault
    assert "tinyframe" in upgrade(locked)


def test_an_index_that_does_not_listen(locked: Checkout) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output = upgrade(locked, UV_DEFAULT_INDEX=f"http://127.0.0.1:{port}/simple/")
    assert str(port) not in output
    assert "index did not respond" in output


def test_credentials_of_the_index_are_not_shown(locked: Checkout, index: Index) -> None:
    index.faults["tinyframe"] = Fault.PAGE_500
    output = upgrade(locked, UV_DEFAULT_INDEX=index.url.replace("://", "://someone:a-secret@"))
    assert "someone" not in output
    assert "a-secret" not in output


def test_a_file_that_differs_from_its_hash(locked: Checkout, index: Index) -> None:
    """A lock needs only the size of the file; the build refuses it, see test_build_failures.py."""
    index.faults["tinyframe"] = Fault.FILE_HAS_OTHER_BYTES
    locked.builder("lock", "--upgrade", UV_NO_CACHE="1")


def _only_an_sdist(index: Index, release: str) -> None:
    index.publish(wheels.sdist("tinyframe", release))


def _yanked(index: Index, release: str) -> None:
    index.publish(wheels.framework(release), yanked="it eats data")


@pytest.mark.parametrize(
    ("publish", "words"),
    [
        (_only_an_sdist, ["tinyframe", "wheel"]),
        (_yanked, ["tinyframe", "yanked", "it eats data"]),
    ],
    ids=["only an sdist", "yanked"],
)
def test_a_release_that_cannot_be_locked_is_named_with_the_reason(
    locked: Checkout, index: Index, publish: Callable[[Index, str], None], words: list[str]
) -> None:
    other = "1.0.9999"
    publish(index, other)
    locked.edit("matrix.yaml", f"release: {locked.release}", f"release: {other}")
    output = upgrade(locked)
    index.withdraw("tinyframe", other)
    for word in words:
        assert word in output
