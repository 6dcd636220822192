"""Commands that answer questions: diff."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import click
from pydantic import TypeAdapter, ValidationError
from rich.table import Table
from rich.text import Text

from builder import cells, diff, host, lock
from builder.cli import publishing
from builder.cli.context import Context
from builder.diff import Amount, Change, Diff, Package, Revisions, Side
from builder.errors import LockError, UsageError
from builder.lock import Lock
from builder.matrix import nearest
from builder.project import Project
from builder.view import size

FORMS = "A side is a cell's id, a git revision, revision:cell-id, or an image as org/name:tag or registry/org/name:tag."
HERE = "working tree"
_LOCK = TypeAdapter(Lock)


@dataclass(frozen=True, kw_only=True)
class _Locks:
    """The locks of a revision, or of the working tree, by cell; `cell` is the one that is meant, empty for all."""

    name: str
    locks: Mapping[str, Lock]
    cell: str = ""


@click.command(name="diff", epilog=FORMS)
@click.argument("old", metavar="A")
@click.argument("new", metavar="[B]", default="")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.pass_obj
def diff_command(context: Context, old: str, new: str, form: str) -> None:
    """Show what changed from A to B, by package and bytes.

    \b
    builder diff HEAD                                        the working tree against a revision
    builder diff v1.0 HEAD                                   every cell of two revisions
    builder diff HEAD:pt-2.9-cu128-py311 pt-2.9-cu128-py311  one cell
    builder diff org/pt-cuda:2.9.1-cu128-py311 registry.example.com/org/pt-cuda:2.9   two images, which are not pulled
    """
    found = _compare(context, old, new)
    if form == "json":
        click.echo(json.dumps(found.as_data(), indent=1))
    elif isinstance(found, Revisions):
        _show_all(context, found)
    else:
        context.out.print(Text(f"{found.old.label} -> {found.new.label}", style="bold"), soft_wrap=True)
        _show(context, found)


def _compare(context: Context, old: str, new: str) -> Diff | Revisions:
    before = _locks(context.project, old)
    if not new:
        if before is None or before.name == HERE:
            told = f"{old!r} is no git revision, and only one can be compared with the working tree"
            raise UsageError(told, hint=f"Name two sides. {FORMS}")
        after: _Locks | None = _Locks(name=HERE, locks=_in_tree(context.project))
    else:
        after = _locks(context.project, new)
    if before and after and not before.cell and not after.cell:
        return diff.compare_all(before.name, before.locks, after.name, after.locks)
    known = diff.sizes(_in_tree(context.project).values()) if before is None or after is None else {}
    # Images first: a word that names nothing at all is the better thing to be told of.
    images = {word: _image(context, word, known) for word, found in ((old, before), (new, after)) if found is None}
    sides = [
        _cell(found, other) if found else images[word]
        for word, found, other in ((old, before, after), (new, after, before))
    ]
    return diff.compare(*sides)


def _cell(found: _Locks, other: _Locks | None) -> Side:
    """One cell of a revision; of a revision as a whole, it is the cell that the other side is about."""
    cell = found.cell or (other.cell if other else "")
    if not cell:
        raise UsageError(
            f"{found.name} has many cells, and an image is compared with one", hint=f"Write {found.name}:cell-id."
        )
    if cell not in found.locks:
        raise UsageError(f"{found.name} has no lock of {cell}{nearest(cell, found.locks)}")
    return diff.of_lock(found.locks[cell], f"{cell} ({found.name})")


def _image(context: Context, name: str, known: Mapping[str, int]) -> Side:
    lent, store = host.read(), context.store
    with store.used():
        try:
            source = publishing.source(context, store, lent, name)
        except UsageError as error:
            raise UsageError(f"{name!r} is no cell, no git revision and no image: {error}", hint=FORMS) from error
        manifest = source.manifest()
        return diff.of_image(name, manifest, source.read_blob(diff.config_of(name, manifest)), known)


# ---- locks of the working tree and of git revisions


def _locks(project: Project, word: str) -> _Locks | None:
    """What a word names, None if that is no cell and no revision."""
    if cells.ID.fullmatch(word):
        return _Locks(name=HERE, locks=_in_tree(project), cell=word)
    revision, _, cell = word.rpartition(":")
    if revision and cells.ID.fullmatch(cell):
        if not _commit(project.root, revision):
            raise UsageError(f"git knows no revision {revision!r}", hint="`git log --oneline` lists them.")
        return _Locks(name=revision, locks=_at(project.root, revision), cell=cell)
    return _Locks(name=word, locks=_at(project.root, word)) if _commit(project.root, word) else None


def _in_tree(project: Project) -> dict[str, Lock]:
    names = [path.stem for path in sorted((project.root / "locks").glob("*.json"))]
    return {name: found for name in names if (found := lock.read(project.root, name))}


def _at(root: Path, revision: str) -> dict[str, Lock]:
    """The locks that a revision has."""
    listed = _git(root, "ls-tree", "-z", "--name-only", _commit(root, revision), "locks/")
    result = {}
    for path in sorted(PurePosixPath(name) for name in listed.split("\0") if name.endswith(".json")):
        text = _git(root, "show", f"{revision}:./{path}")
        try:
            result[path.stem] = _LOCK.validate_json(text)
        except ValidationError as error:
            told = error.errors(include_url=False)[0]["msg"]
            raise LockError(f"{revision}:{path} is no lock that this builder reads: {told}") from error
    return result


def _commit(root: Path, revision: str) -> str:
    """The commit that a word stands for in git, empty for none."""
    if not revision or revision.startswith("-"):
        return ""
    return _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", fails="").strip()


def _git(root: Path, *arguments: str, fails: str | None = None) -> str:
    """What git prints; `fails` is returned instead if it refuses."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, encoding="utf-8", check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except FileNotFoundError:
        if fails is not None:
            return fails
        raise UsageError("revisions cannot be compared without git", hint="Install it: apt-get install git") from None
    if done.returncode == 0:
        return done.stdout
    if fails is not None:
        return fails
    raise UsageError(f"git {arguments[0]}: {done.stderr.strip()[:500]}")


