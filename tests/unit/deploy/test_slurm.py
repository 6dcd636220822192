"""The text of the batch script. tests/integration runs it with a fake Slurm."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, get_args

import pytest

from builder.common.errors import UsageError
from builder.common.reference import ImageRef
from builder.deploy import examples
from builder.deploy.examples import Runtime
from tests.fakes.deployed import HOSTILE, image_of, request_of

TRAIN = ("train.py", "--epochs", "3")
DIGEST = "sha256:" + "a" * 64


def slurm(
    variant: str = "", options: Mapping[str, Any] | None = None, *, reference: str = "org/pt-cuda:2.9", **changes: Any
) -> str:
    image = image_of(variant, reference=ImageRef.parse(reference))
    return examples.slurm(image, request_of(**changes), **(options or {}))


def sbatch_options(script: str) -> dict[str, str]:
    """The options that sbatch reads: those before the first command."""
    head = re.split(r"^[^#\n]", script, maxsplit=1, flags=re.MULTILINE)[0]
    assert script.count("\n#SBATCH ") == head.count("\n#SBATCH "), "sbatch ignores an option after the first command"
    pairs = re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", head, re.MULTILINE)
    assert len(pairs) == head.count("#SBATCH") == len(dict(pairs))
    return dict(pairs)


def test_options_of_sbatch() -> None:
    assert sbatch_options(slurm(command=TRAIN)) == {
        "job-name": "train",
        "output": "%x-%j.out",
        "nodes": "1",
        "ntasks-per-node": "1",
        "gpus-per-node": "1",
    }
    queue = {"time": "1-08:00:00", "partition": "gpu,gpu-2", "account": "team@lab"}
    script = slurm(options=queue, command=TRAIN, nodes=4, gpus=8, cpus=32, memory=64 * 10**9)
    expected = {"nodes": "4", "gpus-per-node": "8", "cpus-per-task": "32", "mem": "61036M"} | queue
    assert expected.items() <= sbatch_options(script).items()
    assert "  --cpus-per-task=32\n" in script, "since Slurm 22.05, srun does not inherit it from sbatch"


@pytest.mark.parametrize("runtime", get_args(Runtime))
def test_no_gpus(runtime: Runtime) -> None:
    script = slurm(options={"runtime": runtime}, command=TRAIN, gpus=0)
    assert "gpus-per-node" not in sbatch_options(script)
    assert "--nv" not in script
    assert ("--nv" in slurm(options={"runtime": runtime}, command=TRAIN)) == (runtime == "apptainer")


@pytest.mark.parametrize(
    ("reference", "runtime", "line"),
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
def test_the_notation_of_the_runtime(reference: str, runtime: Runtime, line: str) -> None:
    script = slurm(options={"runtime": runtime}, reference=reference, command=TRAIN)
    assert line in script.replace("'", ""), "shlex.quote may add quotes"


def test_enroot_cannot_pull_by_digest() -> None:
    with pytest.raises(UsageError, match="by digest") as caught:
        slurm(reference=f"org/x@{DIGEST}", command=TRAIN)
    assert "--runtime apptainer" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workspace": "data"}, "not an absolute path"),
        ({"workspace": "$HOME"}, "not an absolute path"),
        ({"workspace": "/a:b"}, "a path with ':'"),
        ({"workspace": "/a,/etc:/etc"}, "a path with ':'"),
        ({"workspace": "/a,b"}, "a path with ','"),
        ({"workspace": "/a\n#SBATCH --uid=0"}, "unprintable character"),
        ({"time": "1\n#SBATCH --uid=0"}, "--time"),
        ({"time": "-1"}, "--time"),
        ({"partition": "a b"}, "--partition"),
        ({"account": "$(id)"}, "--account"),
        ({"account": ""}, "--account"),
    ],
)
def test_invalid_options(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        slurm(options=options, command=TRAIN)


def test_a_plain_image_needs_a_command() -> None:
    with pytest.raises(UsageError, match="has no service to run"):
        slurm()


@pytest.mark.parametrize("text", HOSTILE)
def test_a_word_of_the_command_is_quoted(text: str) -> None:
    script = slurm(command=("python", "train.py", text))
    assert script.endswith(f'"${{step[@]}}" python train.py {shlex.quote(text)}\n')


def test_services_have_their_own_ports_and_folders() -> None:
    script = slurm("full", gpus=2)
    assert "export JUPYTER_PORT=$((20000 + SLURM_JOB_ID % 10000))" in script
    assert "export SSH_PORT=$((30000 + SLURM_JOB_ID % 10000))" in script
    assert "$state:/tmp" in script
    assert script.endswith('"${step[@]}" start services\n')
    assert not re.search("JUPYTER_TOKEN=[^.]", script)
