"""From matrix.yaml to tagged images; without changes, a second run does nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.integration.checkout import SHORT, Checkout
from tests.integration.conftest import NewCheckout


@pytest.fixture(scope="module")
def built(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with both images, built and tested with short image tests."""
    new = new_checkout(tmp_path_factory.mktemp("built"))
    new.write_tests(SHORT)
    new.lock_and_render()
    new.builder("images")
    return new


def times(checkout: Checkout, pattern: str) -> dict[str, int]:
    """The time of each log file."""
    return {path.name: path.stat().st_mtime_ns for path in (checkout.root / ".builder/logs").glob(pattern)}


def test_every_tag_of_every_cell_exists(built: Checkout) -> None:
    tags = built.tags()
    assert set(tags) == {*built.references(), *built.references("-extra")}
    assert len({tags[reference] for reference in built.references()}) == 1
    assert len({tags[reference] for reference in built.references("-extra")}) == 1
    assert built.image_ids() == set(tags.values())


def test_no_temporary_files_or_images_are_left(built: Checkout, seed: Path) -> None:
    """Of the images, and of the layers, which another checkout made."""
    for checkout in (built, dataclasses.replace(built, root=seed.parent / "checkout")):
        assert checkout.containers() == []
        assert checkout.working_images() == []
        assert list((checkout.root.parent / "tmp").iterdir()) == []
        assert checkout.processes() == {}


def test_a_second_run_does_nothing(built: Checkout) -> None:
    before = built.tags(), times(built, "*.log")
    assert "2 images: 2 up to date" in built.builder("images")
    assert (built.tags(), times(built, "*.log")) == before
