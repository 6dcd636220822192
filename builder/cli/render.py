"""The command render."""

from __future__ import annotations

import click

from builder.cli.context import Context
from builder.common.units import counted
from builder.layers import known_layers
from builder.lock.document import KNOWN_LAYERS
from builder.plan import plan, render


@click.command(name="render")
@click.option("--check", is_flag=True, help="Fail if images/ is out of date; write nothing.")
@click.pass_obj
def render_command(context: Context, check: bool) -> None:
    """Write images/ from templates/ and locks/.

    Writes a readable Dockerfile for every cell, which plain `docker build` can build.
    """
    project = context.project
    planned = plan.make_locked(project, project.cells)
    files = render.render(project.root, project.matrix, planned)
    if check:
        render.check(project.root, files)
        context.say(f"images/ is up to date ({counted(len(files), 'file')})")
        return
    with context.locked(project, "render"):
        changed = render.write(project.root, files)
        if known_layers.prune(project.root, {layer.inputs for image in planned.images for layer in image.layers}):
            changed.append(f"{KNOWN_LAYERS} (without layers that no image has)")
    context.say_written(changed)
    context.say(f"{counted(len(files), 'file')}, {len(changed)} changed")
