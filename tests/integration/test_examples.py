"""examples/: Compose starts the workstation, and the containers of the other Compose files.

The image is the tiny one, without a GPU; launcher, user and health check are the real ones. Stand-ins replace Jupyter,
the frameworks and TensorFlow Serving; nightly/test_real_examples.py runs the frameworks.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def of_services(changes: Mapping[str, object]) -> str:
    """Changes of services. Their ports replace those of the file, which may be in use on this machine."""
    return json.dumps({"services": changes}).replace('"ports": ', '"ports": !override ')


def ask(url: str, content: object) -> tuple[int, Any]:
    """The status and the content of the answer to a POST with JSON."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(content).encode()), timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


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

NUMPY = """\
class Array(list):
    def tolist(self):
        return list(self)
def asarray(values, type):
    assert type == "float32"
    return Array([float(value) for value in row] for row in values)
"""
ONNXRUNTIME = """\
from types import SimpleNamespace
from numpy import Array
class InferenceSession:
    def __init__(self, path, providers):
        self.factor = float(open(path).read())
    def get_inputs(self):
        return [SimpleNamespace(name="features", type="tensor(float)")]
    def run(self, outputs, inputs):
        return [Array([self.factor * value for value in row] for row in inputs["features"])]
"""
TRAIN = "import pathlib, sys; pathlib.Path(sys.argv[sys.argv.index('--checkpoint') + 1]).write_text('2')\n"
EXPORT = """\
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
folder.mkdir(parents=True)
(folder / "{file}").write_text({content})
"""
TASK = """\
import json, os, socket, time
tasks = json.loads(os.environ["TF_CONFIG"])
kind, index = tasks["task"]["type"], tasks["task"]["index"]
if kind != "chief":
    server = socket.create_server(("", int(tasks["cluster"][kind][index].split(":")[1])))
    while True:
        server.accept()[0].sendall(f"{kind} {index}\\n".encode())
for address in (address for kind in ("ps", "worker") for address in tasks["cluster"][kind]):
    for _ in range(300):
        try:
            print(socket.create_connection(address.split(":")).makefile().readline().strip(), flush=True)
            break
        except OSError:
            time.sleep(0.1)
open("/workspace/checkpoint", "w").close()
"""


def mounted(folder: Path, files: Mapping[str, str]) -> list[dict[str, object]]:
    """Writes stand-ins, by their paths in the container, to a folder; returns their mounts."""
    mounts = []
    for number, (path, text) in enumerate(files.items()):
        (folder / f"{number}").write_text(text, encoding="utf-8")
        mounts.append({"type": "bind", "source": str(folder / f"{number}"), "target": path, "read_only": True})
    return mounts


def test_a_model_is_exported_and_then_served(
    compose_is_installed: None, released_once: Checkout, tmp_path: Path
) -> None:
    image = released_once.references()[0]
    programs_of_the_image = {
        "/opt/examples/pytorch/train_ddp.py": TRAIN,
        "/opt/examples/pytorch/export_onnx.py": EXPORT.format(file="model.onnx", content="open('model.pt').read()"),
    }
    modules = {"/modules/numpy.py": NUMPY, "/modules/onnxruntime.py": ONNXRUNTIME}
    stand_ins = mounted(tmp_path, programs_of_the_image | modules)
    changes = {
        "export": {"image": image, "volumes": stand_ins[:2]},
        "serve": {
            "image": image,
            "environment": {"PYTHONPATH": "/modules"},
            "volumes": stand_ins[2:],
            "ports": ["127.0.0.1::8000"],
            "healthcheck": {"interval": "1s"},
        },
    }
    with composed("compose-onnx.yaml", of_services(changes), tmp_path) as project:
        project("up", "--detach", "--wait")
        url = project.published("serve", 8000) + "/v1/models/example"
        assert ask(f"{url}:predict", {"instances": [[1, 2], [3, 4]]}) == (
            200,
            {"predictions": [[2.0, 4.0], [6.0, 8.0]]},
        )
        status, content = ask(f"{url}:predict", {"instances": [["one"]]})
        assert status == 400
        assert "could not convert string to float" in content["error"]
        assert ask(f"{url}:predict", {"inputs": []})[0] == 400
        assert ask(url, {"instances": [[1, 2]]})[0] == 404
        request = urllib.request.Request(f"{url}:predict", b"{}", {"Content-Length": str(2**30)})
        with pytest.raises(urllib.error.HTTPError, match="413"):
            urllib.request.urlopen(request, timeout=10)


def test_a_saved_model_is_exported_and_tensorflow_serving_may_read_it(
    compose_is_installed: None, released_once: Checkout, tmp_path: Path
) -> None:
    image = released_once.references()[0]
    program = {"/opt/examples/tensorflow/train_mirrored.py": EXPORT.format(file="saved_model.pb", content="'saved'")}
    changes = {
        "export": {"image": image, "volumes": mounted(tmp_path, program)},
        "serve": {
            "image": image,
            "command": ["sh", "-c", 'exec python -m http.server 8501 -d "/models/$$MODEL_NAME"'],
            "ports": ["127.0.0.1::8501"],
            "healthcheck": {"test": f"python -c '{CONNECT.format(port=8501)}'", "interval": "1s"},
        },
    }
    with composed("compose-tensorflow-serving.yaml", of_services(changes), tmp_path) as project:
        project("up", "--detach", "--wait")
        with urllib.request.urlopen(project.published("serve", 8501) + "/1/saved_model.pb", timeout=10) as answer:
            assert answer.read() == b"saved"


def test_tasks_with_parameter_servers_reach_each_other(
    compose_is_installed: None, released_once: Checkout, tmp_path: Path
) -> None:
    task = {"image": released_once.references()[0], "command": ["python", "-c", TASK.replace("$", "$$")]}
    changes = dict.fromkeys(("chief", "ps", "worker-0", "worker-1"), task)
    with composed("compose-parameter-server.yaml", of_services(changes), tmp_path) as project:
        project("up", "--exit-code-from", "chief", "--timeout", "2")
        logged = project("logs", "--no-log-prefix", "chief").replace("\x1b[2K", "")  # Compose 2.26 clears each line
        assert logged.split("\n")[-4:] == ["ps 0", "worker 0", "worker 1", ""]
