"""The command plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from builder.cli.context import Context, new_table
from builder.cli.options import CELLS_HELP, Size, cells_argument, format_option
from builder.common.errors import LockError, for_cells
from builder.common.units import counted, size
from builder.matrix.project import Project
from builder.plan import plan, revisions, shards
from builder.plan.plan import Plan, PlannedImage


@click.command(name="plan", epilog=CELLS_HELP)
@cells_argument
@format_option(
    "json: all details, for scripts. ids: only the cell ids. github: outputs of a GitHub Actions step: `parts`, the "
    "matrix of a job, in parts that fit on the disk, and `cells`, all cell ids.",
    "table", "json", "ids", "github",
)  # fmt: skip
@click.option(
    "--changed-since", "revision", default="", metavar="REVISION",
    help="Only the images whose plan differs from that of a git revision.",
)  # fmt: skip
@click.option(
    "--unreleased",
    is_flag=True,
    help="Only the images whose tag in the registry is missing or was built from a different plan.",
)
@click.option(
    "--disk", type=Size(positive=True), default="14GB", show_default=True,
    help="Disk of the machine that builds one part, for --format github.",
)  # fmt: skip
@click.option(
    "--layers", is_flag=True, help="Show the layers and all tags of each image. This is the default for a single image."
)
@click.pass_obj
def plan_command(
    context: Context, /, patterns: Sequence[str], form: str, disk: int, layers: bool, **limits: Any
) -> None:
    """Show what would be built: cells, tags, layers, sizes. Needs no engine, and no network without --unreleased.

    SIZE is the download size of the wheels and Debian packages. ADDS is the part that is in no image higher in the
    table; OWN is the part that is in no other image in the table.
    """
    project = context.project
    chosen = project.select(patterns)
    if form == "ids" and not any(limits.values()):
        click.echo("\n".join(cell.id for cell in chosen))
        return
    planned = plan.make(project, chosen)
    planned = Plan(images=tuple(_limited(context, project, planned, **limits)), unlocked=planned.unlocked)
    if form == "ids":
        click.echo("\n".join(image.id for image in planned.images))
        return
    if form == "github":
        _print_outputs(planned, disk)
        return
    if form == "json":
        context.print_json(planned.as_data())
        return
    _print_tables(context, planned, layers=layers)


def _print_outputs(planned: Plan, disk: int) -> None:
    if planned.unlocked:
        raise LockError(f"not locked: {', '.join(planned.unlocked)}", hint=for_cells("builder lock", planned.unlocked))
    click.echo(f"parts={json.dumps(shards.for_github(shards.split(planned.images, disk)))}")
    click.echo(f"cells={' '.join(image.id for image in planned.images)}")


def _print_tables(context: Context, planned: Plan, *, layers: bool) -> None:
    if len(planned.images) == 1 or (planned.images and layers):
        context.out.print(_layer_table(planned))
    elif planned.images:
        _print_images(planned, bold=bool(context.out.color_system))
    if len(planned.images) > 1:
        context.out.print(_sums(planned), soft_wrap=True)
    if planned.unlocked:
        context.say(f"not locked: {', '.join(planned.unlocked)}   ({for_cells('builder lock', planned.unlocked)})")


def _limited(
    context: Context, project: Project, planned: Plan, *, revision: str, unreleased: bool
) -> Sequence[PlannedImage]:
    images: Sequence[PlannedImage] = planned.images
    if revision:
        images = shards.changed(revisions.digests(project, revision, context.say), images)
    if unreleased:
        from builder.registry import publish, status  # noqa: PLC0415  0.2 s, which other plans would pay

        publish.require_registry(project, "")
        images = status.unreleased(images, context.host)
    return images


def _image_rows(planned: Plan) -> Iterator[tuple[str, ...]]:
    """The columns of the table, then one row per image, with its shortest tag."""
    yield "CELL", "LAYERS", "WHEELS", "SIZE", "ADDS", "OWN", "TAG"
    users = Counter(layer.inputs for image in planned.images for layer in image.layers)
    lengths = {layer.inputs: layer.bytes for image in planned.images for layer in image.layers}
    above: set[str] = set()
    for image in planned.images:
        inputs = {layer.inputs for layer in image.layers}
        adds = sum(lengths[layer] for layer in inputs - above)
        own = sum(lengths[layer] for layer in inputs if users[layer] == 1)
        above |= inputs
        sizes = (size(count) if count else "-" for count in (image.bytes, adds, own))
        yield image.id, str(len(image.layers)), str(len(image.wheels)), *sizes, image.references[-1]


def _print_images(planned: Plan, *, bold: bool) -> None:
    """The table of images. Not by Rich, which takes 1 ms for each row."""
    rows = list(_image_rows(planned))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, (cell, *numbers, tag) in enumerate(rows):
        columns = [text.rjust(width) for text, width in zip(numbers, widths[1:-1], strict=True)]
        name = cell.ljust(widths[0])
        line = "  ".join([click.style(name, bold=True) if bold and number else name, *columns, tag])
        lines.append(click.style(line, bold=True) if bold and not number else line)
    click.echo("\n".join(lines))


def _sums(planned: Plan) -> str:
    """What shared layers save."""
    total, unique = planned.sum_bytes, planned.unique_bytes
    percent = f" ({100 * unique / total:.0f} %)" if total else ""
    return f"{counted(len(planned.images), 'image')}: {size(total)} in total, {size(unique)} in unique layers{percent}"


def _layer_table(planned: Plan) -> Table:
    """One row per layer, beside the tags of its image."""
    table = new_table("CELL", "LAYER", "WHEELS", "SIZE", "TAGS", right=["WHEELS", "SIZE"], fold=["TAGS"])
    for image in planned.images:
        rows = [
            (
                f"{layer.kind} {layer.name}" if layer.kind == "wheels" else layer.name,
                str(len(layer.wheels) or ""),
                size(layer.bytes) if layer.bytes else "",
            )
            for layer in image.layers
        ]
        rows.append(("total", str(len(image.wheels)), size(image.bytes)))
        for number, (row, tag) in enumerate(zip_longest(rows, image.references, fillvalue=None)):
            table.add_row(Text(image.id, style="bold") if number == 0 else "", *(row or ("", "", "")), tag or "")
        table.add_section()
    return table
