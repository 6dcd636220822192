"""The reason that a combination works or does not, and the nearest cells of the matrix. Pure.

The cell is resolved as `builder lock` does it, through `Resolve`: uv reports which requirements conflict, and the
checks of locks which wheels are not for the cell's CUDA.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from builder.common.errors import UsageError, did_you_mean
from builder.index.releases import Index, ListedPackage, ListedRelease
from builder.index.wheels import LONGEST, PLATFORMS, tag_ranks
from builder.lock.lockfile import TOOLKIT
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.facts import Facts
from builder.matrix.schema import AMD64, ARM64, CPU, Cuda, FrameworkVersion, Matrix, Python, cuda_major

MOST_NAMED = 3  # cells, or releases
LONGEST_SENTENCE = 300  # characters
Resolve = Callable[[Matrix, Cell], str]  # returns the reason that the cell does not resolve, or an empty string
_NUMBERS = r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,3}"
_SUFFIX = r"(?:(?:a|b|rc)[0-9]{1,4})?(?:\.post[0-9]{1,4})?(?:\.dev[0-9]{1,10})?"
_COMBINATION = re.compile(
    rf"([a-z]+)-({_NUMBERS})({_SUFFIX})-(cu[0-9]{{3,4}}|cpu)-py([0-9])([0-9]{{1,2}})(?:-([a-z0-9]+))??(?:-(arm64))?",
    re.ASCII,
)
# The parts that every combination has: the message names the invalid part.
_PARTS = (
    ("framework", r"[a-z]+"),
    ("version", _NUMBERS + _SUFFIX),
    ("CUDA", r"cu[0-9]{3,4}|cpu"),
    ("Python", r"py[0-9]{2,3}"),
)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """`because` is the reason, `near` are the nearest cells with a current lock, `add` the lines for matrix.yaml."""

    id: str
    works: bool
    because: str
    near: tuple[str, ...] = ()
    add: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        if not self.works:
            near = ", ".join(self.near) or "no cell of this framework has a current lock"
            return [f"{self.id} does not work: {self.because}", f"nearest that work: {near}"]
        return [f"{self.id} works: {self.because}", *self.add]


def cell_of_combination(matrix: Matrix, text: str) -> Cell:
    """The cell of a combination, in the matrix or not; `release` is empty if `text` names a line. Raises UsageError."""
    names = {framework.short: name for name, framework in matrix.frameworks.items()}
    known = ", ".join(f"{short} ({name})" for short, name in names.items())
    match = _COMBINATION.fullmatch(text)
    if not match:
        ids = [cell.id for cell in cells.expand(matrix)]
        near = [id_ for id_ in ids if id_.startswith(text)] or difflib.get_close_matches(text, ids) or ids
        faults = [
            f"invalid {name} {part!r}; "
            for part, (name, form) in zip(text.split("-"), _PARTS, strict=False)
            if not re.fullmatch(form, part, re.ASCII)
        ]
        raise UsageError(
            f"invalid combination {text!r}: {''.join(faults[:1])}use FRAMEWORK-VERSION-CUDA-PYTHON[-VARIANT][-{ARM64}]",
            hint=f"For example {', '.join(near[:MOST_NAMED])}. Write CUDA with its minor version, as cu130. "
            f"Frameworks: {known}. For a package, use `builder add`.",
        )
    short, numbers, suffix, cuda_tag, major, minor, variant, arch = match.groups()
    suffix = str(Version(f"0{suffix}")).removeprefix("0")  # rc01 is rc1
    version = numbers + suffix
    if short not in names:
        raise UsageError(f"{text}: unknown framework {short!r}", hint=f"matrix.yaml has {known}.")
    variant = variant or "plain"
    if variant not in matrix.variants:
        raise UsageError(f"{text}: unknown variant {variant!r}{did_you_mean(variant, matrix.variants)}")
    versions = matrix.frameworks[names[short]].versions
    line = next((line for line, entry in versions.items() if version in (line, entry.release)), "")
    return Cell(
        framework=names[short],
        short=short,
        line=line or version,
        release=versions[line].release if line else version if suffix else "",
        cuda=CPU if cuda_tag == CPU else f"{cuda_tag[2:4]}.{cuda_tag[4:]}",
        python=f"{major}.{minor}",
        variant=variant,
        arch=ARM64 if arch else AMD64,
    )


@dataclass(frozen=True, kw_only=True)
class Explainer:
    """Explains combinations. `known` are the cells of the matrix, `locked` the ids of cells with a current lock.

    `bounds` are constraints of a line to add, for conflicts that only facts.yaml knows.
    """

    matrix: Matrix
    known: Sequence[Cell]
    catalogue: Index
    facts: Facts
    resolve: Resolve
    locked: Container[str] = ()
    bounds: tuple[str, ...] = ()

    def explain(self, asked: Cell) -> Explanation:
        """The explanation of a cell from `cell_of_combination`. Raises FetchError if the index cannot be read."""
        # The releases of this package define the lines; the cell's CUDA may need another package (`package_on`).
        package = self._package(asked, Requirement(self.matrix.frameworks[asked.framework].package).name)
        if asked.release:  # exactly this one, also if it is a pre-release
            releases = [item for item in package.releases if Version(item.version.public) == Version(asked.release)]
            usable = [item for item in releases if not item.is_yanked]
        else:
            prefix = Version(asked.line).release
            releases = [item for item in package.releases if item.version.release[: len(prefix)] == prefix]
            usable = [item for item in releases if item.is_stable]
        if not usable:
            reason = _no_release(package, asked.release or asked.line, releases)
            return Explanation(id=asked.id, works=False, because=reason, near=self._nearest(asked))
        cell = replace(asked, release=asked.release or usable[-1].version.public)
        if excluded := cells.exclusion(self.matrix, cell.id):
            return Explanation(id=cell.id, works=False, because=f"excluded by {excluded}", near=self._nearest(cell))
        explainer = self
        while reason := explainer.refusal(cell):
            bound = explainer.missing_bound(cell, reason)
            if not bound:
                return Explanation(id=cell.id, works=False, because=reason, near=self._nearest(cell))
            explainer = replace(explainer, bounds=(*explainer.bounds, bound))
        build = "the CPU" if cell.is_cpu else f"CUDA {cell.cuda}"
        because = f"its packages resolve for Python {cell.python} and {build}"
        return Explanation(id=cell.id, works=True, because=because, add=tuple(explainer.lines_to_add(cell)))

    def missing_bound(self, cell: Cell, reason: str) -> str:
        """The constraint of facts.yaml that `reason` shows to be missing from a new line; empty if there is none."""
        if cell.line in self.matrix.frameworks[cell.framework].versions:
            return ""
        bounds = [f"{conflict.other}{conflict.wants}" for conflict in self.facts.traps]
        # Matches the text of `Facts.violations`.
        missing = (bound for bound in bounds if bound not in self.bounds and f" needs {bound}, not " in reason)
        return next(missing, "")

    def refusal(self, cell: Cell) -> str:
        """The reason that a cell does not work, or an empty string. Raises FetchError."""
        if self._has_wheel(cell):
            return self._conflict(cell)
        debian = self._debian(cell.python)
        return (
            f"{self._requirement(cell).name} {cell.release} has no wheel on the index for Python {cell.python} on "
            f"{PLATFORMS[cell.arch]} and Debian {debian} (glibc {self.matrix.debian[debian].glibc})"
        )

    def entry(self, cell: Cell) -> FrameworkVersion:
        """The cell's line in matrix.yaml, or the line to add.

        A line to add has the constraints and components of the nearest line for the same CUDA major, and `bounds`.
        """
        framework = self.matrix.frameworks[cell.framework]
        if cell.line in framework.versions:
            return framework.versions[cell.line]
        siblings = [
            (abs(Version(line).minor - Version(cell.line).minor), line)
            for line, entry in framework.versions.items()
            if any(cuda_major(cuda) == cuda_major(cell.cuda) for cuda in entry.cuda)
        ]
        sibling = framework.versions[min(siblings)[1]] if siblings else None
        return FrameworkVersion(
            release=cell.release,
            index=cells.indexes_of_packages(self.matrix, cell).get(canonicalize_name(self._requirement(cell).name)),
            cuda=[cell.cuda],
            python=[cell.python],
            constraints=list(dict.fromkeys([*(sibling.constraints if sibling else []), *self.bounds])),
            components=sibling.components if sibling and not cell.is_cpu else [],
        )

    def _requirement(self, cell: Cell) -> Requirement:
        """The package that matrix.yaml installs for the cell's CUDA, with its extras."""
        return Requirement(self.matrix.frameworks[cell.framework].package_for(cell.cuda))

    def _package(self, cell: Cell, name: str) -> ListedPackage:
        """The releases of a package on the index that the cell takes it from."""
        indexes = cells.indexes_of_packages(self.matrix, cell)
        return self.catalogue.package(name, indexes.get(canonicalize_name(name), ""))

    def _toolkit(self, cell: Cell) -> str:
        """The newest release of cuda-toolkit for the cell's CUDA; empty if there is none."""
        releases = self._package(cell, TOOLKIT).releases
        versions = [str(release.version) for release in releases if release.is_stable]
        return next((version for version in reversed(versions) if version.startswith(f"{cell.cuda}.")), "")

    def _nearest(self, asked: Cell) -> tuple[str, ...]:
        """The most similar locked cells of the same framework and architecture, those of the same variant first.

        Leaves out cells on a Python whose images were not built yet. A cell without a current lock may not work either.
        """

        def difference(cell: Cell) -> tuple[bool, bool, bool, bool, float]:
            return (
                cell.variant != asked.variant,
                cell.line != asked.line,
                cell.cuda != asked.cuda,
                cell.python != asked.python,
                -difflib.SequenceMatcher(None, asked.id, cell.id).ratio(),
            )

        others = [
            cell
            for cell in self.known
            if (cell.framework, cell.arch) == (asked.framework, asked.arch)
            and cell.id in self.locked
            and not self.matrix.python[cell.python].not_built
        ]
        return tuple(cell.id for cell in sorted(others, key=difference)[:MOST_NAMED])

    def _conflict(self, cell: Cell) -> str:
        """The reason that uv gives, in a sentence; empty if uv resolves the cell, or if its lock is current."""
        if cell.id in self.locked:
            return ""
        framework = self.matrix.frameworks[cell.framework]
        framework = framework.model_copy(update={"versions": {**framework.versions, cell.line: self.entry(cell)}})
        cuda, python = dict(self.matrix.cuda), dict(self.matrix.python)
        if cell.cuda not in cuda:
            cuda[cell.cuda] = Cuda(toolkit=self._toolkit(cell) or None)
        python.setdefault(cell.python, Python(debian=self._debian(cell.python)))
        frameworks = {**self.matrix.frameworks, cell.framework: framework}
        matrix = self.matrix.model_copy(update={"frameworks": frameworks, "cuda": cuda, "python": python})
        return summarize_reason(self.resolve(matrix, cell)).removeprefix(f"{cell.id}: ")

    def _has_wheel(self, cell: Cell) -> bool:
        """True if an installer would take a wheel of the framework's release."""
        release = self._package(cell, self._requirement(cell).name).release(Version(cell.release))
        if release is None:
            return False
        with suppress(InvalidSpecifier):  # an invalid Requires-Python is ignored
            if not SpecifierSet(release.requires_python).contains(cell.python):
                return False
        glibc = self.matrix.debian[self._debian(cell.python)].glibc
        ranks = tag_ranks(cell.python, glibc, PLATFORMS[cell.arch])
        for file in release.wheels:
            with suppress(InvalidWheelFilename):
                if len(file) <= LONGEST and not ranks.keys().isdisjoint(parse_wheel_filename(file)[3]):
                    return True
        return False

    def _debian(self, python: str) -> str:
        """The Debian release of a Python; the newest for a Python that is not in the matrix."""
        entry = self.matrix.python.get(python)
        return entry.debian if entry else self.matrix.newest_debian

    def lines_to_add(self, cell: Cell) -> Iterator[str]:
        """The lines for matrix.yaml."""
        if cell.id in {known.id for known in self.known}:
            yield "it is in matrix.yaml"
            return
        yield "no image of it was built; add to matrix.yaml:"
        if cell.python not in self.matrix.python:
            yield f'  under python: "{cell.python}": {{debian: {self._debian(cell.python)}, uv: <the full version>}}'
        if cell.cuda not in self.matrix.cuda:
            toolkit = "" if cell.is_cpu else self._toolkit(cell)
            key = cell.cuda if cell.is_cpu else f'"{cell.cuda}"'
            yield f"  under cuda: {key}: {{{f'toolkit: {toolkit}' if toolkit else ''}}}"
        if cell.line in self.matrix.frameworks[cell.framework].versions:
            yield f'  under include: - {{cell: {cell.id}, reason: "<why it is needed>"}}'
        else:
            line = ".".join(map(str, Version(cell.line).release[:3]))  # a key in matrix.yaml has at most three numbers
            yield f"  under frameworks.{cell.framework}.versions: {matrix_line(line, self.entry(cell))}"


