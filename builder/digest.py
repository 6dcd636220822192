"""Digests of inputs: one canonical form, so that the same inputs give the same digest everywhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from builder.errors import FileError


def of_bytes(blob: bytes) -> str:
    """`sha256:<hex>` of bytes."""
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def of_data(data: Any) -> str:
    """`sha256:<hex>` of JSON data, keys sorted, no spaces."""
    return of_bytes(json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode())


def tree(folder: Path) -> list[Path]:
    """Every file and link below a folder, sorted. Links are not followed: they are content themselves.

    Raises FileError if the folder itself is one.
    """
    if folder.is_symlink():
        raise FileError(f"{folder} is a link; a folder of the checkout is wanted")
    found = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return sorted(path for path in found if "__pycache__" not in path.parts)


def of_tree(root: Path, folder: Path) -> dict[str, str]:
    """Path relative to `root` -> digest, for every file below `folder`; a file's execute bit is part of it."""
    files = [folder] if folder.is_file() else tree(folder)
    return {path.relative_to(root).as_posix(): _of_file(path) for path in files}


def _of_file(path: Path) -> str:
    if path.is_symlink():
        return of_data(["link", str(path.readlink())])
    executable = "x" if path.stat().st_mode & 0o100 else "-"
    return of_data([executable, hashlib.sha256(path.read_bytes()).hexdigest()])


def short(digest: str) -> str:
    """The first twelve hex digits, as Docker shows them."""
    return digest.removeprefix("sha256:")[:12]
