"""One builder at a time in one checkout. The lock dies with its process, however that ends."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from builder.errors import BusyError


@contextmanager
def held(state: Path, command: str, *, wait: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of the checkout; raises BusyError naming the holder unless `wait`."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(file.name)
            if not wait:
                raise BusyError(
                    f"another builder works in this checkout: {holder}", hint="Wait for it, or give --wait."
                ) from None
            say(f"waiting for another builder: {holder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        json.dump({"pid": os.getpid(), "command": command, "since": time.strftime("%H:%M:%S")}, file)
        file.flush()
        yield


def _holder(path: str) -> str:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return f"`{data['command']}` (pid {data['pid']}, since {data['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "one that has just begun"
