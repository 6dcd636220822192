"""The command explain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click
from rich.text import Text

from builder.cli.context import Context
from builder.common.console import View
from builder.common.errors import RefusedError, UsageError
from builder.compat import explain, gpu_support, gpus
from builder.compat.explain import Explainer
from builder.compat.gpu_support import Device, ImageNeeds
from builder.index.releases import Index
from builder.lock import lockfile
from builder.lock.lockfile import GROUP_LOCKS
from builder.lock.resolve import Resolver
from builder.matrix import facts, support
from builder.matrix.cells import Cell
from builder.matrix.schema import Matrix

THIS = "this"
_STATES = {
    True: Text("  runs          ", style="green"),
    False: Text("  does not run  ", style="bold red"),
    None: Text("  unknown       ", style="yellow"),
}
EXAMPLES = """\b
Examples:
  builder explain pt-2.9-cu130-py39       why it does not work, the nearest
  builder explain tf-2.19-cu125-py311     versions that matrix.yaml lacks
  builder explain jax-0.10.2-cpu-py313    a full release, without CUDA
  builder explain --gpu "RTX 5090" --driver 570.86.10    what runs there
  builder explain --gpu this 'pt-*'       the GPUs and the driver found here

Exit code: 0 if the combination works, 16 if not. With --gpu: 0 if every cell that you name runs, or, if you name none,
if at least one cell of the matrix does.
"""


@click.command(name="explain", epilog=EXAMPLES)
@click.argument("targets", metavar="[COMBINATION | CELLS]...", nargs=-1)
@click.option(
    "--gpu",
    "gpu_name",
    metavar="NAME",
    help="GPU name or compute capability. `this`: the GPUs and the driver of this machine.",
)
@click.option(
    "--driver", default="", metavar="VERSION", help="With --gpu: the version of the NVIDIA driver, e.g. 570.86.10."
)
@click.pass_obj
def explain_command(context: Context, targets: Sequence[str], gpu_name: str | None, driver: str) -> None:
    """Show whether a combination works, or which images run on a GPU.

    COMBINATION is a framework, version, CUDA, Python and, optionally, a variant, written like a cell id. It need not be
    in matrix.yaml. It is checked against the package index and the metadata of the packages, then resolved to wheels.
    Nothing is written.

    With --gpu, CELLS are cell ids, patterns or sets (default: all).
    """
    if gpu_name is not None:
        _on_gpu(context, targets, gpu_name, driver)
        return
    if driver:
        raise UsageError("--driver needs --gpu")
    if len(targets) != 1:
        raise UsageError("name one combination, or a GPU", hint="`builder explain --help` has examples.")
    project = context.project
    locks = {cell.group: GROUP_LOCKS.find(project.root, cell.group) for cell in project.cells}

    view = View(context.err)

    def resolve(matrix: Matrix, cell: Cell) -> str:
        view.say_once(f"{cell.id}: resolving")  # a second time with the constraints that the first one needs
        return Resolver(project, context.host, view, matrix).reason(cell)

    cell = explain.cell_of_combination(project.matrix, targets[0])
    explanation = Explainer(
        matrix=project.matrix,
        known=project.cells,
        catalogue=Index(context.host.index),
        facts=facts.load_facts(),
        resolve=resolve,
        locked={
            known.id for known in project.cells
            if not lockfile.stale_reason(project.matrix, locks[known.group], [known])
        },
    ).explain(cell)  # fmt: skip
    for line in explanation.lines:
        click.echo(line)
    if not explanation.works:
        click.get_current_context().exit(RefusedError.exit_code)
    for end in support.ends_of_cell(project.matrix, cell):
        reason = f"; released anyway: {end.after_support}" if end.after_support else ""
        click.echo(f"{end.sentence(context.today)} ({end.source}){reason}")
    if (python := project.matrix.python.get(cell.python)) and python.not_built:
        click.echo(f"its images are not in the set `all`: {python.not_built}")


def _on_gpu(context: Context, targets: Sequence[str], gpu_name: str, driver: str) -> None:
    """Shows for each GPU which of the images run there. Raises RefusedError."""
    devices: Sequence[Device]
    if gpu_name == THIS:
        installed, present = gpus.read_gpus()
        if not present:
            raise UsageError(
                "no NVIDIA GPU with a driver on this machine", hint='Name a GPU: --gpu "RTX 5090" --driver 570.86.10'
            )
        # A machine may have several GPUs of one model.
        devices, driver = list({(gpu.name, gpu.capability): gpu for gpu in present}.values()), driver or installed
    else:
        devices = [gpu_support.find_gpu(gpu_name, facts.load_facts())]
    images = dict(_images(context, targets))
    refused: set[str] = set()
    for device in devices:
        is_named = device.description != device.name or device.capability in device.name
        capability = "" if is_named else f" (compute capability {device.capability})"
        verdicts = {
            name: gpu_support.judge(device, driver, needs, facts.load_facts()) for name, needs in images.items()
        }
        click.echo(f"{device.description}{capability}{f', driver {driver}' if driver else ''}:")
        for name, verdict in verdicts.items():
            if not verdict.runs:
                refused.add(name)
            reasons = f": {'; '.join(verdict.reasons)}" if verdict.reasons else ""
            context.out.print(_STATES[verdict.runs], Text(f"{name}{reasons}"), sep="", soft_wrap=True)
    if (targets and refused) or len(refused) == len(images):
        raise RefusedError(f"{len(refused)} of {len(images)} images do not run on this GPU, or could not be checked")


def _images(context: Context, patterns: Sequence[str]) -> Iterator[tuple[str, ImageNeeds]]:
    """The names of cells, by group, with what their images need."""
    project = context.project
    # Variants of a group have the same framework and CUDA, so one line is enough for all of them.
    groups: dict[str, list[Cell]] = {}
    for cell in project.select(patterns or ("*",)):
        groups.setdefault(cell.group, []).append(cell)
    for members in groups.values():
        suffixes = [cell.suffix for cell in members]
        name = suffixes[0] if len(suffixes) == 1 else f"{{{','.join(suffixes)}}}"
        name = members[0].axes + name + members[0].arch_suffix
        yield name, gpu_support.needs_of_cell(project.matrix, members[0], facts.load_facts())
