"""Cells: the points of the matrix, their ids, components, and how people select them. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from packaging.version import Version

from builder.errors import MatrixError, UsageError
from builder.matrix import CPU, Component, Matrix, nearest

CUDA = "cuda"  # the component of NVIDIA's libraries
ID = re.compile(r"([a-z]+)-([0-9.]+)-(cu[0-9]+|cpu)-(py[0-9]+)(?:-([a-z][a-z0-9]*))?", re.ASCII)
MAX_CELLS = 50_000
MAX_ALTERNATIVES = 256
_BRACE = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the matrix. `line` is what people ask for (2.9), `release` what they get (2.9.1)."""

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
        """The id without variant: cells of one group share every wheel that both have."""
        return f"{self.short}-{self.line}-{self.cuda_tag}-{self.python_tag}"

    @property
    def suffix(self) -> str:
        return "" if self.variant == "plain" else f"-{self.variant}"

    @property
    def cuda_tag(self) -> str:
        return CPU if self.is_cpu else "cu" + self.cuda.replace(".", "")

    @property
    def is_cpu(self) -> bool:
        return self.cuda == CPU

    @property
    def python_tag(self) -> str:
        return "py" + self.python.replace(".", "")


def expand(matrix: Matrix) -> tuple[Cell, ...]:
    """All cells, in a stable order; raises MatrixError for exclusions and inclusions that do nothing."""
    product = _product(matrix)
    known = {cell.id: cell for cell in product}
    if len(known) != len(product):
        twice = Counter(cell.id for cell in product).most_common(1)[0][0]
        cell = next(cell for cell in product if cell.id == twice)
        where = matrix.where("frameworks", cell.framework, "versions", cell.line)
        raise MatrixError(f"{where}: two cells have the id {twice}: two versions differ only by their dots")
    for number, inclusion in enumerate(matrix.include):
        where = matrix.where("include", number, "cell")
        cell = parse(matrix, inclusion.cell, where)
        if cell.id in known:
            raise MatrixError(f"{where}: {cell.id} is in the matrix already; delete the entry")
        known[cell.id] = cell
    for number, budget in enumerate(matrix.budgets):
        where = matrix.where("budgets", number, "cells")
        try:
            hits = match(budget.cells, known)
        except UsageError as error:
            raise MatrixError(f"{where}: {error}") from error
        if not hits:
            raise MatrixError(f"{where}: {budget.cells!r} matches no cell; delete it or mend the pattern")
    for number, exclusion in enumerate(matrix.exclude):
        where = matrix.where("exclude", number, "cells")
        try:
            hits = match(exclusion.cells, known)
        except UsageError as error:
            raise MatrixError(f"{where}: {error}") from error
        if not hits:
            raise MatrixError(f"{where}: {exclusion.cells!r} matches no cell; delete it or mend the pattern")
        for hit in hits:
            del known[hit]
    if not known:
        raise MatrixError(f"{matrix.where('exclude')}: every cell is excluded; there is nothing to build")
    return tuple(sorted(known.values(), key=_order(matrix)))


def components(matrix: Matrix, cell: Cell) -> tuple[str, ...]:
    """The cell's components, each after all that it needs: the framework's, those of its line, the variant's.

    On the cpu there is no `cuda` component, and nothing that a line has for CUDA's sake; on no CUDA those that are only
    for others.
    """
    ordered: list[str] = []

    def add(name: str) -> None:
        if name in ordered:
            return
        for need in matrix.components[name].needs:
            add(need)
        if not (name == CUDA and cell.is_cpu) and _is_on(matrix.components[name], cell.cuda):
            ordered.append(name)

    line = matrix.frameworks[cell.framework].versions[cell.line]
    of_line = [name for name in line.components if not (cell.is_cpu and _needs_cuda(matrix, name))]
    for name in (cell.framework, *of_line, *matrix.variants[cell.variant]):
        add(name)
    return tuple(ordered)


def _is_on(component: Component, cuda: str) -> bool:
    return not component.only_on or cuda.split(".", maxsplit=1)[0] in component.only_on


def _needs_cuda(matrix: Matrix, name: str) -> bool:
    return name == CUDA or any(_needs_cuda(matrix, need) for need in matrix.components[name].needs)


def together(matrix: Matrix, cells: Sequence[Cell]) -> dict[str, tuple[Cell, ...]]:
    """Group -> the cells that are resolved with it, so that all of them share one set of CUDA wheels.

    Those are of the same CUDA and Python; of another framework the first line that the matrix names, since two lines
    of a framework never fit into one environment.
    """
    alike: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        alike.setdefault((cell.cuda, cell.python), []).append(cell)
    result = {}
    for members in alike.values():
        lines = {(cell.framework, cell.line) for cell in members}
        first = {
            name: next((line for line in framework.versions if (name, line) in lines), "")
            for name, framework in matrix.frameworks.items()
        }
        for group, one in {cell.group: cell for cell in members}.items():
            wanted = first | {one.framework: one.line}
            result[group] = tuple(cell for cell in members if wanted[cell.framework] == cell.line)
    return result


def match(pattern: str, ids: Iterable[str]) -> list[str]:
    """The ids that a shell pattern with braces matches."""
    alternatives = _braces(pattern)
    return [id_ for id_ in ids if any(fnmatch.fnmatchcase(id_, one) for one in alternatives)]


