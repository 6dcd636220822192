"""From requirements to exact wheels.

Only this step looks up which versions exist. Each group is resolved by itself, so that adding to the matrix never
changes the lock of another group. Groups share wheels because each prefers the versions of the others.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from builder.common.errors import FetchError, LockError, MatrixError, UnreachableError, choose_again
from builder.common.files import digest_of_data
from builder.common.text import counted
from builder.host import Host
from builder.index.local_index import LocalIndex, Sources, serve_index
from builder.index.releases import Index
from builder.index.wheels import ORIGIN, BuiltWheel, LockedWheel, Wheel
from builder.lock import checks, lockfile, sources, uv
from builder.lock.lockfile import Basis, Lock, LockedBuild, LockedComponent
from builder.lock.sources import WheelBuild, WheelBuilder
from builder.lock.uv import ListedWheels, Target, Uv
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import Matrix, required_name

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage


class Resolver:
    """Resolves groups of cells. `sizes` are known sizes of wheels, by SHA-256, so that each is requested once."""

    def __init__(
        self,
        project: Project,
        host: Host,
        *,
        say: Callable[[str], None],
        matrix: Matrix | None = None,
        run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
        catalogue: Index | None = None,
        serve: Callable[[Index, Sources], AbstractContextManager[tuple[str, LocalIndex]]] = serve_index,
        builder: WheelBuilder | None = None,
    ) -> None:
        """`matrix` replaces that of the project; `run` runs uv.

        `catalogue` replaces the index of `host`, if packages come from named indexes, and `serve` serves it to uv.
        `builder` builds packages from source.
        """
        self.matrix = matrix or project.matrix
        self.host = host
        self.say = say
        self.builder = builder
        self.uv = Uv(host, run, catalogue or Index(host.index), serve, project.scratch)
        self.sizes: dict[str, int] = {}
        self.toolkits: dict[tuple[str, str, str, frozenset[tuple[str, str]]], Mapping[str, str]] = {}

    def resolve(self, group: Sequence[Cell], present: Lock | None, prefer: Mapping[str, str]) -> Lock:
        """The lock of a group, from its own requirements alone.

        Components of the lock `present` with the same requirements are kept, if the new ones fit beside them. Else all
        is resolved, with the versions in `prefer` and in `present` where they still fit. Builds the packages of
        `sources` that the group needs. Raises LockError, and errors of the builder.
        """
        images = [cell for cell in group if not lockfile.packages_from_source(self.matrix, cell)]
        if len(images) == len(group):
            return _Resolution(self, present).lock(group, present, prefer)
        if not images:
            name = min(lockfile.packages_from_source(self.matrix, group[0]))
            sources.cell_to_build_in(self.matrix, name, group[0].group, images)  # raises the error
        # The images without such packages first: the packages are built in them.
        base = _Resolution(self, present).lock(images, present, prefer)
        prefer = {**prefer, **(present.versions if present else {})}
        kept = present
        while True:
            is_same = kept is not None and _part(kept, base.components) == base
            resolution = _Resolution(self, present, image_lock=base, images=images)
            lock = resolution.lock(group, kept if is_same else base, prefer)
            if (part := _part(lock, base.components)) == base:
                return lock
            base, kept = part, None  # they fit only with other versions in the images

    def reason(self, cell: Cell) -> str:
        """The reason that a cell, in the matrix or not, does not resolve to wheels, or an empty string.

        Names the requirement or constraint of matrix.yaml that causes it, if there is one. Raises FetchError if the
        index cannot be reached.
        """
        needs, basis = lockfile.requirements(self.matrix, cell), lockfile.basis(self.matrix, cell)
        # Nothing is built here, so packages from source are left out.
        left = {
            component: [package for package in packages if required_name(package) not in self.matrix.sources]
            for component, packages in needs.items()
        }
        needs = {component: packages for component, packages in left.items() if packages}
        try:
            if reason := self._failure(cell, needs, basis):
                for setting, other_needs, other_basis in self._without_one_setting(cell, needs, basis):
                    if not self._failure(cell, other_needs, other_basis):
                        return f"matrix.yaml: {setting} causes the conflict; without it, this resolves. {reason}"
            return reason
        except UnreachableError as error:
            raise FetchError(str(error), hint=error.hint) from error

    def _failure(self, cell: Cell, needs: Mapping[str, list[str]], basis: Basis) -> str:
        """The reason that requirements do not resolve, or an empty string."""
        try:
            resolution = _Resolution(self, None)
            versions = resolution.versions(cell, needs, basis)
            closures = {name: resolution.closure(cell, packages, versions) for name, packages in needs.items()}
            wheels = {name: wheel for closure in closures.values() for name, (wheel, _) in closure.items()}
            _check(self.matrix, cell, closures, wheels)
        except UnreachableError:
            raise
        except LockError as error:
            return str(error)
        return ""

    def _without_one_setting(
        self, cell: Cell, needs: Mapping[str, list[str]], basis: Basis
    ) -> Iterator[tuple[str, Mapping[str, list[str]], Basis]]:
        """Each optional setting of matrix.yaml for a cell, and the requirements and basis without it."""
        framework = self.matrix.frameworks[cell.framework]
        line = f'frameworks.{cell.framework}.versions."{cell.line}"'
        for bound in basis.constraints:
            others = [other for other in basis.constraints if other != bound]
            yield f"{line}.constraints: {bound}", needs, replace(basis, constraints=others)
        if basis.toolkit:
            yield f'cuda."{cell.cuda}".toolkit: {basis.toolkit}', needs, replace(basis, toolkit="")
        for component, packages in needs.items():
            for package in packages:
                if package == f"{framework.package_for(cell.cuda)}=={cell.release}":
                    continue
                is_of_line = package in framework.versions[cell.line].packages
                place = f"{line}.packages" if is_of_line else f"components.{component}.packages"
                left = {**needs, component: [other for other in packages if other != package]}
                yield f"{place}: {package}", left, basis


@dataclass(frozen=True)
class _Resolution:
    """One resolution of a group whose lock is `present`.

    Packages from source are built in images of the cells `images`, whose wheels are in `image_lock`. `built` are their
    wheels (see `Sources`), `builds` their builds, by SHA-256; `building` is the chain of builds that run now.
    """

    resolver: Resolver
    present: Lock | None
    image_lock: Lock | None = None
    images: Sequence[Cell] = ()
    built: dict[tuple[str, str], BuiltWheel] = field(default_factory=dict)
    builds: dict[str, LockedBuild] = field(default_factory=dict)
    building: list[str] = field(default_factory=list)

    @property
    def matrix(self) -> Matrix:
        return self.resolver.matrix

    def lock(self, group: Sequence[Cell], kept: Lock | None, prefer: Mapping[str, str]) -> Lock:
        """The lock of a group, with the parts of the lock `kept` that fit."""
        cell, say = group[0], self.resolver.say
        needs, basis = lockfile.group_requirements(self.matrix, group), lockfile.basis(self.matrix, cell)
        preferred = {**prefer, **(kept.versions if kept else {})}
        # Locked wheels stay as they are where they can: a new variant must not change the wheels of other images.
        parts: dict[str, LockedComponent] = {}
        wheels: dict[str, LockedWheel] = {}
        if kept and kept.basis == basis:
            still_needed = {component: part for component, part in kept.components.items() if component in needs}
            names = {name for part in still_needed.values() for name in part.wheels}
            kept_wheels = {wheel.name: wheel for wheel in kept.wheels if wheel.name in names}
            indexes = cells.indexes_of_packages(self.matrix, cell)
            if (
                all(part.requirements == needs[component] for component, part in still_needed.items())
                and all(wheel.index == indexes.get(name, "") for name, wheel in kept_wheels.items())
                and not lockfile.other_source(self.matrix, kept)
            ):
                parts, wheels = still_needed, kept_wheels
        if parts.keys() != needs.keys():
            say(f"{cell.group}: resolving {counted(sum(map(len, needs.values())), 'requirement')}")
            new = [component for component in needs if component not in parts]
            try:
                pins = {name: wheel.version for name, wheel in wheels.items()}
                versions = self.versions(cell, needs, basis, pins=pins, preferred=preferred)
            except LockError as error:
                if not parts or isinstance(error, UnreachableError):
                    raise
                reason = str(error).split("\n", maxsplit=1)[-1].strip()
                unfit = ", ".join(new)
                say(f"{cell.group}: no versions of {unfit} fit the locked wheels; resolving all again: {reason}")
                parts, wheels, new = {}, {}, list(needs)
                versions = self.versions(cell, needs, basis, preferred=preferred)
            # The versions are chosen for all components together. Each then has a list of its own, so that an image has
            # the wheels of its components and no others.
            added: ListedWheels = {}
            for component in new:
                closure = self.closure(cell, needs[component], versions)
                parts[component] = LockedComponent(requirements=needs[component], wheels=sorted(closure))
                added |= {name: wheel for name, wheel in closure.items() if name not in wheels}
            wheels |= self._with_sizes(cell, added)
        _check(self.matrix, cell, {component: part.wheels for component, part in parts.items()}, wheels)
        return Lock(
            group=cell.group,
            basis=basis,
            components={component: parts[component] for component in needs},
            wheels=tuple(wheels[name] for name in sorted(wheels)),
            builds=self._all_builds(cell, wheels.values()),
        )

    def versions(
        self,
        cell: Cell,
        needs: Mapping[str, list[str]],
        basis: Basis,
        *,
        pins: Mapping[str, str] | None = None,
        preferred: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Name -> version for all that these components need.

        `pins` are versions that must stay, `preferred` those to take where they fit. So are the versions of the release
        of `cuda-toolkit` in matrix.yaml: they fill what no framework pins, and never override one.
        """
        versions = dict(preferred or {})
        if basis.toolkit:
            indexes = frozenset(cells.indexes_of_packages(self.matrix, cell).items())
            key = basis.toolkit, basis.python, basis.platform, indexes
            if key not in self.resolver.toolkits:
                text = self._compile(cell, [f"{lockfile.TOOLKIT}[all]=={basis.toolkit}"], (), {})
                self.resolver.toolkits[key] = uv.parse_versions(text)
            versions |= self.resolver.toolkits[key]
        packages = sorted({package for packages in needs.values() for package in packages})
        constraints = [*basis.constraints, *uv.pinned(pins or {})]
        return uv.parse_versions(self._compile(cell, packages, constraints, versions))

    def closure(self, cell: Cell, packages: Sequence[str], versions: Mapping[str, str]) -> ListedWheels:
        """The wheels for all that some requirements need."""
        pylock = self._compile(cell, packages, uv.pinned(versions))
        return self.resolver.uv.wheels(Target.of(self.matrix, cell), pylock, self.built)

    def _compile(
        self,
        cell: Cell,
        packages: Sequence[str],
        constraints: Sequence[str],
        preferred: Mapping[str, str] | None = None,
    ) -> str:
        """The output of uv, see `Uv.compile`. Builds the packages whose metadata uv needs, then runs it again."""
        target = Target.of(self.matrix, cell)
        while True:
            text, unbuilt = self.resolver.uv.compile(target, packages, constraints, preferred, self.built)
            if not unbuilt:
                return text
            for (name, file), sdist in unbuilt.items():
                self.built[name, file] = self._build(cell, name, self._source(name, sdist))

    def _source(self, name: str, sdist: DistributionPackage | None) -> str:
        """The source of a package, see ORIGIN. Raises MatrixError."""
        if not sdist:
            return self.matrix.origin(name)
        source = f"{sdist.filename}#sha256={sdist.digests.get('sha256', '')}"
        if not re.fullmatch(ORIGIN, source):
            where = self.matrix.where("sources", name, key=True)
            raise MatrixError(
                f"{where}: the index has no SHA-256 for an sdist of {name}", hint="Use an index that has hashes."
            )
        return source

    def _build(self, cell: Cell, name: str, source: str) -> BuiltWheel:
        """The wheel of a package from source: the locked one if it is kept, or else a new one. Raises MatrixError."""
        matrix, group, builder = self.matrix, cell.group, self.resolver.builder
        where, index = matrix.where("sources", name, key=True), cells.indexes_of_packages(matrix, cell).get(name, "")
        if not self.image_lock or not builder:
            raise MatrixError(
                f"{where}: {name} is built from source, and a package of {cell.id} requires it",
                hint=f"List {name} in the `packages` of a component, which must not be a part of all variants.",
            )
        if name in self.building:
            raise MatrixError(f"{where}: {name} is needed for its own build: {' -> '.join([*self.building, name])}")
        lock = self.image_lock
        image_cell, image = self._image(lock, name, group)
        wheel = self.present.built.get(name) if self.present else None
        locked = self._locked_build(lock, name, group) if wheel and wheel.source == source else None
        built = builder.built(wheel, group) if wheel and locked else None
        if built is None:
            recipe = matrix.sources[name]
            build = WheelBuild(name=name, source=source, index=index, recipe=recipe, lock=lock, cell=image_cell)
            self.building.append(name)
            try:
                wheels = locked.wheels if locked else ()
                # Those from source may have to be built again first, and may then be others than the locked ones.
                needed = [each for each in wheels if each.source]
                if not locked or any(self._build(cell, each.name, each.source).wheel != each for each in needed):
                    wheels = self._build_wheels(builder, build, image)
                self.resolver.say(
                    f"{group}: building {name} from {source.partition('#')[0]}, in the image of {image_cell.id}"
                )
                built = builder.build(build, wheels)
            finally:
                self.building.pop()
            digest = _digest_of_image(image)
            locked = LockedBuild(name=name, recipe=recipe, cell=image_cell.id, image=digest, wheels=wheels)
        assert locked
        self.builds[built.wheel.sha256] = locked
        self.resolver.sizes[built.wheel.sha256] = built.wheel.size
        return built

    def _image(self, lock: Lock, name: str, group: str) -> tuple[Cell, Sequence[Wheel]]:
        """The cell in whose image a package is built, and its wheels. Raises MatrixError if there is none."""
        cell = sources.cell_to_build_in(self.matrix, name, group, self.images)
        return cell, lockfile.of_cell(self.matrix, cell, lock).wheels

    def _locked_build(self, lock: Lock, name: str, group: str) -> LockedBuild | None:
        """The build of a package in the present lock, if it would have the same inputs now.

        A wheel that was compiled with another framework may not work with this one, so the image must be the same too;
        and so must the builds of the packages from source that it needs.
        """
        present = self.present
        build = next((each for each in (present.builds if present else ()) if each.name == name), None)
        if (
            not present
            or not build
            or lockfile.other_source(self.matrix, present, [present.built[name], *build.wheels])
            or build.image != _digest_of_image(self._image(lock, name, group)[1])
            or not all(self._locked_build(lock, each.name, group) for each in build.wheels if each.source)
        ):
            return None
        return build

    def _build_wheels(
        self, builder: WheelBuilder, build: WheelBuild, image: Sequence[Wheel]
    ) -> tuple[LockedWheel, ...]:
        """The wheels that a build needs besides those of its image, whose framework and CUDA must stay as they are."""
        cell, requirements = build.cell, [*builder.requirements(build), *build.recipe.requires]
        versions = {wheel.name: wheel.version for wheel in image}
        package = required_name(self.matrix.frameworks[cell.framework].package_for(cell.cuda))
        pins = {wheel.name: wheel.version for wheel in image if wheel.is_cuda or wheel.name == package}
        chosen = uv.parse_versions(self._compile(cell, requirements, uv.pinned(pins), versions))
        closure = self.closure(cell, requirements, chosen)
        missing = {name: each for name, each in closure.items() if each[0].version != versions.get(name)}
        return tuple(wheel for _, wheel in sorted(self._with_sizes(cell, missing).items()))

    def _with_sizes(self, cell: Cell, listed: ListedWheels) -> dict[str, LockedWheel]:
        """Wheels by name. The sizes that the index does not list, and that are not known yet, are requested."""
        sizes = self.resolver.sizes
        for wheel, _ in listed.values():
            if wheel.size:
                sizes.setdefault(wheel.sha256, wheel.size)
        if unknown := {wheel.sha256: (wheel, url) for wheel, url in listed.values() if wheel.sha256 not in sizes}:
            self.resolver.say(f"{cell.group}: getting the size of {counted(len(unknown), 'wheel')}")
            sizes |= self.resolver.uv.sizes(Target.of(self.matrix, cell), unknown)
        return {name: replace(wheel, size=sizes[wheel.sha256]) for name, (wheel, _) in listed.items()}

    def _all_builds(self, cell: Cell, wheels: Iterable[LockedWheel]) -> tuple[LockedBuild, ...]:
        """The builds of wheels, and those of the wheels that these builds needed, sorted by name. Raises LockError."""
        earlier = {build.name: build for build in (self.present.builds if self.present else ())}
        builds: dict[str, LockedBuild] = {}
        built: dict[str, LockedWheel] = {}
        pending = [wheel for wheel in wheels if wheel.source]
        while pending:
            wheel = pending.pop()
            if (other := built.setdefault(wheel.name, wheel)) != wheel:
                versions = " and ".join(sorted(f"{each.version} ({each.sha256[:12]}...)" for each in (wheel, other)))
                raise LockError(
                    f"{cell.group}: images and builds need two wheels of {wheel.name} from source: {versions}",
                    hint=f"Pin one version in matrix.yaml. If one is pinned: {choose_again(wheel.name, [cell.id])}",
                )
            if wheel.name not in builds:
                build = builds[wheel.name] = self.builds.get(wheel.sha256) or earlier[wheel.name]
                pending += [each for each in build.wheels if each.source]
        return tuple(builds[name] for name in sorted(builds))


def _check(matrix: Matrix, cell: Cell, names: Mapping[str, Iterable[str]], wheels: Mapping[str, LockedWheel]) -> None:
    """Raises LockError with every fault of wheels; `names` are those that each component needs."""
    shared = {name for component in cells.foundation(matrix, cell) for name in names.get(component, ())}
    checks.check_wheels(cell, list(wheels.values()), shared)


def _digest_of_image(wheels: Iterable[Wheel]) -> str:
    return digest_of_data([[wheel.name, wheel.sha256] for wheel in wheels])


def _part(lock: Lock, components: Iterable[str]) -> Lock:
    """The part of a lock for some components."""
    parts = {name: lock.components[name] for name in components if name in lock.components}
    names = {name for part in parts.values() for name in part.wheels}
    return replace(
        lock,
        components=parts,
        wheels=tuple(wheel for wheel in lock.wheels if wheel.name in names),
        builds=tuple(build for build in lock.builds if build.name in names),
    )
