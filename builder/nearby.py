"""The cells nearest to one that does not work. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from packaging.version import Version

from builder.cells import Cell

CPU_DISTANCE = 40.0  # farther than any two CUDA versions


@dataclass(frozen=True, kw_only=True)
class Near:
    """A cell that works; `differs` says in what from the one asked for, an axis each."""

    cell: Cell
    differs: tuple[str, ...]
    is_listed: bool

    def __str__(self) -> str:
        return f"{self.cell.id} ({', '.join(self.differs)}{'' if self.is_listed else '; not in the matrix'})"


def rank(asked: Cell, listed: Iterable[Cell], others: Iterable[Cell]) -> list[Near]:
    """The matrix's cells, which are `listed`, and `others`: fewest axes that differ, then least, then those listed."""
    found = []
    candidates = {cell.id: (cell, False) for cell in others} | {cell.id: (cell, True) for cell in listed}
    for cell, is_listed in candidates.values():
        # Another variant only where the one asked for does not exist.
        has_variant = cell.variant == asked.variant or replace(cell, variant=asked.variant).id not in candidates
        if cell.framework == asked.framework and cell.id != asked.id and has_variant:
            differs, distance = _difference(asked, cell)
            found.append((len(differs), distance, not is_listed, Near(cell=cell, differs=differs, is_listed=is_listed)))
    found.sort(key=lambda one: one[:3])
    few = [one for one in found if one[0] < 3] or found  # what differs in everything is no neighbour
    return [one[3] for one in few]


def apart(wanted: Version, version: Version) -> tuple[int, int]:
    """How far a release is, as a key to sort by: of another major line, the end that is on this side is nearest."""
    if version.major == wanted.major:
        return 0, abs(version.minor - wanted.minor)
    return abs(version.major - wanted.major), version.minor if version.major > wanted.major else -version.minor


def _difference(asked: Cell, cell: Cell) -> tuple[tuple[str, ...], float]:
    differs, distance = [], 0.0
    if cell.line != asked.line and cell.release != asked.release:
        differs.append(f"release {cell.release}")
        distance += _far(asked.release or asked.line, cell.release)
    if cell.cuda != asked.cuda:
        differs.append("no CUDA" if cell.is_cpu else f"CUDA {cell.cuda}")
        distance += CPU_DISTANCE if cell.is_cpu or asked.is_cpu else _far(asked.cuda, cell.cuda)
    if cell.python != asked.python:
        differs.append(f"Python {cell.python}")
        distance += _far(asked.python, cell.python)
    if cell.variant != asked.variant:
        differs.append(f"variant {cell.variant}")
        distance += 1
    return tuple(differs), distance


def _far(one: str, other: str) -> float:
    """Between two versions, by their first two numbers; a major one counts as ten minor ones."""
    mine, its = Version(one), Version(other)
    return abs((mine.major - its.major) * 10 + mine.minor - its.minor)
