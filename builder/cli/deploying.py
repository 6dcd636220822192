"""Commands that write examples of running an image: deploy compose, k8s, slurm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from builder import atomic, cells, deploy, deploy_compose, deploy_k8s, deploy_slurm, host, tags
from builder.cli.context import Context, Size
from builder.cli.explain import labels_of
from builder.deploy import Subject, Wish
from builder.deploy_compose import Folder
from builder.deploy_k8s import Place
from builder.deploy_slurm import Batch, Runtime
from builder.engine import Engine
from builder.errors import NoEngineError, UsageError
from builder.matrix import nearest
from builder.project import Project
from builder.reference import ImageRef
from builder.registry import Registry

EXAMPLES = """\b
Examples:
  builder deploy compose pt-2.9-cu128-py311-jupyter -o compose.yaml
  builder deploy compose org/tf-cpu:2.20 --workspace . -- train.py --epochs 3
  builder deploy k8s registry.example.com/org/pt-cuda:2.9-jupyter --namespace research -o jupyter.yaml
  builder deploy k8s registry.example.com/org/pt-cuda:2.9 --nodes 4 --gpus 8 -- train.py --epochs 3
  builder deploy slurm registry.example.com/org/pt-cuda:2.9 --nodes 4 --gpus 8 --time 8:00:00 -- train.py
