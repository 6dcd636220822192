"""Locks the wheels, the operating systems and uv's Pythons of cells."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import indent

from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.build.operating_systems import DebianRunner
from builder.build.outcomes import Report
from builder.common.errors import BuilderError, FetchError, IncompleteError, LockError, UsageError, did_you_mean, join
from builder.common.files import write_atomically
from builder.common.text import counted
from builder.debian import os_lock, os_resolve
from builder.debian.os_lock import OS_LOCKS, DebianPackage
from builder.engine.run import Run
from builder.index.releases import Index
from builder.index.wheels import is_cuda_wheel
from builder.lock import checks, diff, lockfile, python_lock
from builder.lock.lockfile import GROUP_LOCKS, Lock
from builder.lock.python_builds import PythonBuilds
from builder.lock.python_lock import PYTHON_LOCKS
from builder.lock.resolve import Resolver
from builder.matrix.cells import Cell, indexes_of_packages
from builder.matrix.schema import AMD64, required_name


@dataclass
class _Updates:
    """What was updated, by the name of a Debian release, a release of uv's Python, or a group.

    `done` has a note beside each name, `failures` the errors by their messages: an unknown package fails every system
    that requests it. `written` are paths.
    """

    written: list[str] = field(default_factory=list)
    done: dict[str, str] = field(default_factory=dict)
    failures: dict[str, dict[str, BuilderError]] = field(default_factory=dict)

    def fail(self, name: str, *errors: BuilderError) -> None:
        self.failures.setdefault(name, {}).update({str(error): error for error in errors})

    @property
    def error(self) -> BuilderError | None:
        """One error for all failures, of the class of the first; an IncompleteError that lists all if some are done."""
        if not self.failures:
            return None
        if not self.done:
            unique = {message: error for errors in self.failures.values() for message, error in errors.items()}
            return join([*unique.values()], "locks failed")  # architectures share faults
        lines = [f"{counted(len(self.failures), 'lock update')} failed, {len(self.done)} done", "failed:"]
        for name, errors in self.failures.items():
            for text, error in errors.items():
                message = indent(text, "    ").strip()
                lines.append(f"  {message if message.startswith(name) else f'{name}: {message}'}")
                lines += [f"    -> {error.hint}"] if error.hint else []
        lines += ["done:", *(f"  {name}{note}" for name, note in self.done.items())]
        lines += ["written:", *(f"  {path}" for path in self.written)] if self.written else ["nothing changed"]
        return IncompleteError("\n".join(lines))


def lock(
    run: Run,
    chosen: Sequence[Cell],
    *,
    upgrade: bool,
    refresh: bool,
    packages: Collection[str] = (),
) -> Report:
    """Locks the wheels, the operating systems and uv's Pythons of `chosen` that have no current lock.

    `upgrade` chooses the newest wheels, `refresh` the newest Debian packages. `packages` are names of packages to
    choose again in the groups that have them. Raises UsageError for one that no lock has. A failure does not stop
    the rest: the report then has one error for all, an IncompleteError if something was locked. Raises FileError for a
    lock of a newer builder, before anything is written.
    """
    project, matrix, updates = run.project, run.project.matrix, _Updates()
    # All groups, not only the chosen ones: their versions are preferred, so that images share layers.
    present = {group: GROUP_LOCKS.find(project.root, group) for group in project.groups}
    names = _known_packages(present, chosen, packages)

    _lock_systems(run, chosen, updates, refresh=refresh)
    _lock_pythons(run, chosen, updates)

    # Faults of matrix.yaml about a Python and its Debian release. No wheels are locked for such a cell: they would be
    # for another Python. All cells of a Python have its packages and the same release, so one lock is enough.
    faulty: set[str] = set()
    for python, cell in {cell.python: cell for cell in chosen}.items():
        # A lock that could not be made is among the failures.
        system = OS_LOCKS.find(project.root, os_lock.request_of_cell(matrix, cell))
        if system and (faults := list(checks.system_faults(matrix, python, system))):
            faulty.add(python)
            name = _archive_name(system.debian, cell.arch)
            updates.fail(name, *faults)
            updates.done.pop(name, None)

    sound = [cell for cell in chosen if cell.python not in faulty]
    _lock_wheels(run, present, sound, updates, upgrade=upgrade, packages=names)
    try:
        locked = [cell for cell in sound if cell.group not in updates.failures]
        updates.written += _record_release_days(run, locked, updates.done)
    except (FetchError, LockError) as error:  # nothing is built from these days
        run.view.say(f"{lockfile.RELEASE_DAYS}: not updated: {error} ({error.hint})")

    # After a failure, locks without a cell are kept: undoing the change that caused it needs them again.
    if not updates.failures:
        for name in checks.stray_locks(project):
            (project.root / name).unlink()
            updates.written.append(f"{name} (removed: no cell needs it)")
    return Report(written=updates.written, error=updates.error)


def _archive_name(debian: str, arch: str) -> str:
    return f"Debian {debian}{'' if arch == AMD64 else f' for {arch}'}"


def _lock_systems(run: Run, chosen: Sequence[Cell], updates: _Updates, *, refresh: bool) -> None:
    """Locks Debian packages, one archive at a time, to record failures by archive."""
    project, runner = run.project, DebianRunner(run)
    requests = os_lock.requests_of_cells(project.matrix, chosen)
    systems = {request: OS_LOCKS.find(project.root, request) for request in requests}
    stale = [request for request, system in systems.items() if refresh or system is None]
    old = {request.path: system.packages for request, system in systems.items() if system}
    new: dict[str, tuple[DebianPackage, ...]] = {}  # by the path of their lock
    for debian, arch, group in os_resolve.by_archive(stale):
        name = _archive_name(debian, arch)
        run.view.say(f"{name}: reading the lists of packages")
        try:
            resolved, errors = os_resolve.resolve_systems(project.matrix, run.host, group, runner)
        except (FetchError, LockError) as error:
            resolved, errors = {}, [error]
        # A lock that differs only in its time is not written.
        changed = {request: lock for request, lock in resolved.items() if old.get(request.path) != lock.packages}
        for request, system in changed.items():
            OS_LOCKS.write(project.root, request, system)
            new[request.path] = system.packages
            updates.written.append(request.path)
        if errors:
            updates.fail(name, *errors)
        if changed or not errors:
            updates.done[name] = f" ({counted(len(changed), 'other system')})" if errors else ""
    for line in diff.lock_changes(old, new):
        run.view.say(line)


def _lock_pythons(run: Run, chosen: Sequence[Cell], updates: _Updates) -> None:
    """Locks uv's Pythons."""
    root, builds = run.project.root, PythonBuilds(run.host)
    for release in python_lock.uv_releases(run.project.matrix, chosen):
        try:
            python = builds.lock(release, PYTHON_LOCKS.find(root, release))
        except (FetchError, LockError) as error:
            updates.fail(f"Python {release}", error)
            continue
        if PYTHON_LOCKS.write(root, release, python):
            updates.written.append(PYTHON_LOCKS.path(release))
            updates.done[f"Python {release}"] = ""


