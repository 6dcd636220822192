"""From requirements to exact wheels, with uv against the configured index, and those that matrix.yaml names.

Only this step looks up which versions exist. Each group is resolved by itself, so that adding to the matrix never
changes the lock of another group. Groups share wheels because each prefers the versions of the others.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import requests
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import BuildTag, InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from builder.common.errors import FetchError, LockError, MatrixError, UnreachableError, choose_again
from builder.common.files import digest_of_data
from builder.common.http import Fault
from builder.common.tasks import thread_pool
from builder.common.text import counted
from builder.host import Host
from builder.index.local_index import LocalIndex, Sources, serve_index
from builder.index.releases import UPLOAD_AGAIN, Index
from builder.index.session import DOCTOR, POOL, IndexSession, authority_hint, describe
from builder.index.settings import IndexSettings
from builder.index.wheels import ORIGIN, PLATFORMS, BuiltWheel, LockedWheel, Wheel
from builder.lock import checks, lockfile, sources
from builder.lock.lockfile import Basis, Lock, LockedBuild, LockedComponent
from builder.lock.python_builds import uv_program
from builder.lock.sources import WheelBuild, WheelBuilder
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import Matrix, required_name

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

TIMEOUT_S = 900
OTHER_INDEXES = ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX_STRATEGY", "UV_TORCH_BACKEND")
LOGINS = re.compile(r"UV_INDEX_[A-Z0-9_]+_(USERNAME|PASSWORD)")  # uv needs none: see builder.index.local_index
UV_NEWEST_GLIBC = 40  # uv 0.13 has platforms up to manylinux_2_40; newer C libraries run what older ones do
# Lines of uv 0.13. Words such as "dns" also occur in names of packages. A failed request is "Failed to fetch:",
# whatever its cause. Where an index refuses a login, uv only adds a hint to "No solution found".
_UNREACHABLE = re.compile(
    r"(?m)^(error| +cause): (Failed to fetch: |error sending request|error decoding response body)"
    r"|^error: (Unsupported|Missing) `Content-Type`|^hint: An index (URL )?\("
)
_LIBC = ctypes.CDLL(None)
_Closure = dict[str, tuple[LockedWheel, str]]  # name -> wheel, of size 0 if none is listed, and its address


class Resolver:
    """Resolves groups of cells; caches sizes, so that the size of a shared wheel is requested once."""

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
        self._project = project
        self._matrix = matrix or project.matrix
        self._index = host.index
        # The main index alone: uv would take a package from the first index that has it.
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in OTHER_INDEXES and not LOGINS.fullmatch(name)
        }
        self._environ = {**environ, **host.index.environment()}
        self._say = say
        self._hide = host.hide
        self._run = run
        self.sizes: dict[str, int] = {}
        self._toolkits: dict[tuple[str, str, str, frozenset[tuple[str, str]]], Mapping[str, str]] = {}
        self._catalogue = catalogue or Index(host.index)
        self._serve = serve
        # Of the group that is resolved now.
        self._builder = builder
        self._present: Lock | None = None
        self._images: tuple[Lock, Sequence[Cell]] | None = None  # the cells in whose images wheels are built
        self._built: dict[tuple[str, str], BuiltWheel] = {}  # see `Sources`
        self._builds: dict[str, LockedBuild] = {}  # by SHA-256
        self._building: list[str] = []

    def resolve(self, group: Sequence[Cell], present: Lock | None, prefer: Mapping[str, str]) -> Lock:
        """The lock of a group, from its own requirements alone.

        Components of the lock `present` with the same requirements are kept, if the new ones fit beside them. Else all
        is resolved, with the versions in `prefer` and in `present` where they still fit. Builds the packages of
        `sources` that the group needs. Raises LockError, and errors of the builder.
        """
        self._present, self._images, self._built, self._builds = present, None, {}, {}
        images = [cell for cell in group if not lockfile.packages_from_source(self._matrix, cell)]
        if len(images) == len(group):
            return self._resolve(group, present, prefer)
        if not images:
            name = min(lockfile.packages_from_source(self._matrix, group[0]))
            sources.cell_to_build_in(self._matrix, name, group[0].group, images)
        # The images without such packages first: the packages are built in them.
        base = self._resolve(images, present, prefer)
        prefer = {**prefer, **(present.versions if present else {})}
        while True:
            self._images, self._built = (base, images), {}
            is_same = present is not None and _part(present, base.components) == base
            lock = self._resolve(group, present if is_same else base, prefer)
            if (part := _part(lock, base.components)) == base:
                return lock
            base, present = part, None  # they fit only with other versions in the images

    def _resolve(self, group: Sequence[Cell], present: Lock | None, prefer: Mapping[str, str]) -> Lock:
        """As `resolve`, after the wheels of the images in which packages are built."""
        cell = group[0]
        needs, basis = lockfile.group_requirements(self._matrix, group), lockfile.basis(self._matrix, cell)
        preferred = {**prefer, **(present.versions if present else {})}
        # What is locked stays as it is where it can: a new variant must not change the wheels of other images.
        parts: dict[str, LockedComponent] = {}
        wheels: dict[str, LockedWheel] = {}
        if present and present.basis == basis:
            still_needed = {component: part for component, part in present.components.items() if component in needs}
            kept = {name for part in still_needed.values() for name in part.wheels}
            kept_wheels = {wheel.name: wheel for wheel in present.wheels if wheel.name in kept}
            indexes = cells.indexes_of_packages(self._matrix, cell)
            if (
                all(part.requirements == needs[component] for component, part in still_needed.items())
                and all(wheel.index == indexes.get(name, "") for name, wheel in kept_wheels.items())
                and not lockfile.other_source(self._matrix, present)
            ):
                parts, wheels = still_needed, kept_wheels
        if parts.keys() != needs.keys():
            self._say(f"{cell.group}: resolving {counted(sum(map(len, needs.values())), 'requirement')}")
            new = [component for component in needs if component not in parts]
            try:
                pins = {name: wheel.version for name, wheel in wheels.items()}
                versions = self._versions(cell, needs, basis, pins=pins, preferred=preferred)
            except LockError as error:
                if not parts or isinstance(error, UnreachableError):
                    raise
                reason = str(error).split("\n", maxsplit=1)[-1].strip()
                names = ", ".join(new)
                self._say(f"{cell.group}: no versions of {names} fit the locked wheels; resolving all again: {reason}")
                parts, wheels, new = {}, {}, list(needs)
                versions = self._versions(cell, needs, basis, preferred=preferred)
            # The versions are chosen for all components together. Each then has a list of its own, so that an image has
            # the wheels of its components and no others.
            added: _Closure = {}
            for component in new:
                closure = self._closure(cell, needs[component], versions)
                parts[component] = LockedComponent(requirements=needs[component], wheels=sorted(closure))
                added |= {name: wheel for name, wheel in closure.items() if name not in wheels}
            wheels |= self._with_sizes(cell, added)
        self._check(cell, {component: part.wheels for component, part in parts.items()}, wheels)
        return Lock(
            group=cell.group,
            basis=basis,
            components={component: parts[component] for component in needs},
            wheels=tuple(wheels[name] for name in sorted(wheels)),
            builds=self._all_builds(cell, wheels.values()),
        )

    def _all_builds(self, cell: Cell, wheels: Iterable[LockedWheel]) -> tuple[LockedBuild, ...]:
        """The builds of wheels, and those of the wheels that these builds needed, sorted by name. Raises LockError."""
        earlier = {build.name: build for build in (self._present.builds if self._present else ())}
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
                build = builds[wheel.name] = self._builds.get(wheel.sha256) or earlier[wheel.name]
                pending += [each for each in build.wheels if each.source]
        return tuple(builds[name] for name in sorted(builds))

    def reason(self, cell: Cell) -> str:
        """Why a cell, in the matrix or not, does not resolve to wheels; empty if it does.

        Names the requirement or constraint of matrix.yaml that causes it, if there is one. Raises FetchError if the
        index cannot be reached.
        """
        needs, basis = lockfile.requirements(self._matrix, cell), lockfile.basis(self._matrix, cell)
        # Nothing is built for this question, so packages from source are left out.
        left = {
            component: [package for package in packages if required_name(package) not in self._matrix.sources]
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
        """Why requirements do not resolve; empty if they do."""
        try:
            versions = self._versions(cell, needs, basis)
            closures = {name: self._closure(cell, packages, versions) for name, packages in needs.items()}
            wheels = {name: wheel for closure in closures.values() for name, (wheel, _) in closure.items()}
            self._check(cell, closures, wheels)
        except UnreachableError:
            raise
        except LockError as error:
            return str(error)
        return ""

    def _check(self, cell: Cell, names: Mapping[str, Iterable[str]], wheels: Mapping[str, LockedWheel]) -> None:
        """Raises LockError with every fault of wheels; `names` are those that each component needs."""
        foundation = cells.foundation(self._matrix, cell)
        shared = {name for component in foundation for name in names.get(component, ())}
        checks.check_wheels(cell, list(wheels.values()), shared)

    def _without_one_setting(
        self, cell: Cell, needs: Mapping[str, list[str]], basis: Basis
    ) -> Iterator[tuple[str, Mapping[str, list[str]], Basis]]:
        """Each optional setting of matrix.yaml for a cell, and the requirements and basis without it."""
        framework = self._matrix.frameworks[cell.framework]
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

    def _versions(
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
            indexes = frozenset(cells.indexes_of_packages(self._matrix, cell).items())
            key = basis.toolkit, basis.python, basis.platform, indexes
            if key not in self._toolkits:
                text = self._compile(cell, [f"{lockfile.TOOLKIT}[all]=={basis.toolkit}"], (), {})
                self._toolkits[key] = _parse_versions(text)
            versions |= self._toolkits[key]
        packages = sorted({package for packages in needs.values() for package in packages})
        constraints = [*basis.constraints, *_pinned(pins or {})]
        return _parse_versions(self._compile(cell, packages, constraints, versions))

    def _closure(self, cell: Cell, packages: Sequence[str], versions: Mapping[str, str]) -> _Closure:
        """The wheels for all that some requirements need."""
        ranks = tag_ranks(cell.python, self._glibc(cell), PLATFORMS[cell.arch])
        tables = tomllib.loads(self._compile(cell, packages, _pinned(versions)))["packages"]  # pylock.toml, PEP 751
        names: dict[str, Any] = {canonicalize_name(table["name"]): table for table in tables}
        closure: _Closure = {name: _best_wheel(cell, name, table, ranks) for name, table in names.items()}
        indexes = cells.indexes_of_packages(self._matrix, cell)
        if indexes or self._matrix.sources:
            catalogue = self._catalogue.with_indexes(indexes)
            built = {(name, each.wheel.file): each.wheel for (name, _), each in self._built.items()}
            for name, (wheel, _) in closure.items():  # the addresses are those of the local index
                if built_wheel := built.get((name, wheel.file)):
                    closure[name] = built_wheel, ""
                    continue
                addresses = {file.filename: file.url for file in catalogue.files(name)}
                closure[name] = replace(wheel, index=indexes.get(name, "")), addresses[wheel.file]
        return closure

    def _glibc(self, cell: Cell) -> str:
        """glibc of the cell's Debian release, or the newest that uv supports."""
        glibc = self._matrix.debian[self._matrix.python[cell.python].debian].glibc
        return f"2.{min(int(glibc.split('.')[1]), UV_NEWEST_GLIBC)}"

    def _compile(
        self,
        cell: Cell,
        packages: Sequence[str],
        constraints: Sequence[str],
        preferred: Mapping[str, str] | None = None,
    ) -> str:
        """Output of `uv pip compile`: `name==version` lines, or wheels as pylock.toml if no versions are preferred.

        Builds the packages whose metadata uv needs, then runs it again.
        """
        while True:
            text, unbuilt = self._run_uv(cell, packages, constraints, preferred)
            if not unbuilt:
                return text
            for (name, file), sdist in unbuilt.items():
                self._built[name, file] = self._build(cell, name, self._source(name, sdist))

    def _run_uv(
        self,
        cell: Cell,
        packages: Sequence[str],
        constraints: Sequence[str],
        preferred: Mapping[str, str] | None,
    ) -> tuple[str, Mapping[tuple[str, str], DistributionPackage | None]]:
        """The output, or the sources to build first: see `LocalIndex.unbuilt`."""
        with ExitStack() as stack:
            here, environ, local = Path(stack.enter_context(self._project.scratch())), self._environ, None
            indexes, recipes = cells.indexes_of_packages(self._matrix, cell), self._matrix.sources
            if indexes or recipes:
                listed = Sources({name: not self._matrix.origin(name) for name in recipes}, self._built)
                address, local = stack.enter_context(self._serve(self._catalogue.with_indexes(indexes), listed))
                no_proxy = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
                # A cache of its own: the user's one would keep the pages of private packages.
                environ = environ | {"UV_DEFAULT_INDEX": address, "UV_CACHE_DIR": str(here / "cache"), **no_proxy}
                environ["UV_HTTP_TIMEOUT"] = str(TIMEOUT_S)  # the local index may have to download a whole wheel
            (here / "in.txt").write_text(_lines(packages))
            (here / "bounds.txt").write_text(_lines(constraints))
            out = here / ("pylock.toml" if preferred is None else "out.txt")
            if preferred is not None:
                out.write_text(_lines(_pinned(preferred)))
            command = [
                uv_program(), "pip", "compile", str(here / "in.txt"), "-o", str(out),
                "--no-header", "--no-config",
                "--only-binary", ":all:", "--prerelease", "explicit", "--no-annotate", "--color", "never",
                "--python-version", cell.python, "--no-sources", "--no-python-downloads",
                "--python-platform", f"{PLATFORMS[cell.arch]}-manylinux_{self._glibc(cell).replace('.', '_')}",
                "--constraint", str(here / "bounds.txt"),
                # The version of a commit or a folder is often one of development, and the only one.
                *(f"--prerelease-package={name}=allow" for name in recipes if self._matrix.origin(name)),
            ]  # fmt: skip
            try:
                done = self._run(
                    command,
                    env=environ,
                    cwd=here,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                    check=False,
                    preexec_fn=_end_with_parent,  # no other thread runs yet, but that of a local index, which waits
                )
            except subprocess.TimeoutExpired as error:
                raise UnreachableError(
                    f"{cell.id}: uv timed out after {TIMEOUT_S} s", hint=f"Run again. {DOCTOR}"
                ) from error
            if local and local.failures:  # whatever uv made of it
                failure = local.failures[0]
                raise UnreachableError(f"{cell.id}: {failure}", hint=failure.hint) from failure
            if local and local.unbuilt:
                return "", local.unbuilt
            output = self._hide(done.stderr).strip()
            if done.returncode:
                if absent := [name for name in (local.absent if local else ()) if name in indexes]:
                    raise LockError(
                        f"{cell.id}: the index {indexes[absent[0]]} has no package {absent[0]}",
                        hint="Publish it there, or correct `index` or the name of the package in matrix.yaml.",
                    )
                kind = UnreachableError if _UNREACHABLE.search(output) else LockError
                lines = [re.sub(r"^ *(error: |cause: )?", "", line) for line in output.splitlines()]
                explanation = "\n".join(f"  {line}" for line in lines if line and not line.startswith("warning:"))
                raise kind(f"{cell.id}: cannot be resolved to wheels\n{explanation}", hint=_hint(output, self._index))
            if yanked := re.search(r"`([^\s`]+)` (is yanked[^\n]*)", output):
                again = choose_again(yanked[1].partition("==")[0], [cell.id])
                raise LockError(
                    f"{cell.id}: {yanked[1]} {yanked[2]}",
                    hint=f"It was withdrawn: pin another version in matrix.yaml. If none is pinned there: {again}",
                )
            return out.read_text(encoding="utf-8"), {}

    def _source(self, name: str, sdist: DistributionPackage | None) -> str:
        """The source of a package, see ORIGIN. Raises MatrixError."""
        if not sdist:
            return self._matrix.origin(name)
        source = f"{sdist.filename}#sha256={sdist.digests.get('sha256', '')}"
        if not re.fullmatch(ORIGIN, source):
            where = self._matrix.where("sources", name, key=True)
            raise MatrixError(
                f"{where}: the index has no SHA-256 for an sdist of {name}", hint="Use an index that has hashes."
            )
        return source

    def _build(self, cell: Cell, name: str, source: str) -> BuiltWheel:
        """The wheel of a package from source: the locked one if it is kept, or else a new one. Raises MatrixError."""
        matrix, group = self._matrix, cell.group
        where, index = matrix.where("sources", name, key=True), cells.indexes_of_packages(matrix, cell).get(name, "")
        if not self._images or not self._builder:
            raise MatrixError(
                f"{where}: {name} is built from source, and a package of {cell.id} requires it",
                hint=f"List {name} in the `packages` of a component, which must not be a part of all variants.",
            )
        if name in self._building:
            raise MatrixError(f"{where}: {name} is needed for its own build: {' -> '.join([*self._building, name])}")
        lock, _ = self._images
        image_cell, image = self._image(name, group)
        wheel = self._present.built.get(name) if self._present else None
        locked = self._locked_build(name, group) if wheel and wheel.source == source else None
        built = self._builder.built(wheel, group) if wheel and locked else None
        if built is None:
            recipe = matrix.sources[name]
            build = WheelBuild(name=name, source=source, index=index, recipe=recipe, lock=lock, cell=image_cell)
            self._building.append(name)
            try:
                wheels = locked.wheels if locked else ()
                # Those from source may have to be built again first, and may then be others than the locked ones.
                needed = [each for each in wheels if each.source]
                if not locked or any(self._build(cell, each.name, each.source).wheel != each for each in needed):
                    wheels = self._build_wheels(build, image)
                self._say(f"{group}: building {name} from {source.partition('#')[0]}, in the image of {image_cell.id}")
                built = self._builder.build(build, wheels)
            finally:
                self._building.pop()
            digest = _digest_of_image(image)
            locked = LockedBuild(name=name, recipe=recipe, cell=image_cell.id, image=digest, wheels=wheels)
        assert locked
        self._builds[built.wheel.sha256] = locked
        self.sizes[built.wheel.sha256] = built.wheel.size
        return built

    def _image(self, name: str, group: str) -> tuple[Cell, Sequence[Wheel]]:
        """The cell in whose image a package is built, and its wheels. Raises MatrixError if there is none."""
        assert self._images
        lock, images = self._images
        cell = sources.cell_to_build_in(self._matrix, name, group, images)
        return cell, lockfile.of_cell(self._matrix, cell, lock).wheels

    def _locked_build(self, name: str, group: str) -> LockedBuild | None:
        """The build of a package in the present lock, if it would have the same inputs now.

        What was compiled with another framework may not work with this one, so the image must be the same too; and so
        must the builds of the packages from source that it needs.
        """
        present = self._present
        build = next((each for each in (present.builds if present else ()) if each.name == name), None)
        if (
            not present
            or not build
            or lockfile.other_source(self._matrix, present, [present.built[name], *build.wheels])
            or build.image != _digest_of_image(self._image(name, group)[1])
            or not all(self._locked_build(each.name, group) for each in build.wheels if each.source)
        ):
            return None
        return build

    def _build_wheels(self, build: WheelBuild, image: Sequence[Wheel]) -> tuple[LockedWheel, ...]:
        """The wheels that a build needs besides those of its image, whose framework and CUDA must stay as they are."""
        assert self._builder
        cell, requirements = build.cell, [*self._builder.requirements(build), *build.recipe.requires]
        versions = {wheel.name: wheel.version for wheel in image}
        package = required_name(self._matrix.frameworks[cell.framework].package_for(cell.cuda))
        pins = {wheel.name: wheel.version for wheel in image if wheel.is_cuda or wheel.name == package}
        chosen = _parse_versions(self._compile(cell, requirements, _pinned(pins), versions))
        closure = self._closure(cell, requirements, chosen)
        missing = {name: each for name, each in closure.items() if each[0].version != versions.get(name)}
        return tuple(wheel for _, wheel in sorted(self._with_sizes(cell, missing).items()))

    def _with_sizes(self, cell: Cell, closure: _Closure) -> dict[str, LockedWheel]:
        """Wheels by name. The sizes that the index does not list, and that are not known yet, are requested."""
        self.sizes = {wheel.sha256: wheel.size for wheel, _ in closure.values() if wheel.size} | self.sizes
        unknown = {wheel.sha256: (wheel, url) for wheel, url in closure.values() if wheel.sha256 not in self.sizes}
        if unknown:
            self._say(f"{cell.group}: getting the size of {counted(len(unknown), 'wheel')}")
            with ExitStack() as stack:
                names = {wheel.index for wheel, _ in unknown.values()}
                opened = {name: IndexSession(self._index.of(name), retries=4) for name in sorted(names)}
                sessions = {name: stack.enter_context(session) for name, session in opened.items()}
                pool = stack.enter_context(thread_pool(POOL, "sizes"))
                sizes = pool.map(lambda item: _size(cell, sessions[item[0].index], item[1]), unknown.values())
                self.sizes |= dict(zip(unknown, sizes, strict=True))
        return {name: replace(wheel, size=self.sizes[wheel.sha256]) for name, (wheel, _) in closure.items()}


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