\b
IMAGE is a cell's id, or an image as org/name:tag or registry/org/name:tag. A COMMAND comes after --; a script alone
(train.py, or -m package) is started on all GPUs of all nodes, as its framework has it. Without a command, an image
with services runs them.
"""


@click.group(name="deploy", epilog=EXAMPLES)
def deploy_command() -> None:
    """Write an example of running IMAGE with Compose, Kubernetes or Slurm.

    It asks for no password and holds none, runs as no root, and has /dev/shm, GPUs and a volume set up.
    """


def _common(*, shm: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    options = [
        click.argument("image"),
        click.argument("command", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED),
        click.option("--name", default="", help="What it is called; default: from the image's name."),
        click.option(
            "--gpus", type=click.IntRange(0, 64), help="GPUs, on each node; default: 1, or 0 for an image for the CPU."
        ),
        click.option("--cpus", type=click.IntRange(1, 4096), help="CPUs, on each node; default: no limit."),
        click.option("--memory", type=Size(positive=True), default=0, help="Such as 64GB; default: no limit."),
        click.option(
            "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: standard output."
        ),
        click.option("--force", is_flag=True, help="Replace the file if it is there."),
    ]
    if shm:
        options.append(
            click.option("--shm", type=Size(positive=True), default="8GB", show_default=True, help="Size of /dev/shm.")
        )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return click.pass_obj(command)

    return decorate


@deploy_command.command(name="compose")
@_common(shm=True)
@click.option(
    "--workspace",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="A folder of this machine for /workspace; default: a volume.",
)
def compose_command(context: Context, image: str, workspace: Path | None, **wanted: Any) -> None:
    """A file for `docker compose`, on one machine."""
    subject = _subject(context, image)
    folder = Folder(path=str(workspace), owner=workspace.stat().st_uid) if workspace else None
    if folder and not folder.owner:
        context.say(f"{folder.path} belongs to root: give it to user {deploy.USER}, who works there, with chown")
    _write(context, deploy_compose.render(subject, _wish(subject, **wanted), folder), **wanted)


@deploy_command.command(name="k8s")
@_common(shm=True)
@click.option("--nodes", type=click.IntRange(1, 1000), default=1, show_default=True, help="Nodes, for a COMMAND.")
@click.option("--namespace", default="", help="Default: that of kubectl's context.")
@click.option("--workspace", metavar="CLAIM", default="", help="An existing PersistentVolumeClaim; default: a new one.")
@click.option("--size", type=Size(positive=True), default="50GB", show_default=True, help="Size of the new claim.")
def k8s_command(context: Context, image: str, namespace: str, workspace: str, size: int, **wanted: Any) -> None:
    """Objects for `kubectl apply`: services, a job, or a job on several nodes."""
    subject = _subject(context, image)
    place = Place(namespace=namespace, claim=workspace, size=size)
    _write(context, deploy_k8s.render(subject, _wish(subject, **wanted), place), **wanted)
    _warn_of_hub(context, subject)


@deploy_command.command(name="slurm")
@_common(shm=False)
@click.option("--nodes", type=click.IntRange(1, 1000), default=1, show_default=True, help="Nodes, for a COMMAND.")
@click.option(
    "--runtime", type=click.Choice(["pyxis", "apptainer"]), default="pyxis", show_default=True,
    help="What runs containers on the cluster; pyxis with enroot.",
)  # fmt: skip
@click.option(
    "--workspace", metavar="PATH", default="", help="For /workspace, as nodes see it; default: where sbatch is."
)
@click.option("--time", default="", help="As sbatch has it, such as 8:00:00.")
@click.option("--partition", default="", help="As sbatch has it.")
@click.option("--account", default="", help="As sbatch has it.")
def slurm_command(
    context: Context, image: str, runtime: Runtime, workspace: str, time: str, partition: str, account: str,
    **wanted: Any,
) -> None:  # fmt: skip
    """A script for `sbatch`. /dev/shm is that of the nodes."""
    subject = _subject(context, image)
    queue = {"time": time, "partition": partition, "account": account}
    batch = Batch(runtime=runtime, workspace=workspace, queue={name: value for name, value in queue.items() if value})
    _write(context, deploy_slurm.render(subject, _wish(subject, **wanted), batch), **wanted)
    _warn_of_hub(context, subject)


def _wish(subject: Subject, **wanted: Any) -> Wish:
    gpus = wanted["gpus"]
    return Wish(
        name=wanted["name"] or subject.name,
        gpus=int(not subject.is_cpu) if gpus is None else gpus,
        nodes=wanted.get("nodes", 1),
        shm=wanted.get("shm", 0),
        cpus=wanted["cpus"] or 0,
        memory=wanted["memory"],
        command=tuple(wanted["command"]),
    )


def _write(context: Context, text: str, **wanted: Any) -> None:
    output: Path | None = wanted["output"]
    if output is None:
        click.echo(text, nl=False)
        return
    if output.exists() and not wanted["force"]:
        raise UsageError(f"{output} is there already", hint="Add --force to replace it, or name another file.")
    atomic.write_text(output, text)
    context.say(f"written: {output}")


def _warn_of_hub(context: Context, subject: Subject) -> None:
    if not subject.reference.registry:
        context.say(
            f"note: {subject.reference} names no registry, so a cluster asks Docker's. "
            "Push the image (`builder push`), and name it with its registry"
        )


def _subject(context: Context, image: str) -> Subject:
    """By the matrix for a cell or a tag of it; else by the labels of the image, in the engine or in its registry."""
    project = context.project
    names = tags.compute(project.matrix, project.cells)
    if cells.ID.fullmatch(image):
        found = next((cell for cell in project.cells if cell.id == image), None)
        if not found:
            raise UsageError(
                f"no cell is called {image!r}{nearest(image, names)}", hint="`builder plan all` lists them."
            )
        return deploy.of_cell(project.matrix, found, names[found.id][0])
    try:
        reference = ImageRef.parse(image)
    except ValueError as error:
        raise UsageError(str(error)) from error
    for cell in project.cells:
        if reference in names[cell.id]:
            return deploy.of_cell(project.matrix, cell, reference)
    return deploy.of_labels(reference, _labels(project, reference), project.matrix.components)


def _labels(project: Project, reference: ImageRef) -> dict[str, str]:
    try:
        local = Engine.connect().image(str(reference))
    except NoEngineError:
        local = None
    if local:
        return dict(local.labels)
    if not reference.registry:
        raise UsageError(
            f"{reference} is no tag of matrix.yaml, and Docker Engine does not have it",
            hint="Name a cell, a tag (`builder plan all` lists them), or an image with its registry.",
        )
    registry = Registry(reference, host=host.read(), write=False)
    return dict(labels_of(registry, reference.digest or reference.tag or "latest"))
