"""The reasons that a combination works or does not, and the nearest ones that work. Pure.

uv resolves all requirements together and reports which of them conflict; it is called through `Resolve`. Other checks
read metadata: whether a release is for the cell's CUDA (`cuda`), and which neighbours work.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from builder.common.errors import UsageError, did_you_mean
from builder.compat import alternatives
from builder.compat.alternatives import Alternative
from builder.compat.cuda import FrameworkRelease
from builder.index.releases import Index, ListedPackage, ListedRelease
from builder.index.wheels import LONGEST, PLATFORMS, tag_ranks
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.facts import Facts
from builder.matrix.schema import AMD64, ARM64, CPU, OTHERS, Cuda, FrameworkVersion, Matrix, Python, required_name

SHOWN = 3  # neighbours
TRIED = 6  # neighbours that are resolved at most: each takes a second or more
Resolve = Callable[[Matrix, Cell], str]  # returns the reason that the cell does not resolve, or an empty string
_NUMBERS = r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,3}"
_SUFFIX = r"(?:(?:a|b|rc)[0-9]{1,4})?(?:\.post[0-9]{1,4})?(?:\.dev[0-9]{1,10})?"
_COMBINATION = re.compile(
    rf"([a-z]+)-({_NUMBERS})({_SUFFIX})-(cu[0-9]{{2,4}}|cpu)-py([0-9])([0-9]{{1,2}})(?:-([a-z0-9]+))??(?:-(arm64))?",
    re.ASCII,
)
_OLDEST = 60  # CUDA 6.0; no framework has wheels for an older CUDA
# torch==2.9.1 depends on nvidia-nccl-cu12{platform_machine == 'x86_64'}==2.27.5
_BOUNDS = r"[<>=!~][^\s,]*(?:,[<>=!~][^\s,]*)*"
_DEPENDS = re.compile(rf"(\S+) depends on ([A-Za-z0-9._-]+)(?:\[[^\]]*\])?(?:\{{[^}}]*\}})?({_BOUNDS})")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """An explanation. `because` are the reasons, a line each; `add` are lines for matrix.yaml that make the cell work.

    A cell that does not work has such lines if only the index of its project has its build of the framework.
    """

    id: str
    works: bool
    because: tuple[str, ...]
    near: tuple[Alternative, ...] = ()
    add: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return f"{self.id} {'works' if self.works else 'is not on the default index' if self.add else 'does not work'}"

    @property
    def lines(self) -> list[str]:
        first, *rest = self.because
        lines = [f"{self.verdict}: {first}", *rest, *self.add]
        if not self.works:
            lines.append("nearest that work: " + ("; ".join(map(str, self.near)) or "none of this framework"))
        return lines


def cell_of_combination(matrix: Matrix, text: str) -> Cell:
    """The cell of a combination, in the matrix or not; `release` is empty if `text` names a line. Raises UsageError."""
    match = _COMBINATION.fullmatch(text)
    if not match:
        raise UsageError(
            f"invalid combination {text!r}", hint="Use e.g. pt-2.9-cu128-py311, or tf-2.20.0-cpu-py313-jupyter."
        )
    short, numbers, suffix, cuda_tag, major, minor, variant, arch = match.groups()
    suffix = str(Version(f"0{suffix}")).removeprefix("0")  # rc01 is rc1
    version = numbers + suffix
    names = {framework.short: name for name, framework in matrix.frameworks.items()}
    if short not in names:
        known = ", ".join(f"{short} ({name})" for short, name in names.items())
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
        cuda=_cuda_of_tag(matrix, text, cuda_tag),
        python=f"{major}.{minor}",
        variant=variant,
        arch=ARM64 if arch else AMD64,
    )


def _cuda_of_tag(matrix: Matrix, text: str, tag: str) -> str:
    """cu128 is 12.8, cu1210 is 12.10, cu92 is 9.2; cu13 lacks a minor version. Raises UsageError."""
    if tag == CPU:
        return CPU
    digits = tag.removeprefix("cu")
    if len(digits) == 2 and int(digits) < _OLDEST:
        like = next((cuda for cuda in matrix.cuda if cuda.startswith(f"{digits}.")), f"{digits}.0")
        raise UsageError(
            f"{text}: {tag} lacks the minor version of CUDA", hint=f"Use cu{like.replace('.', '')} for {like}."
        )
    places = 1 if len(digits) == 2 else 2
    return f"{digits[:places]}.{digits[places:]}"


@dataclass(frozen=True, kw_only=True)
class Explainer:
    """Explains combinations. `known` are the cells of the matrix."""

    matrix: Matrix
    known: Sequence[Cell]
    catalogue: Index
    facts: Facts
    resolve: Resolve

    def explain(self, asked: Cell) -> Explanation:
        """The explanation of a cell from `cell_of_combination`. Raises FetchError if the index cannot be read."""
        # The releases of this package define the lines; the cell's CUDA may need another package (`package_on`).
        indexes = cells.indexes_of_packages(self.matrix, asked)
        own = Requirement(self.matrix.frameworks[asked.framework].package).name
        package = self.catalogue.with_indexes(indexes, asked.arch).package(own)
        if asked.release:  # exactly this one, also if it is a pre-release
            releases = [item for item in package.releases if Version(item.version.public) == Version(asked.release)]
            usable = [item for item in releases if not item.is_yanked]
        else:
            prefix = Version(asked.line).release
            releases = [item for item in package.releases if item.version.release[: len(prefix)] == prefix]
            usable = [item for item in releases if item.is_stable]
        if not usable:
            return self._no_release(asked, package, releases)
        cell = replace(asked, release=asked.release or usable[-1].version.public)
        # uv takes seconds: it runs only if no other check refuses the cell, or if a wheel is missing, since uv explains
        # that best.
        fault, reasons = self.release(cell).fault(), self._faults(cell)
        is_new_python = cell.python not in self.matrix.python
        conflict = [] if (reasons or is_new_python) and self._has_wheel(cell) else self._conflict(cell)
        if is_new_python and not conflict:
            pythons = ", ".join(f"{python} on {entry.debian}" for python, entry in self.matrix.python.items())
            reasons.append(
                f"matrix.yaml has no Python {cell.python} (it has {pythons}); to use uv's, add under python: "
                f'"{cell.python}": {{debian: {self._debian(cell.python)}, uv: <full version>}}'
            )
        if conflict or reasons:
            refusal = self._refused(cell, [*conflict, *reasons], self._others(cell))
            return refusal if conflict or reasons != [fault] else replace(refusal, add=tuple(self._from_project(cell)))
        because = f"resolves for Python {cell.python}; {self.release(cell).evidence()}"
        return Explanation(id=cell.id, works=True, because=(because,), add=tuple(self._to_add(cell)))

    def refusal(self, cell: Cell) -> str:
        """The reason that a cell does not work, in few words, or an empty string. Raises FetchError."""
        if not self._has_wheel(cell):
            return "no wheel on the index"
        return self.release(cell).fault().partition(": ")[0] or " ".join(self._conflict(cell))

    def release(self, cell: Cell) -> FrameworkRelease:
        """The data of the index and of facts.yaml about a cell's release."""
        catalogue = self.catalogue.with_indexes(cells.indexes_of_packages(self.matrix, cell), cell.arch)
        return FrameworkRelease(matrix=self.matrix, catalogue=catalogue, facts=self.facts, cell=cell)

    def _no_release(self, asked: Cell, package: ListedPackage, unstable: Sequence[ListedRelease]) -> Explanation:
        """The refusal of a combination without a release to install.

        `unstable` are pre-releases and yanked releases of the line.
        """
        version = asked.release or asked.line
        # The newest first: `sorted` keeps this order for releases at the same distance.
        stable = [release.version for release in reversed(package.releases) if release.is_stable]
        nearest = sorted(stable, key=lambda version: alternatives.release_distance(Version(asked.line), version))
        if unstable:
            names = ", ".join(f"{item.version}{' (yanked)' if item.is_yanked else ''}" for item in unstable[-SHOWN:])
            reason = f"{package.name} {version} has only pre-releases or yanked releases: {names}"
        elif stable:
            names = ", ".join(map(str, nearest[:SHOWN]))
            reason = (
                f"{package.name} has no release {version} on the index: nearest are {names}; the newest is {stable[0]}"
            )
        else:
            reason = f"the index has no stable release of {package.name}"
        others: list[Cell] = []
        if nearest:
            line = f"{nearest[0].major}.{nearest[0].minor}"
            if line not in self.matrix.frameworks[asked.framework].versions:  # else its cells are in the matrix
                cell = replace(asked, line=line, release=str(nearest[0]))
                others = [cell, *self._others(cell)]
        return self._refused(asked, [reason], others)

    def _faults(self, cell: Cell) -> list[str]:
        """The reasons that uv does not report."""
        excluded = (item.reason for item in self.matrix.exclude if cells.match(item.cells, [cell.id]))
        faults = [f"excluded by matrix.yaml: {reason}" for reason in excluded][:1]
        if fault := self.release(cell).fault():
            faults.append(fault)
        return faults

    def _conflict(self, cell: Cell) -> list[str]:
        """The reason that uv gives, as lines; none if uv resolves the cell."""
        release, framework = self.release(cell), self.matrix.frameworks[cell.framework]
        framework = framework.model_copy(update={"versions": {**framework.versions, cell.line: release.entry()}})
        cuda, python = dict(self.matrix.cuda), dict(self.matrix.python)
        if cell.cuda not in cuda:
            cuda[cell.cuda] = Cuda(toolkit=release.toolkit() or None)
        python.setdefault(cell.python, Python(debian=self._debian(cell.python)))
        with_cell = {
            "frameworks": {**self.matrix.frameworks, cell.framework: framework},
            "cuda": cuda,
            "python": python,
        }
        matrix, reason = self.matrix.model_copy(update=with_cell), ""
        # The framework alone fails, and faster. Without the packages of components, their indexes would be lost.
        if not self._has_wheel(cell) and not cells.indexes_of_packages(matrix, cell):
            components = {name: item.model_copy(update={"packages": []}) for name, item in matrix.components.items()}
            alone = {"components": components, "cuda": {**cuda, cell.cuda: Cuda()}}
            reason = self.resolve(matrix.model_copy(update=alone), cell)
        reason = reason or self.resolve(matrix, cell)
        return summarize(reason) if reason else []

    def _has_wheel(self, cell: Cell) -> bool:
        """True if an installer would take a wheel of the framework's release."""
        release = self.release(cell).release
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

    def _refused(self, cell: Cell, reasons: Iterable[str], others: Iterable[Cell]) -> Explanation:
        """A refusal, with the nearest cells that work. Cells of the matrix work; resolves at most TRIED others.

        Leaves out cells on a Python whose images were not built yet.
        """
        near: list[Alternative] = []
        tried = 0
        not_built = {version for version, python in self.matrix.python.items() if python.not_built}
        for candidate in alternatives.rank(cell, self.known, others):
            if len(near) == SHOWN:
                break
            if candidate.cell.python in not_built:
                continue
            if not candidate.is_listed:
                if tried == TRIED or not self._has_wheel(candidate.cell) or self._faults(candidate.cell):
                    continue
                tried += 1
                if self._conflict(candidate.cell):
                    continue
            near.append(candidate)
        return Explanation(id=cell.id, works=False, because=tuple(reasons), near=tuple(near))

    def _others(self, cell: Cell) -> list[Cell]:
        """Cells of the same release that are not in the matrix: each CUDA of the matrix, and the one that it pins."""
        listed = {cell.id, *(known.id for known in self.known)}
        runtime = self.release(cell).runtime
        pinned = runtime.cudas if runtime and len(runtime.cudas) == 1 else ()
        pairs = itertools.product(dict.fromkeys([*self.matrix.cuda, *pinned]), self.matrix.python)
        others = [replace(cell, cuda=cuda, python=python) for cuda, python in pairs]
        return [other for other in others if other.id not in listed]

    def _from_project(self, cell: Cell) -> Iterator[str]:
        """The lines for matrix.yaml with which a cell gets its framework from the index of the framework's project.

        None if that index has no build for the cell, or if matrix.yaml already names an index.
        """
        framework, release = self.matrix.frameworks[cell.framework], self.release(cell)
        package, version = required_name(framework.package_for(cell.cuda)), Version(cell.release)
        project, line = self.facts.project_indexes.get(package), f"{version.major}.{version.minor}"
        is_named = package in cells.indexes_of_packages(self.matrix, cell)
        if not project or cell.cuda not in project.builds.get(line, ()) or cell.arch != AMD64 or is_named:
            return
        build, index = "the CPU" if cell.is_cpu else f"CUDA {cell.cuda}", f"{cell.framework}-{cell.cuda_tag}"
        entry = release.entry()
        arch = {**entry.arch, cell.cuda: [*entry.arch_on(cell.cuda), cell.arch]}
        changed = entry.model_copy(
            update={
                "cuda": list(dict.fromkeys([*entry.cuda, cell.cuda])),
                "python": list(dict.fromkeys([*entry.python, cell.python])),
                "index_on": {**entry.index_on, cell.cuda: index},
                "arch": entry.arch if cell.arch in entry.arch_on(cell.cuda) else arch,
            }
        )
        yield f"the project's own index has {package} {line} for {build} ({project.source}); see docs/matrix.md; add:"
        yield f"  under indexes: {index}: <its address for {build}, from the project's installation page>"
        yield from self._cuda_to_add(cell)
        if cell.is_cpu and not framework.cpu_image:
            yield f"  under frameworks.{cell.framework}: cpu_image: {cell.short}-cpu"
        instead = ", instead of that entry" if cell.line in framework.versions else ""
        yield f"  under frameworks.{cell.framework}.versions{instead}: {matrix_line(_line_of(cell), changed)}"
        yield f"  to its `packages`: all other packages that are compiled for {build}, such as torchvision"
        moved = [each for each in self.known if each.line == cell.line and each.framework == cell.framework]
        if ids := sorted({each.group for each in moved if each.cuda == cell.cuda}):
            yield f"  these cells then come from that index, too: {', '.join(ids)}"

    def _cuda_to_add(self, cell: Cell) -> Iterator[str]:
        if cell.cuda not in self.matrix.cuda:
            toolkit = "" if cell.is_cpu else self.release(cell).toolkit()
            key = cell.cuda if cell.is_cpu else f'"{cell.cuda}"'
            yield f"  under cuda: {key}: {{{f'toolkit: {toolkit}' if toolkit else ''}}}"

    def _to_add(self, cell: Cell) -> Iterator[str]:
        """The lines for matrix.yaml."""
        if cell.id in {known.id for known in self.known}:
            yield "it is in matrix.yaml"
            return
        release = self.release(cell)
        yield "it is not in matrix.yaml; add:"
        yield from self._cuda_to_add(cell)
        if cell.line in self.matrix.frameworks[cell.framework].versions:
            yield f'  under include: - {{cell: {cell.id}, reason: "<why>"}}'
            return
        yield f"  under frameworks.{cell.framework}.versions: {matrix_line(_line_of(cell), release.entry())}"