def select(matrix: Matrix, cells: Sequence[Cell], wanted: Sequence[str]) -> tuple[Cell, ...]:
    """Cells named by ids, patterns or sets (default: the set `default`, else all); raises UsageError if none."""
    by_id = {cell.id: cell for cell in cells}
    chosen: set[str] = set()
    for want in wanted or (("default",) if "default" in matrix.sets else ("*",)):
        hits = _members(matrix, want, by_id) if want in matrix.sets else match(want, by_id)
        if not hits:
            for exclusion in matrix.exclude:
                if match(exclusion.cells, [want]):
                    raise UsageError(f"{want} is excluded: {exclusion.reason}")
            raise UsageError(
                f"no cell matches {want!r}{nearest(want, [*matrix.sets, *by_id])}",
                hint="`builder plan all` lists every cell.",
            )
        chosen.update(hits)
    return tuple(cell for cell in cells if cell.id in chosen)


def parse(matrix: Matrix, cell_id: str, where: str) -> Cell:
    """A cell from its id, in or outside the product; raises MatrixError naming the part that is unknown."""
    found = ID.fullmatch(cell_id)
    if not found:
        raise MatrixError(f"{where}: {cell_id!r} is not a cell id; one looks like pt-2.9-cu128-py311-jupyter")
    short, line, cuda_tag, python_tag, variant = found.groups()
    frameworks = {framework.short: (name, framework) for name, framework in matrix.frameworks.items()}
    if short not in frameworks:
        raise MatrixError(f"{where}: {cell_id}: no framework is called {short!r}{nearest(short, frameworks)}")
    name, framework = frameworks[short]
    if line not in framework.versions:
        raise MatrixError(f"{where}: {cell_id}: {name} has no version {line!r}{nearest(line, framework.versions)}")
    cudas = {CPU if version == CPU else "cu" + version.replace(".", ""): version for version in matrix.cuda}
    pythons = {"py" + version.replace(".", ""): version for version in matrix.python}
    for tag, tags, what in ((cuda_tag, cudas, "CUDA"), (python_tag, pythons, "Python")):
        if tag not in tags:
            raise MatrixError(f"{where}: {cell_id}: the matrix has no {what} {tag!r}{nearest(tag, tags)}")
    variant = variant or "plain"
    if variant not in matrix.variants:
        raise MatrixError(f"{where}: {cell_id}: no variant {variant!r}{nearest(variant, matrix.variants)}")
    return Cell(
        framework=name,
        short=short,
        line=line,
        release=framework.versions[line].release,
        cuda=cudas[cuda_tag],
        python=pythons[python_tag],
        variant=variant,
    )


def _product(matrix: Matrix) -> list[Cell]:
    total = sum(
        len(entry.cuda) * len(entry.python) * len(matrix.variants)
        for framework in matrix.frameworks.values()
        for entry in framework.versions.values()
    )
    if total > MAX_CELLS:
        where = matrix.where("frameworks")
        raise MatrixError(
            f"{where}: the matrix has {total} cells; at most {MAX_CELLS} make sense", hint="Shorten an axis."
        )
    return [
        Cell(
            framework=name,
            short=framework.short,
            line=line,
            release=entry.release,
            cuda=cuda,
            python=python,
            variant=variant,
        )
        for name, framework in matrix.frameworks.items()
        for line, entry in framework.versions.items()
        for cuda in entry.cuda
        for python in entry.python
        for variant in matrix.variants
    ]


_Order = tuple[int, Version, bool, Version, Version, int]


def _order(matrix: Matrix) -> Callable[[Cell], _Order]:
    """Frameworks and variants as the matrix lists them, versions as versions (12.10 after 12.9), the cpu last."""
    frameworks, variants = list(matrix.frameworks), list(matrix.variants)

    def key(cell: Cell) -> _Order:
        cuda = Version("0" if cell.is_cpu else cell.cuda)
        versions = (Version(cell.line), cell.is_cpu, cuda, Version(cell.python))
        return (frameworks.index(cell.framework), *versions, variants.index(cell.variant))

    return key


def _members(matrix: Matrix, name: str, ids: Iterable[str]) -> list[str]:
    """The ids of a set; raises MatrixError for a pattern of it that matches nothing."""
    ids = list(ids)
    hits: list[str] = []
    for number, pattern in enumerate(matrix.sets[name]):
        found = match(pattern, ids)
        if not found:
            where = matrix.where("sets", name, number)
            raise MatrixError(f"{where}: {pattern!r} in the set {name!r} matches no cell{nearest(pattern, ids)}")
        hits += found
    return hits


def _braces(pattern: str) -> list[str]:
    """`a{b,c}` to `ab`, `ac`, as in cibuildwheel's selectors; raises UsageError for a pattern of too many."""
    patterns = [pattern]
    while any(found := [_BRACE.search(one) for one in patterns]):
        patterns = [
            one if brace is None else one[: brace.start()] + option + one[brace.end() :]
            for one, brace in zip(patterns, found, strict=True)
            for option in (brace[1].split(",") if brace else [""])
        ]
        if len(patterns) > MAX_ALTERNATIVES:
            raise UsageError(f"{pattern!r} stands for more than {MAX_ALTERNATIVES} patterns")
    return patterns
