"""Ends of support: the last day on which the parts of a cell get security updates. Pure: callers give today's date.

A Python from Debian's packages gets Debian's updates, so the end of its Debian release counts. A build of uv gets the
updates of Python itself. docs/decisions/0027.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def ends_of_cell(matrix: Matrix, cell: Cell) -> tuple[SupportEnd, ...]:
    """The known ends of support of a cell, in the matrix or not, the earliest first: it counts for the image."""
    known = facts.load_facts().support
    python, cuda = matrix.python.get(cell.python), matrix.cuda.get(cell.cuda)
    framework = matrix.frameworks[cell.framework]
    line = framework.versions.get(cell.line)
    ends = []
    if python and (release := known.debian.get(python.debian)):
        source = release.source + (f"; security team until {release.security}, then LTS" if release.lts else "")
        end = SupportEnd(
            path=("debian", python.debian), name=f"Debian {python.debian}", last=release.lts or release.security,
            source=source, after_support=matrix.debian[python.debian].after_support,
        )  # fmt: skip
        ends.append(end)
    # A Python that is not in the matrix could only be one of uv's builds.
    of_python = known.python.get(cell.python) if python is None or python.uv else None
    lines = known.frameworks.get(framework.package.partition("[")[0], {})
    versions: list[tuple[tuple[str, ...], str, facts.VersionSupport | None, str]] = [
        (("python", cell.python), f"Python {cell.python}", of_python, python.after_support if python else ""),
        (("cuda", cell.cuda), f"CUDA {cell.cuda}", known.cuda.get(cell.cuda), cuda.after_support if cuda else ""),
        (
            ("frameworks", cell.framework, "versions", cell.line),
            f"{cell.framework} {cell.line}",
            lines.get(".".join(cell.line.split(".")[:2])),
            line.after_support if line else "",
        ),
    ]
    ends += [
        SupportEnd(path=path, name=name, last=support.last, source=support.source, after_support=reason)
        for path, name, support, reason in versions
        if support
    ]
    return tuple(sorted(ends, key=lambda end: end.last))


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