# ---- what is shown


def _show_all(context: Context, found: Revisions) -> None:
    for name, one in found.changed.items():
        context.out.print(Text(name, style="bold"))
        _show(context, one, indent=2)
        context.out.print()
    for word, sides in (("added", found.added), ("removed", found.removed)):
        for side in sides:
            context.out.print(Text(f"{word}: {side.label}, {len(side.packages)} packages, {size(side.bytes)}"))
    counts = ((len(found.changed), "changed"), (len(found.added), "added"), (len(found.removed), "removed"))
    told = ", ".join(f"{count} {word}" for count, word in (*counts, (found.unchanged, "as before")) if count)
    context.out.print(Text(f"{found.old} -> {found.new}: cells: {told or 'none'}"), soft_wrap=True)


def _show(context: Context, found: Diff, indent: int = 0) -> None:
    if found.changes:
        context.out.print(_table(found.changes, indent))
    for line in _closing(found):
        context.out.print(Text(" " * indent + line), soft_wrap=True)


def _table(changes: Iterable[Change], indent: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    if indent:
        table.add_column("", width=indent - 2)
    table.add_column("PACKAGE", no_wrap=True)
    table.add_column("OLD", overflow="fold")
    table.add_column("NEW", overflow="fold")
    table.add_column("OLD SIZE", justify="right", no_wrap=True)
    table.add_column("NEW SIZE", justify="right", no_wrap=True)
    table.add_column("CHANGE", justify="right", no_wrap=True)
    for change in changes:
        old, new = (one.version if one else "-" for one in (change.old, change.new))
        new += f" ({change.kind})" if change.kind.startswith("other") else ""
        texts = [change.name, old, new, _size(change.old), _size(change.new), _signed(change.difference)]
        table.add_row(*([""] if indent else []), *map(Text, texts))
    return table


def _closing(found: Diff) -> list[str]:
    old, new = found.old, found.new
    alike = old.of == new.of  # an image weighs more than its wheels: not to be subtracted from each other
    sums = (
        f"{new.of}: {size(old.bytes)} -> {size(new.bytes)} ({_signed(new.bytes - old.bytes)})"
        if alike
        else f"{size(old.bytes)} of {old.of} -> {size(new.bytes)} of {new.of}"
    )
    return [
        f"packages: {len(old.packages)} -> {len(new.packages)}, {found.unchanged} the same; {sums}",
        f"{found.unit} that stay: {_amount(found.stays)}; to be fetched: {_amount(found.fetched)}; "
        f"no longer used: {_amount(found.gone)}",
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
