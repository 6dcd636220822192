"""The command catalog."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from builder.cli.context import Context
from builder.cli.options import ALL_CELLS_HELP, cells_argument, format_option, staging_option, to_option
from builder.common.console import View
from builder.common.files import write_atomically
from builder.common.text import counted
from builder.release import publish
from builder.release.staging import StagingArea
from builder.steps.catalog import make_catalog, render_catalog


@click.command(name="catalog", epilog=ALL_CELLS_HELP)
@cells_argument
@staging_option
@to_option
@click.option("--here", is_flag=True, help="Look only at this machine, not at staging and the registry.")
@format_option(
    "markdown: for a wiki or a repository. html: one page with a search, in one file. json: all facts, for scripts. "
    "kubespawner: values for the chart of Zero to JupyterHub, with a profile for each Jupyter image.",
    "markdown", "html", "json", "kubespawner",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write this file. Default: standard output."
)  # fmt: skip
@click.pass_obj
def catalog_command(
    context: Context, /, patterns: Sequence[str], place: str, registry: str, here: bool, form: str, output: Path | None
) -> None:
    """List the images for their users: contents, tests, support.

    For each image: the command that pulls it, framework, CUDA, Python and main packages, size, GPUs and oldest driver,
    test results with their dates and GPUs, end of support, who signed it and the command that checks that, and what
    changed since the release before. A fact that is unknown is named as such.

    Contents are those of this checkout's locks. If the tag in the registry names another image, the entry says so: run
    it in a checkout of the commit that was released. Only images that the registry has exactly as described get a
    command that pulls them, and a profile; with `evidence` in matrix.yaml, a signer that it lists must have signed
    them. Test results count as for `builder status`: those of staging, the registry and this machine. Releases are
    those of the tags with a stamp.

    \b
    Examples:
      builder catalog --format html -o catalog.html        a page of all images
      builder catalog 'pt-*' --here                        of PyTorch, without the network
      builder catalog all --format kubespawner             profiles for a JupyterHub
    """
    project, view = context.project, View(context.err)
    if form == "kubespawner":
        publish.require_registry(project, registry)
    area = None if here else StagingArea.if_set(project, place, context.host)
    chosen = project.select(patterns or ("*",))
    with view.live():
        view.begin("catalog", f"reading {counted(len(chosen), 'image')}")
        content = make_catalog(
            project, context.host, context.store, chosen, area, registry=registry, here=here, today=context.today
        )
        view.end("catalog", "done", counted(len(content.images), "image"))
    text = render_catalog(project, content, form)
    if output:
        write_atomically(output, text)
    else:
        click.echo(text, nl=False)
    context.say_support(project, chosen)
