"""Why a combination works or does not: which constraint fails, whose metadata says so, what works nearby. Pure.

Each constraint has wording of its own, and they are looked at in the order in which a person would have to mend them.
What no single package's metadata says, the resolution of all requirements together decides; it comes as a callable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from builder import cells, lock, nearby, resolve
from builder.cells import Cell
from builder.cudaof import Bound, Finder, named
from builder.errors import UsageError
from builder.facts import Facts
from builder.matrix import CPU, Cuda, Matrix, nearest
from builder.nearby import Near
from builder.released import LONGEST, Catalogue, Package, Release

SHOWN = 3  # neighbours that are named
Resolve = Callable[[Matrix, Cell], str]  # the matrix has the cell
_NUMBERS = r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,3}"
_COMBINATION = re.compile(
    rf"([a-z]+)-({_NUMBERS})-(cu[0-9]{{2,4}}|cpu)-py([0-9])([0-9]{{1,2}})(?:-([a-z0-9]+))?", re.ASCII
)
_OLDEST = 60  # CUDA 6.0; no framework's wheel is for an older one
_PYTHONS = tuple(f"3.{minor}" for minor in range(6, 21))
# torch==2.9.1 depends on nvidia-nccl-cu12{platform_machine == 'x86_64'}==2.27.5
_BOUNDS = r"[<>=!~][^\s,]*(?:,[<>=!~][^\s,]*)*"
_DEPENDS = re.compile(rf"(\S+) depends on ([A-Za-z0-9._-]+)(?:\[[^\]]*\])?(?:\{{[^}}]*\}})?({_BOUNDS})")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """`because` says why it works or not, a line each; `add` are lines for matrix.yaml that it is not in yet."""

    id: str
    works: bool
    because: tuple[str, ...]
    near: tuple[Near, ...] = ()
    add: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        head, *rest = self.because
        told = [f"{self.id} {'works' if self.works else 'does not work'}: {head}", *rest, *self.add]
        if not self.works:
            told.append("nearest that work: " + ("; ".join(map(str, self.near)) or "none of this framework"))
        return told


def parse(matrix: Matrix, text: str) -> Cell:
    """What is asked about, in the matrix or not; `release` is empty where only a line is named. Raises UsageError."""
    found = _COMBINATION.fullmatch(text)
    if not found:
        raise UsageError(
            f"{text!r} is no combination", hint="One looks like pt-2.9-cu128-py311, or tf-2.20.0-cpu-py313-jupyter."
        )
    short, version, cuda_tag, major, minor, variant = found.groups()
    name = next((name for name, framework in matrix.frameworks.items() if framework.short == short), None)
    if name is None:
        shorts = {framework.short: name for name, framework in matrix.frameworks.items()}
        known = ", ".join(f"{short} ({name})" for short, name in shorts.items())
        raise UsageError(f"{text}: no framework is called {short!r}", hint=f"matrix.yaml has {known}.")
    variant = variant or "plain"
    if variant not in matrix.variants:
        raise UsageError(f"{text}: no variant {variant!r}{nearest(variant, matrix.variants)}")
    lines = matrix.frameworks[name].versions
    line = next((line for line, entry in lines.items() if version in (line, entry.release)), "")
    return Cell(
        framework=name,
        short=short,
        line=line or version,
        release=lines[line].release if line else "",
        cuda=_cuda_of(matrix, text, cuda_tag),
        python=f"{major}.{minor}",
        variant=variant,
    )


def _cuda_of(matrix: Matrix, text: str, tag: str) -> str:
    """cu128 is 12.8, cu1210 is 12.10, cu92 is 9.2; but cu13 is no CUDA 1.3. Raises UsageError."""
    if tag == CPU:
        return CPU
    digits = tag.removeprefix("cu")
    if len(digits) == 2 and int(digits) < _OLDEST:
        like = next((cuda for cuda in matrix.cuda if cuda.startswith(f"{digits}.")), f"{digits}.0")
        raise UsageError(
            f"{text}: {tag} names no minor version of CUDA", hint=f"Write cu{like.replace('.', '')} for {like}."
        )
    places = 1 if len(digits) == 2 else 2
    return f"{digits[:places]}.{digits[places:]}"


def explain(
    matrix: Matrix,
    known: Sequence[Cell],
    catalogue: Catalogue,
    facts: Facts,
    asked: Cell,
    resolve: Resolve,
) -> Explanation:
    """`known` are the cells of the matrix; `resolve` gives uv's reason against a cell, and nothing if it has none."""
    return _Explainer(matrix, known, catalogue, facts, resolve).explain(asked)


