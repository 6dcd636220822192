"""Locks of uv's builds of Python: the archive of one release, by its SHA-256, without an address."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as model

from builder.common.lock_text import LockFiles
from builder.index.wheels import STRICT, Sha256
from builder.matrix.cells import Cell
from builder.matrix.schema import Matrix, Release, matches

FORMAT: Literal[1] = 1
PREFIX = "python-"  # begins the file name; groups begin with a framework and a version
ARCHIVE = r"cpython-[0-9.]+\+([0-9]{8})-x86_64-unknown-linux-gnu-install_only(_stripped)?\.tar\.gz"


@model(frozen=True, kw_only=True, config=STRICT)
class LockedPython:
    """The archive of uv's build of a Python release. Source of its name and layout: python-build-standalone."""

    release: Release
    file: Annotated[str, matches(ARCHIVE, "an archive of uv's, cpython-<release>+<date>-...-install_only.tar.gz")]
    sha256: Sha256
    format: Literal[1] = FORMAT

    @property
    def size(self) -> int:
        """0: uv's list has no sizes."""
        return 0

    @property
    def path(self) -> str:
        """The path of its lock in a checkout, for templates."""
        return PYTHON_LOCKS.path(self.release)

    @property
    def key(self) -> str:
        return python_key(self.release)


def python_key(release: str) -> str:
    """uv's name for its build of a release; also the name of the folder that uv installs it into."""
    return f"cpython-{release}-linux-x86_64-gnu"


def uv_releases(matrix: Matrix, cells: Iterable[Cell]) -> list[str]:
    """The releases of uv's Pythons of cells, without duplicates, in their order."""
    releases = (matrix.python[cell.python].uv for cell in cells)
    return list(dict.fromkeys(release for release in releases if release))


def _dump(lock: LockedPython) -> str:
    fields = {"format": FORMAT, "release": lock.release, "file": lock.file, "sha256": lock.sha256}
    return json.dumps(fields, indent=1) + "\n"


def _faults(lock: LockedPython, key: str) -> Iterator[str]:
    if lock.release != key or not lock.file.startswith(f"cpython-{key}+"):
        yield f"it is not the build of {key}"


PYTHON_LOCKS = LockFiles[str, LockedPython](
    adapter=TypeAdapter(LockedPython),
    version=FORMAT,
    path=lambda release: f"locks/{PREFIX}{release}.json",
    hint=lambda _: "Restore it with git, or delete it and run: builder lock",
    dump=_dump,
    faults=_faults,
)
