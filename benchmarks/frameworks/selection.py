"""The images to compare, and whether they are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.common.errors import EngineError, UsageError
from builder.engine.client import Engine
from builder.matrix import cells, tags
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import Matrix

INSIDE = Path(__file__).parents[1] / "inside"
TITLES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX"}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An image to measure. `reference` is its full tag, `image_id` the engine's id for it."""

    cell: Cell
    reference: str
    image_id: str

    @property
    def id(self) -> str:
        return self.cell.id

    @property
    def title(self) -> str:
        return TITLES[self.cell.framework]


def default(matrix: Matrix, known: Sequence[Cell]) -> tuple[Cell, ...]:
    """One plain cell of each framework, all with the same CUDA and Python: the pair that most frameworks share.

    Among several such pairs, the one with most cells in the set `default`, then the first.
    """
    preferred = set(cells.select(matrix, known, ())) if "default" in matrix.sets else set()
    plain = [cell for cell in known if cell.variant == "plain" and cell.framework in TITLES]
    pairs: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in sorted(plain, key=lambda cell: cell not in preferred):
        pairs.setdefault((cell.cuda, cell.python), {}).setdefault(cell.framework, cell)
    if not pairs:
        raise UsageError(f"no plain image of {', '.join(TITLES.values())} in the matrix", hint="Name cells to measure.")
    best = max(pairs.values(), key=lambda pair: (len(pair), len(preferred & set(pair.values()))))
    return tuple(cell for cell in known if best.get(cell.framework) is cell)


def subjects(engine: Engine, project: Project, chosen: Sequence[Cell]) -> tuple[Subject, ...]:
    """Images of cells. Raises UsageError for a framework without a benchmark, EngineError for images not built."""
    if unknown := sorted({cell.framework for cell in chosen} - set(TITLES)):
        raise UsageError(f"no benchmark for {', '.join(unknown)}, only for {', '.join(TITLES)}")
    references = tags.compute(project.matrix, project.cells)
    images = {cell: engine.image(str(references[cell.id][0])) for cell in chosen}
    if missing := [cell.id for cell, image in images.items() if image is None]:
        raise EngineError(f"not built: {', '.join(missing)}", hint=f"builder images {' '.join(missing)}")
    return tuple(
        Subject(cell=cell, reference=str(references[cell.id][0]), image_id=image.id)
        for cell, image in images.items()
        if image
    )
