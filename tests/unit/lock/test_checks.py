"""Faults in the wheels of a cell, and their messages. The names and versions are those of real wheels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builder.common.errors import LockError
from builder.debian import os_lock
from builder.debian.os_lock import OS_LOCKS
from builder.index.wheels import Wheel
from builder.lock import checks, lockfile
from builder.lock.lockfile import GROUP_LOCKS
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from tests.fakes import locks
from tests.paths import ROOT

TORCH = Cell(framework="pytorch", short="pt", line="2.9", release="2.9.1", cuda="12.8", python="3.11", variant="plain")
FLOW = Cell(
    framework="tensorflow", short="tf", line="2.9", release="2.9.3", cuda="11.8", python="3.9", variant="jupyter"
)
LINUX = "py3-none-manylinux_2_27_x86_64"


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
        checks.check_wheels(cell, wheels, {wheel.name for wheel in wheels})
    return caught.value


@pytest.mark.parametrize(
    ("cell", "wheels"),
    [
        (TORCH, RIGHT),
        # From CUDA 13 on, NVIDIA's names have no suffix; the version is that of the CUDA.
        (
            replace(TORCH, cuda="13.2"),
            [library("nvidia-cuda-runtime", "13.2.75"), library("nvidia-cudnn-cu13", "9.26")],
        ),
        (
            FLOW,
            [library("nvidia-cuda-runtime-cu11", "11.8.89"), wheel("numpy", "1.26.4"), wheel("tensorflow", "2.9.3")],
        ),
        # From NVIDIA, but plain Python.
        (replace(TORCH, cuda="cpu"), [wheel("nvidia-ml-py", "13.580.82"), wheel("jax", "0.12.0")]),
        (TORCH, [*RIGHT, wheel("pytz", "2025.2.post1"), wheel("local", "1.0+cu128")]),
    ],
    ids=["CUDA 12", "CUDA 13", "CUDA 11", "cpu", "post and local versions"],
)
def test_good_wheels(cell: Cell, wheels: list[Wheel]) -> None:
    checks.check_wheels(cell, wheels, {wheel.name for wheel in wheels})


@pytest.mark.parametrize(
    "name", ["nvidia-cudnn-cu12", "nvidia-cuda-runtime-tools-cu12", "nvidia-cuda-nvrtc-cu12"], ids=str
)
def test_an_extra_that_resolves_to_cpu_only(name: str) -> None:
    error = refusal(TORCH, library(name, "12.8.90"), wheel("torch", "2.9.1"))
    assert str(error) == "pt-2.9-cu128-py311: no CUDA runtime among the wheels: pytorch 2.9.1 would be CPU only"
    assert error.hint == (
        "`builder explain pt-2.9-cu128-py311` shows which CUDA it supports, and with which extra. Correct "
        'frameworks.pytorch.versions."2.9", or its package_on."12".'
    )


@pytest.mark.parametrize(
    ("name", "version"), [("nvidia-cuda-runtime-cu12", "12.9.79"), ("nvidia-cuda-runtime", "12.80.1")]
)
def test_another_cuda_than_in_the_tag(name: str, version: str) -> None:
    error = refusal(TORCH, library(name, version), CUDNN)
    assert str(error) == f"pt-2.9-cu128-py311: pytorch 2.9.1 requires CUDA {version} ({name}), not 12.8"
    assert error.hint == 'Correct frameworks.pytorch.versions."2.9".cuda.'


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
        f"{cell.id}: {stranger.name} is for CUDA {major}: wheels of two CUDA majors overwrite each other's files "
        "(libcudnn, libnccl and others have the same path in both)"
    )
    assert error.hint == f"Find the package that requires it: it is not built for CUDA {cell.cuda}."


def test_one_wheel_of_another_cuda_is_named() -> None:
    strangers = [library(f"nvidia-{name}-cu13", "1") for name in ("nccl", "cudnn", "cusparselt")]
    message = str(refusal(TORCH, *RIGHT, *strangers))
    assert message.count("is for CUDA 13") == 1
    assert "nvidia-nccl-cu13 is for" in message


def test_a_cpu_package_with_cuda_wheels() -> None:
    error = refusal(replace(TORCH, cuda="cpu"), *RIGHT)
    assert str(error) == (
        "pt-2.9-cpu-py311: pytorch 2.9.1 on this index is not a CPU build: "
        "it requires CUDA wheels (nvidia-cuda-runtime-cu12 and 1 more)"
    )
    assert error.hint == "Name a CPU package in frameworks.pytorch.package_on, or remove `cpu` from its `cuda`."


TRAPS = {
    "NumPy 2 with a build before it": (
        [("tensorflow", "2.9.3"), ("numpy", "2.0.2")],
        "tensorflow 2.9.3 needs numpy<2, not 2.0.2: it was compiled with NumPy 1",
    ),
    "setuptools without pkg_resources": (
        [("tensorboard", "2.9.1"), ("setuptools", "82.0.0")],
        "tensorboard 2.9.1 needs setuptools<82, not 82.0.0: it imports pkg_resources",
    ),
    "no setuptools at all": ([("tensorboard", "2.9.1")], "tensorboard 2.9.1 needs setuptools<82: it imports"),
}


@pytest.mark.parametrize(("others", "start"), TRAPS.values(), ids=TRAPS.keys())
def test_bounds_that_no_metadata_has(others: list[tuple[str, str]], start: str) -> None:
    wheels = [wheel(*pair) for pair in others]
    error = refusal(FLOW, library("nvidia-cuda-runtime-cu11", "11.8.89"), *wheels)
    assert str(error).startswith(f"tf-2.9-cu118-py39-jupyter: {start}")
    assert error.hint == 'Add the bound to frameworks.tensorflow.versions."2.9".constraints.'
    assert "\n" not in str(error)


def test_every_fault_is_shown_with_its_hint() -> None:
    """The heading says that they are faults of one image."""
    error = refusal(
        TORCH,
        *(library("nvidia-cuda-runtime-cu12", "12.9.79"), library("nvidia-nccl-cu13", "2")),
        *(wheel("tensorflow", "2.9.3"), wheel("numpy", "2.0.2")),
    )
    head, *rest = str(error).splitlines()
    assert head == "3 faults in the wheels of pt-2.9-cu128-py311"
    assert [line.startswith("  -> ") for line in rest] == [False, True] * 3
    assert all(line.startswith("pt-2.9-cu128-py311: ") for line in rest[::2])


def test_packages_without_a_python(tiny: Project) -> None:
    """Unless uv installs it."""
    request = os_lock.request_of(tiny.matrix, "3.11", ("base", "python"))
    lock = locks.os_lock_of(request)
    assert list(checks.system_faults(tiny.matrix, "3.11", lock)) == []
    others = [each for each in lock.packages if each.name != "python3.11-minimal"]
    meta = replace(lock.packages[0], name="python3-minimal")
    without = replace(lock, packages=(*others, meta))
    [fault] = checks.system_faults(tiny.matrix, "3.11", without)
    assert str(fault) == "matrix.yaml:15:20: Python 3.11: its packages on Debian newbird install no Python"
    python = tiny.matrix.python["3.11"].model_copy(update={"uv": "3.11.9"})
    by_uv = tiny.matrix.model_copy(update={"python": {"3.11": python}})
    assert list(checks.system_faults(by_uv, "3.11", without)) == []


def test_all_locks_of_this_project_are_right() -> None:
    project = Project(ROOT)
    for cell in project.cells:
        system = OS_LOCKS.read(ROOT, os_lock.request_of_cell(project.matrix, cell))
        assert system
        assert list(checks.system_faults(project.matrix, cell.python, system)) == []
    for group, members in project.groups.items():
        lock = GROUP_LOCKS.read(ROOT, group)
        assert lock is not None
        for cell in members:
            assert lockfile.stale_reason(project.matrix, lock, [cell]) == ""
            wheels = lockfile.of_cell(project.matrix, cell, lock).wheels
            foundation = {"cuda", *cells.foundation(project.matrix, cell)}
            checks.check_wheels(cell, wheels, {wheel.name for wheel in wheels if wheel.component in foundation})
