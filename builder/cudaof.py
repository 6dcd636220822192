"""Which CUDA a release is for, by its metadata or, where that names none, by facts.yaml. Pure.

A CUDA runtime is required by the framework itself (torch), by an extra of it (tensorflow), or by a plugin that an extra
asks for (jax); directly, or as NVIDIA's metapackage cuda-toolkit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder import lock
from builder.cells import Cell
from builder.facts import Facts
from builder.matrix import CPU, FrameworkVersion, Matrix
from builder.released import Catalogue, Metadata, Release

DEEPEST = 3  # plugins of plugins that are followed; real ones are one deep
LONGEST = 2000  # characters of a Requires-Dist; real ones have less than 300
_RUNTIME = re.compile(rf"nvidia-cuda-runtime(-cu\d+)?|{lock.TOOLKIT}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Brought:
    """The release `by` requires `what`, which is there in the CUDA versions `cudas`."""

    by: str
    what: Requirement
    cudas: tuple[str, ...]

    def said(self, subject: str, pronoun: str = "it") -> str:
        """In a sentence that speaks of `subject` already."""
        told = f"{pronoun if self.by == subject else self.by} requires {_short(self.what)}"
        if not self.cudas:
            return f"{told}, of which the index has no release"
        which = self.cudas[0] if len(self.cudas) == 1 else f"{self.cudas[0]} to {self.cudas[-1]}"
        return f"{told}, which is CUDA {which}"


@dataclass(frozen=True)
class Bound:
    """A Requires-Python, or none."""

    specifiers: SpecifierSet

    @staticmethod
    def of(text: str) -> Bound:
        try:
            return Bound(SpecifierSet(text))
        except InvalidSpecifier:
            return Bound(SpecifierSet())

    def admits(self, version: Version) -> bool:
        return self.specifiers.contains(version)


class Finder:
    """Reads metadata of frameworks and of what they ask for."""

    def __init__(self, matrix: Matrix, catalogue: Catalogue, facts: Facts) -> None:
        self._matrix = matrix
        self._catalogue = catalogue
        self._facts = facts

    def wanted(self, cell: Cell) -> Requirement:
        """The package that matrix.yaml installs for the cell's CUDA, with its extras."""
        return Requirement(self._matrix.frameworks[cell.framework].package_for(cell.cuda))

    def faults(self, cell: Cell) -> Iterator[str]:
        """What speaks against the cell's CUDA. Its package has to have the release."""
        metadata, extras = self._metadata(cell), self._extras(cell)
        name = f"{metadata.name} {metadata.version}"
        brought = self._brought(cell, metadata, extras)
        if cell.is_cpu:
            if brought:
                yield (
                    f"there is no wheel of {name} for the cpu on the index: the one for Linux is a CUDA build, "
                    f"{brought.said(name)}"
                )
            return
        offers = self._offers(cell, metadata)
        if missing := extras - set(metadata.extras):
            has = ", ".join(extra for extra in metadata.extras if "cuda" in extra) or "none for CUDA"
            yield (
                f"{name} has no extra {', '.join(sorted(missing))} (it has {has}): an installer only warns, and "
                "installs it for the CPU alone"
            )
        elif brought and not brought.cudas:
            yield brought.said(name, name)
        elif brought and cell.cuda not in brought.cudas:
            yield f"{brought.said(name, name)}, not {cell.cuda}"
        elif not brought and offers:
            yield from self._of_offers(cell, name, offers)
        elif not brought:
            yield from self._of_facts(cell, name)

    def _of_offers(self, cell: Cell, name: str, offers: dict[str, Brought]) -> Iterator[str]:
        extra, brought = next(
            ((extra, brought) for extra, brought in offers.items() if cell.cuda in brought.cudas),
            next(iter(offers.items())),
        )
        if cell.cuda not in brought.cudas:
            yield f"{name} has CUDA only by its extra {extra}: {brought.said(name)}, not {cell.cuda}"
        else:
            package = self.wanted(cell).name
            yield (
                f"{name} has CUDA {cell.cuda} only by its extra {extra}, which matrix.yaml does not ask for: "
                f'set frameworks.{cell.framework}.package_on."{_major(cell.cuda)}" to {package}[{extra}]'
            )

    def _of_facts(self, cell: Cell, name: str) -> Iterator[str]:
        if (compiled := self._compiled(cell)) is None:
            yield (
                f"{name} names no CUDA wheels in its metadata, and builder/facts.yaml does not say which CUDA it was "
                "compiled for"
            )
        elif not _serves(cell.cuda, compiled):
            yield (
                f"{name} names no CUDA wheels in its metadata, and was compiled for CUDA {compiled} "
                f"(builder/facts.yaml), which {cell.cuda} is no later minor version of"
            )
        elif not self.entry(cell).components:
            yield (
                f"{name} names no CUDA wheels in its metadata, and no component of matrix.yaml brings those of "
                f"CUDA {cell.cuda}"
            )

    def praise(self, cell: Cell) -> str:
        """What its metadata says of the cell's CUDA, to go on a sentence with."""
        metadata = self._metadata(cell)
        if cell.is_cpu:
            return " and asks for no CUDA"
        if brought := self._brought(cell, metadata, self._extras(cell)):
            return " and " + brought.said(f"{metadata.name} {metadata.version}", "").lstrip()
        return f" and was compiled for CUDA {self._compiled(cell)} (builder/facts.yaml)"

    def entry(self, cell: Cell) -> FrameworkVersion:
        """The line that matrix.yaml has for the cell, or would have, with what the nearest line of its CUDA needs, and
        the bounds that no metadata says.
        """
        versions = self._matrix.frameworks[cell.framework].versions
        if cell.line in versions:
            return versions[cell.line]
        siblings = [
            (abs(Version(line).minor - Version(cell.line).minor), line)
            for line, entry in versions.items()
            if any(_major(cuda) == _major(cell.cuda) for cuda in entry.cuda)
        ]
        like = versions[min(siblings)[1]] if siblings else None
        names_cuda = cell.is_cpu or self._brought(cell, self._metadata(cell), self._extras(cell))
        return FrameworkVersion(
            release=cell.release,
            cuda=[cell.cuda],
            python=[cell.python],
            constraints=list(dict.fromkeys([*(like.constraints if like else []), *self._bounds(cell)])),
            components=like.components if like and not names_cuda else [],
        )

    def _bounds(self, cell: Cell) -> Iterator[str]:
        """What the release, or what it asks for itself, wants of other packages by facts.yaml alone."""
        packages = (Requirement(self._matrix.frameworks[cell.framework].package), self.wanted(cell))
        own = {canonicalize_name(one.name) for one in packages}
        asked: dict[str, Requirement] = {canonicalize_name(one.name): one for one in self._asked(cell)}
        for trap in self._facts.traps:
            version = Version(cell.release) if trap.package in own else None
            if trap.package in asked and (found := self.newest(asked[trap.package])):
                version = found.version
            if version and SpecifierSet(trap.affected).contains(version, prereleases=True):
                yield f"{trap.other}{trap.wants}"

    def offered(self, cell: Cell) -> list[str]:
        """Values of the CUDA axis that the release may have: what it pins, and of a range what the matrix has."""
        base = replace(cell, cuda=next((one for one in self._matrix.cuda if one != CPU), CPU))
        if not self._catalogue.package(self.wanted(base).name).release(Version(cell.release)):
            return [CPU]
        metadata = self._metadata(base)
        offers = [self._brought(cell, metadata, set()), *self._offers(cell, metadata).values()]
        found = {
            cuda
            for brought in offers
            if brought
            for cuda in brought.cudas
            if len(brought.cudas) == 1 or cuda in self._matrix.cuda
        }
        compiled = () if any(offers) else (one for one in self._matrix.cuda if _serves(one, self._compiled(cell)))
        return [*sorted({*found, *compiled}, key=Version), CPU]

    def companions(self, cell: Cell) -> list[Requirement]:
        """Packages of the framework's own that its metadata asks for: jaxlib, jax-cuda12-plugin."""
        name = self._metadata(cell).name
        return [one for one in self._asked(cell) if canonicalize_name(one.name).startswith(name)]

    def _asked(self, cell: Cell) -> list[Requirement]:
        return _active(self._metadata(cell), self._extras(cell), cell.python)

    def newest(self, requirement: Requirement) -> Release | None:
        """The newest stable release that a requirement admits."""
        found = self._catalogue.package(requirement.name).releases
        fitting = [one for one in found if one.is_stable and requirement.specifier.contains(one.version)]
        return fitting[-1] if fitting else None

    def toolkit(self, cell: Cell) -> str:
        """The newest release of cuda-toolkit for the cell's CUDA that fits to what its metadata requires; or empty."""
        if cell.is_cpu:
            return ""
        brought = self._brought(cell, self._metadata(cell), self._extras(cell))
        for release in reversed(self._catalogue.package(lock.TOOLKIT).releases):
            if release.is_stable and _minor(release.version) == cell.cuda and self._agree(brought, release, cell):
                return str(release.version)
        return ""

    def _agree(self, brought: Brought | None, toolkit: Release, cell: Cell) -> bool:
        if brought is None:
            return True
        name = canonicalize_name(brought.what.name)
        if name == lock.TOOLKIT:
            return brought.what.specifier.contains(toolkit.version)
        metadata = self._catalogue.metadata(lock.TOOLKIT, toolkit.version)
        pins = [one for one in _active(metadata, metadata.extras, cell.python) if canonicalize_name(one.name) == name]
        runtimes = [one.version for one in self._catalogue.package(name).releases if one.is_stable]
        return any(
            brought.what.specifier.contains(version) and all(pin.specifier.contains(version) for pin in pins)
            for version in runtimes
        )

    def _metadata(self, cell: Cell) -> Metadata:
        return self._catalogue.metadata(self.wanted(cell).name, Version(cell.release))

    def _extras(self, cell: Cell) -> set[str]:
        return {canonicalize_name(extra) for extra in self.wanted(cell).extras}

    def _compiled(self, cell: Cell) -> str | None:
        found = self._facts.build(self._matrix.frameworks[cell.framework].package, cell.release, cell.cuda)
        return found.cuda if found else None

    def _offers(self, cell: Cell, metadata: Metadata) -> dict[str, Brought]:
        """By extra, the CUDA that it brings; each CUDA once."""
        found: dict[str, Brought] = {}
        for extra in metadata.extras:
            brought = self._brought(cell, metadata, {extra})
            if brought and brought not in found.values():
                found[extra] = brought
        return found

    def _brought(self, cell: Cell, metadata: Metadata, extras: Iterable[str], depth: int = 0) -> Brought | None:
        """The CUDA runtime that comes with a release, asked for by itself or by a plugin of it."""
        asked = _active(metadata, extras, cell.python)
        by = f"{metadata.name} {metadata.version}"
        for one in asked:
            if _RUNTIME.fullmatch(canonicalize_name(one.name)):
                return Brought(by=by, what=one, cudas=self._cudas(one))
        for one in asked:
            if depth < DEEPEST and re.match(rf"{re.escape(metadata.name)}-cuda\d+-", canonicalize_name(one.name)):
                release = self.newest(one)
                if release is None:
                    return Brought(by=by, what=one, cudas=())
                plugin = self._catalogue.metadata(one.name, release.version)
                return self._brought(cell, plugin, {canonicalize_name(extra) for extra in one.extras}, depth + 1)
        return None

    def _cudas(self, requirement: Requirement) -> tuple[str, ...]:
        """First two numbers of all stable releases that a requirement admits."""
        pins = [one.version for one in requirement.specifier if one.operator == "==" and not one.version.endswith("*")]
        if pins:
            return (_minor(Version(pins[0])),)
        found = self._catalogue.package(requirement.name).releases
        fitting = (one for one in found if one.is_stable and requirement.specifier.contains(one.version))
        return tuple(dict.fromkeys(_minor(one.version) for one in fitting))


