"""What must hold of the wheels that a cell resolves to, beyond that they resolve. Pure.

Each refusal names the package that is at fault, and what to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from packaging.version import Version

from builder import facts
from builder.cells import Cell
from builder.errors import LockError, join
from builder.lock import Wheel, is_cuda_wheel

_RUNTIME = re.compile(r"nvidia-cuda-runtime(-cu\d+)?", re.ASCII)
_UNNAMED = 13  # the first CUDA whose wheels do not all say it in their names
_MAJOR = re.compile(r"nvidia-[a-z0-9-]+-cu(\d+)", re.ASCII)


def check(cell: Cell, wheels: Sequence[Wheel]) -> None:
    """Raises LockError for every fault of the cell's wheels together."""
    faults = [*(_of_cpu if cell.is_cpu else _of_cuda)(cell, wheels), *_of_versions(cell, wheels)]
    if faults:
        raise join(faults, f"faults in the wheels of {cell.id}")


def _of_cpu(cell: Cell, wheels: Sequence[Wheel]) -> Iterator[LockError]:
    if cuda := [wheel for wheel in wheels if is_cuda_wheel(wheel.file)]:
        yield LockError(
            f"{cell.id}: {cell.framework} {cell.release} brings CUDA wheels on this index ({cuda[0].name} and "
            f"{len(cuda) - 1} more): it is no build for the cpu",
            hint=f"Name a package that is one in frameworks.{cell.framework}.package_on, or take `cpu` from this line.",
        )


def _of_cuda(cell: Cell, wheels: Sequence[Wheel]) -> Iterator[LockError]:
    """The tag must tell the truth: the CUDA runtime among the wheels is the one that the cell names."""
    runtimes = [wheel for wheel in wheels if _RUNTIME.fullmatch(wheel.name)]
    if not runtimes:
        yield LockError(
            f"{cell.id}: resolves to no CUDA runtime at all: {cell.framework} {cell.release} would be CPU only",
            hint="Ask for the CUDA extra of the framework, or pin a version that has CUDA wheels.",
        )
    for wheel in runtimes:
        if not wheel.version.startswith(cell.cuda + "."):
            yield LockError(
                f"{cell.id}: {cell.framework} {cell.release} brings CUDA {wheel.version} ({wheel.name}), "
                f"not {cell.cuda}",
                hint=f'Under frameworks.{cell.framework}.versions."{cell.line}".cuda name the CUDA that it has.',
            )
    majors: dict[str, str] = {}
    for wheel in wheels:
        if found := _MAJOR.fullmatch(wheel.name):
            majors.setdefault(found[1], wheel.name)
        elif is_cuda_wheel(wheel.file) and not _RUNTIME.fullmatch(wheel.name) and _major(cell) < _UNNAMED:
            majors.setdefault(str(_UNNAMED), wheel.name)
    for major in sorted(majors.keys() - {str(_major(cell))}):
        yield LockError(
            f"{cell.id}: {majors[major]} is of CUDA {major}: wheels of two CUDA majors overwrite each other's files "
            "(libcudnn, libnccl and others have the same path in both)",
            hint=f"Find which package wants it: it is not built for CUDA {cell.cuda}.",
        )


def _major(cell: Cell) -> int:
    return int(cell.cuda.split(".", maxsplit=1)[0])


def _of_versions(cell: Cell, wheels: Sequence[Wheel]) -> Iterator[LockError]:
    for wheel in wheels:
        if Version(wheel.version).is_prerelease:
            yield LockError(
                f"{cell.id}: {wheel.name} {wheel.version} is a pre-release",
                hint="Pin a release that has wheels for this Python, or leave the Python out.",
            )
    for told in facts.load().trap_of({wheel.name: wheel.version for wheel in wheels}):
        yield LockError(
            f"{cell.id}: {told}",
            hint=f'Add the bound to frameworks.{cell.framework}.versions."{cell.line}".constraints.',
        )