class _Refused(Exception):  # noqa: N818  no error: what is said to the person who asked
    """There is nothing more to look at."""


class _Explainer:
    def __init__(
        self, matrix: Matrix, known: Sequence[Cell], catalogue: Catalogue, facts: Facts, resolve: Resolve
    ) -> None:
        self._matrix = matrix
        self._resolve = resolve
        self._known = known
        self._catalogue = catalogue
        self._cuda = Finder(matrix, catalogue, facts)

    def explain(self, asked: Cell) -> Explanation:
        try:
            cell = self._with_release(asked)
        except _Refused as refused:
            return self._refused(asked, [str(refused)], self._of_next_line(asked))
        if faults := [*self._excluded(cell), *self._faults(cell)]:
            return self._refused(cell, faults, self._others(cell))
        if reason := self._reason(cell):
            return self._refused(cell, shorten(reason), self._others(cell))
        return Explanation(id=cell.id, works=True, because=(self._praise(cell),), add=tuple(self._to_add(cell)))

    def _refused(self, cell: Cell, faults: Iterable[str], others: Iterable[Cell]) -> Explanation:
        return Explanation(id=cell.id, works=False, because=tuple(faults), near=tuple(self._near(cell, others)))

    def _near(self, cell: Cell, others: Iterable[Cell]) -> Iterator[Near]:
        """The nearest few. Those of the matrix are known to work; others are resolved first, but not many."""
        shown = tried = 0
        for one in nearby.rank(cell, self._known, others):
            if shown == SHOWN:
                return
            if not one.is_listed:
                if tried == SHOWN or self._excluded(one.cell) or self._faults(one.cell):
                    continue
                tried += 1
                if self._reason(one.cell):
                    continue
            shown += 1
            yield one

    def _reason(self, cell: Cell) -> str:
        return self._resolve(self._with_cell(cell), cell)

    def _with_cell(self, cell: Cell) -> Matrix:
        """The matrix as it would be with the cell in it."""
        framework = self._matrix.frameworks[cell.framework]
        versions = {**framework.versions, cell.line: self._cuda.entry(cell)}
        cuda = dict(self._matrix.cuda)
        if cell.cuda not in cuda:
            cuda[cell.cuda] = Cuda(toolkit=self._cuda.toolkit(cell) or None)
        frameworks = {**self._matrix.frameworks, cell.framework: framework.model_copy(update={"versions": versions})}
        return self._matrix.model_copy(update={"frameworks": frameworks, "cuda": cuda})

    def _package(self, cell: Cell) -> Package:
        """The framework's own, by which its lines are known; that for the cpu may be another one."""
        return self._catalogue.package(Requirement(self._matrix.frameworks[cell.framework].package).name)

    def _with_release(self, asked: Cell) -> Cell:
        """The cell with the release that its line means: the matrix's, else the newest one that is stable."""
        package = self._package(asked)
        wanted = Version(asked.release or asked.line).release
        of_line = [one for one in package.releases if one.version.release[: len(wanted)] == wanted]
        if not of_line:
            raise _Refused(_no_line(package, asked.line))
        stable = [one for one in of_line if one.is_stable]
        if not stable:
            names = ", ".join(f"{one.version}{' (yanked)' if one.is_yanked else ''}" for one in of_line[-3:])
            raise _Refused(
                f"{package.name} {asked.line} has no release that an installer would pick, only pre-releases or yanked "
                f"ones: {names}"
            )
        release = asked.release or str(stable[-1].version)
        return replace(asked, release=release)

    def _of_next_line(self, asked: Cell) -> list[Cell]:
        """The same on the stable release that is nearest, and its neighbours."""
        stable = [one.version for one in self._package(asked).releases if one.is_stable]
        if not stable:
            return []
        wanted = Version(asked.line)
        # Of releases that are equally far the newest: the last.
        best = min(reversed(stable), key=lambda one: nearby.apart(wanted, one))
        line = f"{best.major}.{best.minor}"
        if line in self._matrix.frameworks[asked.framework].versions:
            return []  # its cells are known
        cell = replace(asked, line=line, release=str(best))
        return [cell, *self._others(cell)]

    def _excluded(self, cell: Cell) -> list[str]:
        found = (one for one in self._matrix.exclude if cells.match(one.cells, [cell.id]))
        return [f"matrix.yaml excludes it: {one.reason}" for one in islice(found, 1)]

    def _faults(self, cell: Cell) -> list[str]:
        """What fails of wheels and Python, and what of CUDA: one line each."""
        wheels = list(islice(self._of_wheels(cell), 1))
        cuda = list(islice(self._cuda.faults(cell), 1)) if self._has_release(cell) else []
        return [*wheels, *cuda, *([] if wheels else self._of_python(cell))]

    def _has_release(self, cell: Cell) -> bool:
        return self._catalogue.package(self._cuda.wanted(cell).name).release(Version(cell.release)) is not None

    def _of_wheels(self, cell: Cell) -> Iterator[str]:
        """Of the framework's wheel, and of the packages of its own that come with it."""
        name = self._cuda.wanted(cell).name
        found = self._catalogue.package(name).release(Version(cell.release))
        if found is None:
            what = "no wheel for the cpu on the index: " if cell.is_cpu else ""
            yield f"{what}{name} has no release {cell.release}"
            return
        yield from self._of_release(cell, name, found)
        for part in self._cuda.companions(cell):
            if found := self._cuda.newest(part):
                yield from self._of_release(cell, part.name, found)

    def _of_release(self, cell: Cell, name: str, release: Release) -> Iterator[str]:
        what = f"{name} {release.version}"
        limit = f"Requires-Python: {release.requires_python}" if release.requires_python else ""
        tags = [tag for file in release.wheels for tag in _tags(file)]
        if not tags:
            yield f"{what} has no wheel at all, only its source"
            return
        pythons = [python for python in _PYTHONS if _fits_python(tags, python) and _admits(release, python)]
        if cell.python not in pythons:
            if limit and _fits_python(tags, cell.python):
                yield f"{what} is not for Python {cell.python} ({limit})"
                return
            has = f"its wheels are for Python {_ranges(pythons)}" if pythons else "it has none for any Python 3"
            yield f"{what} has no wheel for Python {cell.python}: {has}{f' ({limit})' if limit else ''}"
            return
        mine = [tag for tag in tags if _fits_python([tag], cell.python)]
        here = [tag for tag in mine if tag.platform == "any" or _is_ours(tag.platform)]
        if not here:
            platforms = ", ".join(sorted({tag.platform for tag in mine}))
            yield f"{what} has no wheel for Linux on {lock.PLATFORM} with Python {cell.python}, only for {platforms}"
            return
        debian, glibc = self._glibc(cell.python)
        if not set(here) & resolve.tag_ranks(cell.python, glibc).keys():
            needs = ", ".join(sorted({tag.platform for tag in here}))
            yield f"the wheel of {what} is built for {needs}, and {debian} has only glibc {glibc}"

    def _glibc(self, python: str) -> tuple[str, str]:
        """Debian release of a Python with its C library, or the newest where the matrix does not have that Python."""
        if found := self._matrix.python.get(python):
            return f"Debian {found.debian}", self._matrix.debian[found.debian].glibc
        name, debian = max(self._matrix.debian.items(), key=lambda item: Version(item[1].glibc))
        return f"Debian {name}", debian.glibc

    def _of_python(self, cell: Cell) -> Iterator[str]:
        if cell.python not in self._matrix.python:
            has = ", ".join(f"{python} on {entry.debian}" for python, entry in self._matrix.python.items())
            debian = self._glibc(cell.python)[0].removeprefix("Debian ")
            yield (
                f"no Debian release of matrix.yaml has Python {cell.python} (it has {has}); under `python`, "
                f'"{cell.python}": {{debian: {debian}, uv: <full version>}} would take it from uv'
            )

    def _others(self, cell: Cell) -> list[Cell]:
        """Cells of the same release that are not in the matrix, with each CUDA that its metadata names."""
        listed = {one.id for one in self._known}
        made = [
            replace(cell, cuda=cuda, python=python)
            for cuda in self._cuda.offered(cell)
            for python in self._matrix.python
        ]
        return [one for one in made if one.id not in listed and one.id != cell.id]

    def _praise(self, cell: Cell) -> str:
        says = self._cuda.praise(cell)
        return f"{self._cuda.wanted(cell).name} {cell.release} has a wheel for Python {cell.python}{says}"

    def _to_add(self, cell: Cell) -> Iterator[str]:
        if cell.id in {one.id for one in self._known}:
            yield "it is in matrix.yaml"
            return
        framework = self._matrix.frameworks[cell.framework]
        yield "it is not in matrix.yaml; add:"
        if cell.cuda not in self._matrix.cuda:
            toolkit = self._cuda.toolkit(cell)
            yield f'  under cuda: "{cell.cuda}": {{{f"toolkit: {toolkit}" if toolkit else ""}}}'
        if cell.line in framework.versions:
            yield f'  under include: - {{cell: {cell.id}, reason: "<why>"}}'
            return
        cuda = cell.cuda if cell.is_cpu else f'"{cell.cuda}"'
        entry = self._cuda.entry(cell)
        more = {"constraints": entry.constraints, "components": entry.components}
        rest = "".join(f", {name}: [{', '.join(map(_quoted, values))}]" for name, values in more.items() if values)
        yield (
            f'  under frameworks.{cell.framework}.versions: "{_line(cell.line)}": '
            f'{{release: {cell.release}, cuda: [{cuda}], python: ["{cell.python}"]{rest}}}'
        )


