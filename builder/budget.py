"""Whether images stay within the sizes that matrix.yaml allows them. Pure.

Asked twice: of the plan, before anything is built, where only wheels have a size; and of the layers that were built, as
they would be pushed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from builder import cells
from builder.cells import Cell
from builder.errors import BuildError, MatrixError, UsageError
from builder.matrix import Matrix
from builder.matrix import size as bytes_of
from builder.oci import BuiltLayer
from builder.plan import PlannedImage
from builder.view import size

SHOWN = 3  # largest layers of an image that are named
HINT = "`builder diff HEAD` shows what grew. Bound or leave out a package, or allow more in matrix.yaml."


def check_plan(matrix: Matrix, images: Iterable[PlannedImage]) -> None:
    """Raises one BuildError for all images whose wheels alone are too large."""
    _refuse([line for image in images for line in check(matrix, image.cell, _planned(image))])


def check_built(matrix: Matrix, cell: Cell, layers: Sequence[BuiltLayer]) -> None:
    """Raises BuildError if an image is too large as built."""
    _refuse(check(matrix, cell, [(layer.planned.name, layer.size) for layer in layers]))


def check(matrix: Matrix, cell: Cell, layers: Sequence[tuple[str, int]]) -> list[str]:
    """One line for the image if its layers, given as name and bytes, are too much together, and one for each too large.

    The first entry that matches the cell counts. Raises MatrixError if there are entries but none for this cell.
    """
    number = _entry(matrix, cell)
    if number is None:
        return []
    budget = matrix.budgets[number]
    lines = []
    if over := _over(sum(count for _, count in layers), budget.image):
        largest = sorted(layers, key=lambda layer: -layer[1])[:SHOWN]
        named = ", ".join(f"{name} {size(count)}" for name, count in largest)
        where = matrix.where("budgets", number, "image")
        lines.append(f"{cell.id}: the image has {over} ({where}); its largest layers: {named}")
    for name, count in layers:
        if over := _over(count, budget.layer):
            lines.append(f"{cell.id}: the layer {name} has {over} ({matrix.where('budgets', number, 'layer')})")
    return lines


def _planned(image: PlannedImage) -> list[tuple[str, int]]:
    return [(layer.name, layer.bytes) for layer in image.layers]


def _entry(matrix: Matrix, cell: Cell) -> int | None:
    for number, budget in enumerate(matrix.budgets):
        try:
            hit = cells.match(budget.cells, [cell.id])
        except UsageError as error:
            raise MatrixError(f"{matrix.where('budgets', number, 'cells')}: {error}") from error
        if hit:
            return number
    if matrix.budgets:
        raise MatrixError(
            f"{matrix.where('budgets')}: no entry matches {cell.id}", hint='End the list with an entry for cells: "*".'
        )
    return None


def _over(count: int, allowed: str) -> str:
    excess = count - bytes_of(allowed)
    return f"{size(count)}, {size(excess)} more than the {allowed} allowed" if excess > 0 else ""


def _refuse(lines: Sequence[str]) -> None:
    if lines:
        raise BuildError("over the size budget\n" + "\n".join(f"  {line}" for line in lines), hint=HINT)
