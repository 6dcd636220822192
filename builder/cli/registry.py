"""The command registry."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click
from rich.text import Text

from builder.cli.context import Context, new_table
from builder.cli.options import format_option, staging_option, to_option
from builder.common.console import Meter, View
from builder.common.errors import VerifyError
from builder.common.text import counted
from builder.plan import plan
from builder.registry.client import Repository
from builder.release import inspection, prune, publish
from builder.release.inspection import RepositoryCheck
from builder.release.staging import StagingArea, plan_tag


@click.group(name="registry")
def registry_command() -> None:
    """Inspect the registry, and delete what is not needed."""


@registry_command.command(name="ls")
@staging_option
@format_option()
@click.pass_obj
def list_command(context: Context, place: str, form: str) -> None:
    """List the staged releases, the newest first."""
    project = context.project
    area = StagingArea.of(project, place, context.host)
    releases = [(area.read(stamp), area.released(stamp)) for stamp in area.stamps()]
    if form == "json":
        context.print_json(
            [staged.model_dump() | {"released": released and released.model_dump()} for staged, released in releases]
        )
        return
    table = new_table("RELEASE", "IMAGES", "RELEASED", "REVISION", right=["IMAGES"])
    for staged, released in releases:
        state = "yes" + "".join(f", {name} allowed" for name in released.allowed) if released else "no"
        table.add_row(*map(Text, [staged.stamp, str(len(staged.images)), state, staged.revision or "-"]))
    context.out.print(table)


@registry_command.command(name="diff")
@staging_option
@to_option
@format_option()
@click.pass_obj
def diff_command(context: Context, place: str, registry: str, form: str) -> None:
    """Compare the tags of the matrix with those in the registry.

    Shows tags that no cell has, such as those of a version that was removed, and tags that are not published yet. With
    staging, also shows tags with a stamp that no release set: `builder release` records each image that it publishes.
    """
    project = context.project
    publish.require_registry(project, registry)
    area = StagingArea.if_set(project, place, context.host)
    recorded = inspection.recorded_tags(area) if area else None
    full = inspection.full_tags(project)
    results = []
    for reference, expected in inspection.references(project, registry).items():
        own = {each.tag for each in full if each.repository == reference.repository}
        repository = Repository(reference, host=context.host, write=False)
        comparison = inspection.compare_tags(repository, expected, own, recorded)
        results.append(asdict(comparison))
        if form == "json":
            continue
        lines = [f"{comparison.repository}:{tag} is not in the matrix" for tag in comparison.unknown]
        lines += [f"{comparison.repository}:{tag} was not set by a recorded release" for tag in comparison.unreleased]
        lines.append(
            f"{comparison.repository}: {len(comparison.missing)} of {counted(len(expected), 'tag')} not published"
        )
        for line in lines:
            context.out.print(Text(line), soft_wrap=True)
    if form == "json":
        context.print_json(results)


@registry_command.command(name="check")
@staging_option
@to_option
@click.option("--fast", is_flag=True, help="Only check that each blob exists; do not download it to compare its hash.")
@format_option()
@click.pass_obj
def check_command(context: Context, place: str, registry: str, fast: bool, form: str) -> None:
    """Check everything in the registry that is in use.

    That is what tags and staged releases lead to: manifests, blobs, and what is attached to images.

    Downloads every blob to compare its hash: a registry may return damaged data without an error. Fails if anything is
    missing or damaged, and if nothing is staged.
    """
    project = context.project
    area = StagingArea.if_set(project, place, context.host)
    repositories = inspection.repositories(project, context.host, area, registry)
    inspection.require_contents(repositories, area)
    staged = inspection.staged_images(area) if area else {}
    view = View(context.err)
    results: list[dict[str, Any]] = []
    with view.live():
        for repository in repositories:
            also = sorted(staged.get(repository.name, ()))
            check = RepositoryCheck(
                repository=repository, also=also, fast=fast, read=Meter(view, repository.name, "read", 0).add
            )
            view.begin(repository.name, "checking")
            faults = []
            for fault in check.faults():
                faults.append(fault)
                if form == "text":
                    context.out.print(Text(fault), soft_wrap=True)
            done = f"{counted(len(check.blobs), 'blob')} {'present' if fast else 'checked'}"
            view.end(repository.name, "done", done if check.manifests else "nothing there")
            results.append(
                {"repository": repository.name, "blobs": len(check.blobs), "hashed": not fast, "faults": faults}
            )
    if form == "json":
        context.print_json(results)
    if count := sum(len(each["faults"]) for each in results):
        raise VerifyError(
            f"{counted(count, 'fault')} in the registry",
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
@format_option()
@click.pass_obj
def prune_command(context: Context, place: str, registry: str, keep: int, delete: bool, form: str) -> None:
    """List what is not needed in staging; with --delete, delete it.

    Keeps the newest staged releases; for each public tag without a stamp, the newest release that contains its image;
    images of this checkout's plan; images with tags of other tools; images that were tested, or staged with
    --images-only, less than 7 days ago, or whose results cannot be read; and the records of what was published. The
    rest of staging is not needed: releases, their images and attachments. If a release
    cannot be read, nothing is deleted.

    In the public repositories, only attachments of images that no longer exist are deleted. Public image tags are never
    deleted: stamped tags never move, and users may depend on them.

    Run it when no job stages, tests or releases images. docs/registries.md describes how the registry frees the space,
    and how to delete what is listed on ghcr.io, which allows no deletion.
    """
    project = context.project
    publish.require_registry(project, registry)
    settings, view = context.host, View(context.err)
    public = inspection.repositories(project, settings, None, registry)
    plans = [plan_tag(image.plan) for image in plan.make_plan(project, project.cells).images]
    with view.live():
        contents = prune.read_registries(StagingArea.of(project, place, settings), public, plans, keep, view)
    items = prune.unneeded(contents, keep, datetime.now(UTC))
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
        context.say(f"not needed: {prune.summary(items)}")
        context.say("Run again with --delete to delete them.")