def _quoted(value: str) -> str:
    """As an entry of a list in brackets, where a comma would begin the next one."""
    return f'"{value}"' if "," in value else value


def shorten(reason: str) -> list[str]:
    """uv's reason in at most two lines that name package and constraint."""
    text = " ".join(reason.split())
    by_name: dict[str, dict[str, str]] = {}
    for who, name, bound in _DEPENDS.findall(text):
        by_name.setdefault(name, {}).setdefault(bound.rstrip(","), named(who))
    for name, bounds in by_name.items():
        for bound in re.findall(rf"you require {re.escape(name)}([<>=!~]\S*?)[.,]?(?: |$)", text):
            bounds.setdefault(bound, "matrix.yaml")
        if len(bounds) > 1:
            (first, one), (second, two) = list(bounds.items())[:2]
            return [
                f"{one} requires {name}{first}, and {two} requires {name}{second};",
                f"no version of {name} is both",
            ]
    plain = re.sub(r"^.*?(?=Because )", "", text)
    sentences = re.split(r"(?<=[a-z])\. (?=[A-Z])|, we can conclude", plain)
    return [sentence if len(sentence) <= 300 else sentence[:297] + "..." for sentence in sentences[:1]]


def _no_line(package: Package, line: str) -> str:
    if not package.releases:
        return f"the index has no package {package.name}"
    wanted = Version(line).release
    stable = [one.version for one in package.releases if one.is_stable]
    siblings = [version for version in stable if version.release[:2] == wanted[:2]]
    if len(wanted) > 2 and siblings:
        return f"{package.name} has no release {line}; of {'.'.join(map(str, wanted[:2]))} it has {_joined(siblings)}"
    # The newest first, which goes before one that is as far.
    lines = list(dict.fromkeys(f"{version.major}.{version.minor}" for version in reversed(stable)))
    lines.sort(key=lambda one: nearby.apart(Version(line), Version(one)))
    near = ", ".join(lines[:SHOWN])
    newest = f"the newest stable one is {stable[-1]}" if stable else "no release of it is stable"
    return f"{package.name} has no release of {line} on the index: nearest are {near}; {newest}"


