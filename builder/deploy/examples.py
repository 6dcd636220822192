"""Examples of running an image: a Compose file, Kubernetes objects, a Slurm script. Pure but for reading templates.

The templates are beside this module. A YAML template passes every value that can hold arbitrary text through the
filter `yaml`, the shell template through `quoted`.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import jinja2
import yaml

from builder.common.errors import UsageError
from builder.deploy.request import JUPYTER, SSH, Image, Request, check, check_path, launch_command
from builder.plan.settings import Health

USER = 1000  # of the image
HEALTH = Health(command=("/usr/local/bin/check-services",))
MASTER_PORT = 29500  # torchrun's default, used for all frameworks
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_CLAIM = re.compile(rf"{_LABEL.pattern}(?:\.{_LABEL.pattern})*", re.ASCII)
_SBATCH_VALUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@:+-]*", re.ASCII)
_JOB_PORTS = (20000, 30000, 40000)  # bases for services on a node that other jobs also use


@dataclass(frozen=True, kw_only=True)
class Folder:
    """An absolute path on the host; `owner` is a user ID, 0 for root or if it is not known."""

    path: str
    owner: int = 0


Runtime = Literal["pyxis", "apptainer"]


def compose(image: Image, request: Request, folder: Folder | None = None) -> str:
    """A Compose file; without a folder, the workspace is a volume. Raises UsageError."""
    check(image, request)
    if folder:
        check_path(folder.path, "--workspace")
        if SSH in image.services and not request.command and folder.owner not in (0, USER):
            raise UsageError(
                f"the SSH server in the image runs as user {USER}, but {folder.path} belongs to user {folder.owner}",
                hint=f"Change its owner to {USER} with chown, or leave out --workspace to use a volume.",
            )
    user = f"{(folder and folder.owner) or USER}:0"
    return _render("compose.yaml.j2", image, request, folder=folder, user=user)


def kubernetes(image: Image, request: Request, *, namespace: str = "", claim: str = "", size: int = 50 * 10**9) -> str:
    """Kubernetes objects: services, a job, or a job on several nodes. Raises UsageError.

    An empty namespace is that of kubectl's context; without an existing `claim`, a new one has `size` bytes.
    """
    check(image, request)
    _check_has_task(image, request)
    if namespace and not _LABEL.fullmatch(namespace):
        raise UsageError(f"--namespace: invalid name of a namespace: {namespace[:80]!r}")
    if claim and (len(claim) > 253 or not _CLAIM.fullmatch(claim)):
        raise UsageError(
            f"--workspace: invalid name of a PersistentVolumeClaim: {claim[:80]!r}",
            hint="Use the name of an existing claim, or leave out --workspace to create one.",
        )
    workers = [f"{request.name}-{index}.{request.name}:{MASTER_PORT}" for index in range(request.nodes)]
    return _render(
        "kubernetes.yaml.j2", image, request, namespace=namespace, claim=claim, size=size, user=USER, workers=workers
    )


def slurm(image: Image, request: Request, *, runtime: Runtime = "pyxis", workspace: str = "", **queue: str) -> str:
    """A batch script for Slurm, with pyxis and enroot, or with Apptainer. Raises UsageError.

    `workspace` is a path on the nodes, empty for the folder of submission; `queue` has options of sbatch.
    """
    check(image, request)
    _check_has_task(image, request)
    if workspace:
        # pyxis and Apptainer read `source:target,source:target` and have no escape for the two separators.
        check_path(workspace, "--workspace", forbidden=":,")
        if not PurePosixPath(workspace).is_absolute():
            raise UsageError(f"--workspace: not an absolute path: {workspace!r}")
    for option, value in queue.items():
        if not _SBATCH_VALUE.fullmatch(value):
            raise UsageError(f"--{option}: invalid value {value[:60]!r}")
    return _render(
        "slurm.sh.j2",
        image,
        request,
        runtime=runtime,
        workspace=workspace,
        queue=queue,
        source=_source(image, runtime),
        sif=_sif_file(image),
        memory_mib=-(-request.memory // 2**20),
        master_port=MASTER_PORT,
        job_ports=dict(zip(image.services, _JOB_PORTS, strict=False)),
    )


def _source(image: Image, runtime: Runtime) -> str:
    """The image, in the runtime's notation. Sources: pyxis wiki, Usage; Apptainer guide, Docker and OCI."""
    reference = image.reference
    if runtime == "pyxis":
        if reference.digest:
            raise UsageError(
                f"enroot cannot pull {reference} by digest",
                hint="Use a stamped tag (e.g. 2.9.1-cu128-py311-20261122), or add --runtime apptainer.",
            )
        registry = f"{reference.registry}#" if reference.registry else ""
        return f"{registry}{reference.repository}:{reference.tag or 'latest'}"
    # Apptainer refuses a tag together with a digest.
    version = f"@{reference.digest}" if reference.digest else f":{reference.tag or 'latest'}"
    return f"docker://{reference.name}{version}"


def _sif_file(image: Image) -> str:
    """A file name that no other image has."""
    reference = image.reference
    version = reference.digest.removeprefix("sha256:")[:12] or reference.tag or "latest"
    return f"{reference.repository.rpartition('/')[2]}-{version}.sif"


def _check_has_task(image: Image, request: Request) -> None:
    if not request.command and not image.services:
        raise UsageError(f"{image.reference} has no service to run", hint="Add a command: -- train.py --epochs 3")


def _render(template: str, image: Image, request: Request, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  YAML and shell, not HTML: the filters below quote
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "yaml": yaml_scalar,
        "literal": _literal,
        "quantity": quantity,
        "quoted": shlex.quote,
        "words": shlex.join,
    }
    serves = bool(image.services) and not request.command
    return environment.get_template(template).render(
        image=image,
        request=request,
        command=launch_command(image, request) if request.command else (),
        serves=serves,
        jupyter=serves and JUPYTER in image.services,
        ssh=serves and SSH in image.services,
        health=HEALTH,
        **values,
    )


def yaml_scalar(value: object) -> str:
    """A double-quoted YAML scalar on one line; parsers differ on which plain texts are numbers or booleans."""
    return yaml.safe_dump(str(value), default_style='"', allow_unicode=True, width=sys.maxsize).rstrip("\n")


def _literal(text: str) -> str:
    """Escapes `$`: Compose expands ${NAME}, Kubernetes $(NAME), and both turn two dollars into one."""
    return text.replace("$", "$$")


def quantity(count: int) -> str:
    """Bytes as a Kubernetes quantity: 8G."""
    for unit, power in (("T", 12), ("G", 9), ("M", 6), ("k", 3)):
        if count and count % 10**power == 0:
            return f"{count // 10**power}{unit}"
    return str(count)
