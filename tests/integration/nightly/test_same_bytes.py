"""Same inputs, same bytes, in every folder and build order; operating systems that a container makes."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.integration import stores
from tests.integration.checkout import EXTRA, IN_CONTAINER, MAKES_OS, PLAIN, Checkout, without
from tests.integration.test_interrupted import finishes, is_stopped_in_os_script


@pytest.fixture(scope="module")
def other(released_once: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """The same project in another folder, with an empty store."""
    folder = tmp_path_factory.mktemp("elsewhere")
    root = folder / "a/deeper/folder"
    shutil.copytree(released_once.root, root, symlinks=True, ignore=shutil.ignore_patterns(".builder"))
    (folder / "a/deeper/tmp").mkdir()
    checkout = Checkout(
        root=root,
        namespace=released_once.namespace,
        release=released_once.release,
        index=released_once.index,
        environ={**released_once.environ, "TMPDIR": str(folder / "a/deeper/tmp")},
    )
    checkout.take_store()
    assert not checkout.store.exists()
    return checkout


def test_two_checkouts_give_the_same_digests(released_once: Checkout, other: Checkout) -> None:
    """Built together there, one after the other in reverse order here: order and -j do not matter."""
    before = released_once.stored()
    assert set(before) == {released_once.references()[0], released_once.references("-extra")[0]}
    other.builder("build", "-j1", EXTRA)
    other.builder("build", "-j4", PLAIN)
    assert other.stored() == before
    assert stores.faults(released_once.store) == stores.faults(other.store) == []


def test_this_machine_and_a_container_make_the_same_operating_system(checkout: Checkout, tmp_path: Path) -> None:
    checkout.lock_and_render()
    checkout.base_image("trixie")  # of the container: no registry has it
    digests = []
    for path in (os.environ["PATH"], without(tmp_path, "unshare")):
        checkout.take_store()
        output = checkout.builder("build", PLAIN, PATH=path)
        assert MAKES_OS.search(output)
        assert (IN_CONTAINER in output) == (path != os.environ["PATH"])
        digests.append(checkout.stored())
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]


def test_an_interrupt_while_a_container_makes_the_operating_system(alone: Checkout, tmp_path: Path) -> None:
    alone.base_image("trixie")
    is_stopped_in_os_script(alone, signal.SIGINT, without(tmp_path, "unshare"))
    finishes(alone)
