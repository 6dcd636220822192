"""Checks of this repository's own files: matrix.yaml, locks/ and tests/mutations/.

They hold for any valid matrix.yaml, so that a team can keep them in a copy of this repository.
"""

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
from builder.index.wheels import PLATFORMS, Wheel, tag_ranks
from builder.matrix import facts, tags
from builder.matrix.project import Project
from builder.matrix.schema import CPU
from builder.plan import budget, plan
from builder.plan.plan import PlannedImage
from tests.images.packages import DOCUMENTED
from tests.images.test_python import DERIVED
from tests.mutations import gates
from tests.paths import ROOT

PROJECT = Project(ROOT)
CUDAS = sorted({cell.cuda for cell in PROJECT.cells if not cell.is_cpu})
RELEASES = sorted({(cell.framework, cell.release, cell.cuda) for cell in PROJECT.cells if not cell.is_cpu})


@pytest.fixture(scope="module")
def images() -> tuple[PlannedImage, ...]:
    return plan.make_locked_plan(PROJECT, PROJECT.cells).images


def of_component(image: PlannedImage, component: str) -> list[Wheel]:
    return [wheel for wheel in image.wheels if wheel.component == component]


def of_cuda(images: tuple[PlannedImage, ...], cuda: str) -> list[PlannedImage]:
    return [image for image in images if image.cell.cuda == cuda]


@pytest.mark.parametrize("cuda", CUDAS)
def test_one_set_of_cuda_wheels(images: tuple[PlannedImage, ...], cuda: str) -> None:
    """Byte for byte, for all Pythons of a release: otherwise the largest layers exist twice.

    On all architectures, they have the same versions. What frameworks share is in tests/integration/test_readme.py: it
    depends on what they pin.
    """
    files: dict[tuple[str, str, str, str], set[tuple[str, str]]] = defaultdict(set)
    versions: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for image in of_cuda(images, cuda):
        for wheel in of_component(image, "cuda"):
            cell = image.cell
            files[cell.framework, cell.release, wheel.name, cell.arch].add((wheel.file, wheel.sha256))
            versions[cell.framework, cell.release, wheel.name].add(wheel.version)
    assert files
    assert {name: wheels for name, wheels in files.items() if len(wheels) > 1} == {}
    assert {name: numbers for name, numbers in versions.items() if len(numbers) > 1} == {}


def test_the_libraries_of_a_release_are_the_lowest_layers(images: tuple[PlannedImage, ...]) -> None:
    """Docker shares only equal beginnings of chains; the CUDA wheels are in that beginning."""
    by_release: dict[tuple[str, str, str], list[PlannedImage]] = defaultdict(list)
    for image in images:
        by_release[image.cell.release, image.cell.cuda, image.cell.arch].append(image)
    for (_, cuda, _), siblings in by_release.items():
        chains = [[layer.inputs for layer in image.layers] for image in siblings]
        columns = list(zip(*chains, strict=False))
        shared = next((number for number, inputs in enumerate(columns) if len(set(inputs)) > 1), len(columns))
        lowest = {wheel.name for layer in siblings[0].layers[:shared] for wheel in layer.wheels}
        assert cuda == CPU or {wheel.name for wheel in of_component(siblings[0], "cuda")} <= lowest


def test_cells_on_the_cpu_have_no_cuda(images: tuple[PlannedImage, ...]) -> None:
    for image in of_cuda(images, CPU):
        assert not [wheel.file for wheel in image.wheels if wheels.is_cuda_wheel(wheel.file)]
        assert not [name for name in image.components if name.startswith("cuda")]
        assert not [name for name in image.settings.env if name.startswith("NVIDIA")]


def test_every_image_is_within_its_budget(images: tuple[PlannedImage, ...]) -> None:
    assert len(images) == len(PROJECT.cells)
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
            assert not version.is_prerelease or f"{wheel.name}=={wheel.version}" in image.requirements[wheel.component]


def test_the_framework_has_the_release_of_the_tag(images: tuple[PlannedImage, ...]) -> None:
    for image in images:
        package = PROJECT.matrix.frameworks[image.cell.framework].package_for(image.cell.cuda).partition("[")[0]
        versions = {wheel.name: wheel.version for wheel in of_component(image, image.cell.framework)}
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


def test_names_are_unique(images: tuple[PlannedImage, ...]) -> None:
    """Tags in a registry are the same for all architectures."""
    names = [name for image in images for name in image.local_names]
    assert len(set(names)) == len(names)
    assert len(tags.compute(PROJECT.matrix, PROJECT.cells)) == len(images)


def test_each_link_to_a_library_of_cuda_11_leads_to_a_wheel(images: tuple[PlannedImage, ...]) -> None:
    """TensorFlow 2.9 searches its own folder."""
    links = [path for path in (ROOT / "templates/cuda11/files").rglob("*") if path.is_symlink()]
    assert links
    for link in links:
        assert str(link.parent).endswith("/files/opt/venv/lib/python/site-packages/tensorflow")
        up, nvidia, folder, lib, file = link.readlink().parts
        # TensorFlow 2.9 opens CUPTI by the name of 11.2.
        name = link.name.replace("cupti.so.11.2", "cupti.so.11.8")
        assert (up, nvidia, lib, file) == ("..", "nvidia", "lib", name)
        for image in images:
            if "cuda11" in image.components:
                assert f"nvidia-{folder.replace('_', '-')}-cu11" in {wheel.name for wheel in image.wheels}


def test_the_commands_of_the_documents_are_those_that_image_tests_run() -> None:
    text = (ROOT / "docs/workstation.md").read_text(encoding="utf-8")
    section = text.split("\n## pip and uv\n")[1].split("\n## ")[0]
    assert [line.split("  #")[0].strip() for line in section.splitlines() if line.startswith("    ")] == DOCUMENTED
    section = text.split("\n## Derived images\n")[1].split("\n## ")[0]
    assert [line.strip() for line in section.splitlines() if line.startswith("    ")] == DERIVED


def test_the_tests_that_the_page_of_the_state_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs/status.md").read_text(encoding="utf-8"))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


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


def test_the_checks_of_a_release_that_mutations_remove_exist() -> None:
    """`python -m tests.mutations.gates` removes each of them, and is not part of CI."""
    texts = {gate: (ROOT / gates.BUILDER / gate.module).read_text(encoding="utf-8") for gate in gates.GATES}
    assert [gate.name for gate, text in texts.items() if text.count(gate.text) != 1] == []
