"""Fixtures of the image tests. `builder test` runs them; it says by two variables what is tested and where to report.

A test file is named after the component that it tests; an image runs the files of all its components.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import testinfra
from docker.errors import NotFound
from docker.models.containers import Container
from testinfra.host import Host

from builder.engine import Engine


@dataclass(frozen=True)
class Subject:
    """The image under test, as `builder.imagetest.describe` tells of it."""

    data: dict[str, Any]

    @property
    def image_id(self) -> str:
        return str(self.data["image_id"])

    @property
    def cell(self) -> dict[str, str]:
        return dict(self.data["cell"])

    @property
    def wheels(self) -> dict[str, str]:
        """Locked distributions: name -> version."""
        return dict(self.data["wheels"])


def pytest_configure() -> None:
    """Ends this process with the builder that started it, even if that is killed: it would start more containers."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test phase that matters: the call, and set-up or tear-down if they did not pass."""
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ["IMAGE_TEST_REPORT"]).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"test": report.nodeid, "outcome": report.outcome}) + "\n")


@pytest.fixture(scope="session")
def subject() -> Subject:
    return Subject(json.loads(Path(os.environ["IMAGE_TEST_SUBJECT"]).read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def engine() -> Engine:
    return Engine.connect()


Start = Callable[..., Container]


@pytest.fixture(scope="session")
def start(engine: Engine, subject: Subject) -> Iterator[Start]:
    """Starts containers of the image; all are removed at the end."""
    started: list[Container] = []

    def run(command: list[str] | None = None, **options: Any) -> Container:
        container = engine.start(subject.image_id, command=command, checkout=str(subject.data["checkout"]), **options)
        started.append(container)
        return container

    yield run
    for container in started:
        with contextlib.suppress(NotFound):
            container.remove(force=True, v=True)


@pytest.fixture(scope="session")
def container(start: Start) -> Container:
    """A container that only waits: for tests of what the image holds."""
    return start(["sleep", "infinity"])


@pytest.fixture(scope="session")
def host(container: Container) -> Host:
    return testinfra.get_host(f"docker://{container.id}")


@pytest.fixture(scope="session")
def python(host: Host) -> Callable[[str], Any]:
    """Runs Python code in the image, as its user; the JSON that the code prints last is the result."""

    def run(code: str) -> Any:
        done = host.run("python -W ignore -c %s", code)
        assert done.rc == 0, done.stderr[-3000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def once(start: Start) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in a new container: its status, what it printed, and what it and the launcher said on stderr."""

    def run(command: list[str] | None, **options: Any) -> tuple[int, str, str]:
        container = start(command, **options)
        status = int(container.wait(timeout=120)["StatusCode"])
        out, err = (container.logs(stdout=out, stderr=not out).decode() for out in (True, False))
        container.remove(v=True)
        return status, out, err

    return run


@pytest.fixture(scope="session")
def attributes(container: Container) -> dict[str, Any]:
    """`docker inspect` of the image."""
    assert container.image is not None
    return dict(container.image.attrs)


MODES: dict[str, dict[str, Any]] = {
    "another user of group 0": {"user": "123456:0"},
    "another user and group": {"user": "123456:123456"},
    "read-only": {"read_only": True, "tmpfs": {"/tmp": "", "/run": "", "/home/user": "mode=0777"}},
    "without capabilities": {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges"]},
    "read-only, another user": {"read_only": True, "tmpfs": {"/tmp": "", "/run": ""}, "user": "123456:0"},
    "root that becomes a user": {"user": "root", "environment": {"NB_UID": "4242", "NB_GID": "4343"}},
}


@pytest.fixture(params=list(MODES))
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Ways to start a container that must work, as options of docker-py."""
    return MODES[request.param]


def wait_until(probe: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Waits for `probe`; fails naming `what`."""
    deadline = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.2)


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    return wait_until
