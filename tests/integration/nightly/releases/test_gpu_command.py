"""GPU tests by a command of matrix.yaml: Slurm with Podman, Podman alone, and Docker, each in real containers.

A stand-in for NVML is where a GPU would be. Slurm is Debian's, with one node: this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from builder.index import host
from tests import nvml
from tests.integration import programs
from tests.integration.checkout import PLAIN, SHORT, Checkout, until
from tests.integration.conftest import NewCheckout
from tests.integration.nightly.test_podman import RUNTIME
from tests.integration.registry import Proxy
from tests.integration.releases.machines import elsewhere, release, stage, tags
from tests.nvml import Card
from tests.paths import ROOT

pytestmark = pytest.mark.skipif(
    not host.is_debian(), reason="only on Debian, whose Slurm and Podman are installed here"
)

GPU = Card("NVIDIA H100 80GB HBM3", "9.0", 81559, 600)
DRIVER = "570.86.10"
CHECKS = '''\
"""The GPU checks of the tiny framework."""

from __future__ import annotations

from typing import Any

from . import common, nvml
from .common import Checks, Figure, NotApplicable, Setup

CHECKS = Checks()


def begin(system: nvml.System) -> Setup:
    module = common.load("tinyframe")
    return Setup(module, None, module.VERSION)


@CHECKS.add("devices", uses_all=True)
def devices(module: Any, device: Any) -> list[Figure]:
    """NVML has a GPU."""
    return [common.at_least("GPUs", len(nvml.read().visible), 1)]


@CHECKS.add("mig")
def mig(module: Any, device: Any) -> list[Figure]:
    """Nothing."""
    raise NotApplicable("no slices")
'''
# As the SlurmUser, root: the daemons need no other accounts. Without cgroups, which differ between machines.
SLURM = """\
ClusterName=test
SlurmctldHost={name}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort=26817
SlurmdPort=26818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
NodeName={name} NodeAddr=127.0.0.1 CPUs=2
PartitionName=gpu Nodes={name} Default=YES
"""


@pytest.fixture(scope="module")
def podman() -> Iterator[list[str]]:
    """The words that run a container with Podman, with a store of its own."""
    programs.install("podman")
    with TemporaryDirectory(prefix="podman-") as folder:
        runtime = Path(folder) / "runtime"
        runtime.write_text(RUNTIME)
        runtime.chmod(0o755)
        command = ["podman", "--root", f"{folder}/root", "--runroot", f"{folder}/run", "--tmpdir", f"{folder}/tmp"]
        yield [*command, "--runtime", str(runtime), "run", "--rm", "--network=none", "--tls-verify=false"]
        subprocess.run([*command, "system", "reset", "--force"], capture_output=True, check=False)


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment of Slurm's commands; its daemons run."""
    programs.install("srun", "slurm-wlm")
    name = socket.gethostname().partition(".")[0]
    with TemporaryDirectory(prefix="slurm-") as base:
        folder = Path(base)
        (folder / "slurm.conf").write_text(SLURM.format(name=name, folder=folder), encoding="utf-8")
        (folder / "state").mkdir()
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        munged = ["munged", "--force", "--foreground", f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
        munged += [f"--{kind}-file={folder}/munged.{kind}" for kind in ("pid", "log", "seed")]
        daemons = [munged, ["slurmctld", "-D", "-i"], ["slurmd", "-D"]]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for daemon in daemons:
                running.append(
                    subprocess.Popen(
                        daemon, env={**os.environ, **environ}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                )
            until(lambda: state_of_node({**os.environ, **environ}) == "idle", "the node is idle")
            yield environ
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait()


def state_of_node(environ: dict[str, str]) -> str:
    command = ["sinfo", "--noheader", "--format=%T"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of `run` that give a container a GPU."""
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "state").write_text(nvml.state(DRIVER, GPU, cuda=12080), encoding="utf-8")
    library = nvml.build(folder)
    return [f"--volume={library}:{nvml.IN_CONTAINER}:ro", f"--volume={folder}/state:/run/nvml-stub.conf:ro"]


@pytest.fixture(scope="module")
def three_images(new_checkout: NewCheckout, seed: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with three images, and GPU tests of their framework."""
    checkout = new_checkout(tmp_path_factory.mktemp("three"))
    checkout.edit("matrix.yaml", "variants:\n", "  note: {needs: [python]}\nvariants:\n  note: [note]\n")
    note = checkout.root / "templates/note/files/usr/local/bin/note"
    note.parent.mkdir(parents=True)
    note.write_text("#!/bin/sh\necho note\n")
    note.chmod(0o755)
    checkout.write_tests({**SHORT, "note": "def test_note(host):\n    assert host.check_output('note') == 'note'\n"})
    gpu = checkout.root / "tests/gpu"
    for name in ("run.py", "inside.py", "conftest.py", "checks/__init__.py", "checks/common.py", "checks/nvml.py"):
        (gpu / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / "tests/gpu" / name, gpu / name)
    checkout.edit("tests/gpu/run.py", "PACKAGES = {", 'PACKAGES = {"tiny": "tinyframe", ')
    (gpu / "checks/tiny.py").write_text(CHECKS, encoding="utf-8")
    text = (ROOT / "tests/gpu/test_pytorch.py").read_text(encoding="utf-8")
    (gpu / "test_tiny.py").write_text(text.replace("checks.pytorch", "checks.tiny"), encoding="utf-8")
    checkout.lock_and_render()
    checkout.take_store(like=seed)
    checkout.builder("images", "all", "--gpu", "off")
    return checkout


@pytest.fixture
def machine(three_images: Checkout, proxy: Proxy, keys: Path, tmp_path: Path) -> Checkout:
    """A second machine, without an engine, and with staged images to test."""
    (three_images.root / "keys").mkdir(exist_ok=True)
    shutil.copy2(keys / "ours.pub", three_images.root / "keys/ours.pub")
    there = elsewhere(three_images, tmp_path / "trusting")
    there.edit("matrix.yaml", 'registry: ""', 'registry: ""\nevidence: [{key: keys/ours.pub}]')
    there.use_registry(proxy.address)
    builder = elsewhere(there, tmp_path / "builder")
    shutil.copytree(three_images.root / ".builder/evidence", builder.root / ".builder/evidence")
    builder.environ["GPU_IMAGES_STORE"] = three_images.environ["GPU_IMAGES_STORE"]
    stage(builder, "all", "--sign", str(keys / "ours.key"))
    there.engine = "tcp://127.0.0.1:1"
    return there


def set_command(machine: Checkout, words: Sequence[str]) -> None:
    path = machine.root / "matrix.yaml"
    text = path.read_text(encoding="utf-8").partition("\ntest: ")[0]
    path.write_text(f"{text}\ntest: {json.dumps({'gpu_command': list(words)})}\n", encoding="utf-8")


def evidence(machine: Checkout) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((machine.root / ".builder/evidence").glob("*.gpu-*.json"))]


def test_a_release_tested_by_slurm_and_podman(
    machine: Checkout,
    proxy: Proxy,
    keys: Path,
    slurm: dict[str, str],
    podman: list[str],
    stub: list[str],
    tmp_path: Path,
) -> None:
    """One machine stages the images, a second one tests them on a cluster, and a third one releases them."""
    sign = ("--sign", str(keys / "ours.key"))
    third = elsewhere(machine, tmp_path / "third")
    assert "GPU tests have not passed (gpu: not run (--gpu off))" in release(third, "--check", code=8)

    machine.environ |= slurm
    set_command(machine, ["srun", "--ntasks=1", "--job-name=gpu-tests", *podman, *stub, "{image}", "{command}"])
    output = machine.builder("test", "--staged", "newest", "--jobs", "2", *sign)
    assert "3 images: 3 tested" in output
    found = evidence(machine)
    assert len(found) == 3
    for results in found:
        assert results["passed"] == ["tests/gpu/test_tiny.py::test[devices]"]
        assert results["not_applicable"] == ["tests/gpu/test_tiny.py::test[mig]"]
        assert results["reasons"] == {"tests/gpu/test_tiny.py::test[mig]": "Skipped: no slices"}, (
            "no path of this machine"
        )
        assert results["machine"]["command"].startswith("srun --ntasks=1 --job-name=gpu-tests podman ")
        assert results["machine"].items() >= {"gpu": GPU.name, "gpus": "1", "driver": DRIVER}.items()
    assert len({results["machine"]["inventory"] for results in found}) == 3

    assert "3 images: 3 up to date" in machine.builder("test", "--staged", "newest", *sign)
    release(third, *sign)
    assert len(set(tags(third, proxy).values())) == 3
    for tag in tags(third, proxy):
        image = f"{proxy.address}/{third.namespace}/ty-cuda:{tag}"
        assert "gpu: passed" in third.builder("verify", image, "--key", str(keys / "ours.pub"))


@pytest.mark.parametrize("engine", ["podman", "docker"])
def test_an_engine_alone_and_results_in_the_output(
    machine: Checkout, keys: Path, podman: list[str], stub: list[str], engine: str
) -> None:
    words = podman if engine == "podman" else ["env", "-u", "DOCKER_HOST", "docker", "run", "--rm", "--network=none"]
    set_command(machine, [*words, *stub, "{image}", "{command}"])
    output = machine.builder("test", PLAIN, "--staged", "newest", "--sign", str(keys / "ours.key"))
    assert "1 image: 1 tested" in output
    assert len(evidence(machine)) == 1
