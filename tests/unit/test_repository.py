"""Checks of this project's own files: matrix.yaml and locks/ (shared wheels, sizes, facts), and tests/mutations/."""

from __future__ import annotations

import re
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import pytest
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from builder.index import wheels
from builder.index.wheels import PLATFORMS, Wheel
from builder.lock.resolve import tag_ranks
from builder.matrix import facts, tags
from builder.matrix.project import Project
from builder.matrix.schema import CPU
from builder.plan import budget, plan
from builder.plan.plan import PlannedImage
from tests.images.test_python import DOCUMENTED
from tests.mutations import gates
from tests.paths import ROOT

PROJECT = Project(ROOT)
CUDAS = [cuda for cuda in PROJECT.matrix.cuda if cuda != CPU]
RELEASES = sorted({(cell.framework, cell.release, cell.cuda) for cell in PROJECT.cells if not cell.is_cpu})
LIMIT = 1 / 3  # unique bytes of all cells of CUDA 12.8, of the sum of their sizes


@pytest.fixture(scope="module")
def images() -> tuple[PlannedImage, ...]:
    return plan.make_locked_plan(PROJECT, PROJECT.cells).images


def of_cuda(images: tuple[PlannedImage, ...], cuda: str) -> list[PlannedImage]:
    selected = [image for image in images if image.cell.cuda == cuda]
    assert selected, f"no cell on CUDA {cuda}"
    return selected


@pytest.mark.parametrize("cuda", CUDAS)
def test_one_set_of_cuda_wheels(images: tuple[PlannedImage, ...], cuda: str) -> None:
    """Byte for byte, for all frameworks and Pythons of an architecture: otherwise the largest layers exist twice.

    On all architectures, they have the same versions.
    """
    files: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    versions: dict[str, set[str]] = defaultdict(set)
    for image in of_cuda(images, cuda):
        for wheel in image.of_component("cuda"):
            files[wheel.name, image.cell.arch].add((wheel.file, wheel.sha256))
            versions[wheel.name].add(wheel.version)
    assert files
    assert {name: wheels for name, wheels in files.items() if len(wheels) > 1} == {}
    assert {name: numbers for name, numbers in versions.items() if len(numbers) > 1} == {}


def test_the_cells_of_cuda_12_8_share_two_thirds(images: tuple[PlannedImage, ...]) -> None:
    selected = of_cuda(images, "12.8")
    assert {image.cell.framework for image in selected} == set(PROJECT.matrix.frameworks)
    groups = {image.cell.group for image in selected}
    assert len(groups) >= 6
    assert len(selected) == len(groups) * len(PROJECT.matrix.variants)
    unique = {layer.inputs: layer.bytes for image in selected for layer in image.layers}
    assert sum(unique.values()) < LIMIT * sum(image.bytes for image in selected)


def test_the_libraries_that_all_share_are_the_lowest_layers(images: tuple[PlannedImage, ...]) -> None:
    """Docker shares only equal beginnings of chains; the largest libraries are in that beginning."""
    chains = [[layer.inputs for layer in image.layers] for image in of_cuda(images, "12.8")]
    shared = next(number for number, layers in enumerate(zip(*chains, strict=False)) if len(set(layers)) > 1)
    lowest = of_cuda(images, "12.8")[0].layers[:shared]
    assert {"nvidia-cublas-cu12", "nvidia-cudnn-cu12"} <= {wheel.name for layer in lowest for wheel in layer.wheels}


def test_cells_on_the_cpu_have_no_cuda(images: tuple[PlannedImage, ...]) -> None:
    for image in of_cuda(images, CPU):
        assert not [wheel.file for wheel in image.wheels if wheels.is_cuda_wheel(wheel.file)]
        assert not [name for name in image.components if name.startswith("cuda")]
        assert not [name for name in image.settings.env if name.startswith("NVIDIA")]


def test_every_image_can_be_stacked_and_is_within_its_budget(images: tuple[PlannedImage, ...]) -> None:
    assert len(images) == len(PROJECT.cells)
    assert max(len(image.layers) for image in images) <= 125
    budget.check_plan(PROJECT.matrix, images)


def test_one_name_is_one_file(images: tuple[PlannedImage, ...]) -> None:
    """Fails if an index served a file in two versions: layers are named by their contents."""
    contents: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for image in images:
        for wheel in image.wheels:
            contents[wheel.file].add((wheel.sha256, wheel.size))
    assert {file: versions for file, versions in contents.items() if len(versions) > 1} == {}


def test_every_wheel_is_for_the_image_that_has_it(images: tuple[PlannedImage, ...]) -> None:
    for image in images:
        glibc = PROJECT.matrix.debian[image.debian].glibc
        accepted: set[Tag] = set(tag_ranks(image.cell.python, glibc, PLATFORMS[image.cell.arch]))
        for wheel in image.wheels:
            _, version, _, of_wheel = parse_wheel_filename(wheel.file)
            assert of_wheel & accepted, f"{image.id}: {wheel.file}"
            assert version == Version(wheel.version)
            assert not version.is_prerelease


