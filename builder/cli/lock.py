"""The command lock."""

from __future__ import annotations

from collections.abc import Sequence

import click

from builder.cli.context import Context
from builder.cli.options import ALL_CELLS_HELP, cells_argument
from builder.common.errors import IncompleteError, UsageError
from builder.common.text import counted
from builder.debian import os_lock
from builder.lock import checks


@click.command(name="lock", epilog=ALL_CELLS_HELP)
@cells_argument
@click.option(
    "--check", is_flag=True, help="Only check that the locks match matrix.yaml; use no network, write nothing."
)
@click.option("--upgrade", is_flag=True, help="Choose the newest wheels. Default: keep the locked versions.")
@click.option(
    "--os", "refresh", is_flag=True, help="Choose the newest Debian packages. Default: keep the locked versions."
)
@click.option(
    "--upgrade-package",
    "packages",
    multiple=True,
    metavar="NAME",
    help="Choose the newest version of this package that fits, in every lock that has it. Other packages change only "
    "if they must. Repeatable.",
)
@click.pass_obj
def lock_command(
    context: Context,
    patterns: Sequence[str],
    check: bool,
    upgrade: bool,
    refresh: bool,
    packages: Sequence[str],
) -> None:
    """Choose the exact wheels and Debian packages of CELLS.

    Writes them to locks/. Queries the package index for wheels, and Debian's archives for packages, with apt. Run
    `builder render` afterwards, to update images/. If some locks fail, the others are written, and the exit code is 18.

    \b
    builder lock                  lock what is new; keep all other versions
    builder lock bookworm --os    update the packages of images on Debian 12
    builder lock 'pt-*' --upgrade-package pillow    for a withdrawn release
    """
    if check and (upgrade or refresh or packages):
        raise UsageError("--check changes no lock", hint="Leave out --check, or --upgrade, --upgrade-package and --os.")
    project = context.project
    chosen = project.select(patterns or ("*",))
    if check:
        checks.check_locks(project, chosen)
        systems = os_lock.requests_of_cells(project.matrix, chosen)
        context.say(f"{counted(len({cell.group for cell in chosen}) + len(systems), 'lock')} up to date")
        return
    # Imported here: these modules load docker-py and others, which `--check` does not need.
    from builder.plan import budget, plan  # noqa: PLC0415
    from builder.steps import lock as locking  # noqa: PLC0415

    with project.locked("builder lock"):
        report = locking.lock(context.run(project), chosen, upgrade=upgrade, refresh=refresh, packages=packages)
    if refresh:
        context.say_support(project, chosen)
    if not isinstance(report.error, IncompleteError):  # it lists them
        context.say_written(report.written)
    if report.error:
        raise report.error
    if not report.written:
        newer = "" if upgrade or refresh else ": --upgrade chooses newer wheels, --os newer Debian packages"
        context.say(f"all locks unchanged{newer}")
    # An image over its budget fails here, before a build.
    budget.check_plan(project.matrix, plan.make_plan(project, chosen).images)
