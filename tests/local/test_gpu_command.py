"""The words of a command for GPU tests: real checks, with a stand-in for NVML and a `torch` of a few lines.

In place of a container, the words run in this machine's Python. tests/integration/nightly/releases has real containers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from builder.build.gpu_command import GpuCommand, StagedTarget
from builder.build.programs import Programs
from builder.evidence.suite import Suite
from builder.matrix.project import Project
from builder.matrix.schema import GpuTesting
from tests import nvml
from tests.gpu import inside
from tests.gpu.checks import pytorch
from tests.local.test_nvml_stub import DRIVER, H100, TORCH, properties
from tests.paths import ROOT

# Runs the words after the image, in this Python.
CONTAINER = """\
import os, sys
image, python, *words = sys.argv[1:]
os.execv(sys.executable, [sys.executable, *words])
"""


def test_the_checks_of_an_image_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = tmp_path / "tests/gpu"
    shutil.copytree(ROOT / "tests/gpu", gpu, ignore=shutil.ignore_patterns("__pycache__"))
    (gpu / "torch.py").write_text(TORCH.format(gpus=[properties(H100)]), encoding="utf-8")
    (tmp_path / "torch.py").write_text("raise ImportError('another one')\n", encoding="utf-8")
    library = nvml.build(tmp_path)
    for name, value in nvml.environment(library, nvml.state(DRIVER, H100), {"PYTHONPATH": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)  # a scheduler passes on the environment of its user
    words = [sys.executable, "-c", CONTAINER, "{image}", "{command}"]
    target = StagedTarget(
        reference="registry.example.test/image@sha256:0", inventory=inside.hashes(Path("/"), inside.INVENTORY)
    )
    assert "var/lib/dpkg/status" in target.inventory
    gpu_results = GpuCommand(words, (), tmp_path).run(
        "pt", target, [gpu / "test_pytorch.py"], Project(tmp_path), Programs(), Suite.of(tmp_path)
    )
    assert (gpu_results.report.driver, [device.name for device in gpu_results.report.devices]) == (DRIVER, [H100.name])
    results = {result["check"]: result["state"] for result in gpu_results.report.model_dump()["results"]}
    assert results.keys() == pytorch.CHECKS.keys()
    assert {name for name, state in results.items() if state == "passed"} == {"devices"}


# ---- examples/

IMAGE = "registry.example.com/org/staging-pt-cuda@sha256:" + "d" * 64
LOGGED = """\
#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as log:
    log.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""
KUBECTL = """\
case $* in
*" create "*) cat > "$CALLS"; echo job.batch/gpu-tests-x7 ;;
*" get "*) printf %s "$STATE" ;;
*" logs job.batch/gpu-tests-x7") echo results ;;
esac
"""


def sections() -> dict[str, list[str]]:
    """The commands of gpu-tests.yaml, by the program that they run in the end."""
    documents = yaml.safe_load_all((ROOT / "examples/gpu-tests.yaml").read_text(encoding="utf-8"))
    commands = [GpuTesting.model_validate(document["test"]).gpu_command for document in documents]
    return dict(zip(("podman", "pyxis", "apptainer", "kubernetes", "docker"), commands, strict=True))


def call(command: list[str], folder: Path, kind: str, words: Sequence[str]) -> list[str]:
    """Runs a command with stand-ins for its programs; returns the first call."""
    for name in ("srun", "ssh"):
        (folder / name).write_text(LOGGED.format(python=sys.executable), encoding="utf-8")
        (folder / name).chmod(0o755)
    filled = [word.replace("{image}", IMAGE) for word in command]
    filled = [part for word in filled for part in (words if word == "{command}" else [word])]
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(folder / f"{kind}.json")}
    subprocess.run(filled, env=environ, check=True, timeout=60)
    return list(json.loads((folder / f"{kind}.json").read_text(encoding="utf-8")))


WORDS = ["python", "-c", "import a;b('c+/=');d[1:]", "pytorch"]


def test_slurm_gets_the_image_and_the_words(tmp_path: Path) -> None:
    pyxis = call(sections()["pyxis"], tmp_path, "pyxis", WORDS)
    assert f"--container-image={IMAGE.replace('/', '#', 1)}" in pyxis
    assert pyxis[-4:] == WORDS
    apptainer = call(sections()["apptainer"], tmp_path, "apptainer", WORDS)
    assert apptainer[apptainer.index("apptainer") :] == [
        "apptainer", "exec", "--nv", "--no-home", "--cleanenv", f"docker://{IMAGE}", *WORDS,
    ]  # fmt: skip


@pytest.mark.parametrize(("state", "status"), [("Complete", 0), ("SuccessCriteriaMetComplete", 0), ("Failed", 1)])
def test_a_job_of_kubernetes_is_valid_and_gets_the_words(tmp_path: Path, state: str, status: int) -> None:
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\n{KUBECTL}", encoding="utf-8")
    (tmp_path / "kubectl").chmod(0o755)
    command = ["sh", str(ROOT / "examples/gpu-tests-job.sh"), IMAGE, *WORDS]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(tmp_path / "job"), "STATE": state}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (status, "results\n")
    job = yaml.safe_load((tmp_path / "job").read_text(encoding="utf-8"))
    kubernetes_validate.validate(job, "1.35", strict=True)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["args"]) == (IMAGE, WORDS)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
