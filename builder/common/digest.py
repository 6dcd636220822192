"""SHA-256 digests of bytes, data and folders, in one canonical form."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from builder.common.errors import FileError

HEX = "[0-9a-f]{64}"  # pattern of a SHA-256, for patterns that hold one
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def of_bytes(blob: bytes) -> str:
    """`sha256:<hex>` of bytes."""
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def is_digest(value: object) -> bool:
    """Whether a value is `sha256:<hex>`."""
    return isinstance(value, str) and re.fullmatch(f"sha256:{HEX}", value) is not None


def of_data(data: Any) -> str:
    """`sha256:<hex>` of JSON data, keys sorted, no spaces."""
    return of_bytes(_CANONICAL.encode(data).encode())


def tree(folder: Path) -> list[Path]:
    """Every file and link below a folder, sorted. Links are not followed: they are content themselves.

    Raises FileError if the folder itself is a link.
    """
    if folder.is_symlink():
        raise FileError(f"{folder} is a link", hint="Replace it with a folder.")
    paths = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return sorted(path for path in paths if "__pycache__" not in path.parts)


def of_tree(root: Path, folder: Path) -> dict[str, str]:
    """Path relative to `root` -> digest of contents and execute bit, for every file at or below `folder`."""
    files = [folder] if folder.is_file() else tree(folder)
    return {path.relative_to(root).as_posix(): of_file(path) for path in files}


def of_file(path: Path) -> str:
    """Digest of the contents and the execute bit of a file, or of the target of a link."""
    if path.is_symlink():
        return of_data(["link", str(path.readlink())])
    executable = "x" if path.stat().st_mode & 0o100 else "-"
    return of_data([executable, hashlib.sha256(path.read_bytes()).hexdigest()])


def short(digest: str) -> str:
    """The first twelve hex digits, as Docker shows them."""
    return digest.removeprefix("sha256:")[:12]
