"""The lock step: which locks are stale, and writing new ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from builder import atomic, lock
from builder.cells import Cell
from builder.errors import LockError, StaleError, join
from builder.host import Host
from builder.project import Project
from builder.resolve import Resolver


def check(project: Project, chosen: Sequence[Cell]) -> None:
    """Raises StaleError naming every lock that is missing, of no cell, or not what matrix.yaml asks for."""
    wrong = []
    for cell in chosen:
        found = lock.read(project.root, cell.id)
        if found is None:
            wrong.append(f"locks/{cell.id}.json: missing")
        elif found.inputs != lock.inputs(project.matrix, cell, project.groups[cell.group]):
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
    """Resolves the groups of `chosen` and writes what changed; returns those paths.

    Groups that fail do not stop the others; their errors are raised together at the end.
    """
    resolver = Resolver(project, host, environ=os.environ, say=say)
    changed: list[str] = []
    failures: list[LockError] = []
    for group in dict.fromkeys(cell.group for cell in chosen):
        members = project.groups[group]
        try:
            made = resolver.resolve(members, {} if upgrade else _known(project, members))
        except LockError as error:
            failures.append(error)
            continue
        for one in made:
            path, text = lock.path(project.root, one.cell), lock.dump(one)
            if not path.exists() or path.read_bytes() != text.encode():
                atomic.write_text(path, text)
                changed.append(path.relative_to(project.root).as_posix())
    for name in strays(project):
        (project.root / name).unlink()
        changed.append(f"{name} (removed: no such cell)")
    if failures:
        raise join(failures)
    return changed


def strays(project: Project) -> list[str]:
    """Lock files that belong to no cell."""
    known = {cell.id for cell in project.cells}
    files = sorted((project.root / "locks").glob("*.json"))
    return [f"locks/{file.name}" for file in files if file.stem not in known]


def _known(project: Project, members: Sequence[Cell]) -> dict[str, str]:
    """Versions of the present locks, to be kept where they still fit. A damaged lock is simply not kept."""
    known: dict[str, str] = {}
    for cell in members:
        try:
            found = lock.read(project.root, cell.id)
        except LockError:
            continue
        for wheel in found.wheels if found else ():
            known[wheel.name] = wheel.version
    return known
