"""Commands before building: lock, plan, render."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import click
from rich.table import Table
from rich.text import Text

from builder import host, locking, plan, render
from builder.cli.context import CELLS_HELP, Context, cells_argument
from builder.plan import Plan
from builder.view import size

SHOWN = 10  # written files that are named


@click.command(name="lock")
@cells_argument
@click.option("--check", is_flag=True, help="Only say whether the locks belong to matrix.yaml; asks nobody.")
@click.option("--upgrade", is_flag=True, help="Take the newest versions, not those of the present locks.")
@click.pass_obj
def lock_command(context: Context, wanted: Sequence[str], check: bool, upgrade: bool) -> None:
    """Resolve cells to exact wheels and write locks/ (default: all cells)."""
    project = context.project
    chosen = project.select(wanted or ("*",))
    if check:
        locking.check(project, chosen)
        context.say(f"{len(chosen)} locks belong to matrix.yaml")
        return
    with context.alone(project, "lock"):
        changed = locking.update(project, chosen, host.read(), upgrade=upgrade, say=context.say)
    _tell_written(context, changed)
    if not changed:
        context.say(f"every lock is as it was{'' if upgrade else '; --upgrade takes newer versions'}")


@click.command(name="plan", epilog=CELLS_HELP)
@cells_argument
@click.option("--format", "form", type=click.Choice(["table", "json", "ids"]), default="table", show_default=True)
@click.option("--layers", is_flag=True, help="Show the layers and all tags of each image, as is done for a single one.")
@click.pass_obj
def plan_command(context: Context, wanted: Sequence[str], form: str, layers: bool) -> None:
    """Show what would be built: cells, tags, layers, sizes. Asks no engine and no network.

    Sizes are those of wheels, as they are downloaded. ADDS is what no image above has, OWN what no other one shown has.
    """
    project = context.project
    chosen = project.select(wanted)
    if form == "ids":
        click.echo("\n".join(cell.id for cell in chosen))
        return
    made = plan.make(project, chosen)
    if form == "json":
        click.echo(json.dumps(made.as_data(), indent=1))
        return
    if made.images:
        context.out.print(_layer_table(made) if layers or len(made.images) == 1 else _image_table(made))
    if len(made.images) > 1:
        context.out.print(_sums(made), soft_wrap=True)
    if made.unlocked:
        context.say(f"not locked yet: {', '.join(made.unlocked)}   (builder lock)")


def _image_table(made: Plan) -> Table:
    """A row an image, with the shortest of its tags."""
    users = Counter(layer.inputs for image in made.images for layer in image.layers)
    above: set[str] = set()
    table = Table(box=None, pad_edge=False)
    table.add_column("CELL", no_wrap=True)
    for name in ("LAYERS", "WHEELS", "SIZE", "ADDS", "OWN"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("TAG", overflow="fold")
    for image in made.images:
        adds = sum(layer.bytes for layer in image.layers if layer.inputs not in above)
        own = sum(layer.bytes for layer in image.layers if users[layer.inputs] == 1)
        above |= {layer.inputs for layer in image.layers}
        counts = (str(len(image.layers)), str(len(image.wheels)))
        sizes = (size(count) if count else "-" for count in (image.bytes, adds, own))
        table.add_row(Text(image.id, style="bold"), *counts, *sizes, Text(image.references[-1]))
    return table


def _sums(made: Plan) -> str:
    """What sharing layers saves."""
    whole, unique = made.sum_bytes, made.unique_bytes
    ratio = f", {100 * unique / whole:.0f} % of that" if whole else ""
    return f"{len(made.images)} images: {size(whole)} if each had layers of its own, {size(unique)} unique{ratio}"


def _layer_table(made: Plan) -> Table:
    """A row a layer, the image's tags beside them."""
    table = Table(box=None, pad_edge=False)
    table.add_column("CELL", no_wrap=True)
    table.add_column("LAYER", no_wrap=True)
    table.add_column("WHEELS", justify="right")
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("TAGS", overflow="fold")
    for image in made.images:
        rows = [
            (
                f"{layer.kind} {layer.name}" if layer.kind == "wheels" else layer.name,
                str(len(layer.wheels) or ""),
                size(layer.bytes) if layer.wheels else "",
            )
            for layer in image.layers
        ]
        rows.append(("sum", str(len(image.wheels)), size(image.bytes)))
        for number, (row, tag) in enumerate(zip_longest(rows, image.references, fillvalue=None)):
            table.add_row(Text(image.id, style="bold") if number == 0 else "", *(row or ("", "", "")), tag or "")
        table.add_section()
    return table


@click.command(name="render")
@click.option("--check", is_flag=True, help="Write nothing; fail if images/ is not what the inputs give.")
@click.pass_obj
def render_command(context: Context, check: bool) -> None:
    """Write images/ from templates/ and locks/, for every cell."""
    project = context.project
    files = render.render(project.root, project.matrix, plan.make_locked(project, project.cells))
    if check:
        render.check(project.root, files)
        context.say(f"images/ is up to date ({len(files)} files)")
        return
    with context.alone(project, "render"):
        changed = render.write(project.root, files)
    _tell_written(context, changed)
    context.say(f"{len(files)} files, {len(changed)} changed")


def _tell_written(context: Context, names: Sequence[str]) -> None:
    for name in names[:SHOWN]:
        context.say(f"written: {name}")
    if len(names) > SHOWN:
        context.say(f"... and {len(names) - SHOWN} more (git status)")
