"""The command diff."""

from __future__ import annotations

import platform
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent

import click
from rich.padding import Padding
from rich.text import Text

from builder.cli.context import Context, new_table, parse_image
from builder.cli.options import format_option
from builder.common import git
from builder.common.errors import BuilderError, UsageError, did_you_mean
from builder.common.text import counted, size
from builder.index.wheels import arch_of
from builder.layers import images
from builder.lock import diff
from builder.lock.diff import Amount, Diff, ImageContents, Revisions
from builder.matrix import cells
from builder.matrix.project import Project
from builder.plan import ci
from builder.steps import verify

FORMS = "A and B are cell ids, git revisions, REVISION:CELL, or images as org/name:tag or registry/org/name:tag."
HERE = "working tree"


@dataclass(frozen=True, kw_only=True)
class _Locks:
    """The locks of a revision or of the working tree, by cell; `cell` is the cell to compare, empty for all."""

    name: str
    by_cell: Mapping[str, ImageContents]
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
    project = context.project
    before = _locks(project, old)
    if new:
        after = _locks(project, new)
    elif before is None or before.name == HERE:
        raise UsageError(
            f"{old!r} is not {_revision(project.root)}: only a revision is compared with the working tree",
            hint=f"Add a second name. {FORMS}",
        )
    else:
        after = _Locks(name=HERE, by_cell=diff.of_project(project))
    if before and after and not before.cell and not after.cell:
        return diff.compare_all(before.name, before.by_cell, after.name, after.by_cell)

    pair = ((old, before, after), (new, after, before))
    # The history of an image has the names of its wheels, but not their sizes.
    wheel_sizes = diff.sizes(diff.of_project(project).values()) if before is None or after is None else {}
    # Images first: their error message covers a name that does not exist at all.
    images = {name: _image(context, name, wheel_sizes) for name, locks, _ in pair if not locks}
    sides = []
    for name, locks, other in pair:
        if not locks:
            sides.append(images[name])
            continue
        # A revision without a cell is compared by the cell of the other side.
        cell = locks.cell or (other.cell if other else "")
        if not cell:
            raise UsageError(
                f"{locks.name} has several cells, but an image is compared with one cell",
                hint=f"Use {locks.name}:CELL.",
            )
        if cell not in locks.by_cell:
            raise UsageError(f"{locks.name} has no lock of {cell}{did_you_mean(cell, locks.by_cell)}")
        sides.append(replace(locks.by_cell[cell], label=f"{cell} ({locks.name})"))
    return diff.compare(*sides)


def _locks(project: Project, name: str) -> _Locks | None:
    """None if the name is neither a cell nor a revision. Raises MatrixError, LockError of the revision."""
    if cells.ID.fullmatch(name):
        return _Locks(name=HERE, by_cell=diff.of_project(project), cell=name)
    revision, _, cell = name.rpartition(":")
    if not (revision and cells.ID.fullmatch(cell)):
        revision, cell = name, ""
    if not git.commit(project.root, revision):
        if cell:
            raise UsageError(f"no git revision {revision!r}", hint="`git log --oneline` lists revisions.")
        return None
    # The cells are those of the revision's own matrix.yaml.
    with ci.checkout_revision(project, revision) as at_revision:
        try:
            return _Locks(name=revision, by_cell=diff.of_project(at_revision), cell=cell)
        except BuilderError as error:
            raise type(error)(indent(str(error), f"{revision}:"), hint=error.hint) from error


def _image(context: Context, name: str, wheel_sizes: Mapping[str, int]) -> ImageContents:
    store = context.store
    with store.used():
        try:
            arch = arch_of(platform.machine())
            [source] = verify.find_images(parse_image(name), arch, context.project, context.host, store)
        except UsageError as error:
            raise UsageError(
                f"{name!r} is not a cell, {_revision(context.project.root)} or an image: {error}", hint=FORMS
            ) from error
        return images.side(name, source.manifest, source.read_blob, wheel_sizes)


def _revision(root: Path) -> str:
    """`a git revision`, with the reason if this checkout can have none."""
    if not shutil.which("git"):
        return "a git revision (git is not installed: apt-get install git)"
    if not git.run_git(root, "rev-parse", "--git-dir", default=""):
        return f"a git revision ({root} is not a git checkout)"
    return "a git revision"


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
    """The table of packages, then how much there is to download, then the Debian packages."""
    if changes.changes:
        numbers = ("OLD SIZE", "NEW SIZE", "CHANGE")
        table = new_table("PACKAGE", "OLD", "NEW", *numbers, right=numbers, fold=["OLD", "NEW"])
        for change in changes.changes:
            packages = (change.old, change.new)
            old_version, new_version = (package.version if package else "-" for package in packages)
            new_version += f" ({change.kind})" if change.kind.startswith("other") else ""
            sizes = ("-" if each is None else "?" if each.size is None else size(each.size) for each in packages)
            table.add_row(*map(Text, [change.name, old_version, new_version, *sizes, _signed(change.difference)]))
        context.out.print(Padding(table, (0, 0, 0, indent), expand=False))
    old, new = changes.old, changes.new
    if old.of == new.of:
        total = f"{new.of}: {size(old.bytes)} -> {size(new.bytes)} ({_signed(new.bytes - old.bytes)})"
    else:  # layers are larger than their wheels: the difference between the two means nothing
        total = f"{size(old.bytes)} of {old.of} -> {size(new.bytes)} of {new.of}"
    kept, fetched, gone = map(_amount, (changes.stays, changes.fetched, changes.gone))
    for line in (
        f"packages: {len(old.packages)} -> {len(new.packages)}, {changes.unchanged} unchanged; {total}",
        f"{changes.unit} kept: {kept}; to download: {fetched}; no longer used: {gone}",
    ):
        context.out.print(Text(" " * indent + line), soft_wrap=True)
    _show_debian(context, map(str, changes.debian))


def _show_debian(context: Context, lines: Iterable[str]) -> None:
    for number, line in enumerate(lines):
        if number == 0:
            context.out.print(Text("Debian packages", style="bold"))
        context.out.print(Text(f"  {line}"), soft_wrap=True)


def _amount(amount: Amount) -> str:
    unknown = f", and {amount.unknown} of unknown size" if amount.unknown else ""
    return f"{amount.count} ({size(amount.bytes)}{unknown})" if amount.count else "none"


def _signed(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{'-' if count < 0 else '+'}{size(abs(count))}" if count else "0 B"
