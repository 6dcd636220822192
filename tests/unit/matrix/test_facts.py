"""facts.yaml: its entries are consistent, and can be looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from builder.common import strict_yaml, validation
from builder.common.errors import MatrixError
from builder.compat.gpu_support import _ARCHITECTURE
from builder.matrix import cells, facts, reader
from builder.matrix.facts import Build
from tests.paths import ROOT, UNIT

KNOWN = facts.load_facts()


@pytest.mark.parametrize(
    ("cuda", "driver"), [("12.8", "525.60.13"), ("11", "450.80.02"), ("13.2", "580.65.06"), ("10.2", ""), ("cpu", "")]
)
def test_the_oldest_driver_of_a_cuda(cuda: str, driver: str) -> None:
    assert KNOWN.driver(cuda) == driver


@pytest.mark.parametrize(("cuda", "driver"), [("12.5.1", "555.42.02"), ("11.2", "460.27.03"), ("12", ""), ("14.0", "")])
def test_the_driver_of_a_toolkit(cuda: str, driver: str) -> None:
    assert KNOWN.toolkit_driver(cuda) == driver


def test_builds_with_and_without_a_package_of_their_own_for_gpu_code() -> None:
    twelve, thirteen = KNOWN.build("jax", "0.10.2", "12.8"), KNOWN.build("jax", "0.10.2", "13.2")
    assert twelve
    assert thirteen
    assert "sm_70" in twelve.architectures
    assert "sm_70" not in thirteen.architectures
    assert KNOWN.build("jax", "0.10.2", "cpu") is None
    torch = KNOWN.build("torch", "2.9.1", "12.8")
    assert torch is not None
    assert torch == KNOWN.build("torch", "2.9.1")
    assert KNOWN.build("torch", "0.1") is None


def test_every_build_has_architectures_and_a_cuda_with_known_drivers() -> None:
    for package, releases in KNOWN.builds.items():
        for release, build in releases.items():
            assert KNOWN.driver(build.cuda), (package, release)
            assert KNOWN.toolkit_driver(build.cuda), (package, release)
            assert build.architectures, (package, release)
            assert all(_ARCHITECTURE.fullmatch(name) for name in build.architectures), (package, release)
            assert build.source, (package, release)


def test_plugins_are_among_the_builds() -> None:
    assert {name for by_cuda in KNOWN.plugins.values() for name in by_cuda.values()} <= KNOWN.builds.keys()


def test_every_gpu_is_listed_once_and_has_a_first_driver() -> None:
    names = [name for group in KNOWN.gpus.values() for name in group.names + group.arm]
    assert len(names) == len(set(names))
    for capability, group in KNOWN.gpus.items():  # the table of drivers starts with CUDA 7; Tegra's have other numbers
        driver = KNOWN.toolkit_driver(group.cuda)
        assert driver or not group.names or Version(group.cuda) < Version("7.0"), capability
    assert "GH200" in KNOWN.gpus["9.0"].arm
    assert "GeForce RTX 5090" in KNOWN.gpus["12.0"].names


@pytest.mark.parametrize(
    ("capability", "cuda", "driver", "last"),
    [
        ("12.0", "12.8", "570.26", ""),
        ("12.1", "12.8", "575.51.03", ""),  # CUDA 12.8 compiles for sm_120, which runs on it
        ("8.9", "11.0", "520.61.05", ""),
        ("7.0", "9.0", "384.81", "580"),
        ("3.5", "5.0", "", "470"),
        ("3.7", "5.0", "", "470"),
        ("5.0", "6.0", "", "580"),
        ("42.0", "", "", ""),
        ("", "", "", ""),
    ],
)
def test_requirements_of_a_compute_capability(capability: str, cuda: str, driver: str, last: str) -> None:
    assert KNOWN.first_cuda(capability) == cuda
    group = KNOWN.gpus.get(capability)
    assert (KNOWN.toolkit_driver(group.cuda) if group else "") == driver
    assert (group.last if group else "") == last


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"tensorboard": "2.20.0", "setuptools": "81.0.0"}, ""),
        ({"tensorboard": "2.20.0", "setuptools": "82.0.1"}, "tensorboard 2.20.0 needs setuptools<82, not 82.0.1"),
        ({"tensorboard": "2.20.0"}, "tensorboard 2.20.0 needs setuptools<82: it imports pkg_resources"),
        ({"tensorboard": "2.21.0", "setuptools": "82.0.1"}, ""),
        ({"tensorflow": "2.9.3", "numpy": "2.0.2"}, "tensorflow 2.9.3 needs numpy<2, not 2.0.2: it was compiled with"),
        ({"tensorflow": "2.9.3", "numpy": "1.26.4"}, ""),
        ({"tensorflow": "2.9.3"}, ""),
        ({"tensorflow": "2.18.1", "numpy": "2.0.2"}, ""),
        ({"torch": "2.2.2", "numpy": "2.4.0"}, "torch 2.2.2 needs numpy<2, not 2.4.0"),
        ({"torch": "2.2.2+cu121", "numpy": "2.0.0rc1"}, "torch 2.2.2+cu121 needs numpy<2, not 2.0.0rc1"),
        ({"torch": "2.3.1", "numpy": "2.4.0"}, ""),
        ({}, ""),
    ],
)
def test_traps(versions: Mapping[str, str], message: str) -> None:
    violations = KNOWN.violations(versions)
    assert len(violations) == bool(message)
    assert " ".join(violations).startswith(message)


def test_traps_have_bounds() -> None:
    for trap in KNOWN.traps:
        assert not SpecifierSet(trap.wants).contains(Version("9999"))


@pytest.mark.parametrize(
    ("framework", "cuda", "capability", "count"),
    [
        ("jax", "12.8", "10.0", 1),
        ("jax", "13.1", "11.0", 1),
        ("jax", "12.6", "10.0", 0),
        ("jax", "13.2", "10.0", 0),
        ("jax", "12.8", "9.0", 0),
        ("jax", "12.8", "12.0", 0),
        ("pt", "12.8", "10.0", 0),
    ],
)
def test_caveats(framework: str, cuda: str, capability: str, count: int) -> None:
    messages = KNOWN.caveats_of(framework, cuda, capability)
    assert len(messages) == count
    assert all("silently corrupt data" in message for message in messages)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("minimum: 450.80.02", 'minimum: "450.80\\"\\nUSER root"', "drivers.11.minimum"),
        ("minimum: 450.80.02", 'minimum: "450.80.02\\n"', "drivers.11.minimum"),
        ('{cuda: "11.7", arch', '{cuda: "11.7 x", arch', "builds.torch.2.0.1.cuda"),
        ("[sm_37,", '["sm_37\\n",', "builds.torch.2.0.1.architectures.0"),
        ("[sm_37,", "[sm_3x,", "builds.torch.2.0.1.architectures.0"),
        ('"5.2":', '"52":', "gpus.52"),
        ('"7.0": "346.46"', '"7.0": new', "toolkits.drivers.7.0"),
        ('cudnn: "8"', 'cudnn: "8.x"', "builds.tensorflow.2.9.3.cudnn"),
        ('">=2.6,<2.21"', "recent", "traps.0.affected"),
        ("security: 2024-08-14", "security: soon", "support.debian.bullseye.security"),
    ],
)
def test_invalid_values_are_refused_with_their_place(tmp_path: Path, old: str, new: str, place: str) -> None:
    text = facts.FILE.read_text()
    assert old in text
    changed = tmp_path / "facts.yaml"
    changed.write_text(text.replace(old, new, 1))
    line = text[: text.index(old)].count("\n") + 1
    with pytest.raises(MatrixError, match=rf"^facts\.yaml:{line}:[0-9]+: {place}: "):
        validation.validate(strict_yaml.load_yaml(changed), facts.Facts)


def test_a_build_for_arm64_has_its_own_architectures() -> None:
    matrix = reader.read_matrix(strict_yaml.load_yaml(ROOT / "matrix.yaml"))
    known = facts.load_facts()
    new, old = (cells.cell_of_id(matrix, f"pt-{line}-py311-arm64", "x") for line in ("2.15-cu132", "2.9-cu128"))
    build = known.build_of_cell(matrix, new)
    assert build
    assert build.architectures == known.builds["torch"]["2.15.0"].arm64
    assert build.architectures
    assert known.build_of_cell(matrix, old) is None, "its wheel for arm64 is for the CPU"
    assert known.build_of_cell(matrix, replace(old, arch="amd64")) == known.builds["torch"]["2.9.1"]


def test_a_named_index_has_builds_of_its_own() -> None:
    """The same release, compiled for another CUDA and other GPUs: those of the default index would be wrong."""
    text = (UNIT / "tiny/matrix.yaml").read_text(encoding="utf-8")
    text = text.replace("debian:\n", "indexes: {a: https://python.example.test/a}\ndebian:\n", 1)
    text = text.replace("release: 1.9.2,", 'release: 1.9.2, index_on: {"12.9": a},')
    matrix = reader.read_matrix(strict_yaml.parse_yaml(text.encode(), "matrix.yaml"))
    by_id = {cell.id: cell for cell in cells.expand(matrix)}
    named, default = by_id["em-1.9-cu129-py39"], by_id["em-1.10-cu129-py311"]
    public, other = (
        Build(cuda="12.8", architectures=["sm_90"], source="x"),
        Build(cuda="12.10", architectures=[], source="x"),
    )
    builds = {"1.9.2": public, "1.10.0": public, "1.9.2+cu1210": other}
    known = KNOWN.model_copy(update={"builds": {"ember": builds}})
    assert known.build_of_cell(matrix, default) == public
    assert known.build_of_cell(matrix, named) is None
    own = Build(cuda="12.9", architectures=["sm_70"], source="x")
    known = KNOWN.model_copy(update={"builds": {"ember": builds | {"1.9.2+cu129": own}}})
    assert known.build_of_cell(matrix, named) == own
