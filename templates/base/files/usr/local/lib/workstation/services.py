"""Runs the services of a container until it ends. Each is a folder /etc/services.d/<name>/ with these programs:

    prepare   checks and creates what the service needs; exit status 0: run it, 77: skip it, else the container ends
    run       is replaced by the service
    check     exit status 0 if the service answers
    ready     prints how to reach the service

A service that ends is restarted; one that keeps ending ends the container with its exit status.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import state
from .refusal import CONFIG, Refusal

FOLDER = Path("/etc/services.d")
NO_PROCESS = -1
SKIPPED = 77  # as in automake's tests
CHECK_S = 4.0  # for each service; the image's health check has 10 for all
STOP_S = 7.0  # Docker kills after 10
STEADY_S = 60.0  # a service that ran longer is no longer counted as failing
MAX_FAILURES = 5
POLL_S = 0.3
RETRY_S = 2.0  # after a start for which the container had no process left
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass
class Service:
    """A service. `started_at`, `next_start` and `next_check` are times of the monotonic clock."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    next_start: float = 0.0
    failures: int = 0  # in a row
    next_check: float = 0.0
    is_ready: bool = False
    was_ready: bool = False  # before a restart

    @property
    def name(self) -> str:
        return self.folder.name


def present(folder: Path = FOLDER) -> list[Path]:
    """The folders of all services of this image."""
    return sorted(path for path in folder.iterdir() if (path / "run").is_file()) if folder.is_dir() else []


def prepare(folders: Sequence[Path], environ: Mapping[str, str]) -> list[Service]:
    """The services to run. Raises Refusal if a service cannot run, or if all are skipped."""
    enabled = []
    for folder in folders:
        status = _call(folder / "prepare", environ) if (folder / "prepare").exists() else 0
        if status == 0:
            enabled.append(Service(folder))
        elif status != SKIPPED:
            raise Refusal(f"{folder.name} cannot start")
    if not enabled:
        raise Refusal(
            "no service to run: set its variables (`docker run --rm IMAGE --help` lists them), or give a command: "
            "`docker run ... IMAGE bash`"
        )
    return enabled


def run(services: Sequence[Service], environ: Mapping[str, str], home: Path, say: Callable[[str], None]) -> int:
    """Runs the services; `say` prints a line in the log.

    Returns the exit status: 128 plus the signal that ended the container, or that of a service that keeps ending.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    state.write(home / state.SERVICES, "".join(f"{service.name}\n" for service in services))
    started_at, all_were_ready = time.monotonic(), False
    for service in services:
        _start(service, environ)
    while True:
        received = signal.sigtimedwait(SIGNALS, _pause(services))
        if received and received.si_signo != signal.SIGCHLD:
            stop(services)
            return 128 + received.si_signo
        for service in services:
            if service.process and service.process.poll() is not None:
                status = _ended(service, say)
                if status:
                    stop(services)
                    return status
            if not service.process and time.monotonic() >= service.next_start:
                _start(service, environ)
            if service.process and not service.is_ready and _answers(service, environ):
                _ready(service, environ, say)
        if not all_were_ready and all(service.is_ready for service in services):
            all_were_ready = True
            say(f"ready after {time.monotonic() - started_at:.1f} s")


def stop(services: Sequence[Service]) -> None:
    """Sends SIGTERM to all services, and SIGKILL to those that still run after STOP_S."""
    running = [service.process for service in services if service.process and service.process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + STOP_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _pause(services: Sequence[Service]) -> float:
    """Seconds to wait for a signal: long if all services are ready."""
    return 3600.0 if all(service.is_ready for service in services) else POLL_S


def _start(service: Service, environ: Mapping[str, str]) -> None:
    service.started_at = time.monotonic()
    service.is_ready = False
    try:
        # In a session of its own: otherwise a signal to the launcher's group would reach the service twice.
        service.process = subprocess.Popen(
            [str(service.folder / "run")], env=dict(environ), stdin=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=_unblock,  # noqa: PLW1509  there are no threads
        )  # fmt: skip
    except OSError as error:
        _check_limits(error)
        service.next_start = service.started_at + RETRY_S


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _ended(service: Service, say: Callable[[str], None]) -> int:
    """Schedules the restart of a service that ended; returns the container's exit status if it must end too, else 0."""
    assert service.process is not None
    code = service.process.returncode
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    ran_steadily = time.monotonic() - service.started_at > STEADY_S
    service.failures = 1 if ran_steadily else service.failures + 1
    service.process, service.is_ready = None, False
    if code == CONFIG:  # a restart with the same settings would fail again
        say(f"error: {service.name} {how}: its configuration is wrong")
        return code
    if service.failures >= MAX_FAILURES:
        say(f"error: {service.name} {how}, {service.failures} times in a row: giving up")
        return code if code > 0 else 1
    pause = 2.0 ** (service.failures - 1)
    service.next_start = time.monotonic() + pause
    say(f"warning: {service.name} {how}: restart in {pause:.0f} s")
    return 0


def _answers(service: Service, environ: Mapping[str, str]) -> bool:
    """Runs the check at most once in POLL_S: the end of each check is a SIGCHLD, which wakes the launcher again."""
    if time.monotonic() < service.next_check:
        return False
    answers = check(service.folder, environ) == 0
    service.next_check = time.monotonic() + POLL_S
    return answers


def check(folder: Path, environ: Mapping[str, str]) -> int:
    """The exit status of a service's check; 0 for a service without a check."""
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
    except OSError as error:
        _check_limits(error)
        return 1


def _ready(service: Service, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    if service.was_ready:
        say(f"{service.name} answers again")
    elif (service.folder / "ready").exists() and _call(service.folder / "ready", environ) == NO_PROCESS:
        return  # try again later: users need the message of `ready`
    service.is_ready = service.was_ready = True


def _call(program: Path, environ: Mapping[str, str]) -> int:
    """The exit status of a program, or NO_PROCESS."""
    try:
        return subprocess.run([str(program)], env=dict(environ), stdout=2, check=False, preexec_fn=_unblock).returncode
    except OSError as error:
        _check_limits(error)
        return NO_PROCESS


def _check_limits(error: OSError) -> None:
    """Ignores an error from the container's limit of processes or memory, which may pass; raises all others."""
    if error.errno not in (errno.EAGAIN, errno.ENOMEM):
        raise error
