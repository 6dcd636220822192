"""The command plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import click

from builder.cli.context import Context
from builder.cli.options import CELLS_HELP, cells_argument, format_option, size_in_bytes
from builder.common.console import View
from builder.common.errors import LockError, UsageError, for_cells
from builder.common.text import counted, size
from builder.plan import plan
from builder.plan.plan import Plan, PlannedImage
from builder.steps import ci


@click.command(name="plan", epilog=CELLS_HELP)
@cells_argument
@format_option(
    "json: all details, for scripts. ids: only the cell ids. github: outputs of a GitHub Actions step: `parts`, the "
    "matrix of a job, in parts that fit on the disk, and `cells`, all cell ids. gitlab: a child pipeline of GitLab CI, "
    "with a job for each such part. updates: outputs of a step of GitHub Actions: `debian` and `frameworks`, the sets "
    "of CELLS to update separately, with `builder lock --os` and `--upgrade`.",
    "table", "json", "ids", "github", "gitlab", "updates",
)  # fmt: skip
@click.option(
    "--changed-since", "revision", default="", metavar="REVISION",
    help="Only the images whose plan differs from that of a git revision.",
)  # fmt: skip
@click.option(
    "--unreleased",
    is_flag=True,
    help="Only the images whose full tag in the registry names no image of this plan. Leaves out images that a "
    "rolled-back release published from this plan.",
)
@click.option(
    "--disk", metavar="SIZE", callback=size_in_bytes, show_default="14GB",
    help="Disk of the machine that builds one part, for --format github and gitlab.",
)  # fmt: skip
@click.option("--publish", "is_release", is_flag=True, help="With --format gitlab: also stage and release the images.")
@click.pass_obj
def plan_command(
    context: Context, /, patterns: Sequence[str], form: str, revision: str, unreleased: bool,
    disk: int | None, is_release: bool,
) -> None:  # fmt: skip
    """Show what would be built: cells, tags, layers, sizes. Needs no engine, and no network without --unreleased.

    Of a single image, shows the layers and all tags. SIZE is the download size of the wheels and Debian packages. NEW
    is the part that no image higher in the table has.
    """
    if is_release and form != "gitlab":
        raise UsageError("--publish needs --format gitlab")
    if disk is not None and not (disk and form in ("github", "gitlab")):
        raise UsageError("--disk needs a size larger than 0, and --format github or gitlab")
    project = context.project
    chosen = project.select(patterns)
    if form == "ids" and not (revision or unreleased):  # needs no locks
        click.echo("\n".join(cell.id for cell in chosen))
        return
    if form == "updates":  # also if locks are damaged: updating makes them again
        for name, sets in ci.updates(project.matrix, chosen).items():
            click.echo(f"{name}={json.dumps(sets)}")
        return
    planned = plan.make_plan(project, chosen)
    if revision:
        before = ci.plan_digests(project, revision, View(context.err))
        planned = replace(planned, images=tuple(ci.changed_images(before, planned.images)))
    if unreleased:
        from builder.release import staging, status  # noqa: PLC0415  0.2 s, which other plans would pay

        staging.require_registry(project)
        area = staging.StagingArea.of(project, context.host)
        planned = replace(planned, images=tuple(status.unreleased(planned.images, area, context.host)))

    images = planned.images
    unlocked, lock = ", ".join(planned.unlocked), for_cells("builder lock", planned.unlocked)
    if form == "ids":
        click.echo("\n".join(image.id for image in images))
    elif form == "json":
        context.print_json(planned.as_data())
    elif form in ("github", "gitlab"):
        if unlocked:  # otherwise the jobs of CI would skip those cells, and pass
            raise LockError(f"not locked: {unlocked}", hint=lock)
        if form == "gitlab":
            click.echo(ci.gitlab_pipeline(images, disk or ci.RUNNER_DISK, publish=is_release), nl=False)
            return
        for name, value in ci.github_outputs(images, disk or ci.RUNNER_DISK).items():
            click.echo(f"{name}={value}")
    else:
        if len(images) == 1:
            _print_layers(context, images[0])
        elif images:
            _print_images(context, planned)
        if len(images) > 1:
            total, once = planned.sum_bytes, planned.unique_bytes
            percent = f" ({100 * once / total:.0f} %)" if total else ""
            shared = f"with the layers that they share counted once, {size(once)}{percent}"
            click.echo(f"{counted(len(images), 'image')}: {size(total)}; {shared}")
        context.say_support(project, [image.cell for image in images])
        context.say_not_built(project, [image.cell for image in images])
        if unlocked:
            context.say(f"not locked: {unlocked}   ({lock})")


def _print_images(context: Context, planned: Plan) -> None:
    """Prints one row per image, with its shortest tag."""
    rows = []
    lengths = {layer.inputs: layer.bytes for image in planned.images for layer in image.layers}
    above: set[str] = set()
    for image in planned.images:
        inputs = {layer.inputs for layer in image.layers}
        added = sum(lengths[layer] for layer in inputs - above)
        above |= inputs
        rows.append((image.id, size(image.bytes), size(added) if added else "-", image.references[-1]))
    context.print_table(("CELL", "SIZE", "NEW", "TAG"), rows, right=("SIZE", "NEW"))


def _print_layers(context: Context, image: PlannedImage) -> None:
    """Prints one row per layer, then the tags of the image."""
    rows = [
        (
            f"{layer.kind} {layer.name}" if layer.kind == "wheels" else layer.name,
            str(len(layer.wheels) or ""),
            size(layer.bytes) if layer.bytes else "",
        )
        for layer in image.layers
    ]
    rows.append(("total", str(len(image.wheels)), size(image.bytes)))
    context.print_table(("LAYER", "WHEELS", "SIZE"), rows, right=("WHEELS", "SIZE"))
    click.echo("\n".join([f"{image.id}:", *(f"  {reference}" for reference in image.references)]))