def _known_packages(present: Mapping[str, Lock | None], chosen: Sequence[Cell], packages: Collection[str]) -> set[str]:
    """The canonical names of packages. Raises UsageError for one that is in no lock of the chosen groups.

    A group without a lock would get the versions of other groups: then the packages of all locks are known.
    """
    names: set[str] = {canonicalize_name(package) for package in packages}
    if not names:
        return names
    locked = {group: lock.versions for group, lock in present.items() if lock}
    groups = {cell.group for cell in chosen}
    known = {name for group in locked if group in groups or groups - locked.keys() for name in locked[group]}
    if unknown := sorted(names - known):
        raise UsageError(
            f"no lock of these cells has the package {unknown[0]}{did_you_mean(unknown[0], sorted(known))}",
            hint="locks/ has all names.",
        )
    return names


def _lock_wheels(
    run: Run,
    present: Mapping[str, Lock | None],
    chosen: Sequence[Cell],
    updates: _Updates,
    *,
    upgrade: bool,
    packages: Collection[str],
) -> None:
    """Resolves the groups of `chosen` whose locks, in `present`, are out of date or have one of `packages`.

    With `upgrade`, resolves all of them. A group is resolved by itself, and prefers the versions of groups with the
    same Python or CUDA. An upgrade prefers only the versions of groups of the same framework: two frameworks that are
    upgraded separately would otherwise keep each other's versions forever.
    """
    project, resolver = run.project, Resolver(run.project, run.host, run.view)
    # A group is resolved as a whole, also if only some of its cells are chosen: they share the lock.
    stale = [
        group
        for group in dict.fromkeys(cell.group for cell in chosen)
        if upgrade
        or ((lock := present[group]) and not lock.versions.keys().isdisjoint(packages))
        or lockfile.stale_reason(project.matrix, present[group], project.groups[group], project.groups[group])
    ]
    locks = [lock for group, lock in present.items() if lock and group not in stale]
    wheels = (wheel for lock in present.values() if lock for wheel in lock.wheels)
    resolver.known.update({wheel.sha256: wheel for wheel in wheels if wheel.license or wheel.supplier})
    new: list[Lock] = []
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
        if lock and not lock.versions.keys().isdisjoint(packages):
            # All is resolved, and all others keep their versions where they still fit.
            preferred |= {name: version for name, version in lock.versions.items() if name not in packages}
            lock = None
        try:
            new.append(resolver.lock(cells, lock, preferred))
        except BuilderError as error:
            updates.fail(group, error)
    before = {lock.group: previous.wheels for lock in new if (previous := present[lock.group])}
    for line in diff.lock_changes(before, {lock.group: lock.wheels for lock in new}):
        run.view.say(line)
    updates.done |= dict.fromkeys((lock.group for lock in new), "")
    changed = [lock.group for lock in new if GROUP_LOCKS.write(project.root, lock.group, lock)]
    updates.written += map(GROUP_LOCKS.path, changed)


def _record_release_days(run: Run, chosen: Sequence[Cell], resolved: Collection[str]) -> list[str]:
    """Records when the releases of frameworks appeared on the default index; returns the path if the file changed.

    Requests the frameworks with a group in `resolved`, or with a release whose day is not recorded. Raises FetchError.
    """
    frameworks, matrix, root = run.project.matrix.frameworks, run.project.matrix, run.project.root
    known = lockfile.read_release_days(root)
    days = dict(known)
    stale = {
        cell.framework: required_name(frameworks[cell.framework].package)
        for cell in chosen
        if cell.group in resolved or cell.release not in known.get(cell.framework, {})
        # A package of another index may have a private name.
        if required_name(frameworks[cell.framework].package) not in indexes_of_packages(matrix, cell)
    }
    for name, package in stale.items():
        listed = Index(run.host.index).package(package)
        releases = [
            listed.newest,
            *(listed.release(Version(line.release)) for line in frameworks[name].versions.values()),
        ]
        if dated := {release.version: release.day for release in releases if release and release.day}:
            days[name] = {str(version): dated[version] for version in sorted(dated)}
    if days == known:
        return []
    write_atomically(root / lockfile.RELEASE_DAYS, lockfile.DAYS_ADAPTER.dump_json(days, indent=1) + b"\n")
    return [lockfile.RELEASE_DAYS]
