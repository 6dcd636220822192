"""Starts the program: installs the Ctrl-C handler before slow imports.

Imports only small modules of the standard library. Without this handler, Ctrl-C in the first 0.3 s shows a traceback.
"""

import gc
import os
import signal
from types import FrameType


def _interrupted(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)  # 128 + SIGINT, what shells report; `builder.common.errors` is not imported yet


def main() -> None:
    """Entry point of the `builder` command."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # shells start background jobs with SIGINT ignored
        signal.signal(signal.SIGINT, _interrupted)
    # A large plan has many objects and no garbage: with the default threshold, garbage collection took a sixth of the
    # time.
    gc.set_threshold(50_000)
    from builder import cli  # noqa: PLC0415

    cli.main()
