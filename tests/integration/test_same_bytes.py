"""Same inputs, same bytes: wherever and in whatever order an image is made. (On what engine: test_containerd_store.)"""

from __future__ import annotations

import shutil

import pytest

from tests.integration import stores
from tests.integration.checkout import EXTRA, MAKES_OS, PLAIN, SHORT, Checkout


@pytest.fixture(scope="module")
def other(released_once: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """The same project in another folder, with an empty store."""
    folder = tmp_path_factory.mktemp("elsewhere")
    root = folder / "a/deeper/folder"
    shutil.copytree(released_once.root, root, symlinks=True, ignore=shutil.ignore_patterns(".builder"))
    (folder / "a/deeper/tmp").mkdir()
    made = Checkout(
        root=root,
        namespace=released_once.namespace,
        release=released_once.release,
        index=released_once.index,
        environ={**released_once.environ, "TMPDIR": str(folder / "a/deeper/tmp")},
    )
    made.take_store()
    assert not made.store.exists()
    return made


def test_two_checkouts_give_the_same_digests(released_once: Checkout, other: Checkout) -> None:
    """Built together there, one after the other here, the last one first: neither order nor -j counts."""
    before = released_once.stored()
    assert set(before) == {released_once.references()[0], released_once.references("-extra")[0]}
    other.builder("build", "-j1", EXTRA)
    other.builder("build", "-j4", PLAIN)
    assert other.stored() == before
    assert stores.faults(released_once.store) == stores.faults(other.store) == []


def test_made_anew_on_the_same_packages_nothing_changes(released_once: Checkout, other: Checkout) -> None:
    """From the base image on, and from nothing that a build before left."""
    other.write_tests(SHORT)
    told = other.builder("rebase")
    assert MAKES_OS.search(told)
    assert other.stored() == released_once.stored()
    assert {other.tags()[one] for one in other.references()} == {released_once.tags()[released_once.references()[0]]}
