"""Programs of this machine: their log, their exit status, and that all of them can be stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from builder.build.programs import Program, Programs

START = subprocess.Popen.__init__


@pytest.fixture(autouse=True)
def _allowed(_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other unit tests may start no program."""
    monkeypatch.setattr(subprocess.Popen, "__init__", START)


def python(code: str, folder: Path, *, timeout_s: float = 60) -> Program:
    command = [sys.executable, "-c", code]
    return Program(
        command=command, environment={"KEY": "value"}, folder=folder, log=folder / "logs/x.log", timeout_s=timeout_s
    )


def test_each_line_is_changed_for_the_log(tmp_path: Path) -> None:
    program = python(
        "import os, sys; print(*sorted(os.environ), flush=True); print('secret', file=sys.stderr); sys.exit(3)",
        tmp_path,
    )
    assert Programs().run(program, lambda line: line.replace("secret", "***")) == 3
    names, hidden = program.log.read_text().splitlines()
    assert "KEY" in names.split()
    assert "HOME" not in names.split()
    assert hidden == "***"


def test_the_output_of_a_program_controls_no_terminal(tmp_path: Path) -> None:
    """Lines are without escape sequences before they are redacted: a host name could be split by one."""
    output = "\x1b[31mred\x1b[0m 10%\r20%\r\n\x1b]52;c;aGk=\x07ho\x1b[1mst\x1b[m\x08\n\x1b]0;title"
    program = python(f"import sys; sys.stdout.buffer.write({output.encode()!r} + b'\\na\\xffb')", tmp_path)
    assert Programs().run(program, lambda line: line.replace("host", "<mirror>")) == 0
    assert program.log.read_text().split("\n") == ["red 10%", "20%", "<mirror>\ufffd", "0;title", "a\ufffdb"]


def test_one_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    assert Programs().run(python("import time; time.sleep(60)", tmp_path, timeout_s=0.2), str) == -signal.SIGKILL


@pytest.mark.parametrize("end", ["exit()", "0"])
def test_a_program_with_grace_can_cancel_its_job(tmp_path: Path, end: str) -> None:
    """As srun does, also if a shell runs it. A process that ignores the signal is killed."""
    code = f"""
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"cancelled\\n"), {end}))
os.write(1, b"ready\\n")
while True:
    time.sleep(1)
"""
    shell = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", code]
    programs = Programs()

    def on_line(line: str) -> str:
        if line == "ready\n":
            programs.stop()
        return line

    assert programs.run(replace(python("", tmp_path), command=shell, grace_s=3), on_line) == -signal.SIGTERM
    assert (tmp_path / "logs/x.log").read_text() == "ready\ncancelled\n"


def test_all_are_stopped_also_those_that_start_later(tmp_path: Path) -> None:
    programs, started, statuses = Programs(), threading.Event(), []

    def on_line(line: str) -> str:
        started.set()
        return line

    waits = python("import time; print('started', flush=True); time.sleep(60)", tmp_path)
    thread = threading.Thread(target=lambda: statuses.append(programs.run(waits, on_line)))
    thread.start()
    assert started.wait(30)
    programs.stop()
    thread.join(30)
    assert statuses == [-signal.SIGKILL]
    assert programs.run(waits, str) == -signal.SIGKILL


def test_the_log_can_be_read_meanwhile(tmp_path: Path) -> None:
    program = python("print('first', flush=True); print('second', flush=True)", tmp_path)
    logs: list[str] = []

    def on_line(line: str) -> str:
        logs.append(program.log.read_text())
        return line

    assert Programs().run(program, on_line) == 0
    assert logs == ["", "first\n"]


def test_nothing_is_started_without_a_log(tmp_path: Path) -> None:
    """A timer once kept the whole builder waiting where the log could not be opened."""
    program = python("open('started', 'w').close()", tmp_path)
    program.log.mkdir(parents=True)
    before = set(threading.enumerate())  # a cancelled timer of an earlier test may take a moment to end
    with pytest.raises(IsADirectoryError):
        Programs().run(program, str)
    assert not (tmp_path / "started").exists()
    assert not any(isinstance(thread, threading.Timer) for thread in {*threading.enumerate()} - before)
