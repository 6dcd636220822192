"""Locks of uv's builds of Python: the archive of one release, by its SHA-256, without an address."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as model

from builder.common import lock_text
from builder.common.errors import LockError
from builder.index.wheels import STRICT, Sha256
from builder.matrix.cells import Cell
from builder.matrix.schema import Matrix, Release, matches

FORMAT: Literal[1] = 1
PREFIX = "python-"  # begins the file name; groups begin with a framework and a version
ARCHIVE = r"cpython-[0-9.]+\+([0-9]{8})-x86_64-unknown-linux-gnu-install_only(_stripped)?\.tar\.gz"
_HINT = "Restore it with git, or delete it and run: builder lock"


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
        """The path of the lock in a checkout."""
        return lock_path(self.release)

    @property
    def key(self) -> str:
        return python_key(self.release)


def lock_path(release: str) -> str:
    return f"locks/{PREFIX}{release}.json"


def python_key(release: str) -> str:
    """uv's name for its build of a release; also the name of the folder that uv installs it into."""
    return f"cpython-{release}-linux-x86_64-gnu"


def dump(lock: LockedPython) -> str:
    fields = {"format": FORMAT, "release": lock.release, "file": lock.file, "sha256": lock.sha256}
    return json.dumps(fields, indent=1) + "\n"


def read_python_lock(root: Path, release: str) -> LockedPython | None:
    """The lock of a release, or None if it has none. Raises LockError for a damaged or edited file."""
    name = lock_path(release)
    text = lock_text.read_lock_text(root / name, _HINT)
    if text is None:
        return None
    lock = lock_text.validate_lock(_LOCK, text, name, FORMAT, _HINT)
    if dump(lock) != text or lock.release != release or not lock.file.startswith(f"cpython-{release}+"):
        raise LockError(f"{name} was edited by hand or is incomplete", hint=_HINT)
    return lock


def find_python_lock(root: Path, release: str) -> LockedPython | None:
    """The lock of a release; None if it is missing or damaged."""
    with suppress(LockError):
        return read_python_lock(root, release)
    return None


def uv_releases(matrix: Matrix, cells: Iterable[Cell]) -> list[str]:
    """The releases of uv's Pythons of cells, each once, in their order."""
    releases = (matrix.python[cell.python].uv for cell in cells)
    return list(dict.fromkeys(release for release in releases if release))


_LOCK = TypeAdapter(LockedPython)
