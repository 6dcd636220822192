"""Same inputs, same bytes: wherever, whenever and in whatever order an image is made."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration import stores
from tests.integration.checkout import EXTRA, MAKES_OS, PLAIN, Checkout
from tests.integration.conftest import NewCheckout


@pytest.fixture(scope="module")
def first(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout that made both images in a store of its own, which was empty."""
    made = new_checkout(tmp_path_factory.mktemp("first"))
    made.lock_and_render()
    made.take_store()
    made.builder("build")
    return made


def digests(checkout: Checkout) -> dict[str, str]:
    """Full tag -> digest of the manifest."""
    found = checkout.stored()
    assert set(found) == {checkout.references()[0], checkout.references("-extra")[0]}
    return found


def elsewhere(first: Checkout, folder: Path) -> Checkout:
    """The same project in another folder, with an empty store, and nothing of it in the engine."""
    shutil.copytree(first.root, folder / "a/deeper/folder", ignore=shutil.ignore_patterns(".builder"))
    (folder / "tmp").mkdir()
    other = Checkout(
        root=folder / "a/deeper/folder",
        namespace=first.namespace,
        release=first.release,
        index=first.index,
        environ={**first.environ, "TMPDIR": str(folder / "tmp")},
    )
    other.take_store()
    return other


def test_two_checkouts_give_the_same_digests(first: Checkout, tmp_path: Path) -> None:
    """One image at a time, the other one first: neither order nor -j counts."""
    before = digests(first)
    first.docker("image", "rm", "-f", *first.image_ids())
    other = elsewhere(first, tmp_path)
    other.builder("build", "-j1", EXTRA)
    other.builder("build", "-j4", PLAIN)
    assert digests(other) == before
    assert stores.faults(first.store) == stores.faults(other.store) == []


def test_made_anew_on_the_same_packages_nothing_changes(first: Checkout) -> None:
    before = digests(first)
    first.write_tests(dict.fromkeys(("base", "python", "cuda", "tiny", "extra"), "def test_passes():\n    pass\n"))
    told = first.builder("rebase")
    assert MAKES_OS.search(told)
    assert digests(first) == before
    assert set(first.tags()) == {*first.references(), *first.references("-extra")}
