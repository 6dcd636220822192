"""Checks images against the size budgets of matrix.yaml: as planned (wheels and Debian packages) and as built. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from builder.common.errors import BuildError, MatrixError
from builder.common.units import parse_size, size
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.schema import Matrix
from builder.plan.plan import PlannedImage

SHOWN = 3  # largest layers of an image that are named
GROWTH = 6  # default budget unpacked, in compressed budgets; the layer of tensorflow-cpu grows 4.2 times
HINT = "`builder diff HEAD` shows what grew. Bound or leave out a package, or raise the budget in matrix.yaml."

_Layers = Sequence[tuple[str, int]]  # name and bytes of each


def check_plan(matrix: Matrix, images: Iterable[PlannedImage]) -> None:
    """Raises one BuildError for all images whose wheels and Debian packages alone are too large."""
    sizes = [(image.cell, [(layer.name, layer.bytes) for layer in image.layers]) for image in images]
    _refuse([fault for cell, layers in sizes for fault in check(matrix, cell, layers)])


def check_built(matrix: Matrix, cell: Cell, layers: Sequence[tuple[str, int, int]]) -> None:
    """Raises BuildError if an image is too large; `layers` are name, compressed bytes and unpacked bytes of each."""
    compressed = [(name, count) for name, count, _ in layers]
    unpacked = [(name, count) for name, _, count in layers]
    _refuse(check(matrix, cell, compressed, unpacked))


def check(matrix: Matrix, cell: Cell, layers: _Layers, unpacked: _Layers = ()) -> list[str]:
    """One line if the image is too large, one for each layer that is, and one if it is too large `unpacked`.

    The first budget that matches the cell applies. Raises MatrixError if there are budgets but none for this cell.
    """
    if (number := _budget(matrix, cell)) is None:
        return []
    budget = matrix.budgets[number]
    of_image, of_layer = (matrix.where("budgets", number, name) for name in ("image", "layer"))
    of_unpacked = matrix.where("budgets", number, "unpacked") if budget.unpacked else of_image
    image, layer = parse_size(budget.image), parse_size(budget.layer)
    lines = [
        _total(f"{cell.id}: the image", layers, image, of_image),
        *(_excess(f"{cell.id}: the layer {name}", count, layer, of_layer) for name, count in layers),
        _total(
            f"{cell.id}: the unpacked image",
            unpacked,
            parse_size(budget.unpacked) if budget.unpacked else GROWTH * image,
            of_unpacked,
        ),
    ]
    return [line for line in lines if line]


def _budget(matrix: Matrix, cell: Cell) -> int | None:
    """The index of the budget of a cell; None if the matrix has no budgets."""
    for number, budget in enumerate(matrix.budgets):
        if cells.match(budget.cells, [cell.id]):
            return number
    if matrix.budgets:
        raise MatrixError(
            f"{matrix.where('budgets')}: no entry matches {cell.id}", hint='End the list with an entry for cells: "*".'
        )
    return None


def _total(image: str, layers: _Layers, allowed: int, where: str) -> str:
    line = _excess(image, sum(count for _, count in layers), allowed, where)
    largest = sorted(layers, key=lambda layer: -layer[1])[:SHOWN]
    return line and f"{line}; largest layers: {', '.join(f'{name} {size(count)}' for name, count in largest)}"


def _excess(what: str, count: int, allowed: int, where: str) -> str:
    excess = count - allowed
    return (
        f"{what} is {size(count)}, {size(excess)} more than the {size(allowed)} allowed ({where})" if excess > 0 else ""
    )


def _refuse(lines: Sequence[str]) -> None:
    if lines:
        raise BuildError("over the size budget\n" + "\n".join(f"  {line}" for line in lines), hint=HINT)
