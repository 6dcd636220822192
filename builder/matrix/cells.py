"""Cells: the points of the matrix, their ids and components, and how they are selected. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from math import prod
from typing import TypeVar

from packaging.version import Version

from builder.common.errors import MatrixError, UsageError, did_you_mean
from builder.matrix.schema import CPU, Component, Framework, Matrix

CUDA = "cuda"  # the component with NVIDIA's libraries
ID = re.compile(r"([a-z]+)-([0-9.]+)-(cu[0-9]+|cpu)-(py[0-9]+)(?:-([a-z][a-z0-9]*))?", re.ASCII)
MAX_CELLS = 50_000
MAX_ALTERNATIVES = 256
_BRACE = re.compile(r"\{([^{}]*)\}")
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the matrix. `line` is the framework's version as listed (2.9), `release` the exact one (2.9.1)."""

    framework: str
    short: str
    line: str
    release: str
    cuda: str
    python: str
    variant: str

    @property
    def id(self) -> str:
        """`pt-2.9-cu128-py311-jupyter`; the plain variant has no suffix."""
        return f"{self.group}{self.suffix}"

    @property
    def group(self) -> str:
        """The id without the variant."""
        return f"{self.short}-{self.line}-{self.cuda_tag}-{self.python_tag}"

    @property
    def suffix(self) -> str:
        return "" if self.variant == "plain" else f"-{self.variant}"

    @property
    def cuda_tag(self) -> str:
        return _cuda_tag(self.cuda)

    @property
    def is_cpu(self) -> bool:
        return self.cuda == CPU

    @property
    def python_tag(self) -> str:
        return _python_tag(self.python)


def _cuda_tag(version: str) -> str:
    return CPU if version == CPU else "cu" + version.replace(".", "")


def _python_tag(version: str) -> str:
    return "py" + version.replace(".", "")


def expand(matrix: Matrix) -> tuple[Cell, ...]:
    """All cells, in a stable order; raises MatrixError for exclusions, inclusions and budgets without effect."""
    cells = {cell.id: cell for cell in _product(matrix)}
    for number, inclusion in enumerate(matrix.include):
        where = matrix.where("include", number, "cell")
        cell = parse(matrix, inclusion.cell, where)
        if cell.id in cells:
            raise MatrixError(f"{where}: {cell.id} is already in the matrix: delete the entry")
        cells[cell.id] = cell
    for number, budget in enumerate(matrix.budgets):
        _hits(matrix.where("budgets", number, "cells"), budget.cells, cells)
    for number, exclusion in enumerate(matrix.exclude):
        for hit in _hits(matrix.where("exclude", number, "cells"), exclusion.cells, cells):
            del cells[hit]
    if not cells:
        raise MatrixError(f"{matrix.where('exclude')}: every cell is excluded; there is nothing to build")
    return tuple(sorted(cells.values(), key=_order(matrix)))


def _hits(where: str, pattern: str, ids: Iterable[str]) -> list[str]:
    """The ids that a pattern of matrix.yaml matches; raises MatrixError if there are none."""
    try:
        if hits := match(pattern, ids):
            return hits
    except UsageError as error:
        raise MatrixError(f"{where}: {error}") from error
    raise MatrixError(f"{where}: {pattern!r} matches no cell{did_you_mean(pattern, ids)}", hint="Correct or delete it.")


def components(matrix: Matrix, cell: Cell) -> tuple[str, ...]:
    """The components of a cell, each after all that it needs: the framework, those of its line, those of the variant.

    On the cpu there is no `cuda` component, and nothing of the line that needs it. Components with `only_on` are left
    out elsewhere.
    """
    return _with_needs(matrix, cell, [*_roots(matrix, cell), *matrix.variants[cell.variant]])


def foundation(matrix: Matrix, cell: Cell) -> tuple[str, ...]:
    """The components of every cell of the group: those of the framework and of its line."""
    return _with_needs(matrix, cell, _roots(matrix, cell))


def _roots(matrix: Matrix, cell: Cell) -> list[str]:
    line = matrix.frameworks[cell.framework].versions[cell.line]
    return [
        cell.framework,
        *(name for name in line.components if not (cell.is_cpu and CUDA in matrix.with_needs[name])),
    ]


def _with_needs(matrix: Matrix, cell: Cell, names: Iterable[str]) -> tuple[str, ...]:
    ordered = dict.fromkeys(chain.from_iterable(matrix.with_needs[name] for name in names))
    return tuple(
        name for name in ordered if not (name == CUDA and cell.is_cpu) and _is_on(matrix.components[name], cell.cuda)
    )


def _is_on(component: Component, cuda: str) -> bool:
    return not component.only_on or cuda.split(".", maxsplit=1)[0] in component.only_on


def match(pattern: str, ids: Iterable[str]) -> list[str]:
    """The ids that a shell pattern with braces matches."""
    alternatives = _alternatives(pattern)
    return [id_ for id_ in ids if any(fnmatch.fnmatchcase(id_, alternative) for alternative in alternatives)]


