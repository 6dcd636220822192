"""What several image tests ask of containers."""

from __future__ import annotations

import time
from collections.abc import Callable

from docker.models.containers import Container


def wait_until(probe: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Waits until `probe` returns True; otherwise fails with `what`."""
    deadline = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.2)


def runs(container: Container, program: str) -> bool:
    """Whether a process of the container runs this program. Fails if the container has ended."""
    container.reload()
    assert container.status == "running", container.logs().decode()
    return bool(container.exec_run(["sh", "-c", f"grep -qx {program} /proc/[0-9]*/comm"]).exit_code == 0)
