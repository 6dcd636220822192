"""The `builder` command: reads the command line, calls one step, shows the result."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
import warnings
from collections import UserDict
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from builder import __version__
from builder.cli.options import CELLS, debug_option, size_in_bytes
from builder.common import errors
from builder.common.errors import BuilderError, BuilderWarning, Terminated
from builder.common.text import printable

if TYPE_CHECKING:
    from builder.cli.context import Context

# Command -> its module in builder.cli, and the first sentence of its help. The module is imported when the command is
# used, as some take 0.3 s to import.
COMMANDS = {
    "add": ("add", "Put packages on an image, without building it."),
    "build": ("images", "Build images, without testing or tagging them."),
    "catalog": ("catalog", "List the released images: contents, tests, support."),
    "doctor": ("machine", "Check whether this machine can build images."),
    "engine": ("machine", "Find a running Docker Engine, or install one."),
    "explain": ("explain", "Show whether a combination works, or which images run on a GPU."),
    "gc": ("machine", "Show the images in the store, and delete unused blobs."),
    "images": ("images", "Build, test and tag images."),
    "init": ("init", "Write a repository for images of your own to FOLDER."),
    "lock": ("lock", "Choose the exact wheels and Debian packages of CELLS."),
    "plan": ("plan", "Show what would be built: cells, tags, layers, sizes."),
    "prune": ("prune", "List what is not needed in staging; with --delete, delete it."),
    "refresh": ("release", "Apply Debian security updates: lock, build, test and stage."),
    "release": ("release", "Publish the staged release STAMP: sign it, then set its tags."),
    "render": ("render", "Write images/ from templates/ and locks/."),
    "stage": ("release", "Push images that passed their tests to staging, with the results."),
    "status": ("release", "Show how far each cell is on its way to a release."),
    "test": ("images", "Run the tests of built or staged images."),
    "verify": ("verify", "Check who signed IMAGE, and compare it with its plan."),
}


class Commands(UserDict[str, Any]):
    """The commands by name; reading a command imports its module. Source: Click, "Lazily Loading Subcommands"."""

    def __getitem__(self, name: str) -> click.Command:
        module, _ = self.data[name]
        command: click.Command = getattr(import_module(f"builder.cli.{module}"), f"{name}_command")
        # Replaces the handler of `builder.start`: an exception in the import of a compiled module shows a traceback.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command


class LazyGroup(click.Group):
    """A group whose help lists the commands without importing them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, sentence) for name, (_, sentence) in COMMANDS.items()])


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
EXIT_CODES = "\n".join(
    f"  {kind.exit_code:>3}  {(kind.__doc__ or '').splitlines()[0].rstrip('.')}" for kind in errors.ALL[1:]
)
EPILOG = f"""{CELLS}

\b
Exit codes:
    0  Success, including nothing to do
    1  Internal error (--debug shows the traceback)
{EXIT_CODES}
  {errors.INTERRUPTED}  Interrupted (Ctrl-C); {errors.TERMINATED} terminated
"""


