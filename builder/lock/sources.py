"""Packages that are built from source, in the image of a cell. `builder.build` builds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from builder.common.errors import MatrixError
from builder.index.wheels import BuiltWheel, LockedWheel
from builder.lock.lockfile import Lock
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.schema import Matrix, PackageSource


@dataclass(frozen=True, kw_only=True)
class WheelBuild:
    """A wheel to build: of the package `name`, from `source` (see `builder.index.wheels.ORIGIN`), an sdist of `index`.

    The build runs in the image of `cell`, whose wheels are in `lock`. `locked` is the wheel that it must give, if any.
    """

    name: str
    source: str
    index: str
    recipe: PackageSource
    cell: Cell
    lock: Lock
    locked: LockedWheel | None = None


class WheelBuilder(Protocol):
    """Builds wheels from source, and keeps them."""

    def requirements(self, build: WheelBuild) -> list[str]:
        """The requirements of a build, in the pyproject.toml of its source."""

    def build(self, build: WheelBuild, wheels: Sequence[LockedWheel]) -> BuiltWheel:
        """Builds a wheel with `wheels`, besides those of the image. Raises BuildError and errors of the engine."""

    def built(self, wheel: LockedWheel, group: str) -> BuiltWheel | None:
        """A wheel that was built before, if the store or a registry has it."""


def cell_to_build_in(matrix: Matrix, name: str, group: str, images: Sequence[Cell]) -> Cell:
    """The smallest cell of `images` that has what a package needs for its build. Raises MatrixError if there is none.

    `images` are the cells of a group without packages from source.
    """
    needs = matrix.sources[name].needs
    fitting = [cell for cell in images if set(needs) <= {*cells.components(matrix, cell)}]
    if not fitting:
        having = f"has the components {', '.join(needs)}, and" if needs else "has"
        raise MatrixError(
            f"{matrix.where('sources', name, key=True)}: {name} cannot be built for {group}: no cell with "
            f"this lock {having} no package that is built from source",
            hint=f"Add a variant with these components to matrix.yaml, and list {name} in `packages` of a component "
            "that only other variants have.",
        )
    return min(fitting, key=lambda cell: len(cells.components(matrix, cell)))
