"""Cells: the points of the matrix, their ids, their components, and their selection. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from typing import TypeVar

from packaging.version import Version

from builder.common.errors import MatrixError, UsageError, did_you_mean
from builder.matrix.schema import AMD64, ARM64, BUILT_IN_SETS, CPU, NOT_BUILT, Arch, Matrix, cuda_major

CUDA = "cuda"  # the component with NVIDIA's libraries
ID = re.compile(r"([a-z]+)-([0-9.]+)-(cu[0-9]+|cpu)-(py[0-9]+)(?:-([a-z][a-z0-9]*))??(?:-(arm64))?", re.ASCII)
MAX_CELLS = 50_000
MAX_ALTERNATIVES = 256  # of one pattern: braces multiply, so ten pairs would already be 1024
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
    arch: Arch = AMD64

    @property
    def id(self) -> str:
        """`pt-2.9-cu128-py313-jupyter`, `pt-2.15-cu132-py313-arm64`: neither the plain variant nor amd64 is written."""
        return f"{self.axes}{self.suffix}{self.arch_suffix}"

    @property
    def group(self) -> str:
        """The id without the variant."""
        return f"{self.axes}{self.arch_suffix}"

    @property
    def axes(self) -> str:
        """The id without variant and architecture."""
        return f"{self.short}-{self.line}-{self.cuda_tag}-{self.python_tag}"

    @property
    def arch_suffix(self) -> str:
        return "" if self.arch == AMD64 else f"-{self.arch}"

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
    """All cells, in a stable order; raises MatrixError, also for exclusions, budgets and sets that match no cell.

    Frameworks and variants have the order of the matrix, versions that of versions (12.10 after 12.9); the cpu is last,
    and arm64 after amd64.
    """
    lines = [
        (name, line, entry)
        for name, framework in matrix.frameworks.items()
        for line, entry in framework.versions.items()
    ]
    # Count the cells before they are made: long lists in all axes would fill the memory.
    pairs = sum(len(entry.arch_on(cuda)) * len(entry.python) for _, _, entry in lines for cuda in entry.cuda)
    total = pairs * len(matrix.variants)
    if total > MAX_CELLS:
        where = matrix.where("frameworks")
        raise MatrixError(
            f"{where}: the matrix has {total} cells; the limit is {MAX_CELLS}",
            hint="Remove versions or variants from matrix.yaml.",
        )
    cells: dict[str, Cell] = {}
    for name, line, entry in lines:
        for cuda, python, variant in product(entry.cuda, entry.python, matrix.variants):
            for arch in entry.arch_on(cuda):
                cell = Cell(
                    framework=name,
                    short=matrix.frameworks[name].short,
                    line=line,
                    release=entry.release,
                    cuda=cuda,
                    python=python,
                    variant=variant,
                    arch=arch,
                )
                if cell.id in cells:  # such as CUDA 13.0 and 1.30
                    raise MatrixError(f"{matrix.where('frameworks', name)}: two cells have the id {cell.id}")
                cells[cell.id] = cell
    for number, inclusion in enumerate(matrix.include):
        where = matrix.where("include", number, "cell")
        cell = cell_of_id(matrix, inclusion.cell, where)
        if cell.id in cells:
            raise MatrixError(f"{where}: {cell.id} is already in the matrix: delete the entry")
        cells[cell.id] = cell
    # After a framework is removed, one error lists all entries to edit, instead of one entry in each run.
    unused = [
        _unused(matrix.where("budgets", number, "cells"), budget.cells, cells)
        for number, budget in enumerate(matrix.budgets)
    ]
    for number, item in enumerate(matrix.exclude):
        if matrix.is_own("exclude", number):  # a shipped one may be about images that the team does not have
            unused.append(_unused(matrix.where("exclude", number, "cells"), item.cells, cells))
        for hit in match(item.cells, cells):
            del cells[hit]
    for name, component in matrix.components.items():
        if component.only:
            path = ("components", name, "only", "cells")
            having = [id_ for id_, cell in cells.items() if name in _of_variant(matrix, cell.variant)]
            if matrix.is_own(*path):
                unused.append(_unused(matrix.where(*path), component.only.cells, having))
            for hit in {*having} - {*match(component.only.cells, having)}:
                del cells[hit]
    for name, patterns in matrix.sets.items():
        for number, pattern in enumerate(patterns):
            unused.append(_unused(matrix.where("sets", name, number), pattern, cells))
    if not cells:
        raise MatrixError(f"{matrix.where('exclude')}: every cell is excluded; there is nothing to build")
    faults = list(filter(None, unused))
    if len(faults) == 1:
        raise MatrixError(faults[0], hint="Correct or delete it.")
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults)
        raise MatrixError(f"{len(faults)} entries match no cell{listed}", hint="Correct or delete them.")
    for cell in cells.values():
        if cell.arch != AMD64 and matrix.python[cell.python].uv:
            where = matrix.where("python", cell.python, "uv")
            raise MatrixError(
                f"{where}: {cell.id}: uv's builds of Python are for {AMD64} only",
                hint="Exclude these cells, or use the Python of a Debian release.",
            )

    frameworks = {name: place for place, name in enumerate(matrix.frameworks)}
    variants = {name: place for place, name in enumerate(matrix.variants)}
    version = cache(Version)  # thousands of cells share a few versions, and parsing is slow

    def order(cell: Cell) -> tuple[int, Version, bool, Version, Version, str, int]:
        cuda = version("0" if cell.is_cpu else cell.cuda)
        versions = (version(cell.line), cell.is_cpu, cuda, version(cell.python))
        return (frameworks[cell.framework], *versions, cell.arch, variants[cell.variant])

    return tuple(sorted(cells.values(), key=order))


def _unused(where: str, pattern: str, ids: Iterable[str]) -> str:
    """A message if a pattern of matrix.yaml matches no cell, else empty; raises MatrixError for an invalid pattern."""
    try:
        if match(pattern, ids):
            unused = _unused_alternative(pattern, ids)
            return f"{where}: {unused!r} in {pattern!r} matches no cell" if unused else ""
    except UsageError as error:
        raise MatrixError(f"{where}: {error}") from error
    # No suggestion for a pattern with wildcards: the most similar id belongs to another framework.
    return f"{where}: {pattern!r} matches no cell{'' if set(pattern) & set('*?[{') else did_you_mean(pattern, ids)}"


def components(matrix: Matrix, cell: Cell) -> tuple[str, ...]:
    """The components of a cell: the framework, its line's components, the variant's components.

    A component comes after all components that it needs. A CPU cell has no `cuda` component, and no component of the
    line that needs `cuda`. A component with `only_on` is left out of cells with another CUDA major
    version.
    """
    return _with_needs(matrix, cell, matrix.variants[cell.variant])


def _of_variant(matrix: Matrix, variant: str) -> set[str]:
    """The components of a variant, and what they need."""
    return {*chain.from_iterable(matrix.with_needs[name] for name in matrix.variants.get(variant, ()))}


def exclusion(matrix: Matrix, cell_id: str) -> str:
    """The place in matrix.yaml that leaves a cell out, and its reason; empty if there is none."""
    for number, item in enumerate(matrix.exclude):
        if match(item.cells, [cell_id]):
            return f"{matrix.where('exclude', number)}: {item.reason}"
    parts = ID.fullmatch(cell_id)
    for name in sorted(_of_variant(matrix, parts[5])) if parts else ():
        only = matrix.components[name].only
        if only and not match(only.cells, [cell_id]):
            return f"{matrix.where('components', name, 'only')}: {only.reason}"
    return ""


def foundation(matrix: Matrix, cell: Cell) -> tuple[str, ...]:
    """The components that all cells of a group have: the framework's and its line's components."""
    return _with_needs(matrix, cell, ())


def _with_needs(matrix: Matrix, cell: Cell, variant: Sequence[str]) -> tuple[str, ...]:
    """The components of the foundation and of a variant, with all that they need."""
    line = matrix.frameworks[cell.framework].versions[cell.line]
    of_line = [name for name in line.components if not (cell.is_cpu and CUDA in matrix.with_needs[name])]
    names = (cell.framework, *of_line, *variant)
    ordered = dict.fromkeys(chain.from_iterable(matrix.with_needs[name] for name in names))
    major = cuda_major(cell.cuda)
    return tuple(
        name
        for name in ordered
        if not (name == CUDA and cell.is_cpu)
        and (not matrix.components[name].only_on or major in matrix.components[name].only_on)
    )


def indexes_of_packages(matrix: Matrix, cell: Cell) -> dict[str, str]:
    """Canonical name of a package -> the index that it comes from; packages of the default index have no entry.

    The same for all cells of a group. A line that is not in the matrix has the indexes of the first line: the name of a
    private framework must not be looked up elsewhere.
    """
    if not matrix.indexes:
        return {}
    versions = matrix.frameworks[cell.framework].versions
    line = cell.line if cell.line in versions else next(iter(versions))
    packages = matrix.indexes_of(cell.framework, line, cell.cuda)
    return {package: next(iter(indexes)) for package, indexes in packages.items()}


def match(pattern: str, ids: Iterable[str]) -> list[str]:
    """The ids that a shell pattern with braces matches; raises UsageError for one with too many alternatives.

    Braces work as in cibuildwheel's selectors: `a{b,c}` is `ab` and `ac`.
    """
    patterns = [pattern]
    while any(braces := [_BRACE.search(text) for text in patterns]):
        patterns = [
            text if brace is None else text[: brace.start()] + option + text[brace.end() :]
            for text, brace in zip(patterns, braces, strict=True)
            for option in (brace[1].split(",") if brace else [""])
        ]
        if len(patterns) > MAX_ALTERNATIVES:
            raise UsageError(f"{pattern!r} expands to more than {MAX_ALTERNATIVES} patterns")
    return [id_ for id_ in ids if any(fnmatch.fnmatchcase(id_, text) for text in patterns)]


def _unused_alternative(pattern: str, ids: Iterable[str]) -> str:
    """The first alternative in braces that matches no cell, such as a typing error; empty if all of them match one."""
    options = ((brace, option) for brace in _BRACE.finditer(pattern) for option in brace[1].split(","))
    texts = ((option, pattern[: brace.start()] + option + pattern[brace.end() :]) for brace, option in options)
    return next((option for option, text in texts if not match(text, ids)), "")


def select(matrix: Matrix, cells: Sequence[Cell], patterns: Sequence[str]) -> tuple[Cell, ...]:
    """The cells of ids, patterns or sets (default: the set `default`, else all).

    Raises UsageError for one that matches no cell. Built-in sets may be empty.
    """
    by_id = {cell.id: cell for cell in cells}
    built_in = {*BUILT_IN_SETS, *matrix.debian, *matrix.frameworks}
    selected: set[str] = set()
    for pattern in patterns or (("default",) if "default" in matrix.sets else ("*",)):
        if pattern in matrix.sets:
            selected.update(hit for member in matrix.sets[pattern] for hit in match(member, by_id))
        elif pattern in built_in:
            selected.update(cell.id for cell in cells if _is_in(matrix, cell, pattern))
        elif hits := match(pattern, by_id):
            if unused := _unused_alternative(pattern, by_id):
                raise UsageError(
                    f"{unused!r} in {pattern!r} matches no cell", hint="`builder plan '*'` lists every cell."
                )
            selected.update(hits)
        elif reason := exclusion(matrix, pattern):
            raise UsageError(f"{pattern} is excluded by {reason}")
        else:
            near = [text for text in (f"{pattern}-*", f"*-{pattern}") if match(text, by_id)]
            raise UsageError(
                f"no cell matches {pattern!r}"
                f"{did_you_mean(pattern, near or [*matrix.sets, *sorted(built_in), *by_id])}",
                hint="`builder plan '*'` lists every cell.",
            )
    return tuple(cell for cell in cells if cell.id in selected)


def _is_in(matrix: Matrix, cell: Cell, name: str) -> bool:
    """True if a cell is in the built-in set `name`, which may be the name of a Debian release or a framework.

    The set `arm64` has all cells for arm64, and no other set has any: a machine builds images for its own architecture.
    A cell with `not_built` in matrix.yaml is in the set `not-built` alone. A cell with `after_support` in matrix.yaml
    is in `unsupported`, any other cell in `all`. The sets do not depend on today's date: otherwise, the same command
    would build other images on another day.
    """
    if ARM64 in (name, cell.arch):
        return name == cell.arch
    python = matrix.python[cell.python]
    was_built = not python.not_built
    if not was_built or name == NOT_BUILT:
        return was_built == (name != NOT_BUILT)
    if name in BUILT_IN_SETS:
        line = matrix.frameworks[cell.framework].versions[cell.line]
        entries = (matrix.debian[python.debian], python, matrix.cuda[cell.cuda], line)
        return any(entry.after_support for entry in entries) == (name == "unsupported")
    return name in (python.debian, cell.framework)


def cell_of_id(matrix: Matrix, cell_id: str, where: str) -> Cell:
    """The cell with this id, in the matrix or not; raises MatrixError with the part that is unknown."""
    parts = ID.fullmatch(cell_id)
    if not parts:
        raise MatrixError(f"{where}: {cell_id!r} is not a cell id such as pt-2.9-cu128-py313-jupyter")
    short, line, cuda_tag, python_tag, variant, arch = parts.groups()
    variant = variant or "plain"

    def find(key: str, known: Mapping[str, _Value], kind: str) -> _Value:
        if key not in known:
            raise MatrixError(f"{where}: {cell_id}: no {kind} {key!r}{did_you_mean(key, known)}")
        return known[key]

    name = find(short, {framework.short: name for name, framework in matrix.frameworks.items()}, "framework")
    entry = find(line, matrix.frameworks[name].versions, f"{name} version")
    cuda = find(cuda_tag, {_cuda_tag(version): version for version in matrix.cuda}, "CUDA version")
    python = find(python_tag, {_python_tag(version): version for version in matrix.python}, "Python version")
    find(variant, matrix.variants, "variant")
    return Cell(
        framework=name,
        short=short,
        line=line,
        release=entry.release,
        cuda=cuda,
        python=python,
        variant=variant,
        arch=ARM64 if arch else AMD64,
    )


def pattern_of_group(group: str) -> str:
    """A pattern that matches all cells of a group. For a group on amd64, it also matches the same group on arm64."""
    return f"{group.removesuffix(ARM64)}*{ARM64}" if group.endswith(f"-{ARM64}") else f"{group}*"
