"""Tags: computed from the matrix for every cell, never typed. Pure.

The full tag names all axes (`2.9.1-cu128-py311-jupyter`) and belongs to one cell for ever. Aliases leave out what
is the default of the cell's line (its first CUDA, its first Python) and may say the line instead of the release:
`2.9.1-jupyter`, `2.9-jupyter`, `2.9-cu128-py311-jupyter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from builder.cells import Cell
from builder.errors import MatrixError
from builder.matrix import Matrix
from builder.reference import ImageRef


def compute(matrix: Matrix, cells: Iterable[Cell]) -> Mapping[str, tuple[ImageRef, ...]]:
    """Cell id -> references, the full one first; raises MatrixError if two cells claim one tag."""
    owners: dict[ImageRef, Cell] = {}
    result: dict[str, tuple[ImageRef, ...]] = {}
    for cell in cells:
        references = tuple(_reference(matrix, cell, tag) for tag in _tags(matrix, cell))
        for reference in references:
            other = owners.setdefault(reference, cell)
            if other is not cell:
                where = matrix.where("frameworks", cell.framework, "versions", cell.line)
                raise MatrixError(f"{where}: {reference} would be both {other.id} and {cell.id}")
        result[cell.id] = references
    return result


def _tags(matrix: Matrix, cell: Cell) -> list[str]:
    entry = matrix.frameworks[cell.framework].versions[cell.line]
    # The image's name says already that it is for the cpu.
    cuda = "" if cell.is_cpu or cell.cuda == entry.cuda[0] else f"-{cell.cuda_tag}"
    python = "" if cell.python == entry.python[0] else f"-{cell.python_tag}"
    long = f"-{cell.cuda_tag}-{cell.python_tag}"
    tags = [version + axes + cell.suffix for axes in (long, cuda + python) for version in (cell.release, cell.line)]
    return list(dict.fromkeys(tags))


def _reference(matrix: Matrix, cell: Cell, tag: str) -> ImageRef:
    repository = f"{matrix.namespace}/{matrix.frameworks[cell.framework].image_for(cell.cuda)}"
    try:
        return ImageRef(registry=matrix.registry, repository=repository, tag=tag)
    except ValueError as error:
        where = matrix.where("frameworks", cell.framework, "versions", cell.line)
        raise MatrixError(f"{where}: {cell.id}: {error}") from error
