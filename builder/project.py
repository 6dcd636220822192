"""A checkout: where its files are, its matrix and cells."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from builder import atomic, cells, matrix
from builder.cells import Cell
from builder.errors import UsageError
from builder.matrix import Matrix


@dataclass(frozen=True)
class Project:
    """All paths below one root; `state` is what this machine knows, never committed."""

    root: Path

    @classmethod
    def find(cls, start: Path) -> Project:
        """The project at or above `start`; raises UsageError."""
        for folder in (start, *start.parents):
            if (folder / "matrix.yaml").is_file():
                return cls(folder)
        raise UsageError(f"no matrix.yaml in {start} or above it", hint="Run this inside a checkout, or give --root.")

    @property
    def state(self) -> Path:
        return self.root / ".builder"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    def scratch(self) -> TemporaryDirectory[str]:
        """A folder for temporary files; `sweep` removes what a killed run left there."""
        parent = self.state / "tmp"
        parent.mkdir(parents=True, exist_ok=True)
        return TemporaryDirectory(dir=parent)

    def sweep(self) -> None:
        """Removes temporary files of runs that were killed. Only for who holds the lock of the checkout."""
        shutil.rmtree(self.state / "tmp", ignore_errors=True)
        for folder in ("locks", "images", ".builder/evidence", ".builder/built"):
            for path in (self.root / folder).rglob(f".*{atomic.SUFFIX}"):
                path.unlink()

    @cached_property
    def matrix(self) -> Matrix:
        return matrix.load(self.root / "matrix.yaml")

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        return cells.expand(self.matrix)

    @cached_property
    def groups(self) -> dict[str, list[Cell]]:
        """Cells by group, in order."""
        result: dict[str, list[Cell]] = {}
        for cell in self.cells:
            result.setdefault(cell.group, []).append(cell)
        return result

    @cached_property
    def together(self) -> dict[str, tuple[Cell, ...]]:
        """By group, the cells that it is resolved with: of the same CUDA and Python, one line of every framework."""
        return cells.together(self.matrix, self.cells)

    def select(self, wanted: Sequence[str]) -> tuple[Cell, ...]:
        return cells.select(self.matrix, self.cells, wanted)
