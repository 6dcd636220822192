"""What must hold of this project's own matrix.yaml and locks/, as they are now: shared wheels, sizes, facts."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from builder import budget, facts, lock, plan, tags
from builder.lock import Wheel
from builder.matrix import CPU
from builder.plan import PlannedImage
from builder.project import Project
from builder.resolve import tag_ranks

ROOT = Path(__file__).parent.parent.parent
PROJECT = Project(ROOT)
CUDAS = [cuda for cuda in PROJECT.matrix.cuda if cuda != CPU]
RELEASES = sorted({(cell.framework, cell.release, cell.cuda) for cell in PROJECT.cells if not cell.is_cpu})
AIM = 1 / 3  # of the sum of their sizes, for all cells of CUDA 12.8


@pytest.fixture(scope="module")
def images() -> tuple[PlannedImage, ...]:
    return plan.make_locked(PROJECT, PROJECT.cells).images


def of_cuda(images: tuple[PlannedImage, ...], cuda: str) -> list[PlannedImage]:
    found = [image for image in images if image.cell.cuda == cuda]
    assert found, f"no cell on CUDA {cuda}"
    return found


@pytest.mark.parametrize("cuda", CUDAS)
def test_one_set_of_cuda_wheels(images: tuple[PlannedImage, ...], cuda: str) -> None:
    """Byte for byte, over all frameworks and Pythons: else the largest layers are there twice."""
    files: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for image in of_cuda(images, cuda):
        for wheel in image.of_component("cuda"):
            files[wheel.name].add((wheel.file, wheel.sha256))
    assert files
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_the_cells_of_cuda_12_8_share_two_thirds(images: tuple[PlannedImage, ...]) -> None:
    found = of_cuda(images, "12.8")
    assert {image.cell.framework for image in found} == set(PROJECT.matrix.frameworks)
    assert len({image.cell.group for image in found}) >= 6
    assert len(found) == len({image.cell.group for image in found}) * len(PROJECT.matrix.variants)
    unique = {layer.inputs: layer.bytes for image in found for layer in image.layers}
    assert sum(unique.values()) < AIM * sum(image.bytes for image in found)


def test_the_libraries_that_all_share_lie_below_all_others(images: tuple[PlannedImage, ...]) -> None:
    """The chains begin alike, which is what Docker shares; the largest library is in that beginning."""
    chains = [[layer.inputs for layer in image.layers] for image in of_cuda(images, "12.8")]
    alike = next(number for number, layers in enumerate(zip(*chains, strict=False)) if len(set(layers)) > 1)
    lowest = of_cuda(images, "12.8")[0].layers[:alike]
    assert {"nvidia-cublas-cu12", "nvidia-cudnn-cu12"} <= {wheel.name for layer in lowest for wheel in layer.wheels}


def test_cells_on_the_cpu_have_no_cuda(images: tuple[PlannedImage, ...]) -> None:
    for image in of_cuda(images, CPU):
        assert not [wheel.file for wheel in image.wheels if lock.is_cuda_wheel(wheel.file)]
        assert not [name for name in image.components if name.startswith("cuda")]
        assert not [name for name in image.settings.env if name.startswith("NVIDIA")]


def test_every_image_can_be_stacked_and_is_within_its_budget(images: tuple[PlannedImage, ...]) -> None:
    assert len(images) == len(PROJECT.cells)
    assert max(len(image.layers) for image in images) <= 125
    budget.check_plan(PROJECT.matrix, images)


def test_one_name_is_one_file(images: tuple[PlannedImage, ...]) -> None:
    """An index that served a file in two versions would show here: layers are named by what is in them."""
    contents: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for image in images:
        for wheel in image.wheels:
            contents[wheel.file].add((wheel.sha256, wheel.size))
    assert {file: found for file, found in contents.items() if len(found) > 1} == {}


def test_every_wheel_is_for_the_image_that_has_it(images: tuple[PlannedImage, ...]) -> None:
    for image in images:
        glibc = PROJECT.matrix.debian[image.debian].glibc
        accepted: set[Tag] = set(tag_ranks(image.cell.python, glibc))
        for wheel in image.wheels:
            _, version, _, of_wheel = parse_wheel_filename(wheel.file)
            assert of_wheel & accepted, f"{image.id}: {wheel.file}"
            assert version == Version(wheel.version)
            assert not version.is_prerelease


def test_the_framework_is_the_release_that_the_tag_says(images: tuple[PlannedImage, ...]) -> None:
    for image in images:
        package = PROJECT.matrix.frameworks[image.cell.framework].package_for(image.cell.cuda).partition("[")[0]
        versions = {wheel.name: wheel.version for wheel in image.of_component(image.cell.framework)}
        assert versions[package] == image.cell.release


@pytest.mark.parametrize(("framework", "release", "cuda"), RELEASES)
def test_facts_know_what_every_release_was_compiled_for(framework: str, release: str, cuda: str) -> None:
    build = facts.load().build(PROJECT.matrix.frameworks[framework].package, release, cuda)
    assert build, "no entry in builder/facts.yaml: run `builder facts`"
    assert Version(build.cuda).major == Version(cuda).major
    assert build.architectures


@pytest.mark.parametrize("cuda", CUDAS)
def test_facts_know_the_driver_of_every_cuda(cuda: str) -> None:
    minimum, came_with = facts.load().driver(cuda), facts.load().toolkit_driver(cuda)
    assert Version(minimum) <= Version(came_with)


def test_the_labels_of_every_image_say_what_it_needs(images: tuple[PlannedImage, ...]) -> None:
    """`builder explain` answers from them alone, without pulling."""
    for image in images:
        labels = image.settings.labels
        asked = ("gpu-images.driver", "gpu-images.framework.cuda", "gpu-images.gpu.architectures")
        assert [name in labels for name in asked] == [not image.cell.is_cpu] * 3, image.id


def test_no_two_images_have_a_tag(images: tuple[PlannedImage, ...]) -> None:
    names = [name for image in images for name in image.references]
    assert len(set(names)) == len(names)
    assert len(tags.compute(PROJECT.matrix, PROJECT.cells)) == len(images)


def wheels_of(images: tuple[PlannedImage, ...], cell: str) -> dict[str, Wheel]:
    [image] = [image for image in images if image.id == cell]
    return {wheel.name: wheel for wheel in image.wheels}


def test_tensorflow_2_9_has_what_its_metadata_does_not_ask_for(images: tuple[PlannedImage, ...]) -> None:
    found = wheels_of(images, "tf-2.9-cu118-py39-jupyter")
    assert Version(found["numpy"].version) < Version("2")
    assert Version(found["setuptools"].version) < Version("82")
    assert Version(found["nvidia-cudnn-cu11"].version) < Version("9")
    # Each library that is linked to where TensorFlow looks is one of a wheel that is there.
    links = [path for path in (ROOT / "templates/cuda11/files").rglob("*") if path.is_symlink()]
    assert links
    for link in links:
        opt, nvidia, _, folder, lib, file = link.readlink().parts[1:]
        assert (opt, nvidia, lib, file) == ("opt", "nvidia", "lib", link.name)
        assert f"nvidia-{folder.replace('_', '-')}-cu11" in found
