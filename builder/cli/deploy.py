"""The commands that write examples of running an image: deploy compose, k8s, slurm."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate

import click

from builder.cli.context import Context, parse_image
from builder.cli.explain import labels_of
from builder.cli.options import Size
from builder.common import atomic
from builder.common.errors import NoEngineError, UsageError, did_you_mean
from builder.common.reference import ImageRef
from builder.deploy import examples
from builder.deploy.examples import Folder, Runtime
from builder.deploy.request import Image, Request, image_of_cell, image_of_labels
from builder.engine.client import Engine
from builder.matrix import cells, tags
from builder.registry.client import Registry

EXAMPLES = """\b
Examples:
  builder deploy compose pt-2.9-cu128-py311-jupyter -o compose.yaml
  builder deploy compose org/tf-cpu:2.20 --workspace . -- train.py --epochs 3
  builder deploy k8s registry.example.com/org/pt-cuda:2.9-jupyter --namespace research -o jupyter.yaml
  builder deploy k8s registry.example.com/org/pt-cuda:2.9 --nodes 4 --gpus 8 -- train.py --epochs 3
  builder deploy slurm registry.example.com/org/pt-cuda:2.9 --nodes 4 --gpus 8 --time 8:00:00 -- train.py
\b
IMAGE is a cell id, or an image as org/name:tag or registry/org/name:tag. Put COMMAND after `--`. If COMMAND is only a
script (train.py, or -m package), it is started on all GPUs of all nodes, in the way that its framework needs. Without
COMMAND, the services of the image run (Jupyter, SSH); k8s and slurm need a COMMAND if the image has no services.
"""
Render = Callable[Concatenate[Context, Image, Request, ...], str]


@click.group(name="deploy", epilog=EXAMPLES)
def deploy_command() -> None:
    """Write an example for Compose, Kubernetes or Slurm.

    The example runs IMAGE with GPUs, shared memory (/dev/shm) and a volume. Its first lines are comments that say how
    to start it. It contains no password, and its containers do not run as root.
    """


_nodes_option = click.option(
    "--nodes", type=click.IntRange(1, 1000), default=1, show_default=True, help="Number of nodes that run COMMAND."
)
_shm_option = click.option(
    "--shm",
    type=Size(positive=True),
    default="8GB",
    show_default=True,
    help="Size of /dev/shm; counts towards --memory.",
)
_SHARED_OPTIONS = (
    click.argument("image"),
    click.argument("command", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED),
    click.option(
        "--name",
        default="",
        help="Name of the project (Compose), objects (Kubernetes) or job (Slurm). Default: the name of the image.",
    ),
    click.option("--gpus", type=click.IntRange(0, 64), help="GPUs per node. Default: 1, or 0 for a CPU image."),
    click.option(
        "--cpus",
        type=click.IntRange(1, 4096),
        help="CPUs per node. Default: no limit; Slurm: as its cluster sets, usually 1.",
    ),
    click.option(
        "--memory",
        type=Size(positive=True),
        default=0,
        help="Memory per node, e.g. 64GB. Default: no limit; Slurm: as its cluster sets.",
    ),
    click.option(
        "-o",
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File to write. Default: standard output.",
    ),
    click.option("--force", is_flag=True, help="Replace the output file if it exists."),
)


def _example(render: Render) -> Callable[..., None]:
    """A command with the shared options, which writes what `render` returns for an image and a request."""

    @wraps(render)
    def command(context: Context, /, image: str, output: Path | None, force: bool, **options: Any) -> None:
        target = _find_image(context, image)
        request = _request(target, options)
        _write(context, render(context, target, request, **options), output, force=force)

    for option in reversed(_SHARED_OPTIONS):
        command = option(command)
    return click.pass_obj(command)


@deploy_command.command(name="compose")
@_example
@_shm_option
@click.option(
    "--workspace",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Folder on this machine to mount at /workspace. Default: a Docker volume.",
)
def compose_command(context: Context, image: Image, request: Request, workspace: Path | None) -> str:
    """Write a file for `docker compose`, on one machine."""
    folder = Folder(path=str(workspace), owner=workspace.stat().st_uid) if workspace else None
    if folder and not folder.owner:
        context.say(f"note: {folder.path} belongs to root: change its owner to {examples.USER} with chown")
    return examples.compose(image, request, folder)


@deploy_command.command(name="k8s")
@_example
@_shm_option
@_nodes_option
@click.option("--namespace", default="", help="Namespace of the objects. Default: that of kubectl's current context.")
@click.option(
    "--workspace",
    metavar="CLAIM",
    default="",
    help="An existing PersistentVolumeClaim to mount at /workspace. Default: a new one.",
)
@click.option("--size", type=Size(positive=True), default="50GB", show_default=True, help="Size of the new claim.")
def k8s_command(context: Context, image: Image, request: Request, namespace: str, workspace: str, size: int) -> str:
    """Write Kubernetes objects for `kubectl apply`.

    They run the services of the image, or COMMAND as a job on one or more nodes.
    """
    text = examples.kubernetes(image, request, namespace=namespace, claim=workspace, size=size)
    return _for_cluster(context, image, text)


@deploy_command.command(name="slurm")
@_example
@_nodes_option
@click.option(
    "--runtime", type=click.Choice(["pyxis", "apptainer"]), default="pyxis", show_default=True,
    help="Container runtime of the cluster; pyxis uses enroot.",
)  # fmt: skip
@click.option(
    "--workspace",
    metavar="PATH",
    default="",
    help="Folder on the nodes to mount at /workspace. Default: the folder in which you run sbatch.",
)
@click.option("--time", default="", help="Time limit for sbatch, e.g. 8:00:00.")
@click.option("--partition", default="", help="Partition for sbatch.")
@click.option("--account", default="", help="Account for sbatch.")
def slurm_command(
    context: Context, image: Image, request: Request, runtime: Runtime, workspace: str, **queue: str
) -> str:
    """Write a script for `sbatch`. The container uses the /dev/shm of its node."""
    queue = {name: value for name, value in queue.items() if value}
    text = examples.slurm(image, request, runtime=runtime, workspace=workspace, **queue)
    return _for_cluster(context, image, text)


def _request(image: Image, options: dict[str, Any]) -> Request:
    """Removes its own options from `options`."""
    gpus = options.pop("gpus")
    return Request(
        name=options.pop("name") or image.name,
        gpus=int(not image.is_cpu) if gpus is None else gpus,
        nodes=options.pop("nodes", 1),
        shm=options.pop("shm", 0),
        cpus=options.pop("cpus") or 0,
        memory=options.pop("memory"),
        command=tuple(options.pop("command")),
    )


def _write(context: Context, text: str, output: Path | None, *, force: bool) -> None:
    if output is None:
        click.echo(text, nl=False)
        return
    if output.exists() and not force:
        raise UsageError(f"{output} already exists", hint="Add --force to replace it, or choose another file.")
    atomic.write_text(output, text)
    context.say(f"written: {output}")


def _for_cluster(context: Context, image: Image, text: str) -> str:
    """The text, after a note if nodes would look for the image on Docker Hub."""
    if not image.reference.registry:
        context.say(
            f"note: {image.reference} has no registry, so the cluster pulls it from Docker Hub. "
            "Push the image (`builder push`), and use its name with the registry"
        )
    return text


def _find_image(context: Context, name: str) -> Image:
    """From the matrix for a cell or its tag, else from the labels of the image in the engine or in its registry."""
    project = context.project
    references = tags.compute(project.matrix, project.cells)
    if cells.ID.fullmatch(name):
        cell = next((cell for cell in project.cells if cell.id == name), None)
        if not cell:
            raise UsageError(
                f"no cell {name!r}{did_you_mean(name, references)}", hint="`builder plan all` lists the cells."
            )
        return image_of_cell(project.matrix, cell, references[cell.id][0])
    reference = parse_image(name)
    for cell in project.cells:
        if reference in references[cell.id]:
            return image_of_cell(project.matrix, cell, reference)
    return image_of_labels(reference, _labels(context, reference), project.matrix.components)


def _labels(context: Context, reference: ImageRef) -> dict[str, str]:
    try:
        image = Engine.connect().image(str(reference))
    except NoEngineError:
        image = None
    if image:
        return dict(image.labels)
    if not reference.registry:
        raise UsageError(
            f"{reference} is not a tag of matrix.yaml and not in Docker Engine",
            hint="Use the id of a cell, a tag (`builder plan all` lists them), or an image with its registry.",
        )
    return labels_of(Registry(reference, host=context.host, write=False), reference.target)
