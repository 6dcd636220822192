"""The command registry."""

from __future__ import annotations

from datetime import UTC, datetime

import click
from rich.text import Text

from builder.cli.context import Context, new_table
from builder.cli.options import staging_option, to_option
from builder.common.console import Meter, View
from builder.common.errors import VerifyError
from builder.common.units import counted
from builder.plan import plan
from builder.registry import inspection, prune, publish
from builder.registry.client import Registry
from builder.registry.inspection import Check
from builder.registry.staging import Place, plan_tag


@click.group(name="registry")
def registry_command() -> None:
    """Inspect the registry, and delete what is not needed."""


@registry_command.command(name="ls")
@staging_option
@click.pass_obj
def list_command(context: Context, place: str) -> None:
    """List the staged releases, the newest first."""
    project = context.project
    table = new_table("RELEASE", "IMAGES", "RELEASED", "REVISION", right=["IMAGES"])
    staging = Place.of(project, place, context.host)
    for stamp in staging.stamps():
        staged, released = staging.read(stamp), staging.released(stamp)
        state = "yes" + "".join(f", {name} allowed" for name in released.allowed) if released else "no"
        table.add_row(*map(Text, [stamp, str(len(staged.images)), state, staged.revision or "-"]))
    context.out.print(table)


@registry_command.command(name="diff")
@to_option
@click.pass_obj
def diff_command(context: Context, registry: str) -> None:
    """Compare the tags of the matrix with those in the registry.

    Shows tags that no cell has, such as those of a version that was removed, and tags that are not published yet.
    """
    publish.require_registry(context.project, registry)
    for reference, expected in inspection.references(context.project, registry).items():
        repository = Registry(reference, host=context.host, write=False)
        present = repository.list_tags()
        for tag in inspection.unknown_tags(present, expected):
            context.out.print(Text(f"{repository.name}:{tag} is not in the matrix"), soft_wrap=True)
        missing = f"{len(expected.difference(present))} of {counted(len(expected), 'tag')} not published"
        context.out.print(Text(f"{repository.name}: {missing}"), soft_wrap=True)


@registry_command.command(name="check")
@staging_option
@to_option
@click.option("--fast", is_flag=True, help="Only check that each blob exists; do not download it to compare its hash.")
@click.pass_obj
def check_command(context: Context, place: str, registry: str, fast: bool) -> None:
    """Check everything in the registry that is in use.

    That is what tags and staged releases lead to: manifests, blobs, and what is attached to images.

    Downloads every blob to compare its hash: a registry may return damaged data without an error. Fails if anything is
    missing or damaged.
    """
    project = context.project
    staging = Place.if_set(project, place, context.host)
    repositories = inspection.repositories(project, context.host, staging, registry)
    staged = inspection.staged_images(staging) if staging else {}
    view, faults = View(context.err), 0
    with view.live():
        for each in repositories:
            also = sorted(staged.get(each.name, ()))
            check = Check(registry=each, also=also, fast=fast, read=Meter(view, each.name, "read", 0).add)
            view.begin(each.name, "checking")
            for fault in check.faults():
                context.out.print(Text(fault), soft_wrap=True)
                faults += 1
            done = f"{counted(len(check.blobs), 'blob')} {'present' if fast else 'checked'}"
            view.end(each.name, "done", done)
    if faults:
        raise VerifyError(
            f"{counted(faults, 'fault')} in the registry",
            hint="Stage or push the images again. First remove damaged data from the registry's storage: a push does "
            "not replace it (docs/publish.md).",
        )


@registry_command.command(name="prune")
@staging_option
@to_option
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of newest staged releases to keep, besides those that are needed.",
)
@click.option("--delete", is_flag=True, help="Delete what is listed. Without this option, nothing is changed.")
@click.pass_obj
def prune_command(context: Context, place: str, registry: str, keep: int, delete: bool) -> None:
    """List what is not needed in staging; with --delete, delete it.

    Keeps the newest staged releases; for each public tag without a stamp, the newest release that contains its image;
    images of this checkout's plan; images with tags of other tools; images that were tested, or staged with
    --images-only, less than 7 days ago, or whose results cannot be read; and the records of what was published. The
    rest of staging is not needed: releases, their images and attachments. If a release
    cannot be read, nothing is deleted.

    In the public repositories, only attachments of images that no longer exist are deleted. Public image tags are never
    deleted: stamped tags never move, and users may depend on them.

    Run it when no job stages, tests or releases images. docs/registries.md describes how the registry frees the space.
    """
    project = context.project
    publish.require_registry(project, registry)
    settings, view = context.host, View(context.err)
    public = inspection.repositories(project, settings, None, registry)
    plans = [plan_tag(image.digest) for image in plan.make(project, project.cells).images]
    with view.live():
        contents = prune.read(Place.of(project, place, settings), public, plans, keep, view)
    items = prune.unneeded(contents, keep, datetime.now(UTC))
    for item in items:
        context.out.print(Text(str(item)), soft_wrap=True)
    if not items:
        context.say("nothing to delete")
    elif not delete:
        context.say(f"not needed: {prune.summary(items)}")
        context.say("Run again with --delete to delete them.")
    else:
        with view.live():
            deleted = prune.delete(items, view)
        context.say(f"{counted(deleted, 'manifest')} deleted")
