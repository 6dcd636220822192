"""The command lock."""

from __future__ import annotations

from collections.abc import Sequence

import click

from builder.cli.context import Context
from builder.cli.options import CELLS_HELP, cells_argument
from builder.common.units import counted
from builder.index import host
from builder.lock import update as locking


@click.command(name="lock", epilog=CELLS_HELP.replace("the set `default`", "all cells"))
@cells_argument
@click.option(
    "--check", is_flag=True, help="Only check that the locks match matrix.yaml; use no network, write nothing."
)
@click.option("--upgrade", is_flag=True, help="Choose the newest versions. Default: keep the locked versions.")
@click.pass_obj
def lock_command(context: Context, patterns: Sequence[str], check: bool, upgrade: bool) -> None:
    """Choose the exact wheels of CELLS, and write them to locks/.

    Queries the package index. Run `builder render` afterwards, to update images/.
    """
    project = context.project
    chosen = project.select(patterns or ("*",))
    if check:
        locking.check(project, chosen)
        context.say(f"{counted(len({cell.group for cell in chosen}), 'lock')} up to date")
        return
    with context.locked(project, "lock"):
        changed = locking.update(project, chosen, host.read(), upgrade=upgrade, say=context.say)
    context.say_written(changed)
    if not changed:
        context.say(f"all locks unchanged{'' if upgrade else '; --upgrade chooses newer versions'}")
