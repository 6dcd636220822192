"""Deployments: Compose starts the generated file, and a batch script calls Slurm with the right arguments.

The image is the tiny one, with a test service instead of Jupyter; launcher, user and checks are the real ones.
No GPU is here: a file that asks for some is only read by Compose.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from builder.deploy import examples
from builder.deploy.examples import Runtime
from builder.engine import setup as engine_setup
from tests.fakes.deployed import HOSTILE, image_of, request_of
from tests.integration import programs
from tests.integration.checkout import BUILDER, ROOT, Checkout, docker

OWNER = 4321  # of a folder: neither root nor the image's user
TIMEOUT_S = 120
PRINT = "import json, sys; print(json.dumps(sys.argv[1:]))"
SERVICE = {
    "Dockerfile": """\
FROM {image}
USER 0:0
RUN rm -rf /etc/services.d
COPY run check /etc/services.d/jupyter/
USER 1000:0
CMD ["services"]
LABEL gpu-images.components="base python cuda tiny jupyter"
""",
    "run": """\
#!/bin/sh
cd /workspace && exec python -m http.server 8888
""",
    "check": """\
#!/bin/sh
exec python -c 'import socket; socket.create_connection(("127.0.0.1", 8888), 2)'
""",
}


@dataclass(frozen=True)
class Composed:
    """A file of `builder deploy compose`, as a separate Compose project."""

    file: Path
    name: str

    def __call__(self, *arguments: str, code: int = 0, **environ: str) -> str:
        """Runs `docker compose`; returns its output. Uses any free port of the host, because 8888 may be in use."""
        ports = self.file.with_name("ports.yaml")
        ports.write_text(f'services: {{{self.name}: {{ports: !override ["127.0.0.1::8888"]}}}}\n')
        files = ["-f", str(self.file), *(["-f", str(ports)] if "8888" in self.file.read_text() else [])]
        result = subprocess.run(
            ["docker", "compose", *files, *arguments], text=True, timeout=TIMEOUT_S, check=False, capture_output=True,
            stdin=subprocess.DEVNULL, env=os.environ | environ,
        )  # fmt: skip
        assert result.returncode == code, f"{arguments}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def inspect(self) -> dict[str, Any]:
        (details,) = json.loads(docker("inspect", self("ps", "-aq").strip()))
        assert isinstance(details, dict)
        return details


NewComposed = Callable[..., Composed]


@pytest.fixture(scope="module")
def compose_is_installed() -> None:
    """Installs Docker's Compose plugin (version 2) if it is missing."""
    command = ["docker", "compose", "version", "--short"]
    with programs.one_at_a_time():
        if subprocess.run(command, capture_output=True, check=False).returncode:
            engine_setup.install_packages(["docker-compose"], (2, 0))
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert engine_setup.parse_version(version.removeprefix("v")) >= (2, 0)


