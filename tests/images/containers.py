"""What several image tests ask of containers."""

from __future__ import annotations

import io
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from docker.models.containers import Container

STATUS_S = 120


def wait_until(probe: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Waits until `probe` returns True; otherwise fails with `what`."""
    deadline = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.2)


class Ended(NamedTuple):
    """What a program wrote, and its status."""

    status: int
    out: str
    err: str


def run_in(container: Container, command: Sequence[str], user: str = "") -> Ended:
    """Runs a program in a container, as `docker exec` does.

    exec_run of docker-py reads the socket, not the buffer of its HTTP reader: output that arrives together with the
    headers is lost (docker-py issue 3332). On a busy machine, programs that wrote seemed to write nothing.
    """
    engine: Any = container.client
    api = engine.api
    program = api.exec_create(container.id, list(command), user=user)["Id"]
    request = {"Detach": False, "Tty": False}
    answer = api._post_json(api._url("/exec/{0}/start", program), data=request, timeout=None)
    frames, streams = io.BytesIO(api._result(answer, binary=True)), {1: b"", 2: b""}
    while header := frames.read(8):
        stream, length = struct.unpack(">BxxxL", header)
        streams[stream] += frames.read(length)
    # The output can end before the engine has the status.
    deadline = time.monotonic() + STATUS_S
    while (status := api.exec_inspect(program)["ExitCode"]) is None:
        assert time.monotonic() < deadline, f"{command} has no status"
        time.sleep(0.05)
    return Ended(int(status), streams[1].decode(errors="replace"), streams[2].decode(errors="replace"))


def runs(container: Container, program: str) -> bool:
    """Whether a process of the container runs this program. Fails if the container has ended."""
    container.reload()
    assert container.status == "running", container.logs().decode()
    return run_in(container, ["sh", "-c", f"grep -sqx {program} /proc/[0-9]*/comm"]).status == 0


def wait_for_program(container: Container, program: str) -> None:
    """Waits until a process of the container runs this program.

    One program in the container waits: each `docker exec` takes 0.07 s of the processor, as much as the launcher.
    """
    container.reload()
    assert container.status == "running", container.logs().decode()
    loop = f"until grep -sqx {program} /proc/[0-9]*/comm; do sleep 0.1; done"
    status = run_in(container, ["timeout", "90", "sh", "-c", loop]).status
    assert status != 124, f"{program} does not run after 90 s: {container.logs().decode()}"
    assert status == 0, f"the container ended: {container.logs().decode()}"
