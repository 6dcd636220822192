"""What to deploy and how: the image, the request, their checks, and the command that starts a script. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from builder.common.errors import UsageError
from builder.common.reference import ImageRef
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.schema import CPU, Component, Matrix
from builder.matrix.tags import CUDA_LABEL, LABEL

JUPYTER, SSH = "jupyter", "ssh"  # the components with a login
SSH_PORT = 2222  # sshd does not run as root, so it cannot use port 22 everywhere
PYTORCH, TENSORFLOW, JAX = "pytorch", "tensorflow", "jax"
NAME_LENGTH = 50  # the host name of a pod is this name, a dash and an index: at most 63 characters
_NAME = re.compile(rf"[a-z](?:[a-z0-9-]{{0,{NAME_LENGTH - 2}}}[a-z0-9])?", re.ASCII)
_PYTHON = re.compile(r"python(?:3(?:\.[0-9]+)?)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Image:
    """`services` are the components that listen, with their ports in the image; a plain image has none."""

    reference: ImageRef
    framework: str
    is_cpu: bool
    services: Mapping[str, int]

    @property
    def name(self) -> str:
        """The default for `Request.name`."""
        return re.sub(r"[^a-z0-9]+", "-", self.reference.repository.rpartition("/")[2])[:NAME_LENGTH].strip("-")

    @property
    def ports(self) -> dict[str, int]:
        """Service -> the port on which it listens when it is deployed here."""
        return {name: SSH_PORT if name == SSH else port for name, port in self.services.items()}


@dataclass(frozen=True, kw_only=True)
class Request:
    """How to run the image; see `check`. Sizes in bytes, 0: no limit. An empty command runs the services."""

    name: str
    gpus: int
    nodes: int = 1
    shm: int = 8 * 10**9
    cpus: int = 0
    memory: int = 0
    command: tuple[str, ...] = ()


def image_of_cell(matrix: Matrix, cell: Cell, reference: ImageRef) -> Image:
    return Image(
        reference=reference,
        framework=cell.framework,
        is_cpu=cell.is_cpu,
        services=_services(matrix.components, cells.components(matrix, cell)),
    )


def image_of_labels(reference: ImageRef, labels: Mapping[str, str], components: Mapping[str, Component]) -> Image:
    """The ports are those of `components` in matrix.yaml. Raises UsageError if this builder did not build the image."""
    try:
        return Image(
            reference=reference,
            framework=labels[f"{LABEL}.framework"],
            is_cpu=labels[CUDA_LABEL] == CPU,
            services=_services(components, labels[f"{LABEL}.components"].split()),
        )
    except KeyError as error:
        raise UsageError(
            f"{reference} has no label {error.args[0]}: this builder did not build it",
            hint="Use the id of a cell, or an image that `builder images` built.",
        ) from error


def _services(components: Mapping[str, Component], names: Sequence[str]) -> dict[str, int]:
    return {name: port for name in names if name in components and (port := components[name].port)}


def check(image: Image, request: Request) -> None:
    """Raises UsageError for a request that cannot work or cannot be written to a file."""
    if not _NAME.fullmatch(request.name):
        raise UsageError(
            f"invalid name {request.name[:80]!r} for a container, pod or host",
            hint=f"Set --name: lowercase letters, digits and dashes, a letter first, at most {NAME_LENGTH} characters.",
        )
    if image.is_cpu and request.gpus:
        raise UsageError(f"{image.reference} is a CPU image", hint="Leave out --gpus, or use --gpus 0.")
    for word in request.command:
        if not word.replace("\n", "").replace("\t", "").isprintable():
            raise UsageError(f"unprintable character in the command: {word[:60]!r}")
    if request.command and not request.command[0]:
        raise UsageError("the command is empty")
    if 0 < request.memory <= request.shm:
        raise UsageError(
            "--memory must be larger than --shm: /dev/shm counts as memory",
            hint="Increase --memory, or decrease --shm.",
        )
    if request.nodes > 1:
        if not request.command:
            raise UsageError("--nodes needs a command", hint="Add it: -- train.py --epochs 3")
        if image.framework not in (PYTORCH, TENSORFLOW, JAX):
            raise UsageError(f"{image.framework} is not supported on several nodes", hint="Use --nodes 1.")
        _script(request.command)


def launch_command(image: Image, request: Request) -> tuple[str, ...]:
    """The command that runs on each node, without torchrun's options about the other nodes.

    Launches a script on all GPUs as its framework needs it, with torchrun if there are several. Any other command is
    not changed; it runs on one node.
    """
    one_node = request.nodes == 1
    if one_node and not _is_script(request.command):
        return request.command
    words = _script(request.command)
    if image.framework == PYTORCH and (request.gpus > 1 or not one_node):
        return ("torchrun", *(["--standalone"] if one_node else []), f"--nproc-per-node={max(request.gpus, 1)}", *words)
    return ("python", *words)


def _is_script(command: Sequence[str]) -> bool:
    return command[0].endswith(".py") or command[0] == "-m"


def _script(command: tuple[str, ...]) -> tuple[str, ...]:
    """A Python script and its arguments, without `python`. Raises UsageError."""
    words = command[1:] if _PYTHON.fullmatch(PurePosixPath(command[0]).name) else command
    if words and _is_script(words):
        return words
    raise UsageError(
        f"--nodes needs a Python script, not {command[0][:60]!r}",
        hint="Use e.g. -- train.py --epochs 3, or -- -m package.train; the file adds the launcher for each node.",
    )


def check_path(text: str, option: str, *, forbidden: str = "") -> None:
    """Raises UsageError unless the path can be written on one line, without the `forbidden` characters."""
    if not text or not text.isprintable():
        raise UsageError(f"{option}: empty path or unprintable character: {text[:60]!r}")
    for character in forbidden:
        if character in text:
            raise UsageError(f"{option}: a path with {character!r} cannot be mounted: {text[:60]!r}")
