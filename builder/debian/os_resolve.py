"""Makes locks of operating systems from the packages that Debian's archives have now."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from builder.common.errors import BuilderError, FetchError, LockError
from builder.common.text import listed
from builder.debian import apt
from builder.debian.apt import AptRunner
from builder.debian.archives import Archives
from builder.debian.os_lock import OS_LOCKS, OsLock, OsRequest
from builder.index.host import Host
from builder.matrix.project import Project
from builder.matrix.schema import NO_SNAPSHOT, Arch, Matrix


def by_archive(requests: Iterable[OsRequest]) -> Iterator[tuple[str, Arch, list[OsRequest]]]:
    """The requests of each Debian release and architecture, whose packages are in the same archives."""
    ordered = sorted(requests, key=lambda request: (request.debian, request.arch))
    for (release, arch), group in groupby(ordered, key=lambda request: (request.debian, request.arch)):
        yield release, arch, list(group)


def resolve_systems(
    matrix: Matrix, host: Host, requests: Iterable[OsRequest], runner: AptRunner
) -> tuple[dict[OsRequest, OsLock], list[BuilderError]]:
    """New locks for requests of one Debian release and architecture, and the errors of those that fail.

    Raises FetchError if the archives cannot be read, LockError if this machine cannot run apt.
    """
    requests = list(requests)
    debian, now = matrix.debian[requests[0].debian], time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    # A release is locked from its snapshot archive, if matrix.yaml names one.
    if debian.snapshot in ("", NO_SNAPSHOT):
        host = host.for_release(debian)
    else:
        host = host.with_snapshot(debian.snapshot, now)
    new: dict[OsRequest, OsLock] = {}
    failures: list[BuilderError] = []
    with apt.open_archive(requests[0].debian, host, runner, requests[0].arch) as archive:
        for request in requests:
            try:
                new[request] = archive.resolve(request, now)
            except LockError as error:
                lines = [str(error), *_places(matrix, request, str(error))]
                failures.append(LockError("\n".join(lines), hint=error.hint))
    return new, failures


def _places(matrix: Matrix, request: OsRequest, message: str) -> list[str]:
    """The places in matrix.yaml of the requested packages that an error names."""
    named = set(re.findall(r"[a-z0-9][a-z0-9+.-]*[a-z0-9+]", message)) & set(request.packages)
    lists = {("components", name): component.apt for name, component in matrix.components.items()}
    lists |= {("python", name): python.apt or [] for name, python in matrix.python.items()}
    return [
        f"  {matrix.where(*path, 'apt', number)}: {'.'.join(path)}.apt: {package}"
        for path, packages in lists.items()
        for number, package in enumerate(packages)
        if package in named
    ]


def current_locks_of_stale(
    project: Project, requests: Iterable[OsRequest], archives: Archives, blobs: Path | None
) -> tuple[dict[OsRequest, OsLock], list[BuilderError]]:
    """New locks for the operating systems with locked packages that no place has any more; and errors.

    Looks for them in `blobs`, the folder of the store's blobs, if there is one, and in `archives`. If a place cannot be
    read, makes no new locks. The errors are those of systems that cannot be locked again.
    """
    new: dict[OsRequest, OsLock] = {}
    failures: list[BuilderError] = []
    for release, _, group in by_archive(requests):
        archives.runner.view.say(f"Debian {release}: looking up the locked packages")
        missing: dict[OsRequest, list[str]] = {}
        for request in group:
            lock = OS_LOCKS.read(project.root, request)
            located = archives.locate(lock, blobs) if lock else None
            if located and located.different:
                different = [f"{package.name} {package.version}" for package in located.different]
                failures.append(
                    LockError(
                        f"{request.path}: Debian's archives have a different file for {listed(different, 3)}",
                        hint="Debian never changes a package without a new version: do not use these archives, "
                        "or this lock, until the difference is explained.",
                    )
                )
            elif located and located.doubts:
                unread = f"going on with them: {located.doubts}"
                archives.runner.view.say(f"Debian {release}: cannot look up the locked packages; {unread}")
            elif located and located.missing:
                missing[request] = [f"{package.name} {package.version}" for package in located.missing]
        if not missing:
            continue
        try:
            resolved, errors = resolve_systems(project.matrix, archives.host, missing, archives.runner)
        except (FetchError, LockError) as error:
            names = sorted({name for names in missing.values() for name in names})
            message = f"Debian {release}: no archive has {listed(names, 3)} any more\n{error}"
            failures.append(type(error)(message, hint=error.hint))
            continue
        failures += errors
        for request, lock in resolved.items():
            before = OS_LOCKS.read(project.root, request)
            if before and before.packages == lock.packages:
                failures.append(
                    LockError(
                        f"{request.path}: the archives list {listed(missing[request], 3)}, but do not have the files",
                        hint="The mirror may be incomplete now: run again later, or use another one.",
                    )
                )
            else:
                new[request] = lock
    return new, failures
