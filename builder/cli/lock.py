"""The commands lock and render."""

from __future__ import annotations

from collections.abc import Sequence

import click

from builder.cli.context import Context
from builder.cli.options import ALL_CELLS_HELP, cells_argument
from builder.common.errors import StaleError, for_cells
from builder.common.text import counted
from builder.layers import known_layers
from builder.lock import os_lock
from builder.lock import update as locking
from builder.lock.lockfile import KNOWN_LAYERS
from builder.plan import plan, render


@click.command(name="lock", epilog=ALL_CELLS_HELP)
@cells_argument
@click.option(
    "--check", is_flag=True, help="Only check that the locks match matrix.yaml; use no network, write nothing."
)
@click.option("--upgrade", is_flag=True, help="Choose the newest wheels. Default: keep the locked versions.")
@click.option(
    "--os", "refresh", is_flag=True, help="Choose the newest Debian packages. Default: keep the locked versions."
)
@click.pass_obj
def lock_command(context: Context, patterns: Sequence[str], check: bool, upgrade: bool, refresh: bool) -> None:
    """Choose the exact wheels and Debian packages of CELLS.

    Writes them to locks/. Queries the package index for wheels, and Debian's archives for packages, with apt. Run
    `builder render` afterwards, to update images/.

    \b
    builder lock                  lock what is new or out of date; keep all other versions
    builder lock --os '*-jupyter' update the Debian packages of the images with Jupyter
    """
    project = context.project
    chosen = project.select(patterns or ("*",))
    if check:
        locking.check_locks(project, chosen)
        systems = {os_lock.request_of_cell(project.matrix, cell) for cell in chosen}
        context.say(f"{counted(len({cell.group for cell in chosen}) + len(systems), 'lock')} up to date")
        return
    with context.locked(project, "lock"):
        changed = locking.update(project, chosen, context.host, upgrade=upgrade, refresh=refresh, say=context.say)
    context.say_written(changed)
    if not changed:
        hints = [] if upgrade else [f"`{for_cells('builder lock --upgrade', patterns)}` chooses newer wheels"]
        hints += [] if refresh else [f"`{for_cells('builder lock --os', patterns)}` chooses newer Debian packages"]
        context.say("; ".join(["all locks unchanged", *hints]))


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
    files = render.render(project.root, project.matrix, planned)
    inputs = {layer.inputs for image in planned.images for layer in image.layers}
    if check:
        render.check_rendered(project.root, files, [cell.id for cell in chosen] if patterns else ())
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