def _joined(versions: Iterable[Version]) -> str:
    return ", ".join(str(version) for version in versions)


def _line(text: str) -> str:
    """A line as matrix.yaml admits it: two or three numbers."""
    return ".".join(text.split(".")[:3])


def _tags(file: str) -> frozenset[Tag]:
    try:
        return parse_wheel_filename(file)[3] if len(file) <= LONGEST else frozenset()
    except InvalidWheelFilename:
        return frozenset()


def _fits_python(tags: Iterable[Tag], python: str) -> bool:
    """Whether one of the tags is for this CPython, on whatever platform."""
    accepted = resolve.tag_ranks(python, "2.17")
    pairs = {(tag.interpreter, tag.abi) for tag in accepted}
    return any((tag.interpreter, tag.abi) in pairs for tag in tags)


def _admits(release: Release, python: str) -> bool:
    return Bound.of(release.requires_python).admits(Version(python))


def _is_ours(platform: str) -> bool:
    return "linux" in platform and platform.endswith(lock.PLATFORM)


def _ranges(pythons: Sequence[str]) -> str:
    """3.9 to 3.12, 3.14."""
    runs: list[list[str]] = []
    for python in pythons:
        if runs and _PYTHONS.index(python) == _PYTHONS.index(runs[-1][-1]) + 1:
            runs[-1].append(python)
        else:
            runs.append([python])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
