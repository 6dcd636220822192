"""Which images are compared, and whether they are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from builder import cells, tags
from builder.cells import Cell
from builder.engine import Engine
from builder.errors import EngineError, UsageError
from builder.matrix import Matrix
from builder.project import Project

INSIDE = Path(__file__).parent / "inside"
TITLES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX"}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An image that is measured. `reference` is its full tag, `image_id` what the engine has under that."""

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
    """One plain cell of each framework, all of one CUDA and Python.

    Taken are the CUDA and Python that most frameworks share, of several those with most cells of the set `default`, and
    then the first.
    """
    plain = [cell for cell in known if cell.variant == "plain" and cell.framework in TITLES]
    usual = set(cells.select(matrix, known, ())) if "default" in matrix.sets else set()
    alike: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in sorted(plain, key=lambda one: one not in usual):
        alike.setdefault((cell.cuda, cell.python), {}).setdefault(cell.framework, cell)
    if not alike:
        raise UsageError(
            f"the matrix has no plain image of {', '.join(TITLES.values())}", hint="Name cells to measure."
        )
    best = max(alike.values(), key=lambda group: (len(group), len(usual & set(group.values()))))
    return tuple(cell for cell in known if best.get(cell.framework) is cell)


def subjects(engine: Engine, project: Project, chosen: Sequence[Cell]) -> tuple[Subject, ...]:
    """Images of some cells. Raises UsageError for a framework without a benchmark, EngineError where none is built."""
    if strange := sorted({cell.framework for cell in chosen} - set(TITLES)):
        raise UsageError(f"there is no benchmark of {', '.join(strange)}, only of {', '.join(TITLES)}")
    references = tags.compute(project.matrix, project.cells)
    found, missing = [], []
    for cell in chosen:
        reference = str(references[cell.id][0])
        image = engine.image(reference)
        if image is None:
            missing.append(cell.id)
        else:
            found.append(Subject(cell=cell, reference=reference, image_id=image.id))
    if missing:
        raise EngineError(f"not built: {', '.join(missing)}", hint=f"builder images {' '.join(missing)}")
    return tuple(found)
