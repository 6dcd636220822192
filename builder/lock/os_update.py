"""The lock step for operating systems: which locks are missing, and writing new ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby

from builder.common import atomic
from builder.common.errors import LockError
from builder.common.units import counted
from builder.index.host import Host
from builder.lock import apt, os_lock
from builder.lock.os_lock import OsLock, OsRequest
from builder.matrix.cells import Cell
from builder.matrix.project import Project


def faults(project: Project, chosen: Iterable[Cell]) -> list[str]:
    """A line for each missing or damaged lock of these cells."""
    lines = []
    for request in _requests(project, chosen):
        try:
            if os_lock.read(project.root, request) is None:
                lines.append(f"{request.path}: missing")
        except LockError as error:
            lines.append(str(error))
    return lines


def update(
    project: Project, chosen: Sequence[Cell], host: Host, *, refresh: bool, say: Callable[[str], None]
) -> tuple[list[str], list[LockError]]:
    """Locks the operating systems of `chosen` that have no lock, or all to `refresh`; the changed paths, and errors.

    Releases that fail do not stop the others.
    """
    present = {request: _present(project, request) for request in _requests(project, chosen)}
    stale = [request for request, lock in present.items() if refresh or lock is None]
    new: dict[OsRequest, OsLock] = {}
    failures: list[LockError] = []
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for release, requests in groupby(sorted(stale), key=lambda request: request.debian):
        say(f"Debian {release}: reading the lists of packages")
        address = project.matrix.debian[release].snapshot
        archives = apt.archive(release, host.with_snapshot(address, now, is_past=False) if address else host, say)
        failures += _resolve(archives, requests, now, new)
    for request, lock in new.items():
        if present[request] is None:
            say(f"{request.path}: {counted(len(lock.packages), 'package')}, the newest versions")
    for line in os_lock.changes(present, new):
        say(line)
    changed = {request.path: lock for request, lock in new.items() if _differs(present[request], lock)}
    for path, lock in changed.items():
        atomic.write_text(project.root / path, os_lock.dump(lock))
    return list(changed), failures


def paths(project: Project) -> set[str]:
    """The paths of the locks of all cells."""
    return {request.path for request in _requests(project, project.cells)}


def _differs(before: OsLock | None, after: OsLock) -> bool:
    """Whether a lock has other packages; its time alone changes nothing."""
    return before is None or before.packages != after.packages


def _resolve(
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
                    yield error
    except LockError as error:
        yield error


def _requests(project: Project, chosen: Iterable[Cell]) -> Mapping[OsRequest, None]:
    """The requests of cells, each once, in their order."""
    return dict.fromkeys(os_lock.request_of_cell(project.matrix, cell) for cell in chosen)


def _present(project: Project, request: OsRequest) -> OsLock | None:
    """The lock of a request; None if it is missing or damaged."""
    try:
        return os_lock.read(project.root, request)
    except LockError:
        return None
