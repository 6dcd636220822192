"""The command scan."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.text import Text

from builder.cli.context import Context, new_table
from builder.cli.options import ALL_CELLS_HELP, cells_argument, format_option, sign_option, to_option
from builder.common.errors import RefusedError, UsageError
from builder.common.units import counted
from builder.plan import plan
from builder.registry import scan
from builder.registry.scan_results import Scanned, Scanner
from builder.registry.signing import Signer

_COUNTS = ("critical", "high", "medium", "low", "unknown", "excepted")


@click.command(name="scan", epilog=ALL_CELLS_HELP)
@cells_argument
@to_option
@sign_option
@format_option("json: print the results to standard output.")
@click.pass_obj
def scan_command(context: Context, patterns: Sequence[str], registry: str, signer: Signer | None, form: str) -> None:
    """Scan released images for vulnerabilities.

    Runs the scanner of `scan` in matrix.yaml on the SBOM of each image that a full tag names, and attaches the result
    to the image. Fails if an image has vulnerabilities that `scan` refuses, or if a scan fails.
    """
    project = context.project
    scanner = Scanner(project, context.host, registry, signer)
    rows = list(scanner.scan(plan.make(project, project.select(patterns or ("*",))).images))
    if not rows:
        raise UsageError("none of these images is released", hint="builder status shows which are.")
    if form == "json":
        context.print_json([each.as_data() for each in rows])
    else:
        _show(context, rows)
    for note in scan.unused(scanner.settings, [each.result for each in rows if each.result]):
        context.say(note)
    if failed := [each for each in rows if each.refused or each.failure]:
        raise RefusedError(
            f"{len(failed)} of {counted(len(rows), 'image')} refused or not scanned",
            hint="Update the packages and release again, or add an exception to `scan` in matrix.yaml. "
            "If a scan failed, correct the error above, then run this again.",
        )


def _show(context: Context, rows: Sequence[Scanned]) -> None:
    table = new_table("CELL", *map(str.upper, _COUNTS), "STATE", right=[name.upper() for name in _COUNTS])
    for each in rows:
        counts = each.result.counts if each.result else {}
        table.add_row(*map(Text, [each.cell, *(str(counts.get(name, "-")) for name in _COUNTS), each.state]))
    context.out.print(table)
    for each in rows:
        for reason in filter(None, [each.failure, *map(str, each.refused)]):
            context.out.print(Text(f"{each.cell}: {reason}"), soft_wrap=True)
