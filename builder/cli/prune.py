"""The command prune."""

from __future__ import annotations

import click
from rich.text import Text

from builder.cli.context import Context
from builder.cli.options import format_option
from builder.common.console import View
from builder.common.reference import ImageRef
from builder.common.text import counted
from builder.plan import plan
from builder.registry.client import Repository
from builder.release import prune, staging
from builder.release.staging import StagingArea, plan_tag


@click.command(name="prune")
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of newest staged releases to keep, besides those that are needed.",
)
@click.option("--delete", is_flag=True, help="Delete what is listed. Without this option, nothing is changed.")
@format_option()
@click.pass_obj
def prune_command(context: Context, keep: int, delete: bool, form: str) -> None:
    """List what is not needed in staging; with --delete, delete it.

    Keeps the newest staged releases; for each public tag without a stamp, the newest release that contains its image;
    images of this checkout's plan; images with tags of other tools; and the records of what was published. The rest of
    staging is not needed: releases, their images and attachments. If a release cannot be read, nothing is deleted.

    Nothing in the public repositories is deleted: stamped tags never move, and users may depend on them.

    Run it when no job stages, tests or releases images. docs/registries.md describes how the registry frees the space,
    and how to delete what is listed on ghcr.io, which allows no deletion.
    """
    project, view = context.project, View(context.err)
    staging.require_registry(project)
    area = StagingArea.of(project, context.host)
    public = [
        Repository(
            ImageRef(registry=project.matrix.registry, repository=f"{project.matrix.namespace}/{name}"),
            host=context.host,
            write=False,
        )
        for name in project.matrix.image_names
    ]
    plans = [plan_tag(image.plan) for image in plan.make_plan(project, project.cells).images]
    with view.live():
        contents = prune.read_registries(area, public, plans, view)
    items = prune.unneeded(contents, keep)
    if form == "text":
        for item in items:
            context.out.print(Text(str(item)), soft_wrap=True)
    deleted = 0
    if delete and items:
        with view.live():
            deleted = prune.delete(items, view)
    if form == "json":
        context.print_json({"items": [item.as_data() for item in items], "deleted": deleted})
    elif not items:
        context.say("nothing to delete")
    elif delete:
        context.say(f"{counted(deleted, 'manifest')} deleted")
    else:
        context.say(f"not needed: {counted(len(items), 'manifest')}\n  -> Run again with --delete to delete them.")
