"""Locks: the exact wheels of each group of cells, as files in locks/.

A group is the cells of one framework line, CUDA and Python. Its lock has every wheel once, and for each component the
names of the wheels that it needs. So a new variant of known components needs no resolution, and the needs of one
component do not change another. `builder.lock.resolve` makes locks. They contain no index address: any mirror works.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, TypeAdapter
from pydantic.dataclasses import dataclass as model

from builder.common import lock_text
from builder.common.errors import StaleError
from builder.common.lock_text import LockFiles
from builder.index.wheels import PLATFORMS, STRICT, LockedWheel, Wheel, is_cuda_wheel
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.schema import Matrix

FORMAT: Literal[2] = 2
TOOLKIT = "cuda-toolkit"  # NVIDIA's metapackage: each release pins the libraries of one CUDA
# The day of the newest release of each framework, and of its releases in matrix.yaml. No image depends on this file.
RELEASE_DAYS = "locks/releases.json"
DAYS_ADAPTER = TypeAdapter(dict[str, dict[Annotated[str, AfterValidator(lambda text: str(Version(text)))], date]])


@model(frozen=True, kw_only=True, config=STRICT)
class LockedComponent:
    """A component of a group: its requirements, and the sorted names of all wheels that it needs."""

    requirements: list[str]
    wheels: list[str]


@model(frozen=True, kw_only=True, config=STRICT)
class Basis:
    """The inputs of the resolution of a group, besides the requirements of its components and the index."""

    cuda: str
    toolkit: str
    python: str
    platform: str
    glibc: str
    constraints: list[str]


@model(frozen=True, kw_only=True, config=STRICT)
class Lock:
    """The lock of a group. `held` are the names of the packages that pip and uv in its images keep, besides CUDA's.

    `toolkit` has the versions of CUDA's packages that belong to a held `cuda-toolkit`, also of packages in no image.
    """

    group: str
    basis: Basis
    held: list[str]
    toolkit: dict[
        Annotated[str, AfterValidator(lambda text: Requirement(text).name)],
        Annotated[str, AfterValidator(lambda text: str(SpecifierSet(text)))],
    ]
    components: dict[str, LockedComponent]
    wheels: tuple[LockedWheel, ...]
    format: Literal[2] = FORMAT

    @property
    def versions(self) -> dict[str, str]:
        return {wheel.name: wheel.version for wheel in self.wheels}

    @cached_property
    def by_component(self) -> dict[tuple[str, bool], list[Wheel]]:
        """The wheels of each component; the second part of a key is True for a component of `cells.foundation`.

        The CUDA wheels of such a component are shared: they belong to `cuda`. Computed once: a group may have thousands
        of cells.
        """
        entries = {entry.name: entry for entry in self.wheels}
        result: dict[tuple[str, bool], list[Wheel]] = {}
        for component, part in self.components.items():
            needed = [entries[name] for name in part.wheels]
            result[component, False] = [Wheel(component=component, **vars(entry)) for entry in needed]
            result[component, True] = [
                Wheel(component=cells.CUDA if is_cuda_wheel(entry.file) else component, **vars(entry))
                for entry in needed
            ]
        return result


@dataclass(frozen=True, kw_only=True)
class CellLock:
    """The part of a lock for one cell: its wheels, sorted by component and name, and each component's requirements."""

    cell: str
    requirements: Mapping[str, list[str]]
    wheels: tuple[Wheel, ...]


def requirements(matrix: Matrix, cell: Cell) -> dict[str, list[str]]:
    """Component -> its requirements, in the order of the cell's components; only components that have any."""
    framework = matrix.frameworks[cell.framework]
    result = {}
    for component in cells.components(matrix, cell):
        packages = list(matrix.components[component].packages)
        if component == cell.framework:
            own = f"{framework.package_for(cell.cuda)}=={cell.release}"
            # A line repeats a package of its component to take it from another index for one CUDA version.
            packages = list(dict.fromkeys([own, *packages, *framework.versions[cell.line].packages]))
        if packages:
            result[component] = packages
    return result


def group_requirements(matrix: Matrix, group: Iterable[Cell]) -> dict[str, list[str]]:
    """Component -> its requirements, for all cells of a group."""
    result: dict[str, list[str]] = {}
    for cell in group:
        result |= requirements(matrix, cell)
    return result


def basis(matrix: Matrix, cell: Cell) -> Basis:
    """The basis of the cell's group."""
    return Basis(
        cuda=cell.cuda,
        toolkit=matrix.cuda[cell.cuda].toolkit or "",
        python=cell.python,
        platform=PLATFORMS[cell.arch],
        glibc=matrix.debian[matrix.python[cell.python].debian].glibc,
        constraints=sorted(matrix.frameworks[cell.framework].versions[cell.line].constraints),
    )


