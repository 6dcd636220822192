"""Checks images against the size budgets of matrix.yaml: as planned (wheels and Debian packages) and as built. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from builder.common.errors import BuildError
from builder.common.text import parse_size, size
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.schema import Matrix
from builder.plan.plan import PlannedImage

SHOWN = 3  # largest layers of an image that are named
GROWTH = 6  # default budget unpacked, in compressed budgets; the layer of tensorflow-cpu grows 4.2 times
HINT = "`git diff locks` shows changed packages. Bound or leave out a package, or raise the budget in matrix.yaml."

_Layers = Sequence[tuple[str, int]]  # the name and bytes of a layer


def check_plan(matrix: Matrix, images: Iterable[PlannedImage]) -> None:
    """Raises one BuildError for all images whose wheels and Debian packages alone are too large."""
    sizes = [(image.cell, [(layer.name, layer.bytes) for layer in image.layers]) for image in images]
    _refuse([fault for cell, layers in sizes for fault in budget_faults(matrix, cell, layers)])


def check_built(matrix: Matrix, cell: Cell, layers: Sequence[tuple[str, int, int]]) -> None:
    """Raises BuildError if an image is too large; `layers` are names, compressed and unpacked bytes."""
    compressed = [(name, count) for name, count, _ in layers]
    unpacked = [(name, count) for name, _, count in layers]
    _refuse(budget_faults(matrix, cell, compressed, unpacked))


def budget_faults(matrix: Matrix, cell: Cell, layers: _Layers, unpacked: _Layers = ()) -> list[str]:
    """One line if the image is too large, one for each layer that is, and one if it is too large `unpacked`.

    The first budget that matches the cell applies; without one, every size is allowed.
    """
    matching = (number for number, budget in enumerate(matrix.budgets) if cells.match(budget.cells, [cell.id]))
    if (number := next(matching, None)) is None:
        return []
    budget = matrix.budgets[number]
    # The title, the parts and the setting of each limit, and the factor of the setting.
    limits: list[tuple[str, _Layers, str, int]] = [("image", layers, "image", 1)]
    limits += [(f"layer {name}", [(name, count)], "layer", 1) for name, count in layers]
    limits.append(("unpacked image", unpacked, *(("unpacked", 1) if budget.unpacked else ("image", GROWTH))))
    lines = []
    for title, parts, setting, factor in limits:
        total, allowed = sum(count for _, count in parts), factor * parse_size(getattr(budget, setting))
        if total <= allowed:
            continue
        where = matrix.where("budgets", number, setting)
        line = (
            f"{cell.id}: the {title} is {size(total)}, {size(total - allowed)} more than the {size(allowed)} allowed "
            f"({where})"
        )
        if title.endswith("image"):
            largest = sorted(parts, key=lambda part: -part[1])[:SHOWN]
            line += f"; largest layers: {', '.join(f'{name} {size(count)}' for name, count in largest)}"
        lines.append(line)
    return lines


def _refuse(lines: Sequence[str]) -> None:
    if lines:
        raise BuildError("over the size budget\n" + "\n".join(f"  {line}" for line in lines), hint=HINT)
