"""What several image tests ask of containers and volumes."""

from __future__ import annotations

import time
from collections.abc import Callable

import docker
from docker.models.containers import Container


def wait_until(probe: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Waits until `probe` returns True; otherwise fails with `what`."""
    deadline = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.2)


def runs(container: Container, command: str) -> bool:
    """Whether a process of the container has exactly this command line."""
    top = container.top(ps_args="-o pid,args")
    return any(process[-1] == command for process in top["Processes"] or ())


def remove_volume(volume: str) -> None:
    """Removes a volume of the engine, with the containers that have it."""
    engine = docker.from_env()
    for container in engine.containers.list(all=True, filters={"volume": volume}):
        container.remove(force=True)
    engine.volumes.get(volume).remove(force=True)
