"""The command engine, and the engine of the commands that need one."""

from __future__ import annotations

import click

from builder.build.work import Work
from builder.cli.context import Context
from builder.common.console import View
from builder.engine import setup
from builder.engine.client import Engine
from builder.matrix.project import Project

start_option = click.option(
    "--start-engine",
    is_flag=True,
    help="If no Docker Engine is running, install and start one first, as `builder engine` does. Default: fail.",
)


@click.command(name="engine")
@click.pass_obj
def engine_command(context: Context) -> None:
    """Find a running Docker Engine, or install one.

    If no engine is running, installs and starts one (only on Debian and Ubuntu, and only as root). Never changes a
    running engine.
    """
    info = setup.ensure(context.say).info()
    context.say(f"engine: Docker Engine {info.version} is running ({info.store})")


def connect(context: Context, project: Project, *, start: bool = False) -> Work:
    """What a build needs, with a running engine. With `start`, installs and starts one if necessary."""
    engine = setup.ensure(context.say) if start else Engine.connect()
    return Work(engine=engine, project=project, host=context.host, view=View(context.err))