def _line_of(cell: Cell) -> str:
    """The line of a cell that matrix.yaml need not have, as a key there: at most three numbers."""
    return ".".join(map(str, Version(cell.line).release[:3]))


def matrix_line(line: str, entry: FrameworkVersion) -> str:
    """A line of a framework, as it is written in matrix.yaml."""
    fields = [f"release: {entry.release}", f"cuda: [{_listed(entry.cuda)}]", f"python: [{_listed(entry.python)}]"]
    lists = {"packages": entry.packages, "constraints": entry.constraints, "components": entry.components}
    fields += [f"{name}: [{_listed(values)}]" for name, values in lists.items() if values]
    by_cuda = ", ".join(f"{_listed([cuda])}: [{_listed(names)}]" for cuda, names in entry.arch.items())
    if [*entry.arch] == [OTHERS]:
        fields += [f"arch: [{_listed(entry.arch[OTHERS])}]"] if entry.arch[OTHERS] != [AMD64] else []
    else:
        fields.append(f"arch: {{{by_cuda}}}")
    fields += [f"index: {entry.index}"] if entry.index else []
    indexes = ", ".join(f"{_listed([cuda])}: {index}" for cuda, index in entry.index_on.items())
    fields += [f"index_on: {{{indexes}}}"] if indexes else []
    return f'"{line}": {{{", ".join(fields)}}}'


