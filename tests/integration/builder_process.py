"""Runs of the program `builder`, forked from a process that has imported it: the imports take half of most runs.

test_start.py, the demo and some other tests start the program as users do.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path

from builder import start
from builder.cli import COMMANDS

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__, *{f"builder.cli.{module}" for module, _ in COMMANDS.values()}])


class BuilderProcess:
    """A run in a session of its own, with the methods of subprocess.Popen that tests use."""

    def __init__(
        self, arguments: Sequence[str], environ: Mapping[str, str], output: Path, folder: Path | None = None
    ) -> None:
        self._process = _CONTEXT.Process(target=_run, args=(arguments, environ, output, folder or Path.cwd()))
        self._process.start()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._lock:  # the status can be read once: of two threads, one would get 255
            return self._process.exitcode

    def wait(self, timeout: float) -> int:
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired("builder", timeout)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(arguments: Sequence[str], environ: Mapping[str, str], output: Path, folder: Path) -> None:
    """Sets up this process as a new one would be, then runs the program."""
    os.setsid()
    os.chdir(folder)
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    faulthandler.enable()
    sys.argv = ["builder", *arguments]
    start.main()