def named(package: str) -> str:
    """torch==2.9.1 as torch 2.9.1."""
    return package.replace("==", " ")


def _active(metadata: Metadata, extras: Iterable[str], python: str) -> list[Requirement]:
    """Requirements that count on Linux with this Python and these extras."""
    names = ["", *sorted(extras)]
    return [one for one in map(_parsed, metadata.requires) if one and _counts(one, python, names)]


def _counts(requirement: Requirement, python: str, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    try:
        return not marker or any(marker.evaluate(_environment(python, name)) for name in extras)
    except (ValueError, KeyError, RecursionError):  # it compares what cannot be compared, or knows other variables
        return False


@cache
def _parsed(text: str) -> Requirement | None:
    if len(text) > LONGEST or not text.replace("\t", " ").isprintable():
        return None
    try:
        return Requirement(text)
    except (InvalidRequirement, RecursionError):  # old metadata has such; an installer cannot read it either
        return None


def _environment(python: str, extra: str) -> dict[str, str]:
    return {
        "extra": extra,
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": lock.PLATFORM,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def _short(requirement: Requirement) -> str:
    """Name, bounds and few extras: cuda-toolkit's are a line of their own."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if len(requirement.extras) == 1 else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def _minor(version: Version) -> str:
    return f"{version.major}.{version.minor}"


def _major(cuda: str) -> str:
    return cuda.split(".", maxsplit=1)[0]


def _serves(cuda: str, compiled: str | None) -> bool:
    """Whether libraries of `cuda` serve what was compiled for an earlier minor version of the same major one."""
    if cuda == CPU or compiled is None:
        return False
    mine, its = Version(cuda), Version(compiled)
    return mine.major == its.major and mine.minor >= its.minor