def _no_release(package: ListedPackage, version: str, unstable: Sequence[ListedRelease]) -> str:
    """The reason that there is no release to install; `unstable` are pre-releases and yanked ones of the line."""
    if unstable:
        names = ", ".join(f"{item.version}{' (yanked)' if item.is_yanked else ''}" for item in unstable[-MOST_NAMED:])
        return f"{package.name} {version} has only pre-releases or yanked releases: {names}"
    stable = [str(release.version) for release in package.releases if release.is_stable]
    newest = f"; the newest is {stable[-1]}" if stable else ", and no stable one at all"
    return f"{package.name} has no release {version} on the index{newest}"


def matrix_line(line: str, entry: FrameworkVersion) -> str:
    """A line of a framework, as it is written in matrix.yaml."""
    fields = yaml.safe_dump(
        entry.model_dump(exclude_defaults=True), default_flow_style=True, sort_keys=False, width=inf
    )
    return f'"{line}": {fields.strip()}'


def summarize_reason(reason: str) -> str:
    """uv's reason in one sentence, without its conclusions; after the setting of matrix.yaml that causes it, if any.

    Of several faults in the wheels, the first: the others follow from the same version of CUDA.
    """
    reason = re.sub(r"^\d+ faults in .*\n(.*)[\s\S]*", r"\1", reason)
    setting, found, rest = " ".join(reason.replace("`", "").split()).rpartition("this resolves. ")
    cause = re.sub(r"^.*?Because ", "", rest)
    sentence = re.split(r"(?<=[a-z])\. (?=[A-Z])|, we can conclude| hint: ", cause)[0]
    return (
        setting + found + (sentence if len(sentence) <= LONGEST_SENTENCE else sentence[: LONGEST_SENTENCE - 3] + "...")
    )
