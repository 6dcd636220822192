"""Starts the ranks of one member, reads their events, and ends them."""

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

# Loading a framework takes long from a cold disk or a network file system.
LONGEST_LOADING = 120.0
LOG_LINES = 25


@dataclass
class Running:
    """A running rank and the data of its events so far. `last` is the monotonic time of the last event."""

    rank: int
    process: subprocess.Popen[bytes]
    events: int  # descriptor
    log: Path
    nccl_log: Path
    report: dict[str, Any] = field(default_factory=lambda: {"checks": [], "measured": []})
    last: float = field(default_factory=time.monotonic)
    state: str = "running"
    unread: bytes = b""

    @property
    def stage(self) -> str:
        return str(self.report.get("stage", "starting"))


class Ranks:
    """All ranks of this member. A context manager: leaving it ends the ranks."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._running: list[Running] = []
        self._folder = tempfile.TemporaryDirectory(prefix="dist-check-")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._running:
            self._end(rank)
            os.close(rank.events)
        self._folder.cleanup()

    def start(self, orders: Sequence[Mapping[str, Any]], program: str, variables: Mapping[str, str]) -> None:
        for order in orders:
            folder = Path(self._folder.name)
            log, nccl_log = folder / f"{order['rank']}.log", folder / f"{order['rank']}.nccl"
            # Only for the check's processes. The variables turn on NCCL's log; they do not change what NCCL does.
            environment = {**os.environ, **variables, **nccl.VARIABLES, "NCCL_DEBUG_FILE": str(nccl_log)}
            # gRPC, of JAX and TensorFlow, asks a proxy for the other ranks, even for those of this machine.
            for name in ("grpc_proxy", "https_proxy", "http_proxy"):
                environment.pop(name, None)
            read_end, write_end = os.pipe()
            with log.open("wb") as stream:
                process = subprocess.Popen(
                    [sys.executable, program, f"--events={write_end}"],
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=stream,
                    env=environment,
                    pass_fds=[write_end],
                    start_new_session=True,
                )
            os.close(write_end)
            running = Running(order["rank"], process, read_end, log, nccl_log)
            self._running.append(running)
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has already ended: its log has the reason
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()

    def watch(self, stop: Callable[[float], bool], heard: Callable[[bool], None]) -> list[dict[str, Any]]:
        """The results, once every rank is done, failed or stuck.

        Ends early if `stop` returns True. Calls `heard` for each step of a rank, with whether the rank failed.
        """
        while any(rank.state == "running" for rank in self._running):
            if stop(0.0):
                self._stop_running()
                break
            events = [rank.events for rank in self._running if rank.state == "running"]
            readable, _, _ = select.select(events, [], [], 0.2)
            for rank in self._running:
                if rank.events in readable and rank.state == "running":
                    self._read(rank)
                    heard(rank.state == "failed")
            for rank in self._running:
                is_loading = rank.stage.startswith(("start", "load"))
                limit = max(self._timeout, LONGEST_LOADING) if is_loading else self._timeout
                if rank.state == "running" and time.monotonic() - rank.last > limit:
                    rank.state = "stuck"
                    heard(True)
        return [self._result(rank) for rank in self._running]

    def _read(self, rank: Running) -> None:
        data = os.read(rank.events, 65536)
        rank.last = time.monotonic()
        if not data:
            rank.state = "failed"
            return
        *lines, rank.unread = (rank.unread + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            for name in ("check", "measured"):
                if name in event:
                    rank.report["checks" if name == "check" else name].append(event.pop(name))
            if event.get("stage") == "failed":
                rank.state = "failed"
                event.pop("stage")  # the report keeps the stage in which it failed
            rank.report.update(event)
            if event.get("stage") == "done":
                rank.state = "done"

    def _stop_running(self) -> None:
        for rank in self._running:
            if rank.state == "running":
                rank.state = "stopped"

    def _end(self, rank: Running) -> None:
        assert rank.process.stdin is not None
        with contextlib.suppress(OSError):
            rank.process.stdin.close()
        try:
            # A rank that is done ends when its standard input is closed; one that hangs in a library may not.
            rank.process.wait(timeout=2 if rank.state == "done" else 0.2)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, 9)
            rank.process.wait()

    def _result(self, rank: Running) -> dict[str, Any]:
        log = _text(rank.log)
        if rank.state == "failed" and "error" not in rank.report:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = rank.process.wait(timeout=2)
                rank.report["error"] = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        nccl_log = nccl.parse(_text(rank.nccl_log))
        lines = [*log.splitlines()[-LOG_LINES:], *nccl_log.warnings[-5:]]
        return {
            "rank": rank.rank,
            "state": rank.state,
            "nccl": vars(nccl_log),
            "log": "" if rank.state == "done" else "\n".join(lines),
            **rank.report,
            "stage": rank.stage,
        }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
