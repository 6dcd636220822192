"""Runs programs on this machine: writes their output to a log, line by line, and can stop all of them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.common.text import printable


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to run; `environment` is its whole environment. It is killed after `timeout_s` seconds."""

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    timeout_s: float


class Programs:
    """The programs that run now. Every method may be called from several threads."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self.stopped = False

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
        ) as child:  # fmt: skip
            timer = threading.Timer(program.timeout_s, child.kill)
            timer.daemon = True
            timer.start()
            with self._lock:
                self._running.add(child)
            if self.stopped:  # before the child was registered
                child.kill()
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    log.write(on_line(printable(line)))
                return child.wait()
            finally:
                timer.cancel()
                child.kill()
                with self._lock:
                    self._running.discard(child)

    def stop(self) -> None:
        """Kills the programs, also those that are started from now on."""
        self.stopped = True
        with self._lock:
            for child in self._running:
                child.kill()
