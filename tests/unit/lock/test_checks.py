"""Faults in the wheels of a cell, and their messages. The names and versions are those of real wheels."""

from __future__ import annotations

from collections.abc import Sequence
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
TORCH_13, TORCH_CPU = replace(TORCH, cuda="13.2"), replace(TORCH, cuda="cpu")
FLOW = Cell(
    framework="tensorflow", short="tf", line="2.9", release="2.9.3", cuda="11.8", python="3.9", variant="jupyter"
)
LINUX = "py3-none-manylinux_2_27_x86_64"


def wheel(name: str, version: str) -> Wheel:
    return locks.wheel("x", name, version, 1)


def library(name: str, version: str) -> Wheel:
    return locks.wheel("x", name, version, 1, LINUX)


RUNTIME, RUNTIME_13 = library("nvidia-cuda-runtime-cu12", "12.8.90"), library("nvidia-cuda-runtime", "13.2.75")
RUNTIME_11 = library("nvidia-cuda-runtime-cu11", "11.8.89")
CUDNN = library("nvidia-cudnn-cu12", "9.10.2.21")
RIGHT = [RUNTIME, CUDNN, wheel("torch", "2.9.1"), wheel("numpy", "2.3.5")]


def check(cell: Cell, wheels: Sequence[Wheel], toolkit: str = "12.8.1") -> None:
    owners = {wheel.name: "mine" for wheel in wheels}
    checks.check_wheels(cell, wheels, owners.keys(), owners, owners if toolkit else {}, toolkit)


GOOD = {
    "CUDA 12": (TORCH, RIGHT),
    # From CUDA 13 on, NVIDIA's names have no suffix; the version is that of the CUDA.
    "CUDA 13": (TORCH_13, [RUNTIME_13, library("nvidia-cudnn-cu13", "9.26")]),
    "a part for each CUDA": (TORCH_13, [RUNTIME_13, library("nvidia-cutlass-dsl-libs-cu12", "4.8.0")]),
    "CUDA 11": (FLOW, [RUNTIME_11, wheel("numpy", "1.26.4"), wheel("tensorflow", "2.9.3")]),
    "on the CPU, NVIDIA's plain Python": (TORCH_CPU, [wheel("nvidia-ml-py", "13.580.82"), wheel("jax", "0.12.0")]),
    "post and local versions": (TORCH, [*RIGHT, wheel("pytz", "2025.2.post1"), wheel("local", "1.0+cu128")]),
}


@pytest.mark.parametrize(("cell", "wheels"), GOOD.values(), ids=GOOD.keys())
def test_good_wheels(cell: Cell, wheels: Sequence[Wheel]) -> None:
    check(cell, wheels)


