"""The command catalog."""

from __future__ import annotations

from collections.abc import Sequence

import click

from builder.cli.context import Context
from builder.cli.options import ALL_CELLS_HELP, cells_argument, format_option
from builder.common.errors import for_cells
from builder.release.staging import StagingArea
from builder.steps.catalog import TEMPLATES, make_catalog, render_catalog


@click.command(name="catalog", epilog=ALL_CELLS_HELP)
@cells_argument
@format_option(
    "markdown: for a wiki. html: one page. kubespawner: values for the chart of Zero to JupyterHub, with a profile for "
    "each Jupyter image.", *TEMPLATES
)  # fmt: skip
@click.pass_obj
def catalog_command(context: Context, /, patterns: Sequence[str], form: str) -> None:
    """List the released images: contents, tests, support.

    Run it in a checkout of the commit that was released: its locks name the contents. Only images that the registry
    has exactly as locked get a command that pulls them, and a profile; with `evidence` in matrix.yaml, a signer that it
    lists must have signed them. `builder status --format json` has the data for scripts.
    """
    project = context.project
    chosen = project.select(patterns or ("*",))
    images = make_catalog(context.run(project), chosen, StagingArea.of(project, context.host))
    listed = {image.cell for image in images}
    if unlocked := [cell.id for cell in chosen if cell not in listed]:
        context.say(f"left out, not locked: {', '.join(unlocked)}   ({for_cells('builder lock', unlocked)})")
    click.echo(render_catalog(project, images, form, context.today), nl=False)
