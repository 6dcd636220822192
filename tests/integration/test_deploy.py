"""Deploying for real: Compose starts what it is given, and a batch script calls Slurm as it should.

The image is the tiny one, with a service of our own in place of Jupyter; launcher, user and checks are the real ones.
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

from builder import deploy_slurm, engine_setup
from builder.deploy_slurm import Batch
from tests.integration.checkout import BUILDER, ROOT, Checkout, docker
from tests.unit.deployed import HOSTILE, subject, wish

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
    """A file of `builder deploy compose`, as a project of its own in Compose."""

    file: Path
    name: str

    def __call__(self, *arguments: str, code: int = 0, **environ: str) -> str:
        """Runs `docker compose`; what it prints. Any port of the host will do: 8888 may be somebody's."""
        ports = self.file.with_name("ports.yaml")
        ports.write_text(f'services: {{{self.name}: {{ports: !override ["127.0.0.1::8888"]}}}}\n')
        files = ["-f", str(self.file), *(["-f", str(ports)] if "8888" in self.file.read_text() else [])]
        done = subprocess.run(
            ["docker", "compose", *files, *arguments], text=True, timeout=TIMEOUT_S, check=False, capture_output=True,
            stdin=subprocess.DEVNULL, env=os.environ | environ,
        )  # fmt: skip
        assert done.returncode == code, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def inspect(self) -> dict[str, Any]:
        (found,) = json.loads(docker("inspect", self("ps", "-aq").strip()))
        assert isinstance(found, dict)
        return found


NewComposed = Callable[..., Composed]


@pytest.fixture(scope="module")
def compose_is_here() -> None:
    assert engine_setup.ensure_compose(print) >= engine_setup.COMPOSE_MINIMUM


