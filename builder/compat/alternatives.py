"""The cells nearest to one that does not work. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from packaging.version import Version

from builder.matrix.cells import Cell

CPU_DISTANCE = 40.0  # more than between any two CUDA versions


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A cell that works; `differences` are its differences from the cell that does not work, one for each axis."""

    cell: Cell
    differences: tuple[str, ...]
    is_listed: bool

    def __str__(self) -> str:
        return f"{self.cell.id} ({', '.join(self.differences)}{'' if self.is_listed else '; not in the matrix'})"


def rank(asked: Cell, listed: Iterable[Cell], others: Iterable[Cell]) -> list[Alternative]:
    """Cells of the matrix (`listed`) and `others`, the nearest first.

    Those that differ in fewer axes precede, then those at a smaller distance, then those of the matrix.
    """
    candidates = {cell.id: (cell, False) for cell in others} | {cell.id: (cell, True) for cell in listed}
    ranked = []
    for cell, is_listed in candidates.values():
        # Cells of another variant count only if none has the same variant.
        has_variant = cell.variant == asked.variant or replace(cell, variant=asked.variant).id not in candidates
        is_other = cell.framework != asked.framework or cell.arch != asked.arch
        if is_other or cell.id == asked.id or not has_variant:
            continue
        differences: dict[str, float] = {}  # each axis that differs, and by how much
        if cell.line != asked.line and cell.release != asked.release:
            differences[f"release {cell.release}"] = _distance(asked.release or asked.line, cell.release)
        if cell.cuda != asked.cuda:
            name = "no CUDA" if cell.is_cpu else f"CUDA {cell.cuda}"
            has_cpu = cell.is_cpu or asked.is_cpu
            differences[name] = CPU_DISTANCE if has_cpu else _distance(asked.cuda, cell.cuda)
        if cell.python != asked.python:
            differences[f"Python {cell.python}"] = _distance(asked.python, cell.python)
        if cell.variant != asked.variant:
            differences[f"variant {cell.variant}"] = 1
        near = Alternative(cell=cell, differences=tuple(differences), is_listed=is_listed)
        ranked.append((len(differences), sum(differences.values()), not is_listed, near))
    ranked.sort(key=lambda item: item[:3])
    # Cells that differ in three axes or more help only if there are no nearer ones.
    close = [item for item in ranked if item[0] < 3] or ranked
    return [near for *_, near in close]


def release_distance(asked: Version, version: Version) -> tuple[int, int]:
    """The distance of a release from the requested one, as a sort key.

    Of a later major version, the first releases are nearest; of an earlier one, the last releases.
    """
    if version.major == asked.major:
        return 0, abs(version.minor - asked.minor)
    return abs(version.major - asked.major), version.minor if version.major > asked.major else -version.minor


def _distance(version: str, other: str) -> float:
    """The distance between two versions, by their first two numbers; a major version counts as ten minor versions."""
    first, second = Version(version), Version(other)
    return abs((first.major - second.major) * 10 + first.minor - second.minor)
