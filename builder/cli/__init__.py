"""The `builder` command: reads the command line, calls one step, shows the result."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from builder.cli.commands import COMMANDS, Commands, Group
from builder.cli.options import Size, debug_option
from builder.common import errors
from builder.common.errors import Terminated

if TYPE_CHECKING:
    from builder.cli.context import Context

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
EXIT_CODES = "\n".join(
    f"  {kind.exit_code:>3}  {(kind.__doc__ or '').splitlines()[0].rstrip('.')}" for kind in errors.ALL[1:]
)
EPILOG = f"""\b
Exit codes:
    0  Success, including nothing to do
    1  Internal error (--debug shows the traceback)
{EXIT_CODES}
  {errors.INTERRUPTED}  Interrupted (Ctrl-C); {errors.TERMINATED} terminated
"""


@click.group(cls=Group, commands=Commands(COMMANDS), epilog=EPILOG, context_settings=SETTINGS)
@click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder with matrix.yaml. Default: the current folder, or the nearest parent folder that has one.",
)
@click.option("--wait", is_flag=True, help="If another builder is using this checkout, wait for it instead of failing.")
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="GPU_IMAGES_STORE",
    show_envvar=True,
    help="The store: a folder for layers and images. Default: gpu-images in your cache folder (~/.cache).",
)
@click.option(
    "--store-limit",
    type=Size(),
    default=0,
    envvar="GPU_IMAGES_STORE_LIMIT",
    show_envvar=True,
    help="Maximum size of the store, e.g. 40GB. Default: no limit.",
)
@debug_option
@click.pass_context
def cli(context: click.Context, root: Path | None, wait: bool, store: Path | None, store_limit: int) -> None:
    """Build GPU deep-learning images from matrix.yaml.

    \b
    The steps, in order. Each step reads what the previous ones wrote. A cell is one image of the matrix.
      lock    choose exact wheels and Debian packages   matrix.yaml -> locks/   (queries the index and archives)
      plan    show what would be built                  nothing is written
      render  write a Dockerfile for every cell         locks/, templates/ -> images/
      build   build images, without tests or tags       -> store, Docker
      test    run the tests of built images             -> test results
      images  build, test and tag, in one command       skips what is up to date
      stage   push tested images, with their results    store -> registry, by digest
      release publish what is tested and staged         -> signatures, tags in the registry

    \b
    `test --staged` tests staged images on another machine, such as one with a GPU; `push` publishes without staging;
    `status` shows how far each cell is.

    \b
    To find out more: explain (does a combination work, and if not, why), diff (what changed),
    doctor (can this machine build images). `builder COMMAND --help` describes each command.
    """
    from builder.cli.context import Context  # noqa: PLC0415  takes 0.05 s; --help does not need it

    context.obj = Context(root=root, wait=wait, store_root=store, store_limit=store_limit)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def main(command: click.Command = cli, obj: Context | None = None) -> None:
    """Runs a command, reports any error once, and exits."""
    debug = "--debug" in sys.argv
    signal.signal(signal.SIGTERM, _terminate)
    code = 0
    try:
        # click finds the name of another program, such as `python -m tools.facts`.
        command.main(prog_name="builder" if command is cli else None, standalone_mode=False, obj=obj)
    except (Exception, KeyboardInterrupt, Terminated) as error:  # noqa: BLE001  the last resort
        from builder.cli.report import report  # noqa: PLC0415  only errors need it

        code = report(error, debug=debug)
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (errors.INTERRUPTED, errors.TERMINATED):
        os._exit(code)  # threads that still read from the engine would keep the process alive
    sys.exit(code)
