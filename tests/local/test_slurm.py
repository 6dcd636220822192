"""examples/: the Slurm scripts call srun and the container runtime as they must.

Slurm, pyxis and Apptainer are programs that log how they were called.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

EXAMPLES = ROOT / "examples"
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
COMMAND = ["train.py", "--name", "a 'b' $HOME"]
Submit = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with stand-ins for Slurm and Apptainer, which log their calls and run their commands."""
    folder = tmp_path / "cluster with a space"
    folder.mkdir()
    files = {"srun": SRUN, "apptainer": APPTAINER, "scontrol": SCONTROL}
    for name, text in (files | dict.fromkeys(("torchrun", "python", "start"), ANY)).items():
        (folder / name).write_text(text.format(python=sys.executable))
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def submit(cluster: Path) -> Submit:
    """A function that edits and runs a batch script on two nodes; returns the calls of programs, in order."""

    def run(name: str, *, runtime: str = "pyxis", framework: str = "PyTorch") -> list[dict[str, Any]]:
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        file, log = cluster / "job.sh", cluster / "calls.jsonl"
        file.write_text(edited(text, runtime, framework), encoding="utf-8")
        log.unlink(missing_ok=True)
        environ = {
            "PATH": f"{cluster}:/usr/bin:/bin",
            "CALLS": str(log),
            "PYTHONPATH": "/of/a/module",
            "SLURM_CPUS_PER_TASK": "64",
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_JOB_ID": "1234567",
            "SLURM_JOB_NUM_NODES": "1" if "jupyter" in name else "2",
            "SLURM_JOB_NODELIST": "gpu[07-08]",
            "SLURM_SUBMIT_DIR": str(cluster),
        }
        result = subprocess.run(
            ["bash", str(file)], env=environ, cwd="/", text=True, capture_output=True, check=False, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in log.read_text().splitlines()]

    return run


def edited(text: str, runtime: str, framework: str) -> str:
    """The script as its user would edit it: another runtime and command, and `launch` of another framework."""
    lines = text.splitlines()
    lines[lines.index("runtime=pyxis  # or apptainer")] = f"runtime={runtime}"
    for number, line in enumerate(lines):
        if line.startswith("command="):
            lines[number] = """command=(train.py --name "a 'b' \\$HOME")"""
    if framework != "PyTorch":
        number = next(number for number, line in enumerate(lines) if line.startswith(f"# For {framework}"))
        number += next(index for index, line in enumerate(lines[number:]) if line.startswith("# launch="))
        while not lines[number].endswith("'"):
            lines[number] = lines[number].removeprefix("# ")
            number += 1
        lines[number] = lines[number].removeprefix("# ")
    return "\n".join(lines) + "\n"


def of_program(calls: list[dict[str, Any]], program: str) -> list[dict[str, Any]]:
    return [call for call in calls if call["program"] == program]


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_torchrun_on_two_nodes(submit: Submit, cluster: Path, runtime: str) -> None:
    calls = submit("slurm.sh", runtime=runtime)
    [step] = of_program(calls, "srun")
    of_pyxis = [
        "--container-image=registry.example.com#org/pt-cuda:2.9",
        f"--container-mounts={cluster}:/workspace",
        "--container-workdir=/workspace",
        "--no-container-mount-home",
        "--no-container-remap-root",
        "--no-container-entrypoint",
    ]
    options = ["--ntasks-per-node=1", "--cpus-per-task=64", "--kill-on-bad-exit=1"]
    assert step["options"] == options + (of_pyxis if runtime == "pyxis" else [])
    ranks = of_program(calls, "torchrun")
    assert [call["words"] for call in ranks] == [
        [
            "--nnodes=2",
            f"--node-rank={node}",
            "--nproc-per-node=gpu",
            "--rdzv-backend=static",
            "--rdzv-endpoint=gpu07:30067",
            *COMMAND,
        ]
        for node in range(2)
    ]
    assert all("PYTHONPATH" not in call["environ"] and call["environ"]["PYTHONNOUSERSITE"] == "1" for call in ranks)


def test_apptainer_pulls_once(submit: Submit, cluster: Path) -> None:
    sif = f"{cluster}/pt-cuda-2.9.sif"
    pull, _, run, *_ = submit("slurm.sh", runtime="apptainer")
    assert pull["words"] == ["pull", f"{sif}.1234567", "docker://registry.example.com/org/pt-cuda:2.9"]
    assert run["words"][:7] == ["exec", "--nv", "--no-home", "--bind", f"{cluster}:/workspace", "--pwd", "/workspace"]
    assert run["words"][7] == sif
    assert all(call["words"][0] != "pull" for call in submit("slurm.sh", runtime="apptainer"))


def test_tensorflow_on_two_nodes(submit: Submit) -> None:
    workers = of_program(submit("slurm.sh", framework="TensorFlow"), "python")
    assert [json.loads(call["environ"]["TF_CONFIG"]) for call in workers] == [
        {"cluster": {"worker": ["gpu07:30067", "gpu08:30067"]}, "task": {"type": "worker", "index": node}}
        for node in range(2)
    ]
    assert [call["words"] for call in workers] == [COMMAND] * 2


def test_jax_on_two_nodes(submit: Submit) -> None:
    workers = of_program(submit("slurm.sh", framework="JAX"), "python")
    assert [call["words"] for call in workers] == [
        [*COMMAND, "--coordinator", "gpu07:30067", "--processes", "2", "--process", str(node)] for node in range(2)
    ]
    assert [call["environ"]["JAX_LOCAL_DEVICE_IDS"] for call in workers] == ["0,1,2,3"] * 2


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_jupyter_on_a_node(submit: Submit, runtime: str) -> None:
    calls = submit("slurm-jupyter.sh", runtime=runtime)
    start = calls[-1]
    assert (start["program"], start["words"]) == ("start", ["services"])
    assert start["environ"]["JUPYTER_PORT"] == str(20000 + 4567)
    words = [word for call in calls for word in (*call.get("options", ()), *call["words"])]
    # pyxis has both mounts in one option, Apptainer each in its own.
    [mount] = {part for word in words for part in word.split(",") if part.endswith(":/tmp")}
    assert not Path(mount.split(":")[0]).exists(), "the folder with the token is left behind"