def _listed(values: Iterable[str]) -> str:
    """Items of a YAML list in brackets. Quotes versions, and values with characters that are special in such lists."""
    return ", ".join(
        f'"{value}"' if value[0].isdigit() or value == OTHERS or set(value) & set(",[]{}") else value
        for value in values
    )


def summarize(reason: str) -> list[str]:
    """uv's reason in at most two lines that name package and constraint."""
    text = " ".join(reason.replace("`", "").split())
    if text.startswith("matrix.yaml: "):
        setting, _, rest = text.partition("this resolves. ")
        return [f"{setting}this resolves", *summarize(rest)]
    if lines := _contradiction(text):
        return lines
    cause, *hints = re.sub(r"^.*?Because ", "", text).split(" hint: ")
    first = re.split(r"(?<=[a-z])\. (?=[A-Z])|, we can conclude", cause)[0]
    # Of uv's hints, only those on wheels apply: the rest recommends options of uv.
    lines = [first, *[hint for hint in hints if "wheels" in hint.lower()][:1]]
    return [line if len(line) <= 300 else line[:297] + "..." for line in lines]


def _contradiction(text: str) -> list[str]:
    """Two requirements for the same package that exclude each other; empty if uv's reason is another."""
    by_name: dict[str, dict[str, str]] = {}
    for requirer, name, bound in _DEPENDS.findall(text):
        by_name.setdefault(name, {}).setdefault(bound.rstrip(","), requirer.replace("==", " "))
    for name, bounds in by_name.items():
        for bound in re.findall(rf"you require {re.escape(name)}([<>=!~]\S*?)[.,]?(?: |$)", text):
            bounds.setdefault(bound, "matrix.yaml")
        if len(bounds) > 1:
            (first, by), (second, other) = list(bounds.items())[:2]
            return [
                f"{by} requires {name}{first}, and {other} requires {name}{second};",
                f"no version of {name} satisfies both",
            ]
    return []
