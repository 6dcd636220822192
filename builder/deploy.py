"""Examples of running an image with Compose, Kubernetes or Slurm: what all three are told, and how it is written. Pure.

Files of Compose and Kubernetes are data that is dumped, never text with values pasted in; Slurm's is a shell script
whose values are quoted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from builder import cells
from builder.cells import Cell
from builder.errors import UsageError
from builder.matrix import CPU, Component, Matrix
from builder.reference import ImageRef
from builder.settings import CUDA_LABEL, LABEL

JUPYTER, SSH = "jupyter", "ssh"  # components whose login needs something from the person who starts them
SSH_PORT = 2222  # sshd runs as a user, who may not have port 22 everywhere
WORKSPACE, HOME, HOST_KEYS = "/workspace", "/home/user", "/var/lib/workstation"
TMP, SHM = "/tmp", "/dev/shm"  # noqa: S108  paths in the container
USER, GROUP = 1000, 0
CHECK = ("/usr/local/bin/check-services",)
MASTER_PORT = 29500  # torchrun's default, for all frameworks
PYTORCH, TENSORFLOW, JAX = "pytorch", "tensorflow", "jax"
# The one line that JAX cannot learn from the environment.
JAX_CALL = (
    'jax.distributed.initialize(num_processes=int(os.environ["JAX_NUM_PROCESSES"]), '
    'process_id=int(os.environ["JAX_PROCESS_ID"]), cluster_detection_method="deactivate")'
)
NAME_LENGTH = 50  # the host name of a pod is this, a dash and its index: 63 at most
_NAME = re.compile(rf"[a-z](?:[a-z0-9-]{{0,{NAME_LENGTH - 2}}}[a-z0-9])?", re.ASCII)
_PYTHON = re.compile(r"python(?:3(?:\.[0-9]+)?)?", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*", re.ASCII)
# What YAML 1.1 or a parser of 1.2 may take for something else than text; PyYAML's own list lacks y and n.
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The image. `services` are components that listen, with their ports in the image; none in a plain image."""

    reference: ImageRef
    framework: str
    is_cpu: bool
    services: Mapping[str, int]

    @property
    def name(self) -> str:
        """What it is called where a person gives no name."""
        return re.sub(r"[^a-z0-9]+", "-", self.reference.repository.rpartition("/")[2])[:NAME_LENGTH].strip("-")

    @property
    def ports(self) -> dict[str, int]:
        """Service -> the port on which it listens as it is deployed here."""
        return {name: SSH_PORT if name == SSH else port for name, port in self.services.items()}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a person asks for, checked by `check`. Sizes in bytes, 0: no limit; an empty command: the services."""

    name: str
    gpus: int
    nodes: int = 1
    shm: int = 8 * 10**9
    cpus: int = 0
    memory: int = 0
    command: tuple[str, ...] = ()


def of_cell(matrix: Matrix, cell: Cell, reference: ImageRef) -> Subject:
    return Subject(
        reference=reference,
        framework=cell.framework,
        is_cpu=cell.is_cpu,
        services=_services(matrix.components, cells.components(matrix, cell)),
    )


def of_labels(reference: ImageRef, labels: Mapping[str, str], components: Mapping[str, Component]) -> Subject:
    """`components` are those of matrix.yaml, which know the ports. Raises UsageError for an image that is not ours."""
    try:
        return Subject(
            reference=reference,
            framework=labels[f"{LABEL}.framework"],
            is_cpu=labels[CUDA_LABEL] == CPU,
            services=_services(components, labels[f"{LABEL}.components"].split()),
        )
    except KeyError as error:
        raise UsageError(
            f"{reference} has no label {error.args[0]}: it was not made by this builder",
            hint="Name a cell, or an image that `builder images` made.",
        ) from error


def _services(components: Mapping[str, Component], names: Sequence[str]) -> dict[str, int]:
    return {name: port for name in names if name in components and (port := components[name].port)}


def check(subject: Subject, wish: Wish) -> None:
    """Raises UsageError for what cannot work, or cannot be written."""
    if not _NAME.fullmatch(wish.name):
        raise UsageError(
            f"{wish.name[:80]!r} cannot be the name of a container, a pod and a host",
            hint=f"Give --name: small letters, digits and dashes, a letter first, at most {NAME_LENGTH}.",
        )
    if subject.is_cpu and wish.gpus:
        raise UsageError(f"{subject.reference} is for the CPU and uses no GPU", hint="Leave out --gpus, or give 0.")
    for word in wish.command:
        if not word.replace("\n", "").replace("\t", "").isprintable():
            raise UsageError(f"a word of the command has characters that cannot be printed: {word[:60]!r}")
    if wish.command and not wish.command[0]:
        raise UsageError("the command is empty")
    if 0 < wish.memory <= wish.shm:
        raise UsageError(
            "what is in /dev/shm counts as memory, and --memory is not more than --shm",
            hint="Give more --memory, or less --shm.",
        )
    if wish.nodes > 1:
        if not wish.command:
            raise UsageError("several nodes run a command, and none was given", hint="Add it: -- train.py --epochs 3")
        if subject.framework not in (PYTORCH, TENSORFLOW, JAX):
            raise UsageError(f"nobody knows how {subject.framework} runs on several nodes", hint="Use --nodes 1.")
        _script(wish.command)


def training(subject: Subject, wish: Wish) -> tuple[str, ...]:
    """The command on each node, but for what torchrun is told about the other nodes.

    A script alone is started as its framework has it: on all GPUs, by torchrun if there are several. Any other command
    is run on one node as it stands.
    """
    alone = wish.nodes == 1
    if alone and not _is_script(wish.command):
        return wish.command
    words = _script(wish.command)
    if subject.framework == PYTORCH and (wish.gpus > 1 or not alone):
        return ("torchrun", *(["--standalone"] if alone else []), f"--nproc-per-node={max(wish.gpus, 1)}", *words)
    return ("python", *words)


def _is_script(command: Sequence[str]) -> bool:
    return command[0].endswith(".py") or command[0] == "-m"


def _script(command: tuple[str, ...]) -> tuple[str, ...]:
    """A Python script and its arguments, without `python`; raises UsageError."""
    words = command[1:] if _PYTHON.fullmatch(PurePosixPath(command[0]).name) else command
    if words and _is_script(words):
        return words
    raise UsageError(
        f"on several nodes the command is a Python script, and {command[0][:60]!r} begins none",
        hint="Write -- train.py --epochs 3, or -- -m package.train; what starts it on every node is added.",
    )


def path(text: str, what: str, *, never: str = "") -> str:
    """A path that can be written in one line; `never` are characters that its place cannot hold."""
    if not text.isprintable() or not text:
        raise UsageError(f"{what}: {text[:60]!r} has characters that no path should have")
    for character in never:
        if character in text:
            raise UsageError(f"{what}: {text[:60]!r} has a {character!r}, which cannot be written there")
    return text


class _Dumper(yaml.SafeDumper):
    """Text is quoted unless every parser takes it for text: Kubernetes reads 1e-3 as a number, and PyYAML does not."""

    def ignore_aliases(self, data: Any) -> bool:
        """What is used twice is written twice."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Lists are indented below their key."""
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def dump(documents: Sequence[Mapping[str, Any]], comment: Sequence[str]) -> str:
    """YAML with a comment before it. No line of a comment holds what a person typed but for checked names."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment)
    texts = [
        yaml.dump(dict(one), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=False)
        for one in documents
    ]
    return head + "---\n".join(texts)
