"""The command diff."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent

import click
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from builder.cli import verify
from builder.cli.context import Context, new_table
from builder.cli.options import format_option
from builder.common import git
from builder.common.errors import BuilderError, StaleError, UsageError, did_you_mean
from builder.common.units import counted, size
from builder.layers import images
from builder.lock import diff, lockfile, os_lock
from builder.lock.diff import Amount, Change, Diff, Package, Revisions, Side
from builder.matrix import cells
from builder.matrix.project import Project
from builder.plan import revisions

FORMS = "A and B are cell ids, git revisions, REVISION:CELL, or images as org/name:tag or registry/org/name:tag."
HERE = "working tree"


@dataclass(frozen=True, kw_only=True)
class _Locks:
    """The locks of a revision or of the working tree, by cell; `cell` is the cell to compare, empty for all."""

    name: str
    by_cell: Mapping[str, Side]
    cell: str = ""


@click.command(name="diff", epilog=FORMS)
@click.argument("old", metavar="A")
@click.argument("new", metavar="[B]", default="")
@format_option("json: all details, for scripts.", "table", "json")
@click.pass_obj
def diff_command(context: Context, old: str, new: str, form: str) -> None:
    """Show what changed from A to B, by package and bytes.

    Reads only locks and manifests, and pulls no image. Debian packages are compared between locks, not between images.
    Without B, compares revision A with the working tree.

    \b
    builder diff HEAD                                        a revision and the working tree
    builder diff v1.0 HEAD                                   all cells of two revisions
    builder diff HEAD:pt-2.9-cu128-py311 pt-2.9-cu128-py311  one cell, before and after
    builder diff org/pt-cuda:2.9.1-cu128-py311 registry.example.com/org/pt-cuda:2.9   two images
    """
    changes = _compare(context, old, new)
    if form == "json":
        context.print_json(changes.as_data())
    elif isinstance(changes, Revisions):
        _show_all(context, changes)
    else:
        context.out.print(Text(f"{changes.old.label} -> {changes.new.label}", style="bold"), soft_wrap=True)
        _show(context, changes)


def _compare(context: Context, old: str, new: str) -> Diff | Revisions:
    before = _locks(context.project, old)
    if not new:
        if before is None or before.name == HERE:
            raise UsageError(
                f"{old!r} is not {_revision(context.project.root)}: only a revision is compared with the working tree",
                hint=f"Add a second name. {FORMS}",
            )
        after: _Locks | None = _Locks(name=HERE, by_cell=_sides(context.project))
    else:
        after = _locks(context.project, new)
    if before and after and not before.cell and not after.cell:
        return diff.compare_all(before.name, before.by_cell, after.name, after.by_cell)
    wheel_sizes = diff.sizes(_sides(context.project).values()) if before is None or after is None else {}
    # Images first: their error message covers a name that does not exist at all.
    images = {name: _image(context, name, wheel_sizes) for name, locks in ((old, before), (new, after)) if not locks}
    sides = [
        _cell(locks, other) if locks else images[name]
        for name, locks, other in ((old, before, after), (new, after, before))
    ]
    return diff.compare(*sides)


def _cell(locks: _Locks, other: _Locks | None) -> Side:
    """One cell of a revision: its own, or else that of the other side."""
    cell = locks.cell or (other.cell if other else "")
    if not cell:
        raise UsageError(
            f"{locks.name} has several cells, but an image is compared with one cell", hint=f"Use {locks.name}:CELL."
        )
    if cell not in locks.by_cell:
        raise UsageError(f"{locks.name} has no lock of {cell}{did_you_mean(cell, locks.by_cell)}")
    return replace(locks.by_cell[cell], label=f"{cell} ({locks.name})")


def _image(context: Context, name: str, wheel_sizes: Mapping[str, int]) -> Side:
    store = context.store
    with store.used():
        try:
            source, _ = verify.find_image(context, store, name)
        except UsageError as error:
            raise UsageError(
                f"{name!r} is not a cell, {_revision(context.project.root)} or an image: {error}", hint=FORMS
            ) from error
        return images.side(name, source.manifest, source.read_blob, wheel_sizes)


# ---- locks of the working tree and of git revisions


def _locks(project: Project, name: str) -> _Locks | None:
    """None if the name is neither a cell nor a revision."""
    if cells.ID.fullmatch(name):
        return _Locks(name=HERE, by_cell=_sides(project), cell=name)
    revision, _, cell = name.rpartition(":")
    if revision and cells.ID.fullmatch(cell):
        if not git.commit(project.root, revision):
            raise UsageError(f"no git revision {revision!r}", hint="`git log --oneline` lists revisions.")
        return _Locks(name=revision, by_cell=_at(project, revision), cell=cell)
    return _Locks(name=name, by_cell=_at(project, name)) if git.commit(project.root, name) else None


def _at(project: Project, revision: str) -> dict[str, Side]:
    """The locks of a revision, for the cells of its own matrix.yaml. Raises MatrixError, LockError."""
    with revisions.checkout(project, revision) as at_revision:
        try:
            return _sides(at_revision)
        except BuilderError as error:
            raise type(error)(indent(str(error), f"{revision}:"), hint=error.hint) from error


def _sides(project: Project) -> dict[str, Side]:
    """Cell id -> its wheels and Debian packages, for all cells whose components are locked."""
    locks = {group: lock for group in project.groups if (lock := lockfile.read(project.root, group))}
    requests = {cell.id: os_lock.request_of_cell(project.matrix, cell) for cell in project.cells}
    systems = {request: os_lock.read(project.root, request) for request in set(requests.values())}
    result = {}
    for cell in project.cells:
        if cell.group in locks:
            with suppress(StaleError):
                locked = lockfile.of_cell(project.matrix, cell, locks[cell.group])
                system = systems[requests[cell.id]]
                result[cell.id] = diff.of_lock(locked, system.versions if system else None)
    return result


def _revision(root: Path) -> str:
    """`a git revision`, with the reason if this checkout can have none."""
    if not shutil.which("git"):
        return "a git revision (git is not installed: apt-get install git)"
    if not git.run(root, "rev-parse", "--git-dir", default=""):
        return f"a git revision ({root} is not a git checkout)"
    return "a git revision"


# ---- output


def _show_all(context: Context, changes: Revisions) -> None:
    for cell, difference in changes.changed.items():
        if difference.changes:
            context.out.print(Text(cell, style="bold"))
            _show(context, replace(difference, debian=()), indent=2)
            context.out.print()
    cell_counts = Counter(change for difference in changes.changed.values() for change in difference.debian)
    _show_debian(context, [f"{change} ({counted(count, 'cell')})" for change, count in sorted(cell_counts.items())])
    for word, sides in (("added", changes.added), ("removed", changes.removed)):
        for side in sides:
            packages = counted(len(side.packages), "package")
            context.out.print(Text(f"{word}: {side.label}, {packages}, {size(side.bytes)}"))
    counts = {
        "changed": len(changes.changed),
        "added": len(changes.added),
        "removed": len(changes.removed),
        "unchanged": changes.unchanged,
    }
    summary = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    context.out.print(Text(f"{changes.old} -> {changes.new}: cells: {summary or 'none'}"), soft_wrap=True)


def _show(context: Context, changes: Diff, indent: int = 0) -> None:
    if changes.changes:
        context.out.print(Padding(_table(changes.changes), (0, 0, 0, indent), expand=False))
    for line in _totals(changes):
        context.out.print(Text(" " * indent + line), soft_wrap=True)
    _show_debian(context, map(str, changes.debian))


def _show_debian(context: Context, lines: Iterable[str]) -> None:
    for number, line in enumerate(lines):
        if number == 0:
            context.out.print(Text("Debian packages", style="bold"))
        context.out.print(Text(f"  {line}"), soft_wrap=True)


def _table(changes: Iterable[Change]) -> Table:
    numbers = ("OLD SIZE", "NEW SIZE", "CHANGE")
    table = new_table("PACKAGE", "OLD", "NEW", *numbers, right=numbers, fold=["OLD", "NEW"])
    for change in changes:
        old, new = (package.version if package else "-" for package in (change.old, change.new))
        new += f" ({change.kind})" if change.kind.startswith("other") else ""
        texts = [change.name, old, new, _size(change.old), _size(change.new), _signed(change.difference)]
        table.add_row(*map(Text, texts))
    return table


def _totals(changes: Diff) -> list[str]:
    old, new = changes.old, changes.new
    # Layers are larger than their wheels: the difference between the two means nothing.
    total = (
        f"{new.of}: {size(old.bytes)} -> {size(new.bytes)} ({_signed(new.bytes - old.bytes)})"
        if old.of == new.of
        else f"{size(old.bytes)} of {old.of} -> {size(new.bytes)} of {new.of}"
    )
    return [
        f"packages: {len(old.packages)} -> {len(new.packages)}, {changes.unchanged} unchanged; {total}",
        f"{changes.unit} kept: {_amount(changes.stays)}; to download: {_amount(changes.fetched)}; "
        f"no longer used: {_amount(changes.gone)}",
    ]


def _amount(amount: Amount) -> str:
    unknown = f", and {amount.unknown} of unknown size" if amount.unknown else ""
    return f"{amount.count} ({size(amount.bytes)}{unknown})" if amount.count else "none"


def _size(package: Package | None) -> str:
    if package is None:
        return "-"
    return "?" if package.size is None else size(package.size)


def _signed(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{'-' if count < 0 else '+'}{size(abs(count))}" if count else "0 B"
