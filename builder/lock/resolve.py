"""From requirements to exact wheels.

Only this step looks up which versions exist. Each group is resolved by itself, so that adding to the matrix never
changes the lock of another group. Groups share wheels because a group prefers the versions of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from builder.common.console import View
from builder.common.errors import FetchError, LockError
from builder.common.tasks import thread_pool
from builder.common.text import counted
from builder.index.host import Host
from builder.index.releases import Metadata, parse_metadata
from builder.index.session import POOL
from builder.index.wheels import LockedWheel
from builder.lock import checks, lockfile, uv
from builder.lock.lockfile import Basis, Lock, LockedComponent
from builder.lock.uv import ListedWheels, Target, Uv
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import Matrix

SMALL_WHEEL = 5_000_000  # bytes: smaller wheels are downloaded for their licence if nothing less is offered


class Resolver:
    """Resolves groups of cells with `uv`. `matrix` replaces that of the project.

    `known` are locked wheels by SHA-256, so that their sizes and METADATA are requested once.
    """

    def __init__(self, project: Project, host: Host, view: View, matrix: Matrix | None = None) -> None:
        self.matrix = matrix or project.matrix
        self.view = view
        self.uv = Uv(host, project.scratch)
        self.known: dict[str, LockedWheel] = {}
        self._toolkits: dict[tuple[str, str, str, frozenset[tuple[str, str]]], Mapping[str, str]] = {}

    def lock(self, group: Sequence[Cell], present: Lock | None, prefer: Mapping[str, str]) -> Lock:
        """The lock of a group, from its own requirements alone.

        Components of the lock `present` with the same requirements are kept, if the new ones fit beside them. Else all
        is resolved, with the versions in `prefer` and in `present` where they still fit. Raises LockError.
        """
        cell = group[0]
        target, basis = Target.of(self.matrix, cell), lockfile.basis(self.matrix, cell)
        needs = lockfile.group_requirements(self.matrix, group)
        preferred = {**prefer, **(present.versions if present else {})}
        # Locked wheels stay as they are where they can: a new variant must not change the wheels of other images.
        parts: dict[str, LockedComponent] = {}
        wheels: dict[str, LockedWheel] = {}
        held: list[str] = []
        toolkit: dict[str, str] = {}
        if present and present.basis == basis:
            still_needed = {component: part for component, part in present.components.items() if component in needs}
            names = {name for part in still_needed.values() for name in part.wheels}
            kept_wheels = {wheel.name: wheel for wheel in present.wheels if wheel.name in names}
            if all(part.requirements == needs[component] for component, part in still_needed.items()) and all(
                wheel.index == target.indexes.get(name, "") for name, wheel in kept_wheels.items()
            ):
                parts, wheels = still_needed, kept_wheels
                held, toolkit = present.held, present.toolkit
        if parts.keys() != needs.keys():
            self.view.say(f"{cell.group}: resolving {counted(sum(map(len, needs.values())), 'requirement')}")
            new = [component for component in needs if component not in parts]
            try:
                pins = {name: wheel.version for name, wheel in wheels.items()}
                versions = self._versions(target, needs, basis, pins=pins, preferred=preferred)
            except LockError as error:
                if not parts:
                    raise
                reason = str(error).split("\n", maxsplit=1)[-1].strip()
                unfit = ", ".join(new)
                self.view.say(
                    f"{cell.group}: no versions of {unfit} fit the locked wheels; resolving all again: {reason}"
                )
                parts, wheels, new = {}, {}, list(needs)
                versions = self._versions(target, needs, basis, pins={}, preferred=preferred)
            # The versions are chosen for all components together. Each component then has a list of its own, so that
            # an image has the wheels of its components and no others.
            added: ListedWheels = {}
            for component in new:
                closure = self.uv.wheels(target, needs[component], uv.pinned(versions))
                parts[component] = LockedComponent(requirements=needs[component], wheels=sorted(closure))
                added |= {name: wheel for name, wheel in closure.items() if name not in wheels}
            wheels |= self._completed(target, cell.group, added)
            if cell.framework in new:
                held = self._held(cell, wheels)
                toolkit = self._toolkit(cell, wheels[lockfile.TOOLKIT]) if lockfile.TOOLKIT in held else {}
        _check(self.matrix, cell, {component: part.wheels for component, part in parts.items()}, wheels, held)
        return Lock(
            group=cell.group,
            basis=basis,
            held=held,
            toolkit=toolkit,
            components={component: parts[component] for component in needs},
            wheels=tuple(wheels[name] for name in sorted(wheels)),
        )

    def _versions(
        self,
        target: Target,
        needs: Mapping[str, list[str]],
        basis: Basis,
        *,
        pins: Mapping[str, str],
        preferred: Mapping[str, str],
    ) -> dict[str, str]:
        """Name -> version for all that these components need.

        `pins` are versions that must stay, `preferred` those to take where they fit. So are the versions of the release
        of `cuda-toolkit` in matrix.yaml: they fill what no framework pins, and never override one.
        """
        preferred = dict(preferred)
        if basis.toolkit:
            key = basis.toolkit, basis.python, basis.platform, frozenset(target.indexes.items())
            if key not in self._toolkits:
                self._toolkits[key] = self.uv.versions(target, [f"{lockfile.TOOLKIT}[all]=={basis.toolkit}"], (), {})
            preferred |= self._toolkits[key]
        packages = sorted({package for packages in needs.values() for package in packages})
        return self.uv.versions(target, packages, [*basis.constraints, *uv.pinned(pins)], preferred)

    def _held(self, cell: Cell, wheels: Mapping[str, LockedWheel]) -> list[str]:
        """The framework, the `packages` of its line, and what the METADATA of these wheels requires in one version.

        An exact requirement is followed with its extras: torch requires `cuda-toolkit[cublas]==13.0.2`, which requires
        `nvidia-cublas==13.1.0.3.*`.
        """
        framework = self.matrix.frameworks[cell.framework]
        texts = [framework.package_for(cell.cuda), *framework.versions[cell.line].packages]
        pending, exact = [Requirement(text) for text in texts], set[Requirement]()
        while pending:
            item = pending.pop()
            exact.add(item)
            name = canonicalize_name(item.name)
            if name not in wheels:  # its marker does not apply
                continue
            for requirement in self._metadata(wheels[name]).requirements(cell, item.extras):
                wheel = wheels.get(canonicalize_name(requirement.name))
                if wheel and _is_exact(requirement, wheel.version) and requirement not in exact:
                    pending.append(requirement)
        return sorted(wheels.keys() & {canonicalize_name(item.name) for item in exact})

    def _toolkit(self, cell: Cell, toolkit: LockedWheel) -> dict[str, str]:
        """Name -> specifier, such as `==13.0.88.*`, of all that a wheel of `cuda-toolkit` requires with its extras."""
        required = self._metadata(toolkit).requirements(cell, ["all"])
        return {item.name: str(item.specifier) for item in sorted(required, key=str)}

    def _completed(self, target: Target, group: str, listed: ListedWheels) -> dict[str, LockedWheel]:
        """Wheels by name, with sizes, licences and suppliers: requested unless they are known."""
        new = {wheel.sha256: (wheel, url) for wheel, url in listed.values() if wheel.sha256 not in self.known}
        if unsized := {sha256: item for sha256, item in new.items() if not item[0].size}:
            self.view.say(f"{group}: getting the size of {counted(len(unsized), 'wheel')}")
        sizes = self.uv.sizes(target, unsized) if unsized else {}

        def complete(wheel: LockedWheel) -> LockedWheel:
            wheel = replace(wheel, size=wheel.size or sizes[wheel.sha256])
            try:
                metadata = self._metadata(wheel, whole=wheel.size < SMALL_WHEEL)
            except FetchError:  # such as that of an index without ranges, which would send all of a large wheel
                return wheel
            return replace(wheel, license=metadata.license, supplier=metadata.supplier)

        with thread_pool(POOL, "metadata") as pool:
            self.known |= {wheel.sha256: wheel for wheel in pool.map(complete, [wheel for wheel, _ in new.values()])}
        return {name: replace(self.known[wheel.sha256], index=wheel.index) for name, (wheel, _) in listed.items()}

    def _metadata(self, wheel: LockedWheel, *, whole: bool = True) -> Metadata:
        """The METADATA of a wheel; `whole` is as in `Index.metadata_text`. Raises FetchError."""
        catalogue = self.uv.catalogue
        file = {file.filename: file for file in catalogue.files(wheel.name, wheel.index)}[wheel.file]
        return parse_metadata(file.filename, catalogue.metadata_text(file, wheel.index, whole=whole))

    def reason(self, cell: Cell) -> str:
        """The reason that a cell, in the matrix or not, does not resolve to wheels, or an empty string.

        Raises FetchError if the index cannot be reached.
        """
        target, needs = Target.of(self.matrix, cell), lockfile.requirements(self.matrix, cell)
        try:
            versions = self._versions(target, needs, lockfile.basis(self.matrix, cell), pins={}, preferred={})
            pins = uv.pinned(versions)
            closures = {name: self.uv.wheels(target, packages, pins) for name, packages in needs.items()}
            wheels = {name: wheel for closure in closures.values() for name, (wheel, _) in closure.items()}
            _check(self.matrix, cell, closures, wheels, self._held(cell, wheels))
        except LockError as error:
            return str(error)
        return ""


def _is_exact(requirement: Requirement, version: str) -> bool:
    """True if a requirement admits this version alone.

    JAX writes `<=0.12.0.1,>=0.12.0.1`. cuda-toolkit writes `==13.0.96.*` for 13.0.96; `==13.*` is a range.
    """
    pins = {(pin.operator, pin.version) for pin in requirement.specifier}
    is_pinned = any(operator in ("==", "===") and not pin.endswith(".*") for operator, pin in pins)
    return is_pinned or ("==", f"{version}.*") in pins or pins >= {("<=", version), (">=", version)}


def _check(
    matrix: Matrix,
    cell: Cell,
    names: Mapping[str, Iterable[str]],
    wheels: Mapping[str, LockedWheel],
    held: Sequence[str],
) -> None:
    """Raises LockError with every fault of wheels; `names` are those that each component needs."""
    shared = {name for component in cells.foundation(matrix, cell) for name in names.get(component, ())}
    # Of several components that need a wheel, the first one.
    owners = {name: component for component in reversed([*names]) for name in names[component]}
    checks.check_wheels(cell, list(wheels.values()), shared, owners, held, matrix.cuda[cell.cuda].toolkit)
