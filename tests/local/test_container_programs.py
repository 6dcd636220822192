"""Programs in a container, with the real docker-py and an engine on the loopback."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import docker
import pytest
from docker.models.containers import Container

from builder.engine.client import RunningContainer
from tests.fakes.loopback import Loopback, Request
from tests.images.containers import run_in


class ProgramEngine(Loopback):
    """An engine that runs programs in a container: all end with `status`, after they wrote `frames`."""

    def __init__(self, frames: Sequence[tuple[int, bytes]], status: int) -> None:
        super().__init__()
        self.frames, self.statuses = frames, [None, status]
        self.created: list[dict[str, Any]] = []

    def answer(self, request: Request) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        match request.path.rpartition("/")[2]:
            case "exec":
                self.created.append(json.loads(body))
                request.reply(201, b'{"Id": "e1"}', [("Content-Type", "application/json")])
            case "start":
                data = b"".join(struct.pack(">BxxxL", stream, len(text)) + text for stream, text in self.frames)
                # In one packet, as on a busy machine.
                request.wfile.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n" + data
                )
                request.close_connection = True
            case _:
                status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
                request.reply(200, json.dumps({"ExitCode": status}).encode())

    @contextmanager
    def container(self) -> Iterator[Container]:
        with self.serving():
            client = docker.DockerClient(base_url=f"tcp://{self.address}", version="1.44")
            yield Container(attrs={"Id": "c1"}, client=client)
            client.close()


def test_no_output_of_a_program_is_lost() -> None:
    fake = ProgramEngine([(1, b"lists \xff"), (2, b"warning"), (1, b" end")], status=3)
    with fake.container() as container:
        done = RunningContainer(container).run(["apt-get", "update"], {"A": "b"}, timeout_s=300, user="0:0")
    assert (done.returncode, done.stdout, done.stderr) == (3, "lists \ufffd end", "warning")
    [created] = fake.created
    assert created["Cmd"] == ["timeout", "300", "apt-get", "update"]
    assert (created["Env"], created["User"]) == (["A=b"], "0:0")


def test_no_output_in_an_image_test_is_lost() -> None:
    with ProgramEngine([(1, b"out"), (2, b"err")], status=4).container() as container:
        assert run_in(container, ["true"]) == (4, "out", "err")


def test_a_program_in_a_container_that_takes_too_long() -> None:
    with pytest.raises(subprocess.TimeoutExpired), ProgramEngine([], status=124).container() as container:
        RunningContainer(container).run(["apt-get", "update"], {}, timeout_s=300)