def _pinned(versions: Mapping[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in versions.items()]


def _lines(texts: Sequence[str]) -> str:
    return "".join(f"{text}\n" for text in texts)


def _parse_versions(text: str) -> dict[str, str]:
    pairs = re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pairs}


def _end_with_parent() -> None:
    """Called in the child: uv must not outlive a builder that is killed."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, linux/prctl.h


def _best_wheel(cell: Cell, name: str, package: Mapping[str, Any], ranks: Mapping[Tag, int]) -> tuple[LockedWheel, str]:
    """The wheel that an installer would take: the one with the most specific tag, then the highest build number."""
    ranked: list[tuple[int, BuildTag, str, str, str, str, int]] = []
    for entry in package.get("wheels", []):
        url = str(entry.get("url") or entry.get("path"))
        file = _file_name(url)
        try:
            _, version, build, tags = parse_wheel_filename(file)
        except InvalidWheelFilename as error:
            raise LockError(f"{cell.id}: the index lists an invalid wheel file name: {file!r}") from error
        if fitting := [ranks[tag] for tag in tags if tag in ranks]:
            sha256, size = entry["hashes"].get("sha256", ""), entry.get("size", 0)
            ranked.append((-min(fitting), build, file, str(version), sha256, url, size))
    if not ranked:
        raise LockError(
            f"{cell.id}: {name} {package.get('version', '')} has no wheel for Python {cell.python} on "
            f"{PLATFORMS[cell.arch]}",
            hint="Only wheels are supported: pin a version that has one.",
        )
    best = max(ranked)
    _, _, file, number, sha256, url, size = best
    if rivals := [other[2] for other in ranked if other[:2] == best[:2] and other[4] != sha256]:
        raise LockError(f"{cell.id}: {name} has two builds that fit equally: {file}, {rivals[0]}")
    if not sha256:
        raise LockError(f"{cell.id}: the index has no SHA-256 for {file}", hint="Use an index that has hashes.")
    return LockedWheel(name=name, version=number, file=file, size=size, sha256=sha256), url


@cache
def tag_ranks(python: str, glibc: str, platform: str) -> dict[Tag, int]:
    """Wheel tags that CPython `python` on glibc `glibc` accepts, 0 the most specific.

    Source: PEP 425, PEP 600 (manylinux_x_y) and its legacy aliases.
    """
    version = tuple(int(part) for part in python.split("."))
    newest = int(glibc.split(".")[1])
    aliases = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms = []
    for minor in range(newest, 4, -1):
        platforms.append(f"manylinux_2_{minor}_{platform}")
        if minor in aliases:
            platforms.append(f"{aliases[minor]}_{platform}")
    platforms.append(f"linux_{platform}")
    interpreter = "cp" + python.replace(".", "")
    accepted = [
        *cpython_tags(version, [interpreter], platforms),
        *compatible_tags(version, interpreter, platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(accepted)))}


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path.rsplit("/", 1)[-1])


def _size(cell: Cell, session: IndexSession, url: str) -> int:
    """Bytes of a wheel; the index may also be a folder."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("", "file"):
            return Path(unquote(parts.path)).stat().st_size
        return session.file_size(url)
    except (OSError, ValueError) as error:
        is_request = isinstance(error, requests.RequestException)
        server = session.settings.label
        invalid = Fault.INVALID.sentence.format(server)
        reason = describe(error, server) if is_request else getattr(error, "strerror", None) or invalid
        raise LockError(
            f"{cell.id}: {server} does not serve {_file_name(url)}: {reason}",
            hint=session.hint(error, "Run again. If it fails again, the index lists a file that it does not have."),
        ) from error


def _hint(output: str, index: IndexSettings) -> str:
    if "invalid peer certificate: UnknownIssuer" in output:
        return authority_hint(index.ca_bundle)
    if _UNREACHABLE.search(output):
        return f"The package index did not respond correctly. {DOCTOR}"
    if re.search(r"(?i)source distribution|building from source|no usable wheels|no wheels", output):
        return "Only wheels are supported: pin a version that has one for this Python."
    if "but pre-releases weren't enabled" in output:
        return (
            "Add the pre-release to the `packages` of the framework's line in matrix.yaml, such as triton==3.6.0rc1. "
            "Other pre-releases are never selected."
        )
    if re.search(r"(?i)hash mismatch", output):
        return "The index serves files that do not match its hashes. Do not use it until the reason is known."
    if re.search(r"(?i)invalid package format|failed to extract archive", output):
        return UPLOAD_AGAIN
    return "Change a version in matrix.yaml so that the requirements fit together."
