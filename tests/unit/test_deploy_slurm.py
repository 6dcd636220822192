"""The batch script's text. It runs for real, with a Slurm of our own, in tests/integration."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from builder import deploy_slurm
from builder.deploy_slurm import Batch
from builder.errors import UsageError
from builder.reference import ImageRef
from tests.unit.deployed import HOSTILE, subject, wish

TRAIN = ("train.py", "--epochs", "3")
DIGEST = "sha256:" + "a" * 64


def slurm(
    variant: str = "", batch: Batch | None = None, *, framework: str = "pytorch", image: str = "", **wanted: Any
) -> str:
    reference = ImageRef.parse(image or "registry.example.test/org/pt-cuda:2.9")
    return deploy_slurm.render(
        subject(variant, framework=framework, reference=reference), wish(**wanted), batch or Batch()
    )


def options(script: str) -> dict[str, str]:
    """Those that sbatch reads: before the first command."""
    head = re.split(r"^[^#\n]", script, maxsplit=1, flags=re.MULTILINE)[0]
    assert script.count("\n#SBATCH ") == head.count("\n#SBATCH "), "one stands where sbatch no longer looks"
    found = re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", head, re.MULTILINE)
    assert len(found) == head.count("#SBATCH") == len(dict(found))
    return dict(found)


def test_options_of_sbatch() -> None:
    assert options(slurm(command=TRAIN)) == {
        "job-name": "train",
        "output": "%x-%j.out",
        "nodes": "1",
        "ntasks-per-node": "1",
        "gpus-per-node": "1",
    }
    queue = {"time": "1-08:00:00", "partition": "gpu,gpu-2", "account": "team@lab"}
    script = slurm(batch=Batch(queue=queue), command=TRAIN, nodes=4, gpus=8, cpus=32, memory=64 * 10**9)
    wanted = {"nodes": "4", "gpus-per-node": "8", "cpus-per-task": "32", "mem": "61036M"} | queue
    assert wanted.items() <= options(script).items()
    assert "  --cpus-per-task=32\n" in script, "srun does not take it from sbatch since Slurm 22.05"


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_no_gpus(runtime: Any) -> None:
    script = slurm(batch=Batch(runtime=runtime), command=TRAIN, gpus=0)
    assert "gpus-per-node" not in options(script)
    assert "--nv" not in script
    assert ("--nv" in slurm(batch=Batch(runtime=runtime), command=TRAIN)) == (runtime == "apptainer")


@pytest.mark.parametrize(
    ("image", "runtime", "written"),
    [
        ("registry.example.test:5000/org/x:2.9", "pyxis", "--container-image=registry.example.test:5000#org/x:2.9\n"),
        ("org/x:2.9", "pyxis", "--container-image=org/x:2.9\n"),
        ("org/x", "pyxis", "--container-image=org/x:latest\n"),
        ("r.example.test/org/x:2.9", "apptainer", 'pull "$sif.$SLURM_JOB_ID" docker://r.example.test/org/x:2.9\n'),
        (f"org/x:2.9@{DIGEST}", "apptainer", f"docker://org/x@{DIGEST}\n"),
        (f"org/x:2.9@{DIGEST}", "apptainer", "/x-aaaaaaaaaaaa.sif}\n"),
        ("org/x:2.9", "apptainer", "/x-2.9.sif}\n"),
    ],
)
def test_the_image_as_the_runtime_wants_it(image: str, runtime: Any, written: str) -> None:
    # A # begins a comment only after a space.
    assert written in slurm(batch=Batch(runtime=runtime), image=image, command=TRAIN).replace("'", "")


def test_enroot_takes_no_digest() -> None:
    with pytest.raises(UsageError, match="by digest") as caught:
        slurm(image=f"org/x@{DIGEST}", command=TRAIN)
    assert "--runtime apptainer" in caught.value.hint


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (Batch(workspace="data"), "no path from / on"),
        (Batch(workspace="$HOME"), "no path from / on"),
        (Batch(workspace="/a:b"), "has a ':'"),
        (Batch(workspace="/a,/etc:/etc"), "has a ':'"),
        (Batch(workspace="/a,b"), "has a ','"),
        (Batch(workspace="/a\n#SBATCH --uid=0"), "no path should have"),
        (Batch(queue={"time": "1\n#SBATCH --uid=0"}), "--time"),
        (Batch(queue={"time": "-1"}), "--time"),
        (Batch(queue={"partition": "a b"}), "--partition"),
        (Batch(queue={"account": "$(id)"}), "--account"),
        (Batch(queue={"account": ""}), "--account"),
    ],
)
def test_what_is_refused(batch: Batch, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        slurm(batch=batch, command=TRAIN)


def test_a_plain_image_runs_a_command() -> None:
    with pytest.raises(UsageError, match="has no service to run"):
        slurm()


@pytest.mark.parametrize("text", HOSTILE)
def test_a_word_of_the_command_stands_there_quoted(text: str) -> None:
    script = slurm(command=("python", "train.py", text))
    assert script.endswith(f'"${{step[@]}}" python train.py {shlex.quote(text)}\n')


def test_services_have_ports_and_folders_of_their_own() -> None:
    script = slurm("full", gpus=2)
    assert "export JUPYTER_PORT=$((20000 + SLURM_JOB_ID % 10000))" in script
    assert "export SSH_PORT=$((30000 + SLURM_JOB_ID % 10000))" in script
    assert "$state:/tmp" in script
    assert script.endswith('"${step[@]}" start services\n')
    assert not re.search("JUPYTER_TOKEN=[^.]", script)
