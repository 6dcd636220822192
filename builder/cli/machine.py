"""Commands about this machine: base, engine, doctor, clean, gc."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.table import Table
from rich.text import Text

from builder import base, digest, doctor, engine_setup, errors, host, images
from builder.cli.context import Context
from builder.engine import Engine
from builder.errors import UsageError
from builder.view import size


@click.command(name="base")
@click.argument("release", required=False)
@click.option("--fresh", is_flag=True, help="Make a base that was put together here again, with today's packages.")
@click.pass_obj
def base_command(context: Context, release: str | None, fresh: bool) -> None:
    """Have the base image of a Debian RELEASE in the engine; print its name, for `--build-arg BASE=`."""
    project = context.project
    known = project.matrix.debian
    release = release or next(iter(known))
    if release not in known:
        raise UsageError(f"matrix.yaml has no Debian release {release!r}; it has: {', '.join(known)}")
    with context.alone(project, "base"):
        made = base.ensure(Engine.connect(), project, release, host.read(), context.say, fresh=fresh)
    click.echo(made.reference)


@click.command(name="engine")
@click.pass_obj
def engine_command(context: Context) -> None:
    """Find a Docker Engine; on Debian and Ubuntu, as root, install and start one if none answers."""
    info = engine_setup.ensure(context.say).info()
    context.say(f"engine: Docker Engine {info.version} answers ({info.store})")


@click.command(name="doctor")
@click.pass_obj
def doctor_command(context: Context) -> None:
    """Show what this machine has for building images, and what is missing."""
    findings = doctor.examine(context.project, context.store, context.say)
    table = Table(box=None, show_header=False, pad_edge=False)
    styles = {"ok": "green", "note": "yellow", "missing": "bold red"}
    for finding in findings:
        table.add_row(Text(finding.state, style=styles[finding.state]), finding.name, Text(finding.detail))
    context.out.print(table)
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if missing:
        raise errors.EngineError(f"missing: {', '.join(missing)}")


@click.command(name="clean")
@click.option("--cache", is_flag=True, help="BuildKit's cache too, of all projects on this engine.")
@click.pass_obj
def clean_command(context: Context, cache: bool) -> None:
    """Remove test containers and images of ours that no tag names, and logs; tagged images stay."""
    project = context.project
    with context.alone(project, "clean"):
        freed = images.clean(Engine.connect(), project, cache=cache)
    context.say(freed)


@click.command(name="gc")
@click.option("--dry-run", is_flag=True, help="Only show what would be freed.")
@click.option("--forget", "patterns", multiple=True, metavar="NAME", help="Give up images too; a name or a pattern.")
@click.pass_obj
def gc_command(context: Context, dry_run: bool, patterns: Sequence[str]) -> None:
    """Show what the store holds, and free what none of its images uses.

    An image is used as long as the store has it under its name; one that was built anew gives its name to the new one.
    """
    store = context.store
    store.prepare()
    for pattern in patterns if not dry_run else ():
        names = store.forget(pattern)
        if not names:
            raise UsageError(f"the store has no image {pattern!r}", hint="`builder gc --dry-run` shows its images.")
        context.say(f"given up: {', '.join(names)}")
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("IMAGE", "left"), ("MANIFEST", "left"), ("SIZE", "right"), ("ITS OWN", "right")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for use in store.uses():
        table.add_row(use.name, digest.short(use.manifest), size(use.bytes), size(use.own))
    context.out.print(table)
    freed = store.garbage() if dry_run else store.gc(wait=context.wait)
    context.say(f"store: {store.root}, {size(store.size())}")
    context.say(
        f"{'could free' if dry_run else 'freed'} {size(freed.bytes)}: "
        f"{len(freed.blobs)} blobs of no image, {len(freed.leftovers)} leftovers"
    )
