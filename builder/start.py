"""Starts the program: what Ctrl-C does is settled before anything that takes time is imported.

Imports nothing but the standard library's smallest parts; without it, Ctrl-C in the first 0.3 s shows a traceback.
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
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as for a job in the background
        signal.signal(signal.SIGINT, _interrupted)
    # A large plan is many objects and no garbage; looking for it took a sixth of the time.
    gc.set_threshold(50_000)
    from builder import cli  # noqa: PLC0415

    cli.main()