def test_the_framework_has_the_release_of_the_tag(images: tuple[PlannedImage, ...]) -> None:
    for image in images:
        package = PROJECT.matrix.frameworks[image.cell.framework].package_for(image.cell.cuda).partition("[")[0]
        versions = {wheel.name: wheel.version for wheel in image.of_component(image.cell.framework)}
        assert versions[package] == image.cell.release


@pytest.mark.parametrize(("framework", "release", "cuda"), RELEASES)
def test_facts_have_every_release(framework: str, release: str, cuda: str) -> None:
    build = facts.load_facts().build(PROJECT.matrix.frameworks[framework].package, release, cuda)
    assert build, "no entry in builder/matrix/facts.yaml: run `.venv/bin/python -m tools.facts`"
    assert Version(build.cuda).major == Version(cuda).major
    assert build.architectures


@pytest.mark.parametrize("cuda", CUDAS)
def test_facts_have_the_drivers_of_every_cuda(cuda: str) -> None:
    minimum, bundled = facts.load_facts().driver(cuda), facts.load_facts().toolkit_driver(cuda)
    assert Version(minimum) <= Version(bundled)


def test_the_labels_of_every_image_name_its_requirements(images: tuple[PlannedImage, ...]) -> None:
    """`builder explain` uses only them, without pulling."""
    for image in images:
        labels = image.settings.labels
        names = ("gpu-images.driver", "gpu-images.framework.cuda", "gpu-images.gpu.architectures")
        assert [name in labels for name in names] == [not image.cell.is_cpu] * 3, image.id


def test_names_are_unique(images: tuple[PlannedImage, ...]) -> None:
    """Tags in a registry are the same for all architectures."""
    names = [name for image in images for name in image.local_names]
    assert len(set(names)) == len(names)
    assert len(tags.compute(PROJECT.matrix, PROJECT.cells)) == len(images)


def wheels_of(images: tuple[PlannedImage, ...], cell: str) -> dict[str, Wheel]:
    [image] = [image for image in images if image.id == cell]
    return {wheel.name: wheel for wheel in image.wheels}


def test_tensorflow_2_9_has_limits_that_are_not_in_its_metadata(images: tuple[PlannedImage, ...]) -> None:
    wheel = wheels_of(images, "tf-2.9-cu118-py39-jupyter")
    assert Version(wheel["numpy"].version) < Version("2")
    assert Version(wheel["setuptools"].version) < Version("82")
    assert Version(wheel["nvidia-cudnn-cu11"].version) < Version("9")
    # Each link in the folder that TensorFlow searches leads to a library of a wheel of the image.
    links = [path for path in (ROOT / "templates/cuda11/files").rglob("*") if path.is_symlink()]
    assert links
    for link in links:
        opt, nvidia, _, folder, lib, file = link.readlink().parts[1:]
        assert (opt, nvidia, lib, file) == ("opt", "nvidia", "lib", link.name)
        assert f"nvidia-{folder.replace('_', '-')}-cu11" in wheel


def test_the_commands_of_the_documents_are_those_that_image_tests_run() -> None:
    text = (ROOT / "docs/workstation.md").read_text(encoding="utf-8")
    section = text.split("\n## pip and uv\n")[1].split("\n## ")[0]
    assert [line.split("  #")[0].strip() for line in section.splitlines() if line.startswith("    ")] == DOCUMENTED


def test_plain_docker_build_gets_every_file_that_a_dockerfile_mounts() -> None:
    """`.dockerignore` names what is in the build context."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    admitted = [line.removeprefix("!") for line in lines if line.startswith("!")]
    sources = {
        source
        for path in ROOT.glob("images/*/*.Dockerfile")
        for source in re.findall(r"type=bind,source=([^,]+),", path.read_text(encoding="utf-8"))
    }
    assert any(source.startswith("locks/os-") for source in sources)
    for source in sources:
        parents = [source, *map(str, PurePosixPath(source).parents)]
        assert any(fnmatchcase(parent, pattern) for parent in parents for pattern in admitted), source


def test_the_readme_lists_the_images() -> None:
    """With their CUDA versions and Pythons, the default first."""
    rows = re.findall(
        r"^\| `(\S+-cuda):(\S+)` \| ([^|]+) \| ([^|]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    listed = {(image, line): (cudas.split(", "), pythons.split(", ")) for image, line, cudas, pythons in rows}
    assert listed == {
        (framework.image, line): ([cuda for cuda in version.cuda if cuda != CPU], version.python)
        for framework in PROJECT.matrix.frameworks.values()
        for line, version in framework.versions.items()
    }


def test_the_checks_of_a_release_that_mutations_remove_exist() -> None:
    """`python -m tests.mutations.gates` removes each of them, and is not part of CI."""
    texts = {gate: (ROOT / gates.REGISTRY / gate.module).read_text(encoding="utf-8") for gate in gates.GATES}
    assert [gate.name for gate, text in texts.items() if text.count(gate.text) != 1] == []
