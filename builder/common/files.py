"""Atomic writes (to a temporary name in the same folder, fsync, rename), and SHA-256 digests."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from builder.common.errors import FileError

# ---- writing

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write in the block, which then replaces `path`; a crash leaves the old file or the new one."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)  # whatever the umask is
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the contents of `path`, as `replacing`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


# ---- digests

SHA256_HEX = "[0-9a-f]{64}"  # the pattern of a SHA-256, a part of other patterns
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest_of_bytes(blob: bytes) -> str:
    """`sha256:<hex>` of bytes."""
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def is_digest(value: object) -> bool:
    """True if a value is `sha256:<hex>`."""
    return isinstance(value, str) and re.fullmatch(f"sha256:{SHA256_HEX}", value) is not None


def digest_of_data(data: Any) -> str:
    """`sha256:<hex>` of JSON data, keys sorted, no spaces."""
    return digest_of_bytes(_CANONICAL.encode(data).encode())


def files_below(folder: Path) -> list[Path]:
    """Every file and link below a folder, sorted. Links are not followed: they are content themselves.

    Raises FileError if the folder itself is a link.
    """
    if folder.is_symlink():
        raise FileError(f"{folder} is a link", hint="Replace it with a folder.")
    paths = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return sorted(path for path in paths if "__pycache__" not in path.parts)


def digests_of_tree(root: Path, folder: Path) -> dict[str, str]:
    """Path relative to `root` -> digest of contents and execute bit, for every file at or below `folder`."""
    files = [folder] if folder.is_file() else files_below(folder)
    return {path.relative_to(root).as_posix(): digest_of_file(path) for path in files}


def digest_of_file(path: Path) -> str:
    """Digest of the contents and the execute bit of a file, or of the target of a link."""
    if path.is_symlink():
        return digest_of_data(["link", str(path.readlink())])
    executable = "x" if path.stat().st_mode & 0o100 else "-"
    return digest_of_data([executable, hashlib.sha256(path.read_bytes()).hexdigest()])


def short_digest(digest: str) -> str:
    """The first twelve hex digits, as Docker shows them."""
    return digest.removeprefix("sha256:")[:12]
