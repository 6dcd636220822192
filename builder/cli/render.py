"""The command render. Apart from the command lock, so that neither imports what only the other one needs."""

from __future__ import annotations

from collections.abc import Sequence

import click

from builder.cli.context import Context
from builder.cli.options import ALL_CELLS_HELP, cells_argument
from builder.common.errors import StaleError
from builder.common.lock_text import KNOWN_LAYERS
from builder.common.text import counted
from builder.layers import known_layers
from builder.plan import budget, plan, render


@click.command(name="render", epilog=ALL_CELLS_HELP)
@cells_argument
@click.option("--check", is_flag=True, help="Fail if images/ is out of date; write nothing.")
@click.pass_obj
def render_command(context: Context, patterns: Sequence[str], check: bool) -> None:
    """Write images/ from templates/ and locks/.

    Writes a readable Dockerfile for every cell, which plain `docker build` can build. Without CELLS, also removes files
    of cells that are no longer in the matrix.
    """
    project = context.project
    chosen = project.select(patterns or ("*",))
    planned = plan.make_locked_plan(project, chosen)
    budget.check_plan(project.matrix, planned.images)
    files = render.render(project.root, project.matrix, planned)
    inputs = {layer.inputs for image in planned.images for layer in image.layers}
    if check:
        render.check_rendered(project.root, files, [cell.id for cell in chosen] if patterns else None)
        if not patterns and known_layers.prune(project.root, inputs, check=True):
            raise StaleError(f"{KNOWN_LAYERS} has layers that no image has", hint="Update it: builder render")
        context.say(f"images/ is up to date ({counted(len(files), 'file')})")
        return
    with context.locked(project, "render"):
        changed = render.write_rendered(project.root, files, is_part=bool(patterns))
        if not patterns and known_layers.prune(project.root, inputs):
            changed.append(f"{KNOWN_LAYERS} (without layers that no image has)")
    context.say_written(changed)
    context.say(f"{counted(len(files), 'file')}, {len(changed)} changed")
