"""Writes the Dockerfiles of cells to images/, and compares them."""

from __future__ import annotations

from collections.abc import Sequence

from builder.common.errors import StaleError
from builder.common.lock_text import KNOWN_LAYERS
from builder.layers import known_layers
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.plan import budget, plan, render


def render_images(
    project: Project, chosen: Sequence[Cell], *, is_part: bool, check: bool = False
) -> tuple[int, list[str]]:
    """Writes the files of cells; returns their number, and the changes.

    Unless they are a part of all cells, also removes the files of other cells, and the known layers that no image has.
    With `check`, writes nothing, and raises StaleError if something would change. Raises BuildError for an image that
    is over its budget.
    """
    planned = plan.make_locked_plan(project, chosen)
    budget.check_plan(project.matrix, planned.images)
    files = render.render(project, planned)
    inputs = {layer.inputs for image in planned.images for layer in image.layers}
    if check:
        render.check_rendered(project.root, files, [cell.id for cell in chosen] if is_part else None)
        if not is_part and known_layers.prune(project.root, inputs, check=True):
            raise StaleError(f"{KNOWN_LAYERS} has layers that no image has", hint="Update it: builder render")
        return len(files), []
    changed = render.write_rendered(project.root, files, is_part=is_part)
    changed += project.record({image.id: image.plan for image in planned.images})
    if not is_part and known_layers.prune(project.root, inputs):
        changed.append(f"{KNOWN_LAYERS} (without layers that no image has)")
    return len(files), changed
