"""Checks that the locks match matrix.yaml, and checks the wheels and Debian packages that a cell resolves to.

Each error names the lock or package at fault and what to change.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from builder.common.errors import LockError, MatrixError, StaleError, for_cells, join
from builder.common.lock_text import KNOWN_LAYERS
from builder.debian import os_lock
from builder.debian.os_lock import OS_LOCKS, OsLock
from builder.index.wheels import LockedWheel, is_cuda_wheel
from builder.lock import lockfile, python_lock
from builder.lock.lockfile import GROUP_LOCKS
from builder.lock.python_lock import PYTHON_LOCKS
from builder.matrix import facts
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import Matrix, cuda_major

_RUNTIME = re.compile(r"nvidia-cuda-runtime(-cu\d+)?", re.ASCII)
_MAJOR = re.compile(r"nvidia-[a-z0-9-]+-cu(\d+)", re.ASCII)
_UNNAMED = 13  # the first CUDA major that is not in the names of all its wheels


def check_locks(project: Project, chosen: Sequence[Cell]) -> None:
    """Raises StaleError with every lock that is missing, out of date for these cells, or of no group."""
    faults = []
    for group in dict.fromkeys(cell.group for cell in chosen):
        cells = [cell for cell in chosen if cell.group == group]
        lock = GROUP_LOCKS.read(project.root, group)
        if reason := lockfile.stale_reason(project.matrix, lock, cells, project.groups[group]):
            faults.append(f"locks/{group}.json: {reason}")
    for request in os_lock.requests_of_cells(project.matrix, chosen):
        faults += OS_LOCKS.check(project.root, request)
    for release in python_lock.uv_releases(project.matrix, chosen):
        faults += PYTHON_LOCKS.check(project.root, release)
    faults += [f"{name}: belongs to no cell" for name in stray_locks(project)]
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults[:20])
        part = [] if len(chosen) == len(project.cells) else [cell.id for cell in chosen]
        raise StaleError(f"locks are out of date:\n{lines}", hint=f"Resolve again: {for_cells('builder lock', part)}")


def current_cells(project: Project) -> list[Cell]:
    """The cells whose locks of wheels, operating system and Python match matrix.yaml."""
    matrix, root = project.matrix, project.root
    return [
        cell
        for group, cells in project.groups.items()
        for lock in [GROUP_LOCKS.find(root, group)]
        for cell in cells
        if not lockfile.stale_reason(matrix, lock, [cell])
        and OS_LOCKS.find(root, os_lock.request_of_cell(matrix, cell))
        and all(PYTHON_LOCKS.find(root, release) for release in python_lock.uv_releases(matrix, [cell]))
    ]


def stray_locks(project: Project) -> list[str]:
    """The paths of lock files that belong to no cell."""
    files = {f"locks/{file.name}" for file in (project.root / "locks").glob("*.json")}
    groups = {f"locks/{group}.json" for group in project.groups}
    systems = {request.path for request in os_lock.requests_of_cells(project.matrix, project.cells)}
    pythons = {PYTHON_LOCKS.path(release) for release in python_lock.uv_releases(project.matrix, project.cells)}
    return sorted(files - groups - systems - pythons - {KNOWN_LAYERS, lockfile.RELEASE_DAYS})


def check_wheels(
    cell: Cell,
    wheels: Sequence[LockedWheel],
    shared: Collection[str],
    owners: Mapping[str, str],
    held: Collection[str],
    toolkit: str | None,
) -> None:
    """Raises LockError with every fault of the wheels of a cell, or of its group.

    `shared` are the names of the wheels that every image of the group has, `owners` the component that needs each
    wheel, `held` the names of the wheels that the framework requires in one version; `toolkit` is the release of
    cuda-toolkit in matrix.yaml.
    """
    faults: list[LockError] = []
    if not cell.is_cpu:
        faults += _cuda_faults(cell, wheels, shared, owners, held, toolkit)
    elif cuda := [wheel for wheel in wheels if is_cuda_wheel(wheel.file)]:
        others = f" and {len(cuda) - 1} more" if len(cuda) > 1 else ""
        faults.append(
            LockError(
                f"{cell.id}: the component {owners[cuda[0].name]} is not for the CPU on this index: it requires CUDA "
                f"wheels ({cuda[0].name}{others})",
                hint="Name packages of it that are built for the CPU: those of the framework in "
                f"frameworks.{cell.framework}.package_on. Or remove `cpu` from its `cuda`.",
            )
        )
    faults += [
        LockError(
            f"{cell.id}: {violation}",
            hint=f'Add the bound to frameworks.{cell.framework}.versions."{cell.line}".constraints.',
        )
        for violation in facts.load_facts().violations({wheel.name: wheel.version for wheel in wheels})
    ]
    if faults:
        raise join(faults, f"faults in the wheels of {cell.id}")


def _cuda_faults(
    cell: Cell,
    wheels: Sequence[LockedWheel],
    shared: Collection[str],
    owners: Mapping[str, str],
    held: Collection[str],
    toolkit: str | None,
) -> Iterator[LockError]:
    """The faults of CUDA wheels: the runtime must be that of the cell, and all wheels of the same CUDA major.

    A variant may have a compiler, which requires a runtime too: only one in `shared` shows that the framework has one.
    """
    expected = int(cuda_major(cell.cuda))
    runtimes = [wheel for wheel in wheels if _RUNTIME.fullmatch(wheel.name)]
    if not any(wheel.name in shared for wheel in runtimes):
        yield LockError(
            f"{cell.id}: no CUDA runtime among the wheels: {cell.framework} {cell.release} would be CPU only",
            hint=f"If {cell.framework} has an extra for CUDA {expected}, name its package with it in "
            f'frameworks.{cell.framework}.package_on."{expected}". Otherwise remove "{cell.cuda}" from '
            f'frameworks.{cell.framework}.versions."{cell.line}".cuda.',
        )
    for wheel in runtimes:
        if wheel.version.startswith(cell.cuda + "."):
            continue
        if not toolkit and wheel.name not in held:
            yield LockError(
                f'{cell.id}: cuda."{cell.cuda}" of matrix.yaml has no `toolkit`: the newest CUDA that {cell.framework} '
                f"{cell.release} admits was taken, {wheel.version} ({wheel.name})",
                hint=f'Name a release of NVIDIA\'s cuda-toolkit: "{cell.cuda}": {{toolkit: {cell.cuda}.1}}',
            )
        else:
            yield LockError(
                f"{cell.id}: {cell.framework} {cell.release} requires CUDA {wheel.version} ({wheel.name}), "
                f"not {cell.cuda}",
                hint=f'Correct frameworks.{cell.framework}.versions."{cell.line}".cuda.',
            )
    majors = cuda_majors(wheels, expected)
    for major in sorted(majors.keys() - {expected}):
        yield LockError(
            f"{cell.id}: {majors[major]} is for CUDA {major}: wheels of two CUDA majors overwrite each other's files "
            "(libcudnn, libnccl and others have the same path in both)",
            hint=f"The component {owners[majors[major]]} needs it: name a build of its packages for CUDA {cell.cuda}.",
        )


def cuda_majors(wheels: Iterable[LockedWheel], expected: int) -> dict[int, str]:
    """The name of the first CUDA wheel, by CUDA major version; `expected` is the major version of the image."""
    majors: dict[int, str] = {}
    for wheel in wheels:
        if wheel.name.startswith("nvidia-cutlass-dsl-"):  # for both majors at once, in nvidia_cutlass_dsl/cu12 and cu13
            continue
        if match := _MAJOR.fullmatch(wheel.name):
            majors.setdefault(int(match[1]), wheel.name)
        elif is_cuda_wheel(wheel.file) and not _RUNTIME.fullmatch(wheel.name) and expected < _UNNAMED:
            majors.setdefault(_UNNAMED, wheel.name)
    return majors


def system_faults(matrix: Matrix, version: str, lock: OsLock) -> Iterator[MatrixError]:
    """The faults of matrix.yaml about a Python and its Debian release, by the lock of an operating system with it."""
    debian, python = matrix.debian[lock.debian], matrix.python[version]
    glibc = re.match(r"[0-9]+\.[0-9]+", lock.versions.get("libc6", ""))
    if glibc and glibc[0] != debian.glibc:
        yield MatrixError(
            f"{matrix.where('debian', lock.debian, 'glibc')}: debian.{lock.debian}.glibc: Debian {lock.debian} has "
            f"glibc {glibc[0]}, not {debian.glibc}",
            hint=f'Write: glibc: "{glibc[0]}"',
        )
    names = (re.fullmatch(r"python([0-9]+\.[0-9]+)-minimal", name) for name in lock.versions)
    installed = [name[1] for name in names if name]
    if not python.uv and version not in installed:
        where = matrix.where("python", version, "apt" if python.apt else "debian")
        yield MatrixError(
            f"{where}: Python {version}: its packages on Debian {lock.debian} install "
            f"{f'Python {installed[0]}' if installed else 'no Python'}",
            hint=f"Name a Debian release that has Python {version}, or add `uv` with a full release of it.",
        )
