"""The command upstream."""

from __future__ import annotations

import click

from builder.cli.context import Context
from builder.cli.options import format_option
from builder.compat import upstream
from builder.compat.explain import Explainer
from builder.index.releases import Index
from builder.lock.resolve import Resolver
from builder.matrix import facts
from builder.matrix.cells import Cell
from builder.matrix.schema import Matrix


@click.command(name="upstream")
@format_option("json: all details, for scripts.")
@click.pass_obj
def upstream_command(context: Context, form: str) -> None:
    """Propose newer releases of the frameworks for matrix.yaml.

    Queries the package index for the newest stable release of each line of matrix.yaml, and for newer lines. For a new
    line, proposes the CUDA and Python versions of matrix.yaml that work with it: the first variant of each is resolved
    to wheels. The output can be pasted into matrix.yaml. Nothing is written.
    """
    project, settings = context.project, context.host

    def reason(matrix: Matrix, cell: Cell) -> str:
        context.say(f"{cell.group}: resolving {cell.release}")
        return Resolver(project, settings, matrix=matrix, say=context.say).reason(cell)

    explainer = Explainer(
        matrix=project.matrix,
        known=project.cells,
        catalogue=Index(settings.index),
        facts=facts.load(),
        resolve=reason,
    )
    proposals = list(upstream.propose(explainer))
    if form == "json":
        context.print_json([proposal.as_data() for proposal in proposals])
        return
    for proposal in proposals:
        click.echo("\n".join(proposal.lines))
    if not proposals:
        click.echo("all frameworks are at their newest releases")
