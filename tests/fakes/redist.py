"""NVIDIA's archives in memory, and the list of their release."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from typing import Any

from builder.lock.lockfile import LockedArchive

PLATFORM = "linux-x86_64"
RELEASE = "12.10.1"


def path_of(name: str, platform: str = PLATFORM) -> str:
    return f"{name}/{platform}/{name}-{platform}-12.10.7-archive.tar.xz"


def pack(name: str, files: Mapping[str, Any], folder: str = "") -> bytes:
    """An archive: content of files by path, text for the target of a link, or the fields of a member."""
    buffer = io.BytesIO()
    folder = folder or path_of(name).rpartition("/")[2].removesuffix(".tar.xz")
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        for path, content in files.items():
            item = tarfile.TarInfo(f"{folder}/{path}")
            item.uid, item.mtime = 1000, 1_700_000_000
            item.mode = 0o750 if path.startswith("bin/") else 0o664
            if isinstance(content, bytes):
                item.size = len(content)
            elif isinstance(content, str):
                item.type, item.linkname = tarfile.SYMTYPE, content
            else:
                for field, value in content.items():
                    setattr(item, field, value)
            tar.addfile(item, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def locked(name: str, content: bytes) -> LockedArchive:
    return LockedArchive(path=path_of(name), size=len(content), sha256=hashlib.sha256(content).hexdigest())


def listed(archives: Mapping[str, bytes], platform: str = PLATFORM) -> dict[str, Any]:
    """The list of a release with these archives, as NVIDIA writes it."""
    entries = {
        name: {
            "name": f"CUDA {name}",
            "license": "CUDA Toolkit",
            "license_path": f"{name}/LICENSE.txt",
            "version": "12.10.7",
            platform: {
                "relative_path": path_of(name, platform),
                "sha256": hashlib.sha256(content).hexdigest(),
                "md5": hashlib.md5(content, usedforsecurity=False).hexdigest(),
                "size": str(len(content)),
            },
        }
        for name, content in archives.items()
    }
    return {"release_date": "2026-11-01", "release_label": RELEASE, "release_product": "cuda", **entries}


def list_text(archives: Mapping[str, bytes], platform: str = PLATFORM) -> bytes:
    return json.dumps(listed(archives, platform)).encode()
