"""Runs services until the container is to end. Which there are, components say: /etc/services.d/<name>/ has programs

    prepare   checks and makes what the service needs; status 77: not wanted, 0: wanted, else the container ends
    run       becomes the service
    check     status 0 if it answers
    ready     prints what people need to reach it

A service that ends is started again; one that cannot stay up ends the container with its status.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import state
from .refusal import Refusal

FOLDER = Path("/etc/services.d")
NOT_WANTED = 77  # as automake's tests say "skipped"
CHECK_S = 5.0
STOP_S = 7.0  # Docker kills after 10
STEADY_S = 60.0  # one that ran so long starts anew without being suspected
MOST_DEATHS = 5
POLL_S = 0.3
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass
class Service:
    """One service; `due` is when it is to be started again, `next_check` when it is asked again, both monotonic."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    due: float = 0.0
    deaths: int = 0
    next_check: float = 0.0
    is_ready: bool = False
    was_ready: bool = False

    @property
    def name(self) -> str:
        return self.folder.name


def present(folder: Path = FOLDER) -> list[Path]:
    return sorted(path for path in folder.iterdir() if (path / "run").is_file()) if folder.is_dir() else []


def prepare(folders: Sequence[Path], environ: Mapping[str, str]) -> list[Service]:
    """Those that are wanted. Raises Refusal if one cannot run, or none is wanted."""
    wanted = []
    for folder in folders:
        status = _call(folder / "prepare", environ) if (folder / "prepare").exists() else 0
        if status == 0:
            wanted.append(Service(folder))
        elif status != NOT_WANTED:
            raise Refusal(f"{folder.name} cannot be started")
    if not wanted:
        raise Refusal("no service to run. Give what it needs, or a command: `docker run ... IMAGE bash`")
    return wanted


def run(services: Sequence[Service], environ: Mapping[str, str], home: Path, say: Callable[[str], None]) -> int:
    """Exit status: 128 and the signal that ended the container, or that of a service that could not stay up."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    state.write(home / state.SERVICES, "".join(f"{one.name}\n" for one in services))
    began, told_all = time.monotonic(), False
    for one in services:
        _start(one, environ)
    while True:
        told = signal.sigtimedwait(SIGNALS, _pause(services))
        if told and told.si_signo != signal.SIGCHLD:
            stop(services)
            return 128 + told.si_signo
        for one in services:
            if one.process and one.process.poll() is not None:
                status = _ended(one, say)
                if status:
                    stop(services)
                    return status
            if not one.process and time.monotonic() >= one.due:
                _start(one, environ)
            if one.process and not one.is_ready and _answers(one, environ):
                _ready(one, environ, say)
        if not told_all and all(one.is_ready for one in services):
            told_all = True
            say(f"ready after {time.monotonic() - began:.1f} s")


def stop(services: Sequence[Service]) -> None:
    """Asks all to end, and kills what has not after STOP_S."""
    running = [one.process for one in services if one.process and one.process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + STOP_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _pause(services: Sequence[Service]) -> float:
    """Seconds to wait for a signal: long when there is nothing to look at."""
    return 3600.0 if all(one.is_ready for one in services) else POLL_S


def _start(one: Service, environ: Mapping[str, str]) -> None:
    one.began = time.monotonic()
    one.is_ready = False
    # A session of its own: a signal to the launcher's group must not reach it twice.
    one.process = subprocess.Popen(
        [str(one.folder / "run")], env=dict(environ), stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=_unblock,  # noqa: PLW1509  there are no threads
    )  # fmt: skip


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _ended(one: Service, say: Callable[[str], None]) -> int:
    """Notes the end of a service; the container's exit status if it is to end too, else 0."""
    assert one.process is not None
    code = one.process.returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
    one.deaths = 1 if time.monotonic() - one.began > STEADY_S else one.deaths + 1
    one.process, one.is_ready = None, False
    if one.deaths >= MOST_DEATHS:
        say(f"error: {one.name} {how}, {one.deaths} times in a row: giving up")
        return code if code > 0 else 1
    pause = 2.0 ** (one.deaths - 1)
    one.due = time.monotonic() + pause
    say(f"warning: {one.name} {how}; it is started again in {pause:.0f} s")
    return 0


def _answers(one: Service, environ: Mapping[str, str]) -> bool:
    """Asks no oftener than each POLL_S: the end of each check is itself a signal that wakes the launcher."""
    if time.monotonic() < one.next_check:
        return False
    answers = check(one.folder, environ) == 0
    one.next_check = time.monotonic() + POLL_S
    return answers


def check(folder: Path, environ: Mapping[str, str]) -> int:
    """Status of a service's own check; 0 for a service without one."""
    program = folder / "check"
    if not program.exists():
        return 0
    try:
        return subprocess.run(
            [str(program)], env=dict(environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=CHECK_S,
            check=False, preexec_fn=_unblock,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1


def _ready(one: Service, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    one.is_ready = True
    if one.was_ready:
        say(f"{one.name} answers again")
    elif (one.folder / "ready").exists():
        _call(one.folder / "ready", environ)
    one.was_ready = True


def _call(program: Path, environ: Mapping[str, str]) -> int:
    return subprocess.run([str(program)], env=dict(environ), stdout=2, check=False, preexec_fn=_unblock).returncode
