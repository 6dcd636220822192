"""The commands about this machine: doctor, gc, engine."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.text import Text

from builder.build import doctor
from builder.cli.context import Context
from builder.common.console import View
from builder.common.errors import EngineError, FetchError, UsageError
from builder.common.files import short_digest
from builder.common.text import counted, size
from builder.engine import setup
from builder.layers import garbage, stored_images
from builder.matrix import tags


@click.command(name="doctor")
@click.pass_obj
def doctor_command(context: Context) -> None:
    """Check whether this machine can build images.

    Shows what is present (ok), what is absent but only some tasks need (note), and what is absent and every build needs
    (missing).
    """
    styles = {"ok": "green", "note": "yellow", "missing": "bold red"}
    checks = list(doctor.examine(context.run(context.find_project(ignore_invalid=True))))
    width = max(len(name) for name, _, _ in checks)
    for name, state, detail in checks:
        text = Text(f"{state:<7}", style=styles[state])
        indented = detail.replace("\n", "\n" + " " * (width + 11))
        context.out.print(text, Text(f"  {name:<{width}}  {indented}"), sep="", soft_wrap=True)
    if missing := [name for name, state, _ in checks if state == "missing"]:
        kind = FetchError if all(name.startswith("index") for name in missing) else EngineError
        raise kind(f"missing: {', '.join(missing)}")


@click.command(name="gc")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted; write nothing.")
@click.option(
    "--forget",
    "patterns",
    multiple=True,
    metavar="NAME",
    help="Also delete these images. NAME is a tag, a cell id, or a pattern; the option can be repeated.",
)
@click.pass_obj
def gc_command(context: Context, dry_run: bool, patterns: Sequence[str]) -> None:
    """Show the images in the store, and delete unused blobs.

    Blobs are files of the store: layers, configurations and manifests. SIZE is the size of an image, UNIQUE the
    part that no other image shares. A name ends with `.untested` until the image has passed its tests. If an image is
    incomplete, nothing is deleted.
    """
    store = context.store
    store.require()
    # Every pattern is checked before anything is changed. The order is that of the patterns.
    stored = store.images()
    project = context.find_project(ignore_invalid=True) if patterns else None
    references = tags.local_names(project.matrix, project.cells) if project else {}
    forgotten: dict[str, None] = {}
    for pattern in patterns:
        matches = stored_images.match_names(stored, pattern, references)
        if not matches:
            raise UsageError(f"the store has no image {pattern!r}", hint="`builder gc --dry-run` lists its images.")
        forgotten |= dict.fromkeys(matches)
    names = list(forgotten)
    freed = garbage.find_garbage(store, without=names) if dry_run else garbage.remove_garbage(store, without=names)
    would = "would be " if dry_run else ""
    for name in names:
        context.say(f"{would}removed: {name}")
    uses = garbage.image_uses(store, without=names)
    rows = [(use.name, short_digest(use.manifest), size(use.bytes), size(use.own)) for use in uses]
    context.print_table(("IMAGE", "MANIFEST", "SIZE", "UNIQUE"), rows, right=("SIZE", "UNIQUE"))
    context.say(f"store: {store.root}, {size(store.size())}")
    if freed.packages:
        kept = counted(len(freed.packages), "Debian package")
        context.say(
            f"kept, to make the operating systems of these images again: {kept}, {size(sum(freed.packages.values()))}"
        )
    parts = f"{counted(len(freed.blobs), 'unused blob')}, {counted(len(freed.leftovers), 'leftover')}"
    context.say(f"{would}freed: {size(freed.bytes)} ({parts})")


@click.command(name="engine")
@click.pass_obj
def engine_command(context: Context) -> None:
    """Find a running Docker Engine, or install one.

    If no engine is running, installs and starts one (only on Debian and Ubuntu, and only as root). Never changes a
    running engine.
    """
    info = setup.ensure(View(context.err)).info()
    context.say(f"engine: {info.name} {info.version} is running ({info.store})")
