"""Atomic writes: to a temporary name in the same folder, fsync, rename."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SUFFIX = ".tmp"


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replaces the contents of `path`; a crash at any point leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=SUFFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
