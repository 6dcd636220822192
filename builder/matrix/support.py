"""Ends of support: the last day on which the parts of a cell get security updates. Pure: callers give today's date.

A Python from Debian's packages gets Debian's updates, so the end of its Debian release counts. A build of uv gets the
updates of Python itself. docs/decisions/0027.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date

from builder.common.errors import RefusedError
from builder.common.text import counted, listed
from builder.matrix import facts
from builder.matrix.cells import Cell
from builder.matrix.schema import Matrix

WARN_DAYS = 60
SHOWN = 3  # groups in a line


@dataclass(frozen=True, kw_only=True)
class SupportEnd:
    """The last day of support of one entry of matrix.yaml, such as a Debian release.

    `path` is its place in the file. `after_support` is the reason there for images after that day, or empty.
    """

    path: tuple[str, ...]
    name: str
    last: date
    source: str
    after_support: str = ""

    @property
    def entry(self) -> str:
        """`debian.bullseye`, as in messages about matrix.yaml."""
        return ".".join(self.path)

    def is_over(self, today: date) -> bool:
        return today > self.last

    def is_near(self, today: date) -> bool:
        """True if it is over, or at most 60 days away."""
        return (self.last - today).days <= WARN_DAYS

    def sentence(self, today: date) -> str:
        """`support of Debian bullseye ended on 2026-08-31: no security updates since`."""
        if self.is_over(today):
            return f"support of {self.name} ended on {self.last}: no security updates since"
        left = (self.last - today).days
        days = "" if left > WARN_DAYS else f", in {counted(left, 'day')}" if left else ", today"
        return f"support of {self.name} ends on {self.last}{days}"


def end_of(matrix: Matrix, path: tuple[str, ...]) -> SupportEnd | None:
    """The end of support of an entry of matrix.yaml; None if none is known. The entry need not exist."""
    known = facts.load_facts().support
    match path:
        case "debian", name:
            release, debian = known.debian.get(name), matrix.debian.get(name)
            if release is None:
                return None
            source = release.source + (f"; security team until {release.security}, then LTS" if release.lts else "")
            reason, last = debian.after_support if debian else "", release.lts or release.security
            return SupportEnd(path=path, name=f"Debian {name}", last=last, source=source, after_support=reason)
        case "python", version:
            python = matrix.python.get(version)
            # A Python that is not in the matrix could only be one of uv's builds.
            support = known.python.get(version) if python is None or python.uv else None
            reason, label = python.after_support if python else "", f"Python {version}"
        case "cuda", version:
            cuda = matrix.cuda.get(version)
            support, label = known.cuda.get(version), f"CUDA {version}"
            reason = cuda.after_support if cuda else ""
        case "frameworks", name, "versions", line:
            framework = matrix.frameworks[name]
            package, entry = framework.package.partition("[")[0], framework.versions.get(line)
            support = known.frameworks.get(package, {}).get(".".join(line.split(".")[:2]))
            reason, label = entry.after_support if entry else "", f"{name} {line}"
        case _:
            raise AssertionError(path)
    if support is None:
        return None
    return SupportEnd(path=path, name=label, last=support.last, source=support.source, after_support=reason)


def ends_of_cell(matrix: Matrix, cell: Cell) -> tuple[SupportEnd, ...]:
    """The known ends of support of a cell, in the matrix or not, the earliest first: it counts for the image."""
    python = matrix.python.get(cell.python)
    paths = [
        *([("debian", python.debian)] if python else []),
        ("python", cell.python),
        ("cuda", cell.cuda),
        ("frameworks", cell.framework, "versions", cell.line),
    ]
    ends = [end for path in paths if (end := end_of(matrix, path))]
    return tuple(sorted(ends, key=lambda end: end.last))


def reasons_without_end(matrix: Matrix) -> Iterator[str]:
    """A fault for each `after_support` whose end of support is not known: it would take cells out of the set `all`."""
    entries: dict[tuple[str, ...], str] = {}
    entries |= {("debian", name): debian.after_support for name, debian in matrix.debian.items()}
    entries |= {("python", version): python.after_support for version, python in matrix.python.items()}
    entries |= {("cuda", version): cuda.after_support for version, cuda in matrix.cuda.items()}
    for name, framework in matrix.frameworks.items():
        for line, entry in framework.versions.items():
            entries["frameworks", name, "versions", line] = entry.after_support
    for path, reason in entries.items():
        if reason and not end_of(matrix, path):
            where, label = matrix.where(*path, "after_support"), ".".join(path)
            python = matrix.python.get(path[1]) if path[0] == "python" else None
            advice = "delete it"
            if python and not python.uv:
                advice = f"its updates are those of Debian: add it to debian.{python.debian} instead"
            yield f"{where}: {label}.after_support: builder/matrix/facts.yaml has no end of support for it: {advice}"


def near_ends(matrix: Matrix, cells: Iterable[Cell], today: date) -> dict[SupportEnd, list[Cell]]:
    """The ends of support of cells that are over or at most 60 days away, with their cells; the earliest first."""
    cells_by_end: dict[SupportEnd, list[Cell]] = {}
    for cell in cells:
        for end in ends_of_cell(matrix, cell):
            if end.is_near(today):
                cells_by_end.setdefault(end, []).append(cell)
    return dict(sorted(cells_by_end.items(), key=lambda item: item[0].last))


def warnings(matrix: Matrix, cells: Iterable[Cell], today: date) -> list[str]:
    """A line for each end of support that is over or near, with its cells, and the reason of matrix.yaml."""
    return [
        f"{end.sentence(today)} ({_named(members)})" + (f": {end.after_support}" if end.after_support else "")
        for end, members in near_ends(matrix, cells, today).items()
    ]


def refusals(matrix: Matrix, cells: Iterable[Cell], today: date) -> list[RefusedError]:
    """An error for each end of support that is over, without a reason in matrix.yaml to release images after it."""
    return [
        RefusedError(
            f"support of {end.name} ended on {end.last}, so these images get no security updates: {_named(members)}",
            hint="Move them to a supported version, or remove them from matrix.yaml. To release them anyway, add "
            f'to {end.entry} ({matrix.where(*end.path)}): after_support: "why" (this changes no image)',
        )
        for end, members in near_ends(matrix, cells, today).items()
        if end.is_over(today) and not end.after_support
    ]


def not_built(matrix: Matrix, cells: Iterable[Cell]) -> dict[str, str]:
    """By Python, the cells that matrix.yaml says were not built yet: `5 images of tf-2.9-cu118-py39`."""
    by_python: dict[str, list[Cell]] = {}
    for cell in cells:
        if matrix.python[cell.python].not_built:
            by_python.setdefault(cell.python, []).append(cell)
    return {version: _named(members) for version, members in by_python.items()}


def _named(cells: Iterable[Cell]) -> str:
    """`5 images of tf-2.9-cu118-py39`."""
    members = list(cells)
    return f"{counted(len(members), 'image')} of {listed(list(dict.fromkeys(cell.group for cell in members)), SHOWN)}"