def select(matrix: Matrix, cells: Sequence[Cell], patterns: Sequence[str]) -> tuple[Cell, ...]:
    """The cells of ids, patterns or sets (default: the set `default`, else all).

    Raises UsageError for one that matches no cell, and MatrixError for such a pattern in a set.
    """
    by_id = {cell.id: cell for cell in cells}
    selected: set[str] = set()
    for pattern in patterns or (("default",) if "default" in matrix.sets else ("*",)):
        if pattern in matrix.sets:
            for number, member in enumerate(matrix.sets[pattern]):
                selected.update(_hits(matrix.where("sets", pattern, number), member, by_id))
            continue
        hits = match(pattern, by_id)
        if not hits:
            raise _no_cell(matrix, pattern, by_id)
        selected.update(hits)
    return tuple(cell for cell in cells if cell.id in selected)


def _no_cell(matrix: Matrix, pattern: str, ids: Iterable[str]) -> UsageError:
    for exclusion in matrix.exclude:
        if match(exclusion.cells, [pattern]):
            return UsageError(f"{pattern} is excluded: {exclusion.reason}")
    return UsageError(
        f"no cell matches {pattern!r}{did_you_mean(pattern, [*matrix.sets, *ids])}",
        hint="`builder plan '*'` lists every cell.",
    )


def parse(matrix: Matrix, cell_id: str, where: str) -> Cell:
    """The cell with this id, in the matrix or not; raises MatrixError with the part that is unknown."""
    parts = ID.fullmatch(cell_id)
    if not parts:
        raise MatrixError(f"{where}: {cell_id!r} is not a cell id such as pt-2.9-cu128-py311-jupyter")
    short, line, cuda_tag, python_tag, variant = parts.groups("plain")

    def find(key: str, known: Mapping[str, _Value], kind: str) -> _Value:
        if key not in known:
            raise MatrixError(f"{where}: {cell_id}: no {kind} {key!r}{did_you_mean(key, known)}")
        return known[key]

    name = find(short, {framework.short: name for name, framework in matrix.frameworks.items()}, "framework")
    framework = matrix.frameworks[name]
    find(line, framework.versions, f"{name} version")
    cuda = find(cuda_tag, {_cuda_tag(version): version for version in matrix.cuda}, "CUDA version")
    python = find(python_tag, {_python_tag(version): version for version in matrix.python}, "Python version")
    find(variant, matrix.variants, "variant")
    return _cell(name, framework, line, (cuda, python, variant))


def _cell(name: str, framework: Framework, line: str, axes: tuple[str, str, str]) -> Cell:
    cuda, python, variant = axes
    release = framework.versions[line].release
    return Cell(
        framework=name, short=framework.short, line=line, release=release, cuda=cuda, python=python, variant=variant
    )


def _product(matrix: Matrix) -> list[Cell]:
    lines = [
        (name, framework, line, (entry.cuda, entry.python, list(matrix.variants)))
        for name, framework in matrix.frameworks.items()
        for line, entry in framework.versions.items()
    ]
    total = sum(prod(map(len, axes)) for _, _, _, axes in lines)
    if total > MAX_CELLS:
        where = matrix.where("frameworks")
        raise MatrixError(
            f"{where}: the matrix has {total} cells; the limit is {MAX_CELLS}",
            hint="Remove versions or variants from matrix.yaml.",
        )
    return [_cell(name, framework, line, values) for name, framework, line, axes in lines for values in product(*axes)]


_Order = tuple[int, Version, bool, Version, Version, int]


def _order(matrix: Matrix) -> Callable[[Cell], _Order]:
    """Frameworks and variants in the order of the matrix, versions as versions (12.10 after 12.9), the cpu last."""
    frameworks, variants = (
        {name: place for place, name in enumerate(names)} for names in (matrix.frameworks, matrix.variants)
    )
    version = cache(Version)

    def key(cell: Cell) -> _Order:
        cuda = version("0" if cell.is_cpu else cell.cuda)
        versions = (version(cell.line), cell.is_cpu, cuda, version(cell.python))
        return (frameworks[cell.framework], *versions, variants[cell.variant])

    return key


def _alternatives(pattern: str) -> list[str]:
    """`a{b,c}` to `ab`, `ac`, as in cibuildwheel's selectors; raises UsageError for too many."""
    patterns = [pattern]
    while any(braces := [_BRACE.search(pattern) for pattern in patterns]):
        patterns = [
            pattern if brace is None else pattern[: brace.start()] + option + pattern[brace.end() :]
            for pattern, brace in zip(patterns, braces, strict=True)
            for option in (brace[1].split(",") if brace else [""])
        ]
        if len(patterns) > MAX_ALTERNATIVES:
            raise UsageError(f"{pattern!r} expands to more than {MAX_ALTERNATIVES} patterns")
    return patterns
