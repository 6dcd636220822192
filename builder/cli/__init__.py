"""The `builder` command: reads the command line, calls one step, shows what came of it."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.text import Text

from builder import errors
from builder.cli import asking, benchmarks, deploying, explain, inputs, machine, making, publishing
from builder.cli import facts as facts_cli
from builder.cli.context import Context, Size
from builder.errors import BuilderError

EXIT_CODES = "\n".join(
    f"  {kind.exit_code:>3}  {(kind.__doc__ or '').splitlines()[0].rstrip('.')}" for kind in errors.ALL[1:]
)
EPILOG = f"""\b
Exit codes:
    0  Done, or nothing to do
    1  A fault of this program (with --debug: its traceback)
{EXIT_CODES}
  {errors.INTERRUPTED}  Interrupted (Ctrl-C); {errors.TERMINATED} terminated
"""


class Terminated(BaseException):
    """SIGTERM came."""


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    help="The checkout; default: found from here upwards.",
)
@click.option("--wait", is_flag=True, help="Wait for another builder in this checkout instead of giving up.")
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="GPU_IMAGES_STORE",
    show_envvar=True,
    help="Where layers and images are kept; default: gpu-images in the user's cache.",
)
@click.option(
    "--store-limit",
    type=Size(),
    default=0,
    envvar="GPU_IMAGES_STORE_LIMIT",
    show_envvar=True,
    help="Bytes that the store may take, such as 40GB; default: what the disk has.",
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def cli(
    context: click.Context, root: Path | None, wait: bool, store: Path | None, store_limit: int, debug: bool
) -> None:
    """Builds GPU deep-learning images from matrix.yaml.

    \b
    The way through, each step a command of its own:
      lock    matrix.yaml -> locks/     exact wheels of every cell (asks the package index)
      plan    matrix.yaml, locks/       what would be built
      render  locks/, templates/ -> images/   a Dockerfile for every cell
      build   wheels, os -> store -> Docker   without tests, without tags
      test    Docker -> evidence        the image tests
      images  all that is needed of build, test and tagging; does nothing where nothing changed
      push    store -> registry         what passed its tests, by digest

    \b
    To ask: plan, explain (why a combination does not work, or not on a GPU), diff, doctor (this machine).
    """
    del debug  # read in `main`, which catches what is raised here too
    context.obj = Context(root=root, wait=wait, store_root=store, store_limit=store_limit)


for _command in (
    inputs.lock_command,
    inputs.plan_command,
    inputs.render_command,
    explain.explain_command,
    asking.diff_command,
    facts_cli.facts_command,
    making.images_command,
    making.build_command,
    making.test_command,
    making.rebase_command,
    publishing.push_command,
    publishing.verify_command,
    deploying.deploy_command,
    benchmarks.bench_command,
    machine.base_command,
    machine.engine_command,
    machine.doctor_command,
    machine.clean_command,
    machine.gc_command,
):
    cli.add_command(_command)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _show(console: Console, error: BuilderError, debug: bool) -> int:
    console.print(Text(f"{error.title}: ", style="bold red"), Text(str(error)), sep="", soft_wrap=True)
    if error.hint:
        console.print(Text(f"  -> {error.hint}"), soft_wrap=True)
    if debug:
        traceback.print_exc()
    return error.exit_code


def _fault(console: Console, error: Exception, debug: bool) -> int:
    """An error that nobody foresaw."""
    if debug:
        traceback.print_exc()
    else:
        told = f"a fault of builder itself: {type(error).__name__}: {error}"
        console.print(Text(told, style="bold red"), soft_wrap=True)
        console.print("  -> Run again with --debug for the traceback, and report it.")
    return 1


def main() -> None:
    """Entry point: catches every error once and ends with its exit code."""
    debug = "--debug" in sys.argv
    console = Console(stderr=True, highlight=False)
    signal.signal(signal.SIGTERM, _terminate)
    code = 0
    try:
        cli.main(standalone_mode=False)
    except BuilderError as error:
        code = _show(console, error, debug)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        console.print("interrupted; run the same command again to go on")
        code = errors.INTERRUPTED
    except Terminated:
        console.print("terminated; run the same command again to go on")
        code = errors.TERMINATED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or error.filename:
            code = _show(console, errors.of_file(error), debug)
        else:
            code = _fault(console, error, debug)
    except Exception as error:  # noqa: BLE001  the last resort: a fault of ours, said as such
        code = _fault(console, error, debug)
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (errors.INTERRUPTED, errors.TERMINATED):
        os._exit(code)  # threads that still read from the engine must not keep the program
    sys.exit(code)