@pytest.fixture
def new(compose_is_here: None, tmp_path: Path) -> Iterator[NewComposed]:
    """Writes a file with `builder deploy compose`; what came of it is removed at the end, volumes too."""
    made = []

    def write(image: str, *arguments: str) -> Composed:
        name = f"t{secrets.token_hex(4)}"
        one = Composed(tmp_path / f"{name}.yaml", name)
        command = ["deploy", "compose", image, "--name", name, "-o", str(one.file), *arguments]
        done = subprocess.run(
            [str(BUILDER), "--root", str(ROOT), *command], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        made.append(one)
        return one

    yield write
    for one in made:
        one("down", "--volumes", "--timeout", "2")


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
    found = compose.inspect()
    assert found["State"]["Health"]["Status"] == "healthy"
    assert found["Config"]["Healthcheck"]["Test"] == ["CMD", "/usr/local/bin/check-services"]
    (published,) = found["NetworkSettings"]["Ports"]["8888/tcp"]
    assert published["HostIp"] == "127.0.0.1"
    compose("exec", "-T", compose.name, "sh", "-c", "echo hello > /workspace/told.txt && mkdir -p ~/.local/x")
    with urllib.request.urlopen(f"http://127.0.0.1:{published['HostPort']}/told.txt", timeout=10) as answer:
        assert answer.read() == b"hello\n"
    memory = compose("exec", "-T", compose.name, "df", "--block-size=1", "--output=size", "/dev/shm").split()[-1]
    assert abs(int(memory) - 256 * 10**6) < 4096 * 2


def test_nobody_in_it_is_or_becomes_root(serving: str, new: NewComposed) -> None:
    compose = new(serving, "--gpus", "0")
    compose("up", "--detach", "--wait")
    status = compose("exec", "-T", compose.name, "cat", "/proc/1/status")
    told = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert told["Uid"].split() == ["1000"] * 4
    assert told["NoNewPrivs"] == "1"
    assert {told[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    compose("exec", "-T", compose.name, "sh", "-c", "! touch /etc/x && ! touch /opt/venv/x && touch /tmp/x")


def test_what_was_written_is_there_after_a_new_start(serving: str, new: NewComposed) -> None:
    compose = new(serving, "--gpus", "0")
    compose("up", "--detach", "--wait")
    compose("exec", "-T", compose.name, "sh", "-c", "echo 1 > /workspace/a; echo 2 > /home/user/b")
    compose("down", "--timeout", "5")
    compose("up", "--detach", "--wait")
    assert compose("exec", "-T", compose.name, "cat", "/workspace/a", "/home/user/b").split() == ["1", "2"]


def test_a_token_of_the_environment_is_handed_on_and_none_is_made_up(serving: str, new: NewComposed) -> None:
    compose = new(serving, "--gpus", "0")
    show = ("run", "--rm", "-T", compose.name, "sh", "-c", "echo ${JUPYTER_TOKEN-unset}")
    assert compose(*show, JUPYTER_TOKEN="from outside").strip() == "from outside"
    assert compose(*show).strip() == "unset"
    assert "JUPYTER_TOKEN" not in compose("config", "--no-interpolate").replace("JUPYTER_TOKEN: null", "")


def test_a_plain_image_has_a_shell(built: Checkout, new: NewComposed) -> None:
    compose = new(built.references()[0], "--gpus", "0")
    assert compose("run", "--rm", "-T", compose.name, "tinyframe").strip() == built.release
    assert compose("run", "--rm", "-T", compose.name, "pwd").strip() == "/workspace"


def test_words_of_a_command_and_a_folder_arrive_as_they_are(built: Checkout, new: NewComposed, tmp_path: Path) -> None:
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


def test_gpus_and_limits_are_what_compose_reads(serving: str, new: NewComposed) -> None:
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
with open(os.environ["TOLD"], "a") as told:
    told.write(json.dumps({{"program": "srun", "options": options, "words": words}}) + "\\n")
for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
    subprocess.run(words, check=True, env={{**os.environ, "SLURM_NODEID": str(node)}})
"""
APPTAINER = """\
#!{python}
import json, os, sys
with open(os.environ["TOLD"], "a") as told:
    told.write(json.dumps({{"program": "apptainer", "words": sys.argv[1:]}}) + "\\n")
words = sys.argv[1:]
if words[0] == "pull":
    open(words[1], "x").close()
else:
    os.execvp(words[(end := next(i for i, word in enumerate(words) if word.endswith(".sif"))) + 1], words[end + 1:])
"""
ANY = """\
#!{python}
import json, os, sys
with open(os.environ["TOLD"], "a") as told:
    name = os.path.basename(sys.argv[0])
    told.write(json.dumps({{"program": name, "words": sys.argv[1:], "environ": dict(os.environ)}}) + "\\n")
"""
SCONTROL = """\
#!/bin/sh
test "$*" = "show hostnames gpu[07-08]" && printf 'gpu07\\ngpu08\\n'
"""


@dataclass(frozen=True)
class Cluster:
    """A Slurm whose programs write down how they were called, and run what they were given."""

    folder: Path

    def submit(self, script: str, *, nodes: int = 1) -> list[dict[str, Any]]:
        """The calls, in order."""
        file, told = self.folder / "job.sh", self.folder / "told.jsonl"
        file.write_text(script, encoding="utf-8")
        told.unlink(missing_ok=True)
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
            "TOLD": str(told),
            "PYTHONPATH": "/of/a/module",
            "SLURM_JOB_ID": "1234567",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": "gpu[07-08]",
            "SLURM_SUBMIT_DIR": str(self.folder),
        }
        done = subprocess.run(
            ["bash", str(file)], env=environ, cwd="/", text=True, capture_output=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in told.read_text().splitlines()]


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
def test_torchrun_on_two_nodes(cluster: Cluster, runtime: deploy_slurm.Runtime) -> None:
    wanted = wish(nodes=2, gpus=8, cpus=32, command=("train.py", *HOSTILE))
    script = deploy_slurm.render(subject(), wanted, Batch(runtime=runtime, workspace="/data/my work"))
    calls = cluster.submit(script, nodes=2)
    (step,) = [one for one in calls if one["program"] == "srun"]
    assert step["options"][:3] == ["--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=32"]
    ranks = [one for one in calls if one["program"] == "torchrun"]
    assert [one["words"] for one in ranks] == [
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
    assert all("PYTHONPATH" not in one["environ"] and one["environ"]["PYTHONNOUSERSITE"] == "1" for one in ranks)


def test_how_pyxis_is_told_of_the_container(cluster: Cluster) -> None:
    script = deploy_slurm.render(subject(), wish(command=("python", "x")), Batch(workspace="/data/of 'x' & y"))
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
    script = deploy_slurm.render(subject(), wish(command=("python", "x")), Batch(runtime="apptainer"))
    sif = f"{cluster.folder}/pt-cuda-2.9.sif"
    pull, step, run, _ = cluster.submit(script)
    assert pull["words"] == ["pull", f"{sif}.1234567", "docker://registry.example.test/org/pt-cuda:2.9"]
    assert step["words"] == ["apptainer", *run["words"]]
    place = ["--no-home", "--bind", f"{cluster.folder}:/workspace", "--pwd", "/workspace"]
    assert run["words"] == ["exec", "--nv", *place, sif, "python", "x"]
    assert "pull" not in cluster.submit(script)[0]["words"]


def test_tensorflow_on_two_nodes(cluster: Cluster) -> None:
    wanted = wish(nodes=2, command=("train.py", *HOSTILE))
    calls = cluster.submit(deploy_slurm.render(subject(framework="tensorflow"), wanted, Batch()), nodes=2)
    workers = [one for one in calls if one["program"] == "python"]
    assert [json.loads(one["environ"]["TF_CONFIG"]) for one in workers] == [
        {"cluster": {"worker": ["gpu07:30067", "gpu08:30067"]}, "task": {"type": "worker", "index": node}}
        for node in range(2)
    ]
    assert all(one["words"] == ["train.py", *HOSTILE] for one in workers)


@pytest.mark.parametrize("gpus", [0, 4])
def test_jax_on_two_nodes(cluster: Cluster, gpus: int) -> None:
    wanted = wish(nodes=2, gpus=gpus, command=("train.py", *HOSTILE))
    calls = cluster.submit(deploy_slurm.render(subject(framework="jax"), wanted, Batch()), nodes=2)
    workers = [one for one in calls if one["program"] == "python"]
    for node, one in enumerate(workers):
        assert {name: value for name, value in one["environ"].items() if name.startswith("JAX_")} == {
            "JAX_COORDINATOR_ADDRESS": "gpu07:30067",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(node),
            **({"JAX_LOCAL_DEVICE_IDS": "0,1,2,3"} if gpus else {}),
        }
        assert one["words"] == ["train.py", *HOSTILE]
    assert len(workers) == 2


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
@pytest.mark.parametrize("variant", ["jupyter", "ssh", "full"])
def test_services_on_a_node(cluster: Cluster, variant: str, runtime: deploy_slurm.Runtime) -> None:
    calls = cluster.submit(deploy_slurm.render(subject(variant), wish(), Batch(runtime=runtime)))
    start = calls[-1]
    assert (start["program"], start["words"]) == ("start", ["services"])
    ports = {name: int(start["environ"][name]) for name in ("JUPYTER_PORT", "SSH_PORT") if name in start["environ"]}
    assert all(port > 1024 for port in ports.values())
    assert len(ports) == len(set(ports.values())) == (2 if variant == "full" else 1)
    words = [word for one in calls for word in (*one.get("options", ()), *one["words"])]
    # pyxis has both mounts in one option, Apptainer each in its own.
    (mount,) = {part for word in words for part in word.split(",") if part.endswith(":/tmp")}
    assert not Path(mount.split(":")[0]).exists(), "the folder with the token is left behind"
