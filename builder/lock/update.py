"""The lock step: which locks of wheels and operating systems are out of date, and writing new ones."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from builder.common import atomic
from builder.common.errors import LockError, MatrixError, StaleError, for_cells, join
from builder.common.units import counted, listed
from builder.index.host import Host
from builder.index.wheels import is_cuda_wheel
from builder.lock import apt, checks, diff, document, lockfile, os_lock
from builder.lock.lockfile import Lock
from builder.lock.os_lock import OsLock, OsRequest
from builder.lock.resolve import Resolver
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import Matrix

_Key = TypeVar("_Key")
_Lock = TypeVar("_Lock")


def check(project: Project, chosen: Sequence[Cell]) -> None:
    """Raises StaleError with every lock that is missing, out of date for these cells, or of no group."""
    faults = []
    for group in dict.fromkeys(cell.group for cell in chosen):
        cells = [cell for cell in chosen if cell.group == group]
        lock = lockfile.read(project.root, group)
        if reason := lockfile.stale_reason(project.matrix, lock, cells, project.groups[group]):
            faults.append(f"locks/{group}.json: {reason}")
    faults += os_faults(project, chosen)
    faults += [f"{name}: belongs to no cell" for name in _strays(project)]
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults[:20])
        part = [] if len(chosen) == len(project.cells) else [cell.id for cell in chosen]
        raise StaleError(f"locks are out of date:\n{lines}", hint=f"Resolve again: {for_cells('builder lock', part)}")


def update(
    project: Project,
    chosen: Sequence[Cell],
    host: Host,
    *,
    upgrade: bool,
    refresh: bool,
    say: Callable[[str], None],
) -> list[str]:
    """Locks the wheels and the operating systems of `chosen`, as far as they are not; returns the changed paths.

    `upgrade` chooses the newest wheels, `refresh` the newest Debian packages. What fails does not stop the rest; the
    errors are raised together at the end.
    """
    systems, os_failures = update_systems(project, chosen, host, refresh=refresh, say=say)
    faults = _system_faults(project, chosen)
    sound = [cell for cell in chosen if cell.python not in faults]
    changed, wheel_failures = _update_wheels(project, sound, host, upgrade=upgrade, say=say)
    unique = {str(fault): fault for of_python in faults.values() for fault in of_python}
    if failures := [*unique.values(), *os_failures, *wheel_failures]:
        raise join(failures, "locks failed")
    strays = _strays(project)  # kept after a failure: undoing the change that caused it needs them again
    for name in strays:
        (project.root / name).unlink()
    return [*changed, *systems, *(f"{name} (removed: no cell needs it)" for name in strays)]


def _update_wheels(
    project: Project, chosen: Sequence[Cell], host: Host, *, upgrade: bool, say: Callable[[str], None]
) -> tuple[list[str], list[LockError]]:
    """Resolves the groups of `chosen` whose locks are out of date, or all to upgrade; the changed paths, and errors.

    Each group is resolved by itself, and prefers versions that groups of the same Python or CUDA have.
    """
    present = {group: _undamaged(lockfile.read, project, group) for group in project.groups}
    stale = [
        group
        for group in dict.fromkeys(cell.group for cell in chosen)
        if upgrade
        or lockfile.stale_reason(project.matrix, present[group], project.groups[group], project.groups[group])
    ]
    sizes = diff.sizes(diff.of_lock(lock) for lock in present.values() if lock)
    resolver = Resolver(project, host, say=say, sizes=sizes)
    new, failures = _resolve(project, resolver, stale, present, upgrade=upgrade)
    for line in diff.upgrades(present, new):
        say(line)
    return [name for lock in new if (name := _write(project, lock))], failures


def _resolve(
    project: Project, resolver: Resolver, stale: Sequence[str], present: Mapping[str, Lock | None], *, upgrade: bool
) -> tuple[list[Lock], list[LockError]]:
    """New locks for the groups in `stale`, and the errors of those that fail."""
    current = [lock for group, lock in present.items() if lock and group not in stale]
    new: list[Lock] = []
    failures: list[LockError] = []
    for group in stale:
        cells = project.groups[group]
        try:
            lock = resolver.resolve(cells, None if upgrade else present[group], _preferred(cells[0], [*current, *new]))
        except LockError as error:
            failures.append(error)
        else:
            new.append(lock)
    return new, failures


def _preferred(cell: Cell, locks: Iterable[Lock]) -> dict[str, str]:
    """Versions in groups of the same Python or CUDA, the first group first, so that groups share wheels.

    CUDA wheels are for any Python.
    """
    preferred: dict[str, str] = {}
    for lock in locks:
        for wheel in lock.wheels:
            if lock.basis.cuda == cell.cuda if is_cuda_wheel(wheel.file) else lock.basis.python == cell.python:
                preferred.setdefault(wheel.name, wheel.version)
    return preferred


def _write(project: Project, lock: Lock) -> str:
    """The path of the lock if it changed."""
    path, text = lockfile.path(project.root, lock.group), lockfile.dump(lock)
    if path.exists() and path.read_bytes() == text.encode():
        return ""
    atomic.write_text(path, text)
    return path.relative_to(project.root).as_posix()


# ---- operating systems


def os_faults(project: Project, chosen: Iterable[Cell]) -> list[str]:
    """A line for each missing or damaged lock of these cells."""
    lines = []
    for request in _requests(project, chosen):
        try:
            if os_lock.read(project.root, request) is None:
                lines.append(f"{request.path}: missing")
        except LockError as error:
            lines.append(str(error))
    return lines


def update_systems(
    project: Project, chosen: Sequence[Cell], host: Host, *, refresh: bool, say: Callable[[str], None]
) -> tuple[list[str], list[LockError]]:
    """Locks the operating systems of `chosen` that have no lock, or all to `refresh`; the changed paths, and errors.

    Releases that fail do not stop the others.
    """
    present = {request: _undamaged(os_lock.read, project, request) for request in _requests(project, chosen)}
    stale = [request for request, lock in present.items() if refresh or lock is None]
    new: dict[OsRequest, OsLock] = {}
    failures: list[LockError] = []
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for release, requests in groupby(sorted(stale), key=lambda request: request.debian):
        say(f"Debian {release}: reading the lists of packages")
        address = project.matrix.debian[release].snapshot
        archives = apt.archive(release, host.with_snapshot(address, now, is_past=False) if address else host, say)
        failures += _resolve_systems(project.matrix, archives, requests, now, new)
    for request, lock in new.items():
        if present[request] is None:
            say(f"{request.path}: {counted(len(lock.packages), 'package')}, the newest versions")
    for line in os_lock.changes(present, new):
        say(line)
    changed = []
    for request, lock in new.items():
        before = present[request]
        if before is None or before.packages != lock.packages:  # its time alone changes nothing
            atomic.write_text(project.root / request.path, os_lock.dump(lock))
            changed.append(request.path)
    unique = {str(error): error for error in failures}  # an unknown package fails every request that has it
    return changed, list(unique.values())


def current_locks_of_stale(
    project: Project, requests: Iterable[OsRequest], host: Host, say: Callable[[str], None]
) -> tuple[dict[OsRequest, OsLock], list[LockError]]:
    """New locks for the operating systems of which Debian's archives no longer have all locked packages; and errors.

    Downloads only lists of packages: 1.5 s for each Debian release. Leaves out releases with a snapshot archive, which
    has every version, and, after saying so, releases that cannot be looked up on this machine. The errors are those of
    systems that cannot be locked again.
    """
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    new: dict[OsRequest, OsLock] = {}
    failures: list[LockError] = []
    for release, group in groupby(sorted(requests), key=lambda request: request.debian):
        if project.matrix.debian[release].snapshot:
            continue
        say(f"Debian {release}: looking up the locked packages")
        try:
            with apt.archive(release, host, say) as archive:
                for request in group:
                    lock = os_lock.read(project.root, request)
                    missing = archive.missing(lock) if lock else []
                    if others := [name.removesuffix(apt.OTHER) for name in missing if name.endswith(apt.OTHER)]:
                        failures.append(
                            LockError(
                                f"{request.path}: Debian's archives have another file of {listed(others, 3)}",
                                hint="Debian never changes a package without a new version: do not use these archives, "
                                "or this lock, until the difference is explained.",
                            )
                        )
                    elif missing:
                        failures += _resolve_systems(project.matrix, nullcontext(archive), [request], now, new)
        except LockError as error:
            say(f"Debian {release}: cannot look up the locked packages; going on with them: {error}")
    return new, failures


def _system_faults(project: Project, chosen: Iterable[Cell]) -> dict[str, list[MatrixError]]:
    """What matrix.yaml has wrong about the Pythons of `chosen` and their Debian releases, by Python.

    All cells of a Python have its packages and the same release, so the lock of one of them is enough.
    """
    faults = {}
    for python, cell in {cell.python: cell for cell in chosen}.items():
        lock = _undamaged(os_lock.read, project, os_lock.request_of_cell(project.matrix, cell))
        if lock and (of_python := list(checks.system_faults(project.matrix, python, lock))):
            faults[python] = of_python
    return faults


def _resolve_systems(
    matrix: Matrix,
    archives: AbstractContextManager[apt.Archive],
    requests: Iterable[OsRequest],
    now: str,
    new: dict[OsRequest, OsLock],
) -> Iterator[LockError]:
    """Adds the locks of requests for one Debian release to `new`; yields the errors of those that fail."""
    try:
        with archives as archive:
            for request in requests:
                try:
                    new[request] = archive.resolve(request, now)
                except LockError as error:
                    yield _with_places(matrix, request, error)
    except LockError as error:
        yield error


def _with_places(matrix: Matrix, request: OsRequest, error: LockError) -> LockError:
    """The error, with the places in matrix.yaml of the requested packages that it names."""
    named = set(re.findall(r"[a-z0-9][a-z0-9+.-]*[a-z0-9+]", str(error))) & set(request.packages)
    lists = {("components", name): component.apt for name, component in matrix.components.items()}
    lists |= {("python", name): python.apt or [] for name, python in matrix.python.items()}
    lines = [
        f"  {matrix.where(*path, 'apt', number)}: {'.'.join(path)}.apt: {package}"
        for path, packages in lists.items()
        for number, package in enumerate(packages)
        if package in named
    ]
    return LockError("\n".join([str(error), *lines]), hint=error.hint)


def _requests(project: Project, chosen: Iterable[Cell]) -> Mapping[OsRequest, None]:
    """The requests of cells, each once, in their order."""
    return dict.fromkeys(os_lock.request_of_cell(project.matrix, cell) for cell in chosen)


# ---- both


def _strays(project: Project) -> list[str]:
    """Lock files that belong to no group."""
    files = {f"locks/{file.name}" for file in (project.root / "locks").glob("*.json")}
    groups = {f"locks/{group}.json" for group in project.groups}
    systems = {request.path for request in _requests(project, project.cells)}
    return sorted(files - groups - systems - {document.KNOWN_LAYERS})


def _undamaged(read: Callable[[Path, _Key], _Lock | None], project: Project, key: _Key) -> _Lock | None:
    """The lock of a group or of an operating system; None if it is missing or damaged."""
    try:
        return read(project.root, key)
    except LockError:
        return None
