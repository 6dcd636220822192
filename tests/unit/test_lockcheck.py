"""What is refused of a cell's wheels, in which words; the names and versions are those of real wheels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from builder import lock, lockcheck
from builder.cells import Cell
from builder.errors import LockError
from builder.lock import Wheel
from builder.project import Project

TORCH = Cell(framework="pytorch", short="pt", line="2.9", release="2.9.1", cuda="12.8", python="3.11", variant="plain")
FLOW = Cell(
    framework="tensorflow", short="tf", line="2.9", release="2.9.3", cuda="11.8", python="3.9", variant="jupyter"
)
LINUX = "py3-none-manylinux_2_27_x86_64"
ROOT = Path(__file__).parent.parent.parent


def wheel(name: str, version: str, tag: str = "py3-none-any") -> Wheel:
    file = f"{name.replace('-', '_')}-{version}-{tag}.whl"
    return Wheel(component="x", name=name, version=version, file=file, size=1, sha256="0" * 64)


def library(name: str, version: str) -> Wheel:
    return wheel(name, version, LINUX)


RUNTIME = library("nvidia-cuda-runtime-cu12", "12.8.90")
CUDNN = library("nvidia-cudnn-cu12", "9.10.2.21")
RIGHT = (RUNTIME, CUDNN, wheel("torch", "2.9.1", "cp311-cp311-manylinux_2_28_x86_64"), wheel("numpy", "2.3.5"))


def refusal(cell: Cell, *wheels: Wheel) -> LockError:
    with pytest.raises(LockError) as caught:
        lockcheck.check(cell, wheels)
    return caught.value


@pytest.mark.parametrize(
    ("cell", "wheels"),
    [
        (TORCH, RIGHT),
        # From CUDA 13 on, NVIDIA's names have no suffix; its version tells the CUDA.
        (
            replace(TORCH, cuda="13.2"),
            [library("nvidia-cuda-runtime", "13.2.75"), library("nvidia-cudnn-cu13", "9.26")],
        ),
        (
            FLOW,
            [library("nvidia-cuda-runtime-cu11", "11.8.89"), wheel("numpy", "1.26.4"), wheel("tensorflow", "2.9.3")],
        ),
        # NVIDIA's too, and plain Python.
        (replace(TORCH, cuda="cpu"), [wheel("nvidia-ml-py", "13.580.82"), wheel("jax", "0.12.0")]),
        (TORCH, [*RIGHT, wheel("pytz", "2025.2.post1"), wheel("local", "1.0+cu128")]),
    ],
    ids=["CUDA 12", "CUDA 13", "CUDA 11", "cpu", "post and local versions"],
)
def test_what_is_right(cell: Cell, wheels: list[Wheel]) -> None:
    lockcheck.check(cell, wheels)


@pytest.mark.parametrize(
    "name", ["nvidia-cudnn-cu12", "nvidia-cuda-runtime-tools-cu12", "nvidia-cuda-nvrtc-cu12"], ids=str
)
def test_an_extra_that_resolves_to_cpu_only(name: str) -> None:
    error = refusal(TORCH, library(name, "12.8.90"), wheel("torch", "2.9.1"))
    assert str(error) == "pt-2.9-cu128-py311: resolves to no CUDA runtime at all: pytorch 2.9.1 would be CPU only"
    assert error.hint == "Ask for the CUDA extra of the framework, or pin a version that has CUDA wheels."


@pytest.mark.parametrize(
    ("name", "version"), [("nvidia-cuda-runtime-cu12", "12.9.79"), ("nvidia-cuda-runtime", "12.80.1")]
)
def test_another_cuda_than_the_tag_would_say(name: str, version: str) -> None:
    error = refusal(TORCH, library(name, version), CUDNN)
    assert str(error) == f"pt-2.9-cu128-py311: pytorch 2.9.1 brings CUDA {version} ({name}), not 12.8"
    assert error.hint == 'Under frameworks.pytorch.versions."2.9".cuda name the CUDA that it has.'


@pytest.mark.parametrize(
    ("cell", "stranger", "major"),
    [
        (TORCH, library("nvidia-nccl-cu13", "2.27.7"), "13"),
        (TORCH, library("nvidia-cublas-cu11", "11.11.3.6"), "11"),
        (TORCH, library("nvidia-cublas", "13.1.0.3"), "13"),
        (replace(TORCH, cuda="13.2"), CUDNN, "12"),
    ],
    ids=["13 beside 12", "11 beside 12", "13 without a suffix beside 12", "12 beside 13"],
)
def test_wheels_of_two_cudas(cell: Cell, stranger: Wheel, major: str) -> None:
    mine = RUNTIME if cell is TORCH else library("nvidia-cuda-runtime", "13.2.75")
    error = refusal(cell, mine, stranger)
    assert str(error) == (
        f"{cell.id}: {stranger.name} is of CUDA {major}: wheels of two CUDA majors overwrite each other's files "
        "(libcudnn, libnccl and others have the same path in both)"
    )
    assert error.hint == f"Find which package wants it: it is not built for CUDA {cell.cuda}."


def test_of_another_cuda_one_wheel_is_named() -> None:
    strangers = [library(f"nvidia-{name}-cu13", "1") for name in ("nccl", "cudnn", "cusparselt")]
    told = str(refusal(TORCH, *RIGHT, *strangers))
    assert told.count("is of CUDA 13") == 1
    assert "nvidia-nccl-cu13 is of" in told


def test_a_build_for_the_cpu_that_is_none() -> None:
    error = refusal(replace(TORCH, cuda="cpu"), *RIGHT)
    assert str(error) == (
        "pt-2.9-cpu-py311: pytorch 2.9.1 brings CUDA wheels on this index (nvidia-cuda-runtime-cu12 and 1 more): "
        "it is no build for the cpu"
    )
    assert error.hint == "Name a package that is one in frameworks.pytorch.package_on, or take `cpu` from this line."


@pytest.mark.parametrize("version", ["2.10.0rc1", "2.10.0a1", "2.10.0.dev20260101"])
def test_a_pre_release(version: str) -> None:
    error = refusal(TORCH, *RIGHT, wheel("triton", version))
    assert str(error) == f"pt-2.9-cu128-py311: triton {version} is a pre-release"
    assert error.hint == "Pin a release that has wheels for this Python, or leave the Python out."


TRAPS = {
    "NumPy 2 with a build before it": (
        [("tensorflow", "2.9.3"), ("numpy", "2.0.2")],
        "tensorflow 2.9.3 takes numpy<2, not 2.0.2: it was compiled with NumPy 1",
    ),
    "setuptools without pkg_resources": (
        [("tensorboard", "2.9.1"), ("setuptools", "82.0.0")],
        "tensorboard 2.9.1 takes setuptools<82, not 82.0.0: it imports pkg_resources",
    ),
    "no setuptools at all": ([("tensorboard", "2.9.1")], "tensorboard 2.9.1 takes setuptools<82: it imports"),
}


@pytest.mark.parametrize(("others", "says"), TRAPS.values(), ids=TRAPS.keys())
def test_what_no_metadata_says(others: list[tuple[str, str]], says: str) -> None:
    wheels = [wheel(*one) for one in others]
    error = refusal(FLOW, library("nvidia-cuda-runtime-cu11", "11.8.89"), *wheels)
    assert str(error).startswith(f"tf-2.9-cu118-py39-jupyter: {says}")
    assert error.hint == 'Add the bound to frameworks.tensorflow.versions."2.9".constraints.'
    assert "\n" not in str(error)


def test_every_fault_is_told_with_its_hint() -> None:
    """Of one image: it is not to be read as several."""
    error = refusal(
        TORCH, library("nvidia-cuda-runtime-cu12", "12.9.79"), library("nvidia-nccl-cu13", "2"), wheel("x", "1.0rc1")
    )
    head, *rest = str(error).splitlines()
    assert head == "3 faults in the wheels of pt-2.9-cu128-py311"
    assert [line.startswith("  -> ") for line in rest] == [False, True] * 3
    assert all(line.startswith("pt-2.9-cu128-py311: ") for line in rest[::2])


def test_all_locks_of_this_project_are_right() -> None:
    project = Project(ROOT)
    for cell in project.cells:
        locked = lock.read(ROOT, cell.id)
        assert locked is not None
        lockcheck.check(cell, locked.wheels)
