"""The lock step: which locks are stale, and writing new ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from builder import atomic, diff, lock
from builder.cells import CUDA, Cell
from builder.errors import LockError, StaleError, join
from builder.host import Host
from builder.lock import Lock
from builder.project import Project
from builder.resolve import Resolver


def check(project: Project, chosen: Sequence[Cell]) -> None:
    """Raises StaleError naming every lock that is missing, of no cell, or not what matrix.yaml asks for."""
    wrong = []
    for cell in chosen:
        found = lock.read(project.root, cell.id)
        if found is None:
            wrong.append(f"locks/{cell.id}.json: missing")
        elif found.inputs != lock.inputs(project.matrix, cell, project.together[cell.group]):
            wrong.append(f"locks/{cell.id}.json: matrix.yaml asks for something else now")
    wrong += [f"{name}: belongs to no cell" for name in strays(project)]
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong[:20])
        raise StaleError(f"locks are out of date:\n{listed}", hint="Resolve again: builder lock")


def update(
    project: Project,
    chosen: Sequence[Cell],
    host: Host,
    *,
    upgrade: bool,
    say: Callable[[str], None],
) -> list[str]:
    """Resolves the groups of `chosen` and all others of the same CUDA, and writes what changed; returns those paths.

    Groups whose locks are what matrix.yaml asks for are left as they are, but for an upgrade. Groups that fail do not
    stop the others; their errors are raised together at the end.
    """
    present = {cell.id: _present(project, cell.id) for cell in project.cells}
    sizes = diff.sizes(found for found in present.values() if found)
    resolver = Resolver(project, host, environ=os.environ, say=say, sizes=sizes)
    made: list[Lock] = []
    failures: list[LockError] = []
    failed: list[Cell] = []
    cuda_of = {cell.id: cell.cuda for cell in project.cells}
    cudas = {cell.cuda for cell in chosen}
    shared: dict[str, dict[str, str]] = {cuda: {} for cuda in cudas}  # CUDA's wheels so far, for the next Python
    stale = []
    for group in dict.fromkeys(cell.group for cell in project.cells if cell.cuda in cudas):
        members = project.groups[group]
        if not upgrade and (current := _current(project, members, present)):
            _share(shared[members[0].cuda], current)
        else:
            stale.append(group)
    for group in stale:
        members, together = project.groups[group], project.together[group]
        known = {} if upgrade else _known(present, together)
        mine = shared[members[0].cuda]
        try:
            found = resolver.resolve(members, together, known | mine)
        except LockError as error:
            failures.append(error)
            failed += members
            continue
        made += found
        _share(mine, found)
    if upgrade and failures:  # half of a CUDA's groups on newer wheels would no longer share them
        say("nothing is written of a CUDA of which not all could be resolved")
        broken = {cell.cuda for cell in failed}
        made = [one for one in made if cuda_of[one.cell] not in broken]
    for line in (*diff.upgrades(present, made), *_split(cuda_of, {**present, **{one.cell: one for one in made}})):
        say(line)
    changed = [name for one in made if (name := _write(project, one))]
    for name in strays(project):
        (project.root / name).unlink()
        changed.append(f"{name} (removed: no such cell)")
    if failures:
        raise join(failures)
    return changed


def _split(cuda_of: Mapping[str, str], locks: Mapping[str, Lock | None]) -> list[str]:
    """A line for each of CUDA's wheels that cells of one CUDA have in several versions: they share less then."""
    versions: dict[tuple[str, str], set[str]] = {}
    for cell_id, found in locks.items():
        for wheel in found.of_component(CUDA) if found else ():
            versions.setdefault((cuda_of[cell_id], wheel.name), set()).add(wheel.version)
    return [
        f"CUDA {cuda}: {name} is wanted in {len(several)} versions: {', '.join(sorted(several))}"
        for (cuda, name), several in versions.items()
        if len(several) > 1
    ]


def _share(shared: dict[str, str], found: Sequence[Lock]) -> None:
    """Adds the versions of CUDA's wheels that are not known yet."""
    for wheel in (wheel for one in found for wheel in one.of_component(CUDA)):
        shared.setdefault(wheel.name, wheel.version)


def _write(project: Project, made: Lock) -> str:
    """The path of the lock if it changed."""
    path, text = lock.path(project.root, made.cell), lock.dump(made)
    if path.exists() and path.read_bytes() == text.encode():
        return ""
    atomic.write_text(path, text)
    return path.relative_to(project.root).as_posix()


def strays(project: Project) -> list[str]:
    """Lock files that belong to no cell."""
    known = {cell.id for cell in project.cells}
    files = sorted((project.root / "locks").glob("*.json"))
    return [f"locks/{file.name}" for file in files if file.stem not in known]


def _current(project: Project, members: Sequence[Cell], present: Mapping[str, Lock | None]) -> list[Lock]:
    """The locks of a group if all of them are what matrix.yaml asks for; none otherwise."""
    locks = []
    for cell in members:
        found = present[cell.id]
        if not found or found.inputs != lock.inputs(project.matrix, cell, project.together[cell.group]):
            return []
        locks.append(found)
    return locks


def _known(present: Mapping[str, Lock | None], members: Sequence[Cell]) -> dict[str, str]:
    """Versions of the present locks, to be kept where they still fit."""
    locks = [found for cell in members if (found := present[cell.id])]
    return {wheel.name: wheel.version for found in locks for wheel in found.wheels}


def _present(project: Project, cell_id: str) -> Lock | None:
    """The lock that is there. A damaged one is simply not kept."""
    try:
        return lock.read(project.root, cell_id)
    except LockError:
        return None
