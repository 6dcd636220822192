"""A checkout: its paths, matrix, cells and lock."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from builder import __version__
from builder.common import strict_yaml
from builder.common.errors import BusyError, MatrixError, UsageError, did_you_mean
from builder.common.files import TEMPORARY_SUFFIX, write_atomically
from builder.matrix import cells, reader
from builder.matrix.cells import Cell
from builder.matrix.schema import Matrix

RECORD = "locks/gpu-images.txt"  # of a team's repository: what rendered it


@dataclass(frozen=True)
class Project:
    """A folder with matrix.yaml. `state` is of this machine and never committed."""

    root: Path

    @classmethod
    def find(cls, start: Path) -> Project:
        """The project at or above `start`; raises UsageError."""
        for folder in (start, *start.parents):
            if (folder / "matrix.yaml").is_file():
                return cls(folder)
        raise UsageError(f"no matrix.yaml in {start} or above it", hint="Run this inside a checkout, or use --root.")

    @cached_property
    def folders(self) -> tuple[Path, ...]:
        """Where templates and tests are: `root`, and if matrix.yaml extends the shipped one, the shipped files."""
        return (self.root, reader.shipped_files(self.state)) if self.matrix.extends else (self.root,)

    def base(self, name: str) -> Path:
        """The folder of `folders` to which `name`, such as templates/base/files, is relative.

        A component's folder in templates/ replaces the shipped one as a whole: a mix of two would work by chance only.
        The rest of templates/ (how images are made, for every component) cannot be replaced.
        """
        top, part, *_ = Path(name).parts
        if top == "templates":
            is_own = part in self.matrix.components and (self.root / top / part).exists()
        else:
            is_own = (self.root / name).exists()
        return self.root if is_own else self.folders[-1]

    def path(self, name: str) -> Path:
        """The path of a file or folder of the project, of its own or shipped; it need not exist."""
        return self.base(name) / name

    @property
    def state(self) -> Path:
        return self.root / ".builder"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    def scratch(self) -> TemporaryDirectory[str]:
        """A folder for temporary files; `locked` removes what a killed run left there."""
        parent = self.state / "tmp"
        parent.mkdir(parents=True, exist_ok=True)
        return TemporaryDirectory(dir=parent)

    @contextmanager
    def locked(self, command: str) -> Iterator[None]:
        """Holds the lock of the checkout, after removing temporary files of killed runs.

        The kernel releases the lock when the process ends. Raises BusyError with the name of the holder.
        """
        self.state.mkdir(parents=True, exist_ok=True)
        with (self.state / "lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = "a process that has just started"
                with suppress(OSError, ValueError, KeyError, TypeError):
                    data = json.loads(Path(file.name).read_text(encoding="utf-8"))
                    holder = f"`{data['command']}` (pid {data['pid']}, since {data['since']})"
                raise BusyError(
                    f"another builder is using this checkout: {holder}", hint="Run this again when it has ended."
                ) from None
            file.seek(0)
            file.truncate()
            json.dump({"pid": os.getpid(), "command": command, "since": time.strftime("%H:%M:%S")}, file)
            file.flush()
            shutil.rmtree(self.state / "tmp", ignore_errors=True)
            for folder in ("locks", "images", ".builder/evidence"):
                for path in (self.root / folder).rglob(f".*{TEMPORARY_SUFFIX}"):
                    path.unlink()
            yield

    @cached_property
    def matrix(self) -> Matrix:
        matrix = reader.read_matrix(strict_yaml.load_yaml(self.root / "matrix.yaml"))
        self._check_index_folders(matrix)
        # Whoever extends the shipped matrix has folders of components in templates/, and nothing else.
        for folder in sorted((self.root / "templates").glob("[!.]*")) if matrix.extends else ():
            if folder.name not in matrix.components:
                raise MatrixError(
                    f"templates/{folder.name}: no component {folder.name!r}"
                    f"{did_you_mean(folder.name, matrix.components)}",
                    hint="Add it to `components` of matrix.yaml, or delete the folder.",
                )
        return matrix

    def _check_index_folders(self, matrix: Matrix) -> None:
        """Raises MatrixError for an index that is a folder outside of the checkout, or has a wheel from there."""
        for name, place in ((name, matrix.folder_of(name)) for name in matrix.indexes):
            if not place:
                continue
            folder, where = self.root / place, f"{matrix.where('indexes', name)}: indexes.{name}"
            if not folder.is_dir():
                raise MatrixError(
                    f"{where}: the checkout has no folder {place}",
                    hint="Create it, with the wheels; or write an address that begins with https://",
                )
            is_link = folder.resolve() != self.root.resolve() / place
            if is_link or any(path.is_symlink() for path in folder.glob("*.whl")):
                raise MatrixError(
                    f"{where}: {place} or a wheel in it is a link", hint="Copy the wheels into the checkout."
                )

    def recorded(self) -> dict[str, str]:
        """The content of RECORD: digests of plans by cell, and the release of gpu-images that rendered them.

        The shipped templates are not in a team's repository, so a git revision alone does not say what was planned
        then. Empty without the file. Ignores damaged lines.
        """
        path = self.root / RECORD
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        return dict(re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE))

    def record(self, plans: Mapping[str, str]) -> list[str]:
        """Records plans by cell, if matrix.yaml extends the shipped one; returns the path if the file changed."""
        if not self.matrix.extends:
            return []
        before = self.recorded()
        known = {**before, **plans}
        after = {"gpu-images": __version__} | {cell.id: known[cell.id] for cell in self.cells if cell.id in known}
        if after == before:
            return []
        write_atomically(self.root / RECORD, "".join(f"{name} {value}\n" for name, value in after.items()))
        return [RECORD]

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        return cells.expand(self.matrix)

    @cached_property
    def groups(self) -> dict[str, list[Cell]]:
        """Cells by group, in order."""
        groups: dict[str, list[Cell]] = {}
        for cell in self.cells:
            groups.setdefault(cell.group, []).append(cell)
        return groups

    def select(self, patterns: Sequence[str]) -> tuple[Cell, ...]:
        return cells.select(self.matrix, self.cells, patterns)
