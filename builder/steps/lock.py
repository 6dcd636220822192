"""Locks the wheels, the operating systems and uv's Pythons of cells."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from textwrap import indent

from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.build.apt_container import ContainerApt
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
    project, matrix = run.project, run.project.matrix
    # All groups, not only the chosen ones: their versions are preferred, so that images share layers.
    present = {group: GROUP_LOCKS.find(project.root, group) for group in project.groups}
    names = _known_packages(present, chosen, packages)
    written: list[str] = []
    done: list[str] = []
    failures: dict[str, list[BuilderError]] = {}

    # Debian packages, one archive at a time, so that its failure is recorded under its name.
    requests = os_lock.requests_of_cells(matrix, chosen)
    systems = {request: OS_LOCKS.find(project.root, request) for request in requests}
    stale_systems = [request for request, system in systems.items() if refresh or system is None]
    new_packages: dict[str, tuple[DebianPackage, ...]] = {}  # by the path of their lock
    for debian, arch, group in os_resolve.by_archive(stale_systems):
        name = f"Debian {debian}{'' if arch == AMD64 else f' for {arch}'}"
        run.view.say(f"{name}: reading the lists of packages")
        try:
            resolved_systems, errors = os_resolve.resolve_systems(matrix, run.host, group, ContainerApt(run))
        except (FetchError, LockError) as error:
            resolved_systems, errors = {}, [error]
        renewed = {}
        for request, new_lock in resolved_systems.items():
            old_lock = systems[request]
            if old_lock is None or old_lock.packages != new_lock.packages:  # its time alone changes nothing
                OS_LOCKS.write(project.root, request, new_lock)
                renewed[request.path] = new_lock.packages
        new_packages |= renewed
        written += renewed
        if errors:  # an unknown package fails every request that has it
            failures[name] = [*{str(error): error for error in errors}.values()]
        if renewed or not errors:
            part = f" ({counted(len(renewed), 'other system')})" if errors else ""
            done.append(f"{name}{part}")
    old_packages = {request.path: system.packages for request, system in systems.items() if system}
    for line in diff.lock_changes(old_packages, new_packages):
        run.view.say(line)

    # uv's Pythons.
    builds = PythonBuilds(run.host)
    for release in python_lock.uv_releases(matrix, chosen):
        before = PYTHON_LOCKS.find(project.root, release)
        try:
            after = builds.lock(release, before)
        except (FetchError, LockError) as error:
            failures[f"Python {release}"] = [error]
            continue
        if PYTHON_LOCKS.write(project.root, release, after):
            written.append(PYTHON_LOCKS.path(release))
            done.append(f"Python {release}")

    # Faults of matrix.yaml about a Python and its Debian release. No wheels are locked for such a cell: they would be
    # for another Python. All cells of a Python have its packages and the same release, so one lock is enough.
    faulty: set[str] = set()
    for python, cell in {cell.python: cell for cell in chosen}.items():
        # A lock that could not be made is among the failures.
        system = OS_LOCKS.find(project.root, os_lock.request_of_cell(matrix, cell))
        if system and (faults := list(checks.system_faults(matrix, python, system))):
            faulty.add(python)
            name = f"Debian {system.debian}"
            known = {str(error) for error in failures.setdefault(name, [])}
            failures[name] += [fault for fault in faults if str(fault) not in known]
            done = [item for item in done if item != name and not item.startswith(f"{name} (")]

    # Wheels.
    sound = [cell for cell in chosen if cell.python not in faulty]
    changed, resolved, wheel_failures = _lock_wheels(run, present, sound, upgrade=upgrade, packages=names)
    written = [*changed, *written]
    done += resolved
    failures |= {group: [error] for group, error in wheel_failures.items()}
    try:
        written += _record_release_days(run, [cell for cell in sound if cell.group not in wheel_failures], resolved)
    except (FetchError, LockError) as error:  # nothing is built from these days
        run.view.say(f"{lockfile.RELEASE_DAYS}: not updated: {error} ({error.hint})")

    # After a failure, locks without a cell are kept: undoing the change that caused it needs them again.
    if not failures:
        for name in checks.stray_locks(project):
            (project.root / name).unlink()
            written.append(f"{name} (removed: no cell needs it)")
    return Report(written=written, error=_error(failures, done, written))


def _error(
    failures: Mapping[str, Sequence[BuilderError]], done: Sequence[str], written: Sequence[str]
) -> BuilderError | None:
    """One error for all failures, of the class of the first; an IncompleteError that lists all if something was done.

    `failures` and `done` name Debian releases, releases of uv's Pythons, and groups.
    """
    if not failures:
        return None
    if not done:
        unique = {str(error): error for errors in failures.values() for error in errors}  # architectures share faults
        return join([*unique.values()], "locks failed")
    lines = [f"{counted(len(failures), 'lock update')} failed, {len(done)} done", "failed:"]
    for name, errors in failures.items():
        for error in errors:
            message = indent(str(error), "    ").strip()
            lines.append(f"  {message if message.startswith(name) else f'{name}: {message}'}")
            lines += [f"    -> {error.hint}"] if error.hint else []
    lines += ["done:", *(f"  {name}" for name in done)]
    lines += ["written:", *(f"  {name}" for name in written)] if written else ["nothing changed"]
    return IncompleteError("\n".join(lines))


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
    *,
    upgrade: bool,
    packages: Collection[str],
) -> tuple[list[str], list[str], dict[str, BuilderError]]:
    """Resolves the groups of `chosen` whose locks, in `present`, are out of date or have one of `packages`.

    With `upgrade`, resolves all of them. Returns the changed paths, the groups that were resolved, and the errors by
    group. A group is resolved by itself, and prefers the versions of groups with the same Python or CUDA. An
    upgrade prefers only the versions of groups of the same framework: two frameworks that are upgraded separately would
    otherwise keep each other's versions forever.
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
        if lock and not lock.versions.keys().isdisjoint(packages):
            # All is resolved, and all others keep their versions where they still fit.
            preferred |= {name: version for name, version in lock.versions.items() if name not in packages}
            lock = None
        try:
            new.append(resolver.lock(cells, lock, preferred))
        except BuilderError as error:
            failures[group] = error
    before = {lock.group: previous.wheels for lock in new if (previous := present[lock.group])}
    for line in diff.lock_changes(before, {lock.group: lock.wheels for lock in new}):
        run.view.say(line)
    changed = [lock.group for lock in new if GROUP_LOCKS.write(project.root, lock.group, lock)]
    return [GROUP_LOCKS.path(group) for group in changed], [lock.group for lock in new], failures


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
