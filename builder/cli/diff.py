"""The command diff."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import click
from rich.padding import Padding
from rich.text import Text

from builder.cli.context import Context, new_table
from builder.cli.options import format_option
from builder.common.text import counted, size
from builder.lock.diff import Amount, Diff, Revisions
from builder.steps.diff import FORMS, compare


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
    changes = compare(context.project, context.host, context.store, old, new)
    if form == "json":
        context.print_json(changes.as_data())
    elif isinstance(changes, Revisions):
        _show_all(context, changes)
    else:
        context.out.print(Text(f"{changes.old.label} -> {changes.new.label}", style="bold"), soft_wrap=True)
        _show(context, changes)


def _show_all(context: Context, changes: Revisions) -> None:
    for cell, difference in changes.changed.items():
        if difference.changes:
            context.out.print(Text(cell, style="bold"))
            _show(context, replace(difference, debian=()), indent=2)
            context.out.print()
    cell_counts = Counter(change for difference in changes.changed.values() for change in difference.debian)
    _show_debian(context, [f"{change} ({counted(count, 'cell')})" for change, count in sorted(cell_counts.items())])
    for word, images in (("added", changes.added), ("removed", changes.removed)):
        for image in images:
            packages = counted(len(image.packages), "package")
            context.out.print(Text(f"{word}: {image.label}, {packages}, {size(image.bytes)}"))
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
    if old.unit == new.unit:
        total = f"{new.unit}: {size(old.bytes)} -> {size(new.bytes)} ({_signed(new.bytes - old.bytes)})"
    else:  # layers are larger than their wheels: the difference between the two means nothing
        total = f"{size(old.bytes)} of {old.unit} -> {size(new.bytes)} of {new.unit}"
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