CPU_ONLY = (
    "no CUDA runtime among the wheels: pytorch 2.9.1 would be CPU only",
    'If pytorch has an extra for CUDA 12, name its package with it in frameworks.pytorch.package_on."12". '
    'Otherwise remove "12.8" from frameworks.pytorch.versions."2.9".cuda.',
)
OTHER_CUDA = 'Correct frameworks.pytorch.versions."2.9".cuda.'
OVERWRITE = "wheels of two CUDA majors overwrite each other's files (libcudnn, libnccl and others have the same path in"
BUILT_FOR = "The component mine needs it: name a build of its packages for CUDA {}."
BOUND = 'Add the bound to frameworks.tensorflow.versions."2.9".constraints.'
FAULTS: dict[str, tuple[Cell, list[Wheel], str, str]] = {
    "an extra that resolves to CPU only": (TORCH, [CUDNN], *CPU_ONLY),
    "a tool is no runtime": (TORCH, [library("nvidia-cuda-runtime-tools-cu12", "12.8.90")], *CPU_ONLY),
    "another CUDA than in the tag": (
        TORCH,
        [library("nvidia-cuda-runtime-cu12", "12.9.79"), CUDNN],
        "pytorch 2.9.1 requires CUDA 12.9.79 (nvidia-cuda-runtime-cu12), not 12.8",
        OTHER_CUDA,
    ),
    "a CUDA that begins alike": (
        TORCH,
        [library("nvidia-cuda-runtime", "12.80.1"), CUDNN],
        "pytorch 2.9.1 requires CUDA 12.80.1 (nvidia-cuda-runtime), not 12.8",
        OTHER_CUDA,
    ),
    "13 beside 12, named once": (
        TORCH,
        [*RIGHT, *(library(f"nvidia-{name}-cu13", "1") for name in ("nccl", "cudnn", "cusparselt"))],
        f"nvidia-nccl-cu13 is for CUDA 13: {OVERWRITE}",
        BUILT_FOR.format("12.8"),
    ),
    "13 without a suffix beside 12": (
        TORCH,
        [RUNTIME, library("nvidia-cublas", "13.1.0.3")],
        f"nvidia-cublas is for CUDA 13: {OVERWRITE}",
        BUILT_FOR.format("12.8"),
    ),
    "12 beside 13": (
        TORCH_13,
        [RUNTIME_13, CUDNN],
        f"nvidia-cudnn-cu12 is for CUDA 12: {OVERWRITE}",
        BUILT_FOR.format("13.2"),
    ),
    "a CPU package with CUDA wheels": (
        TORCH_CPU,
        RIGHT,
        "the component mine is not for the CPU on this index: it requires CUDA wheels (nvidia-cuda-runtime-cu12 and 1 "
        "more)",
        "Name packages of it that are built for the CPU: those of the framework in frameworks.pytorch.package_on. "
        "Or remove `cpu` from its `cuda`.",
    ),
    # Bounds that no metadata has.
    "NumPy 2 with a build before it": (
        FLOW,
        [RUNTIME_11, wheel("tensorflow", "2.9.3"), wheel("numpy", "2.0.2")],
        "tensorflow 2.9.3 needs numpy<2, not 2.0.2: it was compiled with NumPy 1",
        BOUND,
    ),
    "no setuptools at all": (
        FLOW,
        [RUNTIME_11, wheel("tensorboard", "2.9.1")],
        "tensorboard 2.9.1 needs setuptools<82: it imports",
        BOUND,
    ),
}


@pytest.mark.parametrize(("cell", "wheels", "message", "hint"), FAULTS.values(), ids=FAULTS.keys())
def test_faults(cell: Cell, wheels: list[Wheel], message: str, hint: str) -> None:
    with pytest.raises(LockError) as caught:
        check(cell, wheels)
    assert str(caught.value).startswith(f"{cell.id}: {message}")
    assert "\n" not in str(caught.value), "it is the only one"
    assert caught.value.hint == hint


def test_a_cuda_that_nothing_fixes() -> None:
    """Not the framework requires the newest CUDA: the matrix does not say which."""
    with pytest.raises(LockError) as caught:
        check(TORCH_13, [library("nvidia-cuda-runtime", "13.5.37")], toolkit="")
    assert 'cuda."13.2" of matrix.yaml has no `toolkit`' in str(caught.value)
    assert caught.value.hint == 'Name a release of NVIDIA\'s cuda-toolkit: "13.2": {toolkit: 13.2.1}'


def test_every_fault_is_shown_with_its_hint() -> None:
    """The heading says that they are faults of one image."""
    wheels = [
        library("nvidia-cuda-runtime-cu12", "12.9.79"), library("nvidia-nccl-cu13", "2"),
        wheel("tensorflow", "2.9.3"), wheel("numpy", "2.0.2"),
    ]  # fmt: skip
    with pytest.raises(LockError) as caught:
        check(TORCH, wheels)
    head, *rest = str(caught.value).splitlines()
    assert head == "3 faults in the wheels of pt-2.9-cu128-py311"
    assert [line.startswith("  -> ") for line in rest] == [False, True] * 3


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
            shared = {wheel.name for wheel in wheels if wheel.component in foundation}
            owners = {wheel.name: wheel.component for wheel in wheels}
            checks.check_wheels(cell, wheels, shared, owners, lock.held, project.matrix.cuda[cell.cuda].toolkit)
