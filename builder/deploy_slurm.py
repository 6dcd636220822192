"""A batch script of Slurm for an image, for pyxis with enroot, or for Apptainer. Pure but for reading its template."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

import jinja2

from builder import deploy
from builder.deploy import JAX, SSH, TENSORFLOW, Subject, Wish
from builder.errors import UsageError

Runtime = Literal["pyxis", "apptainer"]
TEMPLATES = Path(__file__).parent / "deployments"
_VALUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@:+-]*", re.ASCII)
_PORTS = (20000, 30000, 40000)  # of services on a node that other jobs use too


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How it is run. `workspace` is a path on the nodes, empty for where the job is submitted; `queue` has options of
    sbatch: time, partition, account."""

    runtime: Runtime = "pyxis"
    workspace: str = ""
    queue: Mapping[str, str] = field(default_factory=dict)


def render(subject: Subject, wish: Wish, batch: Batch) -> str:
    """Raises UsageError."""
    deploy.check(subject, wish)
    if batch.workspace:
        # Slurm's plugin and Apptainer take `source:target,source:target`, and nothing escapes the two signs.
        deploy.path(batch.workspace, "--workspace", never=":,")
        if not PurePosixPath(batch.workspace).is_absolute():
            raise UsageError(f"--workspace: {batch.workspace!r} is no path from / on", hint="Nodes know no other.")
    for option, value in batch.queue.items():
        if not _VALUE.fullmatch(value):
            raise UsageError(f"--{option}: {value[:60]!r} is nothing that sbatch takes")
    serves = not wish.command
    if serves and not subject.services:
        raise UsageError(f"{subject.reference} has no service to run", hint="Add a command: -- train.py --epochs 3")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  a shell script, not HTML; what is not checked above goes through `quoted`
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quoted": shlex.quote, "words": shlex.join}
    return environment.get_template("slurm.sh.j2").render(
        subject=subject,
        wish=wish,
        queue=batch.queue,
        runtime=batch.runtime,
        image=_image(subject, batch.runtime),
        sif=_sif(subject),
        workspace=batch.workspace,
        target=deploy.WORKSPACE,
        framework=subject.framework,
        memory_mib=-(-wish.memory // 2**20),
        master_port=deploy.MASTER_PORT,
        serves=serves,
        ports=dict(zip(subject.services, _PORTS, strict=False)),
        command=("start", "services") if serves else deploy.training(subject, wish),
        comment=_comment(subject, wish, serves=serves),
    )


def _image(subject: Subject, runtime: Runtime) -> str:
    """The image as the runtime wants it. Sources: pyxis' wiki, Usage; Apptainer's guide, Docker and OCI."""
    reference = subject.reference
    if runtime == "pyxis":
        if reference.digest:
            raise UsageError(
                f"enroot does not take {reference} by digest", hint="Name a full tag, or add --runtime apptainer."
            )
        registry = f"{reference.registry}#" if reference.registry else ""
        return f"{registry}{reference.repository}:{reference.tag or 'latest'}"
    # Apptainer refuses a tag beside a digest, which says all.
    version = f"@{reference.digest}" if reference.digest else f":{reference.tag or 'latest'}"
    return f"docker://{reference.name}{version}"


def _sif(subject: Subject) -> str:
    """A file name that another image does not have."""
    reference = subject.reference
    version = reference.digest.removeprefix("sha256:")[:12] or reference.tag or "latest"
    return f"{reference.repository.rpartition('/')[2]}-{version}.sif"


def _comment(subject: Subject, wish: Wish, *, serves: bool) -> list[str]:
    lines = []
    if serves:
        lines.append("The output file has the address and the token: it is as readable as your umask has it. Your own")
        lines.append(
            "token: JUPYTER_TOKEN=... sbatch FILE"
            if SSH not in subject.services
            else 'login: JUPYTER_TOKEN=... SSH_PUBLIC_KEY="$(cat ~/.ssh/id_ed25519.pub)" sbatch FILE'
        )
    if wish.nodes > 1 and subject.framework == JAX:
        lines += ["Your script begins with:", f"  {deploy.JAX_CALL}"]
    if wish.nodes > 1 and subject.framework == TENSORFLOW:
        lines.append("Your script uses tf.distribute.MultiWorkerMirroredStrategy, which reads TF_CONFIG.")
    return lines
