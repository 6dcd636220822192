"""Which image of a group must pass the thorough tests of a component."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage, thorough_components

SMALL, LARGE = "qz-0.5-cu129-py311", "qz-0.5-cu129-py311-board"


class Pair:
    """Two images of one group; the larger one has the components of the smaller one, and one more."""

    def __init__(self, tiny: Project) -> None:
        self.project = tiny
        self.small, self.large = (plan.make_locked_plan(tiny, tiny.select([cell])).images[0] for cell in (SMALL, LARGE))

    def of_large(self) -> set[str]:
        """The components whose thorough tests the larger image must pass."""
        return set(thorough_components([self.small, self.large])[LARGE])


@pytest.fixture
def pair(tiny: Project) -> Pair:
    return Pair(tiny)


ALONE = {"base", "python", "cuda", "quartz", "board"}
BESIDE_THE_SMALL_ONE = {"board"}


def test_the_smallest_image_with_a_component_passes_its_thorough_tests(pair: Pair) -> None:
    assert pair.of_large() == BESIDE_THE_SMALL_ONE
    assert thorough_components([pair.small, pair.large])[SMALL] == set(pair.small.components)


def test_an_image_without_its_smaller_sibling_passes_all_of_them(pair: Pair) -> None:
    assert pair.large.thorough == ALONE
    both = plan.make_locked_plan(pair.project, pair.project.select([SMALL, LARGE])).images
    assert {image.id: set(image.thorough) for image in both}[LARGE] == BESIDE_THE_SMALL_ONE


@pytest.mark.parametrize("kind", ["os", "files"])
def test_layers_of_the_operating_system_and_of_files_may_differ(pair: Pair, kind: str) -> None:
    """A variant has more Debian packages and more files; these are compared one by one."""
    layers = tuple(
        replace(layer, inputs="other") if layer.kind == kind and not layer.compiled else layer
        for layer in pair.small.layers
    )
    assert layers != pair.small.layers
    pair.small = replace(pair.small, layers=layers)
    assert pair.of_large() == BESIDE_THE_SMALL_ONE


@pytest.mark.parametrize("is_bytecode", [False, True])
def test_another_layer_of_wheels_or_bytecode(pair: Pair, is_bytecode: bool) -> None:
    chosen = next(
        layer for layer in pair.small.layers if (bool(layer.compiled) if is_bytecode else layer.kind == "wheels")
    )
    layers = tuple(replace(each, inputs="other") if each is chosen else each for each in pair.small.layers)
    pair.small = replace(pair.small, layers=layers)
    assert pair.of_large() == ALONE


def with_packages(image: PlannedImage, **versions: str) -> PlannedImage:
    """The image with other versions of Debian packages; an empty one removes the package."""
    lock = image.os_lock
    packages = [package for package in lock.packages if versions.get(package.name, "kept")]
    changed = [replace(each, version=versions.get(each.name, each.version)) for each in packages]
    return replace(image, os_lock=replace(lock, packages=tuple(changed)))


def test_all_debian_packages_of_the_smaller_image_are_in_the_larger_one(pair: Pair) -> None:
    name = pair.small.os_lock.packages[0].name
    large = pair.large
    pair.large = with_packages(large, **{name: "99"})
    assert pair.of_large() == ALONE
    pair.large = with_packages(large, **{name: ""})
    assert pair.of_large() == ALONE
    pair.large, pair.small = large, with_packages(pair.small, **{name: ""})
    assert pair.of_large() == BESIDE_THE_SMALL_ONE, "the larger one has one more"


def test_a_file_that_another_component_replaces(pair: Pair) -> None:
    """Tests of the smaller image used the file that it replaces."""
    component = next(iter(pair.small.file_components))
    folder = pair.project.root / "templates"
    name = next(path for path in sorted((folder / component / "files").rglob("*")) if path.is_file())
    other = folder / "board/files" / name.relative_to(folder / component / "files")
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("another")
    both = plan.make_locked_plan(pair.project, pair.project.select([SMALL, LARGE])).images
    assert {image.id: set(image.thorough) for image in both}[LARGE] == ALONE


@pytest.mark.parametrize("is_larger", [False, True])
def test_variables_are_the_same(pair: Pair, is_larger: bool) -> None:
    """A program may read one that only the larger image has."""
    changed = pair.large if is_larger else pair.small
    changed = replace(changed, settings=replace(changed.settings, env={**changed.settings.env, "MODE": "fast"}))
    pair.small, pair.large = (pair.small, changed) if is_larger else (changed, pair.large)
    assert pair.of_large() == ALONE


def test_an_image_of_another_group_proves_nothing(pair: Pair) -> None:
    pair.small = replace(pair.small, cell=replace(pair.small.cell, python="3.13"))
    assert pair.of_large() == ALONE
