"""Starts the ranks of one member, listens to them, and ends them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import nccl

# From a cold disk or a network file system, loading a framework takes long.
LONGEST_LOADING = 120.0
LOG_LINES = 25


@dataclass
class Running:
    """A rank's process, and what it told so far."""

    rank: int
    process: subprocess.Popen[bytes]
    events: int  # descriptor
    log: Path
    nccl_log: Path
    told: dict[str, Any] = field(default_factory=lambda: {"checks": [], "measured": []})
    last: float = field(default_factory=time.monotonic)
    state: str = "running"
    unread: bytes = b""

    @property
    def stage(self) -> str:
        return str(self.told.get("stage", "starting"))


class Ranks:
    """All ranks of this member. Use as a context: its end ends them."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._running: list[Running] = []
        self._folder = tempfile.TemporaryDirectory(prefix="dist-check-")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._running:
            self._end(one)
            os.close(one.events)
        self._folder.cleanup()

    def start(self, orders: Sequence[Mapping[str, Any]], program: str, variables: Mapping[str, str]) -> None:
        for order in orders:
            folder = Path(self._folder.name)
            log, nccl_log = folder / f"{order['rank']}.log", folder / f"{order['rank']}.nccl"
            # For the check's own processes alone, so that NCCL says what it does; not how to do it.
            environment = {**os.environ, **variables, **nccl.VARIABLES, "NCCL_DEBUG_FILE": str(nccl_log)}
            reads, writes = os.pipe()
            with log.open("wb") as stream:
                process = subprocess.Popen(
                    [sys.executable, program, f"--events={writes}"],
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=stream,
                    env=environment,
                    pass_fds=[writes],
                    start_new_session=True,
                )
            os.close(writes)
            running = Running(order["rank"], process, reads, log, nccl_log)
            self._running.append(running)
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # ended already: its log says why
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()

    def watch(self, stop: Callable[[float], bool], heard: Callable[[bool], None]) -> list[dict[str, Any]]:
        """Until every rank is done, failed or stuck. `stop` says whether to end; `heard` learns of steps, failures."""
        while any(one.state == "running" for one in self._running):
            if stop(0.0):
                self._give_up("stopped")
                break
            readable, _, _ = select.select([one.events for one in self._running if one.state == "running"], [], [], 0.2)
            for one in self._running:
                if one.events in readable and one.state == "running":
                    self._read(one)
                    heard(one.state == "failed")
            for one in self._running:
                allowed = (
                    max(self._timeout, LONGEST_LOADING) if one.stage.startswith(("start", "load")) else self._timeout
                )
                if one.state == "running" and time.monotonic() - one.last > allowed:
                    one.state = "stuck"
                    heard(True)
        return [self._result(one) for one in self._running]

    def _read(self, one: Running) -> None:
        data = os.read(one.events, 65536)
        one.last = time.monotonic()
        if not data:
            one.state = "failed"
            return
        *lines, one.unread = (one.unread + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            for name in ("check", "measured"):
                if name in event:
                    one.told["checks" if name == "check" else name].append(event.pop(name))
            if event.get("stage") == "failed":
                one.state = "failed"
                event.pop("stage")  # the one before says where
            one.told.update(event)
            if event.get("stage") == "done":
                one.state = "done"

    def _give_up(self, state: str) -> None:
        for one in self._running:
            if one.state == "running":
                one.state = state

    def _end(self, one: Running) -> None:
        assert one.process.stdin is not None
        with contextlib.suppress(OSError):
            one.process.stdin.close()
        try:
            # A rank that is done leaves when its standard input ends; one that hangs in a library may not.
            one.process.wait(timeout=2 if one.state == "done" else 0.2)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, 9)
            one.process.wait()

    def _result(self, one: Running) -> dict[str, Any]:
        log = _text(one.log)
        if one.state == "failed" and "error" not in one.told:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = one.process.wait(timeout=2)
                one.told["error"] = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        told = nccl.parse(_text(one.nccl_log))
        shown = "" if one.state == "done" else "\n".join([*log.splitlines()[-LOG_LINES:], *told.warnings[-5:]])
        return {"rank": one.rank, "state": one.state, "nccl": vars(told), "log": shown, **one.told, "stage": one.stage}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
