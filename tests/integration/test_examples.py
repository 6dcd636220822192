"""examples/: Compose starts the workstation.

The image is the tiny one, without a GPU; launcher, user and health check are the real ones. A stand-in replaces
Jupyter. nightly/test_real_examples.py starts the other Compose files.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from builder.common.console import View
from builder.engine import setup as engine_setup
from tests.integration import programs
from tests.integration.checkout import ROOT, Checkout, docker

TIMEOUT_S = 300
COMPOSE = (2, 24)  # for `!override` and `!reset`
EXAMPLES = ROOT / "examples"
CONNECT = 'import socket; socket.create_connection(("127.0.0.1", {port}), 2)'
SERVICE = {
    "run": "#!/bin/sh\ncd /workspace && exec python -m http.server 8888\n",
    "check": f"#!/bin/sh\nexec python -c '{CONNECT.format(port=8888)}'\n",
}
# 8888 may be in use on this machine, and the services of the image, if it has some, must not start.
CHANGES = """\
services:
  workstation:
    image: {image}
    command: [services]
    environment: {{GPU_REQUIRED: "0"}}
    ports: !override ["127.0.0.1::8888"]
    volumes: [{{type: bind, source: "{services}", target: /etc/services.d, read_only: true}}]
    deploy: !reset null
    healthcheck: {{test: [CMD, /usr/local/bin/check-services], interval: 1s}}
"""


@dataclass(frozen=True)
class Composed:
    """A Compose file of examples/ with changes, as a separate Compose project."""

    file: str
    changes: Path
    name: str

    def __call__(self, *arguments: str, **environ: str) -> str:
        """Runs `docker compose`; returns its output."""
        files = ["-f", str(EXAMPLES / self.file), "-f", str(self.changes)]
        result = subprocess.run(
            ["docker", "compose", "-p", self.name, *files, *arguments], text=True, timeout=TIMEOUT_S, check=False,
            capture_output=True, stdin=subprocess.DEVNULL, env=os.environ | environ,
        )  # fmt: skip
        assert result.returncode == 0, f"{arguments}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def execute(self, command: str) -> str:
        return self("exec", "-T", "workstation", "sh", "-c", command)

    def published(self, service: str, port: int) -> str:
        """The address of a service on this machine."""
        return f"http://{self('port', service, str(port)).strip()}"


@contextmanager
def composed(file: str, changes: str, folder: Path) -> Iterator[Composed]:
    """A Compose file with changes; its containers and volumes are removed at the end."""
    (folder / "changes.yaml").write_text(changes, encoding="utf-8")
    project = Composed(file, folder / "changes.yaml", f"t{secrets.token_hex(4)}")
    try:
        yield project
    finally:
        project("down", "--volumes", "--timeout", "2")


@pytest.fixture(scope="module")
def compose_is_installed() -> None:
    """Installs Docker's Compose plugin if it is missing."""
    command = ["docker", "compose", "version", "--short"]
    with programs.one_at_a_time():
        if subprocess.run(command, capture_output=True, check=False).returncode:
            engine_setup.install_packages(["docker-compose"], COMPOSE, View(Console()))
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert engine_setup.parse_version(version.removeprefix("v")) >= COMPOSE


@pytest.fixture
def workstation(compose_is_installed: None, released_once: Checkout, tmp_path: Path) -> Iterator[Composed]:
    """The example with the tiny image."""
    folder = tmp_path / "services.d"
    (folder / "jupyter").mkdir(parents=True)
    for file, text in SERVICE.items():
        (folder / "jupyter" / file).write_text(text)
        (folder / "jupyter" / file).chmod(0o755)
    changes = CHANGES.format(image=released_once.references()[0], services=folder)
    with composed("compose.yaml", changes, tmp_path) as project:
        yield project


def test_the_workstation_starts_and_keeps_its_files(workstation: Composed) -> None:
    workstation("up", "--detach", "--wait", JUPYTER_TOKEN="from outside")
    [details] = json.loads(docker("inspect", workstation("ps", "-aq").strip()))
    assert details["State"]["Health"]["Status"] == "healthy"
    assert "JUPYTER_TOKEN=from outside" in details["Config"]["Env"]
    [published] = details["NetworkSettings"]["Ports"]["8888/tcp"]
    assert published["HostIp"] == "127.0.0.1"
    workstation.execute("echo hello > /workspace/told.txt && mkdir -p ~/.local/x && touch /tmp/x")
    with urllib.request.urlopen(f"http://127.0.0.1:{published['HostPort']}/told.txt", timeout=10) as answer:
        assert answer.read() == b"hello\n"
    assert workstation.execute("df --block-size=1 --output=size /dev/shm").split()[-1] == str(8 * 2**30)

    workstation("down", "--timeout", "5")
    workstation("up", "--detach", "--wait")
    assert workstation.execute("cat /workspace/told.txt; ls ~/.local") == "hello\nx\n"


def test_no_process_of_the_workstation_is_or_becomes_root(workstation: Composed) -> None:
    workstation("up", "--detach", "--wait")
    status = dict(line.split(":\t", 1) for line in workstation.execute("cat /proc/1/status").splitlines())
    assert status["Uid"].split() == ["1000"] * 4
    assert status["NoNewPrivs"] == "1"
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    workstation.execute("! touch /etc/x && ! touch /opt/venv/x")


# ---- with stand-ins for the frameworks
