"""The command diff."""

from __future__ import annotations

import click

from builder.cli.context import Context
from builder.steps.diff import compare_revisions


@click.command(name="diff")
@click.argument("old", metavar="A")
@click.argument("new", metavar="[B]", default="")
@click.pass_obj
def diff_command(context: Context, old: str, new: str) -> None:
    """Show the locked packages that changed from A to B.

    A and B are git revisions. Without B, compares A with the working tree.

    \b
    builder diff HEAD         what an edit of matrix.yaml or `builder lock` changed
    builder diff v1.0 v1.1    two releases of this repository
    """
    for line in compare_revisions(context.project, old, new):
        click.echo(line)
