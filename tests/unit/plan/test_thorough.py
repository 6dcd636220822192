"""Which of several images must pass the thorough tests of a component."""

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
        return set(thorough_components([self.large, self.small], self.project.matrix)[self.large.id])


@pytest.fixture
def pair(tiny: Project) -> Pair:
    return Pair(tiny)


ALONE = {"base", "python", "cuda", "quartz", "board"}
BESIDE_THE_SMALL_ONE = {"board"}


def test_the_smallest_image_with_a_component_passes_its_thorough_tests(pair: Pair) -> None:
    assert pair.of_large() == BESIDE_THE_SMALL_ONE
    assert thorough_components([pair.small, pair.large], pair.project.matrix)[SMALL] == set(pair.small.components)


def test_an_image_alone_passes_all_of_them(pair: Pair) -> None:
    assert pair.large.thorough == ALONE
    both = plan.make_locked_plan(pair.project, pair.project.select([SMALL, LARGE])).images
    assert {image.id: set(image.thorough) for image in both}[LARGE] == BESIDE_THE_SMALL_ONE


def with_another_wheel(image: PlannedImage, component: str) -> PlannedImage:
    """The image with another file of a wheel that the component needs."""
    lists = tuple(
        replace(part, wheels=(replace(part.wheels[0], sha256="0" * 64), *part.wheels[1:]))
        if part.component == component
        else part
        for part in image.lists
    )
    assert lists != image.lists
    return replace(image, lists=lists)


def test_another_wheel_of_a_component_is_below_those_that_need_it(pair: Pair) -> None:
    large = pair.large
    pair.large = with_another_wheel(large, "quartz")
    assert pair.of_large() == {"quartz", "board"}
    pair.large = with_another_wheel(large, "python")
    assert pair.of_large() == ALONE, "every program uses the Python"


def test_another_compiler_of_bytecode(pair: Pair) -> None:
    pair.large = replace(pair.large, compiler_inputs="other")
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


def test_another_architecture_has_the_same_packages(pair: Pair) -> None:
    pair.large = replace(pair.large, cell=replace(pair.large.cell, arch="arm64"))
    assert pair.of_large() == ALONE


def of_another_framework(image: PlannedImage, **env: str) -> PlannedImage:
    """An image of another framework on the same operating system and Python."""
    cell = replace(image.cell, framework="ember", short="em", line="1.10", release="1.10.0")
    components = tuple("ember" if name == "quartz" else name for name in image.components)
    lists = tuple(replace(part, component="ember") if part.component == "quartz" else part for part in image.lists)
    settings = replace(image.settings, env={**image.settings.env, **env})
    return replace(image, cell=cell, components=components, lists=lists, settings=settings)


def test_images_of_two_frameworks_share_what_is_below_both(pair: Pair) -> None:
    pair.large = of_another_framework(pair.large, NVIDIA_REQUIRE_CUDA="driver>=999")
    assert pair.of_large() == {"cuda", "ember", "board"}
    pair.large = of_another_framework(pair.large, MODE="fast")
    assert pair.of_large() == {"base", "python", "cuda", "ember", "board"}


@pytest.mark.parametrize(("name", "is_ignored"), [("EMBER_HOME", True), ("LANG", False)])
def test_a_variable_of_the_framework_that_all_programs_read(pair: Pair, name: str, is_ignored: bool) -> None:
    path = pair.project.root / "matrix.yaml"
    text = path.read_text()
    path.write_text(text.replace("env: {EMBER_HOME: /workspace}", "env: {EMBER_HOME: /workspace, LANG: C.UTF-8}"))
    pair.project = Project(pair.project.root)
    assert pair.project.matrix.components["ember"].env.keys() == {"EMBER_HOME", "LANG"}
    pair.large = of_another_framework(pair.large, **{name: "other"})
    assert {"base", "python"}.isdisjoint(pair.of_large()) is is_ignored
