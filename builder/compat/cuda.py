"""The CUDA that a framework's release needs, from its metadata or, where that names none, from facts.yaml. Pure.

The framework itself requires a CUDA runtime (torch), an extra of it does (tensorflow), or a plugin that an extra
requires (jax); directly, or through NVIDIA's metapackage cuda-toolkit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.index.releases import Index, ListedRelease, Metadata
from builder.index.wheels import PLATFORMS
from builder.lock.lockfile import TOOLKIT
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.facts import Facts
from builder.matrix.schema import AMD64, FrameworkVersion, Matrix, cuda_major

MAX_PLUGINS = 3  # plugins of plugins; real plugins are one level deep
_RUNTIME = re.compile(rf"nvidia-cuda-runtime(-cu\d+)?|{TOOLKIT}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A CUDA runtime: the release `by` requires it, and the index has it for the CUDA versions `cudas`."""

    by: str
    requirement: Requirement
    cudas: tuple[str, ...]

    def __str__(self) -> str:
        names = self.requirement.extras
        extra = f"[{next(iter(names))}]" if len(names) == 1 else ""  # cuda-toolkit has a line of them
        cudas = " to ".join(dict.fromkeys((self.cudas[0], self.cudas[-1]))) if self.cudas else ""
        has = f"CUDA {cudas}" if cudas else "no release on the index"
        return f"{self.by} requires {self.requirement.name}{extra}{self.requirement.specifier} ({has})"


