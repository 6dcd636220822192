"""The lock step: which locks of wheels and operating systems are out of date, and writing new ones."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from textwrap import indent

from packaging.utils import canonicalize_name

from builder.common.errors import (
    BuilderError,
    IncompleteError,
    LockError,
    StaleError,
    UsageError,
    did_you_mean,
    for_cells,
    join,
)
from builder.common.files import write_atomically
from builder.common.lock_text import KNOWN_LAYERS
from builder.common.text import counted, listed
from builder.debian import apt, os_lock
from builder.debian.archives import Archives, Kept
from builder.debian.os_lock import OsLock, OsRequest
from builder.host import Host
from builder.index.wheels import is_cuda_wheel
from builder.lock import checks, diff, lockfile, python_lock
from builder.lock.lockfile import Lock
from builder.lock.python_builds import PythonBuilds
from builder.lock.python_lock import LockedPython
from builder.lock.resolve import Resolver
from builder.lock.sources import WheelBuild, WheelBuilder, cell_to_build_in
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import AMD64, NO_SNAPSHOT, Debian, Matrix

_ARCHIVE = attrgetter("debian", "arch")  # of a request: where its packages come from


def check_locks(project: Project, chosen: Sequence[Cell]) -> None:
    """Raises StaleError with every lock that is missing, out of date for these cells, or of no group."""
    faults = []
    for group in dict.fromkeys(cell.group for cell in chosen):
        cells = [cell for cell in chosen if cell.group == group]
        lock = lockfile.read_lock(project.root, group)
        if reason := lockfile.stale_reason(project.matrix, lock, cells, project.groups[group]):
            faults.append(f"locks/{group}.json: {reason}")
    for request in _requests(project, chosen):
        try:
            if os_lock.read_os_lock(project.root, request) is None:
                faults.append(f"{request.path}: missing")
        except LockError as error:
            faults.append(str(error))
    for release in _uv_releases(project, chosen):
        try:
            if python_lock.read_python_lock(project.root, release) is None:
                faults.append(f"{python_lock.lock_path(release)}: missing")
        except LockError as error:
            faults.append(str(error))
    faults += [f"{name}: belongs to no cell" for name in _strays(project)]
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults[:20])
        part = [] if len(chosen) == len(project.cells) else [cell.id for cell in chosen]
        raise StaleError(f"locks are out of date:\n{lines}", hint=f"Resolve again: {for_cells('builder lock', part)}")


@dataclass(frozen=True, kw_only=True)
class Updated:
    """What an update did: `written` are the changed paths.

    `done` and `failures` name Debian releases, releases of uv's Pythons, and groups.
    """

    written: tuple[str, ...]
    done: tuple[str, ...]
    failures: Mapping[str, Sequence[BuilderError]]

    @property
    def error(self) -> BuilderError | None:
        """One error for all failures, of the class of the first; IncompleteError if something else was done."""
        if not self.failures:
            return None
        if not self.done:
            return join([error for errors in self.failures.values() for error in errors], "locks failed")
        lines = [f"{counted(len(self.failures), 'lock update')} failed, {len(self.done)} done", "failed:"]
        for name, errors in self.failures.items():
            for error in errors:
                message = indent(str(error), "    ").strip()
                lines.append(f"  {message if message.startswith(name) else f'{name}: {message}'}")
                lines += [f"    -> {error.hint}"] if error.hint else []
        lines += ["done:", *(f"  {name}" for name in self.done)]
        lines += ["written:", *(f"  {name}" for name in self.written)] if self.written else ["nothing changed"]
        return IncompleteError("\n".join(lines))


def update(  # noqa: PLR0913  the options of the command
    project: Project,
    chosen: Sequence[Cell],
    host: Host,
    *,
    upgrade: bool,
    refresh: bool,
    say: Callable[[str], None],
    builder: WheelBuilder | None,
    packages: Collection[str] = (),
    builds: PythonBuilds | None = None,
) -> Updated:
    """Locks the wheels, the operating systems and uv's Pythons of `chosen` that have no current lock.

    `upgrade` chooses the newest wheels, `refresh` the newest Debian packages. `packages` are names of packages to
    choose again in the groups that have them. Raises UsageError for one that no lock has. What fails does not stop the
    rest: see `Updated.error`. Raises FileError for a lock of a newer builder, before anything is written.
    """
    present: dict[str, Lock | None] = dict.fromkeys(project.groups)
    for group in project.groups:
        with suppress(LockError):  # a damaged lock is made again
            present[group] = lockfile.read_lock(project.root, group)
    names = _known_packages(present, chosen, packages)
    written: list[str] = []
    done: list[str] = []
    failures: dict[str, list[BuilderError]] = {}
    # One Debian release at a time, so that its failure is recorded under its name.
    by_release: dict[str, list[Cell]] = {}
    for cell in chosen:
        by_release.setdefault(project.matrix.python[cell.python].debian, []).append(cell)
    for release, cells in sorted(by_release.items()):
        is_stale = refresh or any(_os_lock(project, request) is None for request in _requests(project, cells))
        changed, errors = update_systems(project, cells, host, refresh=refresh, say=say)
        written += changed
        if errors:
            failures[f"Debian {release}"] = [*errors]
        if changed or (is_stale and not errors):
            part = f" ({counted(len(changed), 'other system')})" if errors else ""
            done.append(f"Debian {release}{part}")
    builds = builds or PythonBuilds(host)
    for release in _uv_releases(project, chosen):
        try:
            if path := _update_python(project, release, builds):
                written.append(path)
                done.append(f"Python {release}")
        except LockError as error:
            failures[f"Python {release}"] = [error]
    # Faults of matrix.yaml about a Python and its Debian release. All cells of a Python have its packages and the same
    # release, so one lock for each Python is enough.
    faulty: set[str] = set()
    for python, cell in {cell.python: cell for cell in chosen}.items():
        # A lock that could not be made is among the failures.
        lock = _os_lock(project, os_lock.request_of_cell(project.matrix, cell))
        if lock and (faults := list(checks.system_faults(project.matrix, python, lock))):
            faulty.add(python)
            name = f"Debian {lock.debian}"
            known = {str(error) for error in failures.setdefault(name, [])}
            failures[name] += [fault for fault in faults if str(fault) not in known]
            done = [each for each in done if each != name and not each.startswith(f"{name} ")]
    sound = [cell for cell in chosen if cell.python not in faulty]
    changed, resolved, wheel_failures = _update_wheels(
        project, present, sound, host, upgrade=upgrade, packages=names, say=say, builder=builder
    )
    failures |= {group: [error] for group, error in wheel_failures.items()}
    written = [*changed, *written]
    if not failures:  # after a failure they are kept: undoing the change that caused it needs them again
        for name in _strays(project):
            (project.root / name).unlink()
            written.append(f"{name} (removed: no cell needs it)")
    return Updated(written=tuple(written), done=(*done, *resolved), failures=failures)


def rebuild(
    project: Project, chosen: Sequence[Cell], names: Collection[str], builder: WheelBuilder, say: Callable[[str], None]
) -> list[str]:
    """Builds locked wheels of packages from source again, as they were built; returns a line for each.

    Raises UsageError for a package without such a wheel, BuildError if a build gives another wheel than the locked one.
    """
    check_locks(project, chosen)
    lines: list[str] = []
    failures: list[BuilderError] = []
    chosen_names: set[str] = {canonicalize_name(name) for name in names}
    unknown = set(chosen_names)
    for group in dict.fromkeys(cell.group for cell in chosen):
        lock = lockfile.read_lock(project.root, group)
        assert lock
        images = [cell for cell in project.groups[group] if not lockfile.packages_from_source(project.matrix, cell)]
        builds = {build.name: build for build in lock.builds}
        needed = chosen_names & builds.keys()
        unknown -= needed
        for name in reversed(lock.built):  # those that a build needs are built too, if no place has them any more
            if name in needed:
                needs = (wheel for wheel in builds[name].wheels if wheel.source)
                needed |= {wheel.name for wheel in needs if not builder.built(wheel, group)}
        for wheel in lock.built.values():
            if wheel.name not in needed:
                continue
            locked = builds[wheel.name]
            say(f"{group}: building {wheel.file} again")
            build = WheelBuild(
                name=wheel.name, source=wheel.source, index=wheel.index, recipe=locked.recipe, lock=lock, locked=wheel,
                cell=next((cell for cell in images if cell.id == locked.cell), None)
                or cell_to_build_in(project.matrix, wheel.name, group, images),
            )  # fmt: skip
            try:
                builder.build(build, locked.wheels)
                lines.append(f"{group}: {wheel.file} is the locked wheel, sha256:{wheel.sha256}")
            except BuilderError as error:
                failures.append(error)
    if unknown:
        raise UsageError(f"no lock of these cells has a wheel of {min(unknown)} that was built from source")
    if failures:
        raise join(failures, "builds failed")
    return lines


def current_cells(project: Project) -> list[Cell]:
    """The cells whose locks of wheels and operating system match matrix.yaml."""
    current: list[Cell] = []
    for group, cells in project.groups.items():
        lock: Lock | None = None
        with suppress(LockError):
            lock = lockfile.read_lock(project.root, group)
        current += [
            cell
            for cell in cells
            if not lockfile.stale_reason(project.matrix, lock, [cell])
            and _os_lock(project, os_lock.request_of_cell(project.matrix, cell))
            and all(_python_lock(project, release) for release in _uv_releases(project, [cell]))
        ]
    return current


def _known_packages(present: Mapping[str, Lock | None], chosen: Sequence[Cell], packages: Collection[str]) -> set[str]:
    """The canonical names of packages. Raises UsageError for one that is in no lock of the chosen groups.

    A group without a lock would get the versions of other groups: then those of all locks are known.
    """
    names: set[str] = {canonicalize_name(package) for package in packages}
    if not names:
        return names
    locked = {group: lock.packages for group, lock in present.items() if lock}
    groups = {cell.group for cell in chosen}
    known = {name for group in locked if group in groups or groups - locked.keys() for name in locked[group]}
    if unknown := sorted(names - known):
        raise UsageError(
            f"no lock of these cells has the package {unknown[0]}{did_you_mean(unknown[0], sorted(known))}",
            hint="locks/ has all names.",
        )
    return names


def _update_wheels(
    project: Project,
    present: Mapping[str, Lock | None],
    chosen: Sequence[Cell],
    host: Host,
    *,
    upgrade: bool,
    packages: Collection[str],
    say: Callable[[str], None],
    builder: WheelBuilder | None,
) -> tuple[list[str], list[str], dict[str, BuilderError]]:
    """Resolves the groups of `chosen` whose locks, in `present`, are out of date or have one of `packages`; or all.

    Returns the changed paths, the groups that were resolved, and the errors by group. Each group is resolved by itself,
    and prefers versions that groups of the same Python or CUDA have; to upgrade, only those of its framework: two
    frameworks that are upgraded separately would otherwise keep each other's versions forever.
    """
    # A group is resolved as a whole, also if only some of its cells are chosen: they share the lock.
    stale = [
        group
        for group in dict.fromkeys(cell.group for cell in chosen)
        if upgrade
        or ((lock := present[group]) and not lock.packages.isdisjoint(packages))
        or lockfile.stale_reason(project.matrix, present[group], project.groups[group], project.groups[group])
    ]
    locks = [lock for group, lock in present.items() if lock and group not in stale]
    sizes = diff.sizes(diff.of_lock(lock) for lock in present.values() if lock)
    resolver = Resolver(project, host, say=say, sizes=sizes, builder=builder)
    new: list[Lock] = []
    failures: dict[str, BuilderError] = {}
    for group in stale:
        cells = project.groups[group]
        # The same wheels are the same layers: prefer the versions of the first group of the same Python, or of the same
        # CUDA for CUDA wheels, which are for any Python.
        preferred: dict[str, str] = {}
        for other in (*locks, *new):
            if upgrade and other in locks and project.groups[other.group][0].framework != cells[0].framework:
                continue
            has_cuda, has_python = other.basis.cuda == cells[0].cuda, other.basis.python == cells[0].python
            for wheel in other.wheels:
                if (has_cuda if is_cuda_wheel(wheel.file) else has_python) and not (
                    wheel.name in packages and other in locks
                ):
                    preferred.setdefault(wheel.name, wheel.version)
        lock = None if upgrade else present[group]
        if lock and not lock.packages.isdisjoint(packages):
            # All is resolved, and all others keep their versions where they still fit.
            preferred |= {name: version for name, version in lock.versions.items() if name not in packages}
            lock = None
        try:
            new.append(resolver.resolve(cells, lock, preferred))
        except BuilderError as error:
            failures[group] = error
    for line in diff.upgrades(present, new):
        say(line)
    changed = []
    for lock in new:
        path, text = lockfile.path(project.root, lock.group), lockfile.dump(lock)
        if not path.exists() or path.read_bytes() != text.encode():
            write_atomically(path, text)
            changed.append(path.relative_to(project.root).as_posix())
    return changed, [lock.group for lock in new], failures


# ---- operating systems


def update_systems(
    project: Project, chosen: Sequence[Cell], host: Host, *, refresh: bool, say: Callable[[str], None]
) -> tuple[list[str], list[LockError]]:
    """Locks the operating systems of `chosen` that have no lock, or all to `refresh`; the changed paths, and errors.

    Releases that fail do not stop the others.
    """
    present: dict[OsRequest, OsLock | None] = dict.fromkeys(_requests(project, chosen))
    for request in present:
        with suppress(LockError):  # a damaged lock is made again
            present[request] = os_lock.read_os_lock(project.root, request)
    stale = [request for request, lock in present.items() if refresh or lock is None]
    new: dict[OsRequest, OsLock] = {}
    failures: list[LockError] = []
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for (release, arch), requests in groupby(sorted(stale, key=_ARCHIVE), key=_ARCHIVE):
        say(f"Debian {release}: reading the lists of packages{'' if arch == AMD64 else f' for {arch}'}")
        try:
            with apt.archive(release, _current(host, project.matrix.debian[release], now), say, arch) as archive:
                for request in requests:
                    try:
                        new[request] = _resolve_system(project.matrix, archive, request, now)
                    except LockError as error:
                        failures.append(error)
        except LockError as error:  # of the archive itself
            failures.append(error)
    for request, lock in new.items():
        if present[request] is None:
            say(f"{request.path}: {counted(len(lock.packages), 'package')}, the newest versions")
    for line in os_lock.changes(present, new):
        say(line)
    changed = []
    for request, lock in new.items():
        before = present[request]
        if before is None or before.packages != lock.packages:  # its time alone changes nothing
            write_atomically(project.root / request.path, os_lock.dump(lock))
            changed.append(request.path)
    unique = {str(error): error for error in failures}  # an unknown package fails every request that has it
    return changed, list(unique.values())


def current_locks_of_stale(
    project: Project, requests: Iterable[OsRequest], archives: Archives, host: Host, is_kept: Kept,
    say: Callable[[str], None],
) -> tuple[dict[OsRequest, OsLock], list[LockError]]:  # fmt: skip
    """New locks for the operating systems with locked packages that no place has any more; and errors.

    Looks for them in the store (`is_kept`) and in `archives`. If a place cannot be read, makes no new locks. The errors
    are those of systems that cannot be locked again.
    """
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    new: dict[OsRequest, OsLock] = {}
    failures: list[LockError] = []
    for (release, arch), group in groupby(sorted(requests, key=_ARCHIVE), key=_ARCHIVE):
        say(f"Debian {release}: looking up the locked packages")
        stale: dict[OsRequest, list[str]] = {}  # with the packages that are gone
        for request in group:
            lock = os_lock.read_os_lock(project.root, request)
            located = archives.locate(lock, is_kept) if lock else None
            if located and located.others:
                others = [f"{package.name} {package.version}" for package in located.others]
                failures.append(
                    LockError(
                        f"{request.path}: Debian's archives have a different file for {listed(others, 3)}",
                        hint="Debian never changes a package without a new version: do not use these archives, "
                        "or this lock, until the difference is explained.",
                    )
                )
            elif located and located.uncertain:
                say(f"Debian {release}: cannot look up the locked packages; going on with them: {located.uncertain}")
            elif located and located.gone:
                stale[request] = [f"{package.name} {package.version}" for package in located.gone]
        if not stale:
            continue
        try:
            with apt.archive(release, _current(host, project.matrix.debian[release], now), say, arch) as archive:
                for request, names in stale.items():
                    try:
                        lock = _resolve_system(project.matrix, archive, request, now)
                        before = os_lock.read_os_lock(project.root, request)
                        if before and before.packages == lock.packages:
                            raise LockError(
                                f"{request.path}: the archives list {listed(names, 3)}, but do not have the files",
                                hint="The mirror may be incomplete now: run again later, or use another one.",
                            )
                        new[request] = lock
                    except LockError as error:
                        failures.append(error)
        except LockError as error:
            names = sorted({name for names in stale.values() for name in names})
            message = f"Debian {release}: no archive has {listed(names, 3)} any more\n{error}"
            failures.append(LockError(message, hint=error.hint))
    return new, failures


def _current(host: Host, debian: Debian, now: str) -> Host:
    """The settings with the archives that a release is locked from: its snapshot archive, if matrix.yaml names one."""
    if debian.snapshot in ("", NO_SNAPSHOT):
        return host.for_release(debian)
    return host.with_snapshot(debian.snapshot, now, is_past=False)


def _resolve_system(matrix: Matrix, archive: apt.Archive, request: OsRequest, now: str) -> OsLock:
    """A new lock. Raises LockError, with the places in matrix.yaml of the requested packages that it names."""
    try:
        return archive.resolve(request, now)
    except LockError as error:
        named = set(re.findall(r"[a-z0-9][a-z0-9+.-]*[a-z0-9+]", str(error))) & set(request.packages)
        lists = {("components", name): component.apt for name, component in matrix.components.items()}
        lists |= {("python", name): python.apt or [] for name, python in matrix.python.items()}
        lines = [
            f"  {matrix.where(*path, 'apt', number)}: {'.'.join(path)}.apt: {package}"
            for path, packages in lists.items()
            for number, package in enumerate(packages)
            if package in named
        ]
        raise LockError("\n".join([str(error), *lines]), hint=error.hint) from error


def _os_lock(project: Project, request: OsRequest) -> OsLock | None:
    """The lock of an operating system; None if it is missing or damaged."""
    with suppress(LockError):
        return os_lock.read_os_lock(project.root, request)
    return None


def _requests(project: Project, chosen: Iterable[Cell]) -> Mapping[OsRequest, None]:
    """The requests of cells, each once, in their order."""
    return dict.fromkeys(os_lock.request_of_cell(project.matrix, cell) for cell in chosen)


# ---- uv's Pythons


def _update_python(project: Project, release: str, builds: PythonBuilds) -> str:
    """Locks uv's build of a release; the path of its lock if that changed, else empty. Raises LockError."""
    present = _python_lock(project, release)
    lock, name = builds.lock(release, present), python_lock.lock_path(release)
    if lock == present:
        return ""
    write_atomically(project.root / name, python_lock.dump(lock))
    return name


def _python_lock(project: Project, release: str) -> LockedPython | None:
    """The lock of uv's build of a release; None if it is missing or damaged."""
    with suppress(LockError):
        return python_lock.read_python_lock(project.root, release)
    return None


def _uv_releases(project: Project, chosen: Iterable[Cell]) -> Mapping[str, None]:
    """The releases of uv's Pythons of cells, each once, in their order."""
    releases = (project.matrix.python[cell.python].uv for cell in chosen)
    return dict.fromkeys(release for release in releases if release)


# ---- all


def _strays(project: Project) -> list[str]:
    """Lock files that belong to no group."""
    files = {f"locks/{file.name}" for file in (project.root / "locks").glob("*.json")}
    groups = {f"locks/{group}.json" for group in project.groups}
    systems = {request.path for request in _requests(project, project.cells)}
    pythons = {python_lock.lock_path(release) for release in _uv_releases(project, project.cells)}
    return sorted(files - groups - systems - pythons - {KNOWN_LAYERS})