def stale_reason(matrix: Matrix, lock: Lock | None, chosen: Iterable[Cell], group: Iterable[Cell] = ()) -> str:
    """The reason that a lock is not current for the chosen cells of its group, or an empty string.

    The requirements of other cells do not count. With `group`, all cells of the group, a component that none of them
    has is a reason too.
    """
    if lock is None:
        return "missing"
    # The basis is the same for all cells of the group, so any of them shows whether it changed.
    chosen = list(chosen)
    if chosen:
        now, before = vars(basis(matrix, chosen[0])), vars(lock.basis)
        if changed := next((name for name, value in now.items() if value != before[name]), ""):
            return f"{changed}: matrix.yaml has {_short(now[changed])}, the lock {_short(before[changed])}"
        if reason := _other_index(matrix, lock, chosen[0]):
            return reason
    for cell in chosen:
        for component, packages in requirements(matrix, cell).items():
            part = lock.components.get(component)
            if part is None:
                return f"the component {component} is new"
            if part.requirements != packages:
                return f"{component}: matrix.yaml requires {_short(packages)}, the lock has {_short(part.requirements)}"
    unused = lock.components.keys() - group_requirements(matrix, group).keys() if group else set()
    return f"no cell has the component {min(unused)}" if unused else ""


def _other_index(matrix: Matrix, lock: Lock, cell: Cell) -> str:
    """A sentence about the first wheel that is not from the index of matrix.yaml, or an empty string."""
    indexes = cells.indexes_of_packages(matrix, cell)
    for wheel in lock.wheels:
        index = indexes.get(wheel.name, "")
        if wheel.index != index:
            names = [f"the index {name}" if name else "the default index" for name in (index, wheel.index)]
            return f"{wheel.name}: matrix.yaml takes it from {names[0]}, the lock from {names[1]}"
    return ""


def _short(value: object) -> str:
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or "nothing"


def of_cell(matrix: Matrix, cell: Cell, lock: Lock) -> CellLock:
    """The part of its group's lock that a cell needs. Raises StaleError if the lock lacks one of its components."""
    needs = requirements(matrix, cell)
    if missing := [component for component in needs if component not in lock.components]:
        raise StaleError(f"locks/{lock.group}.json has no component {missing[0]}", hint=GROUP_LOCKS.hint(lock.group))
    foundation = cells.foundation(matrix, cell)
    wheels: dict[str, Wheel] = {}
    for component in needs:
        for wheel in lock.by_component[component, component in foundation]:
            wheels.setdefault(wheel.name, wheel)
    ordered = sorted(wheels.values(), key=attrgetter("component", "name"))
    return CellLock(cell=cell.id, requirements=needs, wheels=tuple(ordered))


def read_release_days(root: Path) -> dict[str, dict[str, date]]:
    """Framework -> release -> day; empty without RELEASE_DAYS. Raises LockError if the file is damaged."""
    hint = "Delete it, then run: builder lock"
    text = lock_text.read_lock_text(root / RELEASE_DAYS, hint)
    return lock_text.validate_lock(DAYS_ADAPTER, text, RELEASE_DAYS, FORMAT, hint) if text is not None else {}


def _dump(lock: Lock) -> str:
    """The file's text, with one line for each component and each wheel, for readable diffs."""
    head = json.dumps({"format": FORMAT, "group": lock.group, "basis": vars(lock.basis)}, indent=1)[:-2]
    held, toolkit = json.dumps(lock.held), json.dumps(lock.toolkit)
    parts = [f"{json.dumps(name)}: {json.dumps(vars(part))}" for name, part in lock.components.items()]
    wheels = [json.dumps({key: value for key, value in vars(wheel).items() if value != ""}) for wheel in lock.wheels]
    components, entries = lock_text.json_block("{", parts, "}"), lock_text.json_block("[", wheels, "]")
    return (
        f'{head},\n "held": {held},\n "toolkit": {toolkit},\n "components": {components},\n "wheels": {entries}\n}}\n'
    )


def _faults(lock: Lock, key: str) -> Iterator[str]:
    """Contradictions between the wheels and their order, their file names, and the components."""
    if lock.group != key:
        yield f"it is the lock of {lock.group}"
    names = [wheel.name for wheel in lock.wheels]
    if names != sorted(set(names)):
        yield "wheels are not sorted, or one is duplicated"
    for wheel in lock.wheels:
        # Source: PyPA specifications, "Binary distribution format", "File name convention".
        parts = wheel.file.split("-")
        try:
            is_named = (
                len(parts) > 4
                and canonicalize_name(parts[0]) == wheel.name
                and (parts[1] == wheel.version or Version(parts[1]) == Version(wheel.version))
            )
        except InvalidVersion:
            is_named = False
        if not is_named:
            yield f"{wheel.file} is not {wheel.name} {wheel.version}"
        platforms = parts[-1].removesuffix(".whl").split(".")
        if not any(platform == "any" or platform.endswith(f"_{lock.basis.platform}") for platform in platforms):
            yield f"{wheel.file} is not for {lock.basis.platform}"
    if lock.held != sorted(set(lock.held) & set(names)):
        yield "the held packages are not sorted, or one has no wheel"
    needed = {name for part in lock.components.values() for name in part.wheels}
    for name in sorted(needed ^ set(names)):
        yield f"missing wheel {name}" if name in needed else f"unused wheel {name}"


GROUP_LOCKS = LockFiles[str, Lock](
    adapter=TypeAdapter(Lock),
    version=FORMAT,
    path=lambda group: f"locks/{group}.json",
    hint=lambda group: f"Resolve it again: builder lock '{cells.pattern_of_group(group)}'",
    dump=_dump,
    faults=_faults,
)