@dataclass(frozen=True, kw_only=True)
class FrameworkRelease:
    """The release of a framework that a cell has; the cell may be missing in the matrix."""

    matrix: Matrix
    catalogue: Index
    facts: Facts
    cell: Cell

    def __str__(self) -> str:
        return f"{self.metadata.name} {self.metadata.version}"

    @cached_property
    def requirement(self) -> Requirement:
        """The package that matrix.yaml installs for the cell's CUDA, with its extras."""
        return Requirement(self.matrix.frameworks[self.cell.framework].package_for(self.cell.cuda))

    @cached_property
    def release(self) -> ListedRelease | None:
        """The release on the index; None if the index has no wheel of it."""
        release = self.catalogue.package(self.requirement.name).release(Version(self.cell.release))
        return release if release and release.wheels else None

    @cached_property
    def metadata(self) -> Metadata:
        if self.release is None:
            return Metadata(name=self.requirement.name, version=self.cell.release)
        return self.catalogue.metadata(self.requirement.name, self.release.version)

    @cached_property
    def runtime(self) -> Runtime | None:
        """The CUDA runtime that it requires with the extras of matrix.yaml."""
        return self._runtime(self.metadata, self._extras)

    def fault(self) -> str:
        """The reason that the release does not run on the cell's CUDA, or an empty string.

        Also empty if the index lacks the release, or the runtime that it requires.
        """
        if self.release is None:
            return ""
        if self.cell.is_cpu:
            return f"{self} has no CPU wheel on the index: {self.runtime}" if self.runtime else ""
        extras = ", ".join(extra for extra in self.metadata.extras if "cuda" in extra)
        if missing := self._extras - set(self.metadata.extras):
            has = f"it has {extras or 'none for CUDA'}"
            return f"{self} has no extra {', '.join(sorted(missing))} ({has}): it would be CPU only"
        cuda = self.cell.cuda
        if self.runtime:
            fits = not self.runtime.cudas or cuda in self.runtime.cudas
            return "" if fits else f"{self.runtime}, not CUDA {cuda}"
        if extras and not self._extras:
            return f"{self} requires CUDA only with an extra: package_on has none of {extras} for CUDA {cuda}"
        # Its metadata does not name CUDA: components of matrix.yaml must have what it was compiled for.
        if not (compiled := self._compiled):
            unknown = ", and builder/matrix/facts.yaml lacks its CUDA version"
            cpu_only = f" on {PLATFORMS[self.cell.arch]}: it would be CPU only"
            return f"{self} requires no CUDA wheels{unknown if self.cell.arch == AMD64 else cpu_only}"
        own, oldest = Version(cuda), Version(compiled)
        if own.major != oldest.major or own.minor < oldest.minor:  # a later minor version runs code of an older one
            return (
                f"{self} requires no CUDA wheels and was compiled for CUDA {compiled} (builder/matrix/facts.yaml): "
                f"it needs {compiled} or a later {cuda_major(compiled)}.x, not {cuda}"
            )
        if not self.entry().components:
            return f"{self} requires no CUDA wheels, and no component of matrix.yaml has the CUDA {cuda} wheels"
        return ""

    def evidence(self) -> str:
        """The reason that the release runs on the cell's CUDA."""
        if self.cell.is_cpu:
            return f"{self} requires no CUDA"
        return str(self.runtime or f"{self} was compiled for CUDA {self._compiled} (builder/matrix/facts.yaml)")

    def entry(self) -> FrameworkVersion:
        """The cell's line in matrix.yaml, or the line to add.

        A line to add has the constraints of the nearest line for the same CUDA major and of facts.yaml, and the
        components of the nearest line if no metadata names CUDA.
        """
        cell = self.cell
        versions = self.matrix.frameworks[cell.framework].versions
        if cell.line in versions:
            return versions[cell.line]
        siblings = [
            (abs(Version(line).minor - Version(cell.line).minor), line)
            for line, entry in versions.items()
            if any(cuda_major(cuda) == cuda_major(cell.cuda) for cuda in entry.cuda)
        ]
        sibling = versions[min(siblings)[1]] if siblings else None
        own = canonicalize_name(self.requirement.name)
        return FrameworkVersion(
            release=cell.release,
            index=cells.indexes_of_packages(self.matrix, cell).get(own),
            cuda=[cell.cuda],
            python=[cell.python],
            constraints=list(dict.fromkeys([*(sibling.constraints if sibling else []), *self._bounds()])),
            components=sibling.components if sibling and not cell.is_cpu and not self.runtime else [],
        )

    def _bounds(self) -> Iterator[str]:
        """Bounds on other packages that only facts.yaml has, for the release and for what it requires."""
        package = Requirement(self.matrix.frameworks[self.cell.framework].package).name
        active = self.metadata.requirements(self.cell, self._extras)
        required: dict[str, Requirement] = {canonicalize_name(item.name): item for item in active}
        for conflict in self.facts.traps:
            version = None
            if conflict.package in {canonicalize_name(package), canonicalize_name(self.requirement.name)}:
                version = Version(self.cell.release)
            elif conflict.package in required and (release := self._newest(required[conflict.package])):
                version = release.version
            if version and SpecifierSet(conflict.affected).contains(version, prereleases=True):
                yield f"{conflict.other}{conflict.wants}"

    def toolkit(self) -> str:
        """The newest release of cuda-toolkit for the cell's CUDA that the release admits; empty if there is none."""
        # A build of another index requires the CUDA of the cell, unlike this one.
        own = self.runtime.requirement if self.runtime and self.cell.cuda in self.runtime.cudas else None
        is_own = own and canonicalize_name(own.name) == TOOLKIT
        releases = self._admitted(own if own and is_own else Requirement(TOOLKIT))
        versions = [str(item.version) for item in releases if _minor(item.version) == self.cell.cuda]
        return versions[-1] if versions else ""

    @property
    def _extras(self) -> set[str]:
        return {canonicalize_name(extra) for extra in self.requirement.extras}

    @cached_property
    def _compiled(self) -> str:
        """The CUDA that it was compiled for, by facts.yaml; empty if unknown."""
        build = self.facts.build_of_cell(self.matrix, self.cell)
        return build.cuda if build else ""

    def _runtime(self, metadata: Metadata, extras: Iterable[str], depth: int = 0) -> Runtime | None:
        """The CUDA runtime that a release with these extras requires, itself or through a plugin."""
        requirements = metadata.requirements(self.cell, extras)
        by = f"{metadata.name} {metadata.version}"
        for item in requirements:
            if _RUNTIME.fullmatch(canonicalize_name(item.name)):
                pins = [pin.version for pin in item.specifier if pin.operator == "==" and not pin.version.endswith("*")]
                versions = [Version(pins[0])] if pins else [release.version for release in self._admitted(item)]
                return Runtime(by=by, requirement=item, cudas=tuple(dict.fromkeys(map(_minor, versions))))
        for item in requirements:
            if depth < MAX_PLUGINS and re.match(rf"{re.escape(metadata.name)}-cuda\d+-", canonicalize_name(item.name)):
                release = self._newest(item)
                if release is None:
                    return Runtime(by=by, requirement=item, cudas=())
                plugin = self.catalogue.metadata(item.name, release.version)
                return self._runtime(plugin, map(canonicalize_name, item.extras), depth + 1)
        return None

    def _newest(self, requirement: Requirement) -> ListedRelease | None:
        return next(reversed(self._admitted(requirement)), None)

    def _admitted(self, requirement: Requirement) -> list[ListedRelease]:
        """The stable releases that a requirement admits, oldest first."""
        releases = self.catalogue.package(requirement.name).releases
        return [item for item in releases if item.is_stable and requirement.specifier.contains(item.version)]


def _minor(version: Version) -> str:
    return f"{version.major}.{version.minor}"
