"""The command render. Apart from the command lock, so that neither imports what only the other one needs."""

from __future__ import annotations

from collections.abc import Sequence

import click

from builder.cli.context import Context
from builder.cli.options import ALL_CELLS_HELP, cells_argument
from builder.common.text import counted
from builder.steps.render import render_images


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
    chosen, is_part = project.select(patterns or ("*",)), bool(patterns)
    if check:
        count, _ = render_images(project, chosen, is_part=is_part, check=True)
        context.say(f"images/ is up to date ({counted(count, 'file')})")
        return
    with project.locked("builder render"):
        count, changed = render_images(project, chosen, is_part=is_part)
    context.say_written(changed)
    context.say(f"{counted(count, 'file')}, {len(changed)} changed")
