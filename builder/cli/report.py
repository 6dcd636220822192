"""Shows an error. Imported only when there is one."""

from __future__ import annotations

import errno
import os
import sys
import traceback

import click
from rich.console import Console
from rich.text import Text

from builder.common import errors
from builder.common.errors import BuilderError, Terminated


def report(error: BaseException, *, debug: bool) -> int:
    """Shows the error that is being handled; returns the exit code."""
    if isinstance(
        error, BrokenPipeError
    ):  # as of `builder plan | head`: Python would fail again when it flushes stdout
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
            console.print(Text(f"{error.title}: ", style="bold red"), Text(str(error)), sep="", soft_wrap=True)
            if error.hint:
                console.print(Text(f"  -> {error.hint}"), soft_wrap=True)
        case _ if not debug:
            message = f"internal error: {type(error).__name__}: {error}"
            console.print(Text(message, style="bold red"), soft_wrap=True)
            console.print("  -> Run again with --debug to see the traceback, and report it.")
    if debug:
        traceback.print_exc()
    return error.exit_code if isinstance(error, BuilderError) else 1
