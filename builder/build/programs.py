"""Runs programs on this machine: writes their output to a log, line by line, and can stop all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from builder.common.text import printable

POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to run; `environment` is its whole environment. It is killed after `timeout_s` seconds.

    With `grace_s`, the program has a process group of its own. SIGTERM gives the group this time to end, and to cancel
    a job that it started on another machine.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    timeout_s: float
    grace_s: float = 0


class Programs:
    """The programs that run now. Every method may be called from several threads."""

    def __init__(self) -> None:
        self._running: dict[subprocess.Popen[str], float] = {}
        self._lock = threading.Lock()
        self.stopped = threading.Event()

    def run(self, program: Program, on_line: Callable[[str], str]) -> int:
        """Runs a program and returns its exit status, negative if a signal ended it.

        `on_line` gets each line of its output, as `printable` text, and returns the line for the log. Kills the program
        after its time, when all are stopped, or if `on_line` raises an exception.
        """
        program.log.parent.mkdir(parents=True, exist_ok=True)
        # The log is opened first: if that fails, nothing is started, and no timer keeps the builder from ending.
        with program.log.open("w", encoding="utf-8", buffering=1) as log, subprocess.Popen(
            list(program.command), cwd=program.folder, env=dict(program.environment), text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=bool(program.grace_s),
        ) as child:  # fmt: skip
            timer = threading.Timer(program.timeout_s, _end, (child, program.grace_s))
            timer.daemon = True
            timer.start()
            with self._lock:
                self._running[child] = program.grace_s
            if self.stopped.is_set():  # before the child was registered
                _end(child, program.grace_s)
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    log.write(on_line(printable(line)))
                return child.wait()
            finally:
                timer.cancel()
                child.kill()
                with self._lock:
                    del self._running[child]

    def stop(self) -> None:
        """Kills the programs, also those that are started from now on."""
        self.stopped.set()
        with self._lock:
            for child, grace_s in self._running.items():
                if grace_s:
                    threading.Thread(target=_end, args=(child, grace_s), daemon=True).start()
                else:
                    child.kill()


def _end(child: subprocess.Popen[str], grace_s: float) -> None:
    """Kills a program. With `grace_s`, first sends SIGTERM to its process group, and then kills the group."""
    if grace_s:
        deadline = time.monotonic() + grace_s
        with suppress(ProcessLookupError):  # the group is empty
            os.killpg(child.pid, signal.SIGTERM)
            # A shell ends at once, and the `srun` that it started still cancels its job.
            while time.monotonic() < deadline:
                time.sleep(POLL_S)
                child.poll()  # otherwise it would stay in the group
                os.killpg(child.pid, 0)
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()


def last_lines(log: Path, count: int) -> str:
    """The last lines of a log, for a message; empty if the log could not be written."""
    lines = log.read_text(encoding="utf-8").splitlines()[-count:] if log.is_file() else []
    return "\n".join(f"  | {line}" for line in lines)