@pytest.fixture
def new(compose_is_installed: None, tmp_path: Path) -> Iterator[NewComposed]:
    """A function that runs `builder deploy compose`; containers and volumes are removed at the end."""
    projects = []

    def write(image: str, *arguments: str) -> Composed:
        name = f"t{secrets.token_hex(4)}"
        project = Composed(tmp_path / f"{name}.yaml", name)
        command = ["deploy", "compose", image, "--name", name, "-o", str(project.file), *arguments]
        result = subprocess.run(
            [str(BUILDER), "--root", str(ROOT), *command], capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0, result.stderr
        projects.append(project)
        return project

    yield write
    for project in projects:
        project("down", "--volumes", "--timeout", "2")


@pytest.fixture(scope="module")
def serving(built: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The tiny image with a service."""
    name, context = f"{built.namespace}/serving:1", tmp_path_factory.mktemp("serving")
    for file, text in SERVICE.items():
        (context / file).write_text(text.format(image=built.references()[0]) if file == "Dockerfile" else text)
        (context / file).chmod(0o755)
    docker("build", "-q", "-t", name, str(context))
    yield name
    docker("image", "rm", "-f", name)


# ---- Compose


def test_services_start_and_are_healthy(serving: str, new: NewComposed) -> None:
    compose = new(serving, "--gpus", "0", "--shm", "256MB")
    compose("config", "--quiet")
    compose("up", "--detach", "--wait")
    details = compose.inspect()
    assert details["State"]["Health"]["Status"] == "healthy"
    assert details["Config"]["Healthcheck"]["Test"] == ["CMD", "/usr/local/bin/check-services"]
    (published,) = details["NetworkSettings"]["Ports"]["8888/tcp"]
    assert published["HostIp"] == "127.0.0.1"
    compose("exec", "-T", compose.name, "sh", "-c", "echo hello > /workspace/told.txt && mkdir -p ~/.local/x")
    with urllib.request.urlopen(f"http://127.0.0.1:{published['HostPort']}/told.txt", timeout=10) as answer:
        assert answer.read() == b"hello\n"
    memory = compose("exec", "-T", compose.name, "df", "--block-size=1", "--output=size", "/dev/shm").split()[-1]
    assert abs(int(memory) - 256 * 10**6) < 4096 * 2


def test_no_process_is_or_becomes_root(serving: str, new: NewComposed) -> None:
    compose = new(serving, "--gpus", "0")
    compose("up", "--detach", "--wait")
    status = compose("exec", "-T", compose.name, "cat", "/proc/1/status")
    status_fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert status_fields["Uid"].split() == ["1000"] * 4
    assert status_fields["NoNewPrivs"] == "1"
    assert {status_fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    compose("exec", "-T", compose.name, "sh", "-c", "! touch /etc/x && ! touch /opt/venv/x && touch /tmp/x")


def test_files_survive_a_new_start(serving: str, new: NewComposed) -> None:
    compose = new(serving, "--gpus", "0")
    compose("up", "--detach", "--wait")
    compose("exec", "-T", compose.name, "sh", "-c", "echo 1 > /workspace/a; echo 2 > /home/user/b")
    compose("down", "--timeout", "5")
    compose("up", "--detach", "--wait")
    assert compose("exec", "-T", compose.name, "cat", "/workspace/a", "/home/user/b").split() == ["1", "2"]


def test_a_token_comes_only_from_the_environment(serving: str, new: NewComposed) -> None:
    compose = new(serving, "--gpus", "0")
    show = ("run", "--rm", "-T", compose.name, "sh", "-c", "echo ${JUPYTER_TOKEN-unset}")
    assert compose(*show, JUPYTER_TOKEN="from outside").strip() == "from outside"
    assert compose(*show).strip() == "unset"
    assert "JUPYTER_TOKEN" not in compose("config", "--no-interpolate").replace("JUPYTER_TOKEN: null", "")


def test_a_plain_image_has_a_shell(built: Checkout, new: NewComposed) -> None:
    compose = new(built.references()[0], "--gpus", "0")
    assert compose("run", "--rm", "-T", compose.name, "tinyframe").strip() == built.release
    assert compose("run", "--rm", "-T", compose.name, "pwd").strip() == "/workspace"


def test_arguments_and_a_folder_are_passed_unchanged(built: Checkout, new: NewComposed, tmp_path: Path) -> None:
    folder = tmp_path / "of $HOME, 'a' \"b\": #c `id`"
    folder.mkdir()
    os.chown(folder, OWNER, OWNER)
    script = f"{PRINT}; open('/workspace/out', 'w').write('x')"
    compose = new(
        built.references()[0], "--gpus", "0", "--workspace", str(folder), "--", "python", "-c", script, *HOSTILE
    )
    compose("up", "--exit-code-from", compose.name)
    assert json.loads(docker("logs", compose("ps", "-aq").strip())) == list(HOSTILE)
    assert (folder / "out").stat().st_uid == OWNER


def test_compose_reads_gpus_and_limits(serving: str, new: NewComposed) -> None:
    compose = new(serving, "--gpus", "2", "--cpus", "4", "--memory", "16GB")
    service = json.loads(compose("config", "--format", "json"))["services"][compose.name]
    resources = service["deploy"]["resources"]
    assert resources["reservations"]["devices"] == [{"capabilities": ["gpu"], "driver": "nvidia", "count": 2}]
    assert (resources["limits"]["cpus"], int(resources["limits"]["memory"])) == (4, 16 * 10**9)
    assert service["environment"]["GPU_REQUIRED"] == "1"


# ---- Slurm

SRUN = """\
#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
options = []
while words[0].startswith("--"):
    options.append(words.pop(0))
with open(os.environ["CALLS"], "a") as log:
    log.write(json.dumps({{"program": "srun", "options": options, "words": words}}) + "\\n")
for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
    subprocess.run(words, check=True, env={{**os.environ, "SLURM_NODEID": str(node)}})
"""
APPTAINER = """\
#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as log:
    log.write(json.dumps({{"program": "apptainer", "words": sys.argv[1:]}}) + "\\n")
words = sys.argv[1:]
if words[0] == "pull":
    open(words[1], "x").close()
else:
    os.execvp(words[(end := next(i for i, word in enumerate(words) if word.endswith(".sif"))) + 1], words[end + 1:])
"""
ANY = """\
#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as log:
    name = os.path.basename(sys.argv[0])
    log.write(json.dumps({{"program": name, "words": sys.argv[1:], "environ": dict(os.environ)}}) + "\\n")
"""
SCONTROL = """\
#!/bin/sh
test "$*" = "show hostnames gpu[07-08]" && printf 'gpu07\\ngpu08\\n'
"""


@dataclass(frozen=True)
class Cluster:
    """A stand-in for Slurm whose programs log their calls and run their commands."""

    folder: Path

    def submit(self, script: str, *, nodes: int = 1) -> list[dict[str, Any]]:
        """Runs a batch script; returns the calls of programs, in order."""
        file, log = self.folder / "job.sh", self.folder / "calls.jsonl"
        file.write_text(script, encoding="utf-8")
        log.unlink(missing_ok=True)
        subprocess.run(["bash", "-n", str(file)], check=True, timeout=60)
        checked = subprocess.run(
            [str(Path(sys.executable).parent / "shellcheck"), file],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
        environ = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "CALLS": str(log),
            "PYTHONPATH": "/of/a/module",
            "SLURM_JOB_ID": "1234567",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": "gpu[07-08]",
            "SLURM_SUBMIT_DIR": str(self.folder),
        }
        result = subprocess.run(
            ["bash", str(file)], env=environ, cwd="/", text=True, capture_output=True, check=False, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    folder = tmp_path / "cluster with a space"
    folder.mkdir()
    programs = {"srun": SRUN, "apptainer": APPTAINER, "scontrol": SCONTROL}
    for name, text in (programs | dict.fromkeys(("torchrun", "python", "start"), ANY)).items():
        (folder / name).write_text(text.format(python=sys.executable))
        (folder / name).chmod(0o755)
    return Cluster(folder)


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_torchrun_on_two_nodes(cluster: Cluster, runtime: Runtime) -> None:
    request = request_of(nodes=2, gpus=8, cpus=32, command=("train.py", *HOSTILE))
    script = examples.slurm(image_of(), request, runtime=runtime, workspace="/data/my work")
    calls = cluster.submit(script, nodes=2)
    (step,) = [call for call in calls if call["program"] == "srun"]
    assert step["options"][:3] == ["--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=32"]
    ranks = [call for call in calls if call["program"] == "torchrun"]
    assert [call["words"] for call in ranks] == [
        [
            "--nnodes=2",
            f"--node-rank={node}",
            "--rdzv-backend=static",
            "--rdzv-endpoint=gpu07:30067",
            "--nproc-per-node=8",
            "train.py",
            *HOSTILE,
        ]
        for node in range(2)
    ]
    assert all("PYTHONPATH" not in call["environ"] and call["environ"]["PYTHONNOUSERSITE"] == "1" for call in ranks)


def test_the_container_options_of_pyxis(cluster: Cluster) -> None:
    script = examples.slurm(image_of(), request_of(command=("python", "x")), workspace="/data/of 'x' & y")
    step = cluster.submit(script)[0]
    assert step["options"] == [
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--container-image=registry.example.test#org/pt-cuda:2.9",
        "--container-mounts=/data/of 'x' & y:/workspace",
        "--container-workdir=/workspace",
        "--no-container-mount-home",
        "--no-container-remap-root",
        "--no-container-entrypoint",
    ]
    assert step["words"] == ["python", "x"]


def test_apptainer_pulls_once(cluster: Cluster) -> None:
    script = examples.slurm(image_of(), request_of(command=("python", "x")), runtime="apptainer")
    sif = f"{cluster.folder}/pt-cuda-2.9.sif"
    pull, step, run, _ = cluster.submit(script)
    assert pull["words"] == ["pull", f"{sif}.1234567", "docker://registry.example.test/org/pt-cuda:2.9"]
    assert step["words"] == ["apptainer", *run["words"]]
    options = ["--no-home", "--bind", f"{cluster.folder}:/workspace", "--pwd", "/workspace"]
    assert run["words"] == ["exec", "--nv", *options, sif, "python", "x"]
    assert "pull" not in cluster.submit(script)[0]["words"]


def test_tensorflow_on_two_nodes(cluster: Cluster) -> None:
    request = request_of(nodes=2, command=("train.py", *HOSTILE))
    calls = cluster.submit(examples.slurm(image_of(framework="tensorflow"), request), nodes=2)
    workers = [call for call in calls if call["program"] == "python"]
    assert [json.loads(call["environ"]["TF_CONFIG"]) for call in workers] == [
        {"cluster": {"worker": ["gpu07:30067", "gpu08:30067"]}, "task": {"type": "worker", "index": node}}
        for node in range(2)
    ]
    assert all(call["words"] == ["train.py", *HOSTILE] for call in workers)


@pytest.mark.parametrize("gpus", [0, 4])
def test_jax_on_two_nodes(cluster: Cluster, gpus: int) -> None:
    request = request_of(nodes=2, gpus=gpus, command=("train.py", *HOSTILE))
    calls = cluster.submit(examples.slurm(image_of(framework="jax"), request), nodes=2)
    workers = [call for call in calls if call["program"] == "python"]
    for node, call in enumerate(workers):
        assert {name: value for name, value in call["environ"].items() if name.startswith("JAX_")} == {
            "JAX_COORDINATOR_ADDRESS": "gpu07:30067",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(node),
            **({"JAX_LOCAL_DEVICE_IDS": "0,1,2,3"} if gpus else {}),
        }
        assert call["words"] == ["train.py", *HOSTILE]
    assert len(workers) == 2


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
@pytest.mark.parametrize("variant", ["jupyter", "ssh", "full"])
def test_services_on_a_node(cluster: Cluster, variant: str, runtime: Runtime) -> None:
    calls = cluster.submit(examples.slurm(image_of(variant), request_of(), runtime=runtime))
    start = calls[-1]
    assert (start["program"], start["words"]) == ("start", ["services"])
    ports = {name: int(start["environ"][name]) for name in ("JUPYTER_PORT", "SSH_PORT") if name in start["environ"]}
    assert all(port > 1024 for port in ports.values())
    assert len(ports) == len(set(ports.values())) == (2 if variant == "full" else 1)
    words = [word for call in calls for word in (*call.get("options", ()), *call["words"])]
    # pyxis has both mounts in one option, Apptainer each in its own.
    (mount,) = {part for word in words for part in word.split(",") if part.endswith(":/tmp")}
    assert not Path(mount.split(":")[0]).exists(), "the folder with the token is left behind"