@click.group(
    cls=LazyGroup, commands=Commands(COMMANDS), epilog=EPILOG, context_settings=SETTINGS, invoke_without_command=True
)
@click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder with matrix.yaml. Default: the current folder, or the nearest parent folder that has one.",
)
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="GPU_IMAGES_STORE",
    show_envvar=True,
    help="The store: a folder for layers and images. Default: gpu-images in your cache folder (~/.cache).",
)
@click.option(
    "--store-limit",
    metavar="SIZE",
    callback=size_in_bytes,
    default="0B",
    envvar="GPU_IMAGES_STORE_LIMIT",
    show_envvar=True,
    help="Maximum size of the store, e.g. 40GB. Default: no limit.",
)
@debug_option
@click.version_option(__version__, prog_name="gpu-images", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context, root: Path | None, store: Path | None, store_limit: int) -> None:
    """Build GPU deep-learning images from matrix.yaml. A cell is one image.

    \b
    The steps, in order:
      lock     choose exact wheels and Debian packages   -> locks/
      plan     show what would be built
      render   write Dockerfiles; needed before images   -> images/
      images   build, test and tag images                -> store, Docker
      stage    push tested images and their results      -> registry
      release  sign what is tested and staged, tag it    -> registry

    `build` and `test` are the two parts of `images`. `refresh` runs the steps up to `stage` with newer Debian packages.
    `test --staged` tests staged images on another machine, such as one with a GPU. `status` shows how far each cell is.

    `doctor` checks this machine; `explain` says whether a combination works, and if not, why. `builder COMMAND --help`
    describes a command.
    """
    if not context.invoked_subcommand:
        # The whole help has 80 lines, of which a terminal shows the last ones: the exit codes.
        formatter = context.make_formatter()
        cli.format_usage(context, formatter)
        formatter.write(f"\n  {cli.get_short_help_str(80)}\n")
        cli.format_commands(context, formatter)
        formatter.write("\n`builder --help` has the order of the steps; `builder COMMAND --help` describes a command.")
        click.echo(formatter.getvalue())
        return
    from builder.cli.context import Context  # noqa: PLC0415  takes 0.05 s; --help does not need it

    context.obj = replace(context.obj or Context(), root=root, store_root=store, store_limit=store_limit)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """The text of a warning, with its place in the code if Python or a library raised it."""
    place = "" if issubclass(category, BuilderWarning) else f"{filename}:{lineno}: {category.__name__}: "
    return f"{place or 'warning: '}{printable(str(message))}\n"


def main(command: click.Command = cli, obj: Context | None = None) -> None:
    """Runs a command, reports any error once, and exits."""
    debug = "--debug" in sys.argv
    signal.signal(signal.SIGTERM, _terminate)
    warnings.formatwarning = _format_warning
    warnings.filterwarnings("always", category=BuilderWarning)  # a registry may be slow twice with the same error
    warnings.filterwarnings("ignore", module=r"docker\.")  # of a missing helper, for which it also raises an error
    code = 0
    try:
        # click finds the name of another program, such as `python -m tools.facts`.
        # It returns the code of `Context.exit`; a command returns nothing.
        code = command.main(prog_name="builder" if command is cli else None, standalone_mode=False, obj=obj) or 0
    except (Exception, KeyboardInterrupt, Terminated) as error:  # noqa: BLE001  the last resort
        code = report(error, debug=debug)
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (errors.INTERRUPTED, errors.TERMINATED):
        os._exit(code)  # threads that still read from the engine would keep the process alive
    sys.exit(code)


def report(error: BaseException, *, debug: bool) -> int:
    """Shows the error that is being handled; returns the exit code."""
    from rich.console import Console  # noqa: PLC0415  only errors need it
    from rich.text import Text  # noqa: PLC0415

    # `builder plan | head` closed the pipe: Python would fail again when it flushes stdout.
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, OSError) and (error.errno in (errno.ENOSPC, errno.EDQUOT) or error.filename):
        error = errors.of_file(error)
    console = Console(stderr=True, highlight=False)
    match error:
        case KeyboardInterrupt() | click.Abort():
            console.print("interrupted: run the same command again to continue")
            return errors.INTERRUPTED
        case Terminated():
            console.print("terminated: run the same command again to continue")
            return errors.TERMINATED
        case click.ClickException():
            error.show()
            return error.exit_code
        case BuilderError():
            # Messages quote indexes, registries and the output of programs.
            message = printable(str(error))
            console.print(Text(f"{error.title}: ", style="bold red"), Text(message), sep="", soft_wrap=True)
            if error.hint:
                console.print(Text(printable(f"  -> {error.hint}")), soft_wrap=True)
        case _ if not debug:
            message = printable(f"internal error: {type(error).__name__}: {error}")
            console.print(Text(message, style="bold red"), soft_wrap=True)
            console.print("  -> Run again with --debug to see the traceback, and report it.")
    if debug:
        traceback.print_exc()
    return error.exit_code if isinstance(error, BuilderError) else 1
