"""The command refresh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from builder.cli import engine, images, lock, release, render
from builder.cli.context import Context
from builder.cli.options import CELLS_HELP, cells_argument, jobs_option, sign_option, staging_option
from builder.common import git
from builder.common.units import counted
from builder.plan import plan, revisions, shards


@click.command(name="refresh", epilog=CELLS_HELP)
@cells_argument
@jobs_option
@images.gpu_option
@engine.start_option
@staging_option
@sign_option
@click.pass_context
def refresh_command(
    click_context: click.Context, /, patterns: Sequence[str], place: str, signer: Any, **options: Any
) -> None:
    """Apply Debian security updates: lock, build, test and stage.

    Locks the newest Debian packages of CELLS and renders their Dockerfiles. Then builds and tests the images that
    differ from the last commit (without git: that this command changed), and stages them if `staging` is set in
    matrix.yaml. Only the layers of the operating system change. Images whose packages have not changed are not rebuilt.

    If a test fails, restore the earlier packages with `git restore locks images`, which also discards your other
    uncommitted changes there.
    """
    context: Context = click_context.obj
    project = context.project
    chosen = project.select(patterns)
    revision = "HEAD" if git.commit(project.root, "HEAD") else ""
    if revision:
        before = revisions.digests(project, revision, context.say)
    else:
        before = {image.id: image.digest for image in plan.make(project, project.cells).images}
    click_context.invoke(lock.lock_command, patterns=[cell.id for cell in chosen], refresh=True)
    click_context.invoke(render.render_command)
    project = context.project  # its locks are new
    changed = shards.changed(before, plan.make_locked(project, project.cells).images)
    ids = {cell.id for cell in chosen}
    affected = [image.id for image in changed if image.id in ids]
    if others := len(changed) - len(affected):
        context.say(f"{counted(others, 'image')} outside the selection also changed: run `builder refresh '*'`")
    if not affected:
        context.say("no image changed")
        return
    click_context.invoke(images.images_command, patterns=affected, **options)
    if place or project.matrix.staging:
        click_context.invoke(release.stage_command, patterns=affected, place=place, signer=signer)
