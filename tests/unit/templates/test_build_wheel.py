"""The program that builds a wheel in a container: what it does with builds that do not end. No test waits."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from itertools import chain, count, repeat
from pathlib import Path
from typing import cast

import pytest

from templates import build_wheel
from templates.build_wheel import CHECK_S, IDLE_S, Process

BACKEND = Process(8, 7, 100, "python")
DAEMON = Process(9, os.getpid(), 0, "sleep")


class Pip:
    """A pip of process id 7 that ends with `status` after `checks` timeouts of `wait`."""

    pid = 7

    def __init__(self, checks: int, status: int = 0) -> None:
        self.checks, self.status = checks, status
        self.is_killed = False

    def wait(self, timeout: float) -> int:
        if not self.checks:
            return self.status
        self.checks -= 1
        raise subprocess.TimeoutExpired("pip", timeout)

    def kill(self) -> None:
        self.is_killed = True


def wait(pip: Pip, running: Iterable[list[Process]]) -> list[tuple[int, int]]:
    """Waits for pip, beside the processes of each check; the signals that were sent."""
    sent: list[tuple[int, int]] = []
    own = Process(pip.pid, os.getpid(), 100, "pip")
    lists: Iterator[list[Process]] = iter(running)
    build_wheel.wait(
        cast("subprocess.Popen[bytes]", pip),
        processes=lambda: [own, *next(lists)],
        kill=lambda pid, number: sent.append((pid, number)),
    )
    return sent


def test_what_a_build_leaves_running_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """pip would wait for it: it has the output of the build open."""
    assert wait(Pip(3), [[BACKEND, DAEMON], [BACKEND, DAEMON], [DAEMON]]) == [(9, signal.SIGKILL)]
    assert capsys.readouterr().out == "ending sleep, which the build left running\n"


def test_processes_from_outside_the_build_are_left_alone() -> None:
    assert wait(Pip(1), [[Process(9, 0, 0, "bash")]]) == []


def test_a_build_that_does_nothing_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    pip = Pip(10**9)
    with pytest.raises(subprocess.CalledProcessError):
        wait(pip, repeat([BACKEND, DAEMON]))
    assert pip.is_killed
    assert 10**9 - pip.checks == IDLE_S / CHECK_S + 1
    assert (
        capsys.readouterr().out
        == "the build used less than 1 % of a processor for 10 minutes; running: pip, python, sleep\n"
    )


def test_a_build_that_works_is_not_ended() -> None:
    checks = 3 * IDLE_S // CHECK_S
    compiling = ([BACKEND._replace(ticks=6 * check)] for check in count())
    assert wait(Pip(checks), compiling) == []
    many = ([BACKEND, *([Process(100 + number, 8, 50, "cc")] if number % 9 else [])] for number in count())
    assert wait(Pip(checks), many) == [], "compilers that start and end"
    pause = IDLE_S // CHECK_S - 1
    pauses = chain(repeat([BACKEND], pause), repeat([BACKEND._replace(ticks=900)], pause))
    assert wait(Pip(2 * pause), pauses) == []


def test_a_build_that_fails() -> None:
    with pytest.raises(subprocess.CalledProcessError) as raised:
        wait(Pip(0, status=3), [])
    assert raised.value.returncode == 3


def test_processes_are_read_from_proc(tmp_path: Path) -> None:
    """Names may have spaces and parentheses; a zombie has ended, and its parent has not noticed yet."""
    rest = "1 1 0 -1 4194560 100 0 0 0 30 12 0 0 20 0 1 0 100"
    for pid, text in {
        8: f"8 (a (b) c) S 7 {rest}",
        9: f"9 (sleep) Z 1 {rest}",
        os.getpid(): f"{os.getpid()} (python) R 0 {rest}",
    }.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / f"{pid}/stat").write_text(f"{text}\n")
    assert build_wheel.other_processes(tmp_path) == [Process(8, 7, 42, "a (b) c")]
