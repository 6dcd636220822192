"""The build context of one image as a tar: the same bytes for the same files, whatever the machine's umask or clock."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from builder import digest
from builder.plan import COMMON_INPUTS, PlannedImage


def paths(root: Path, image: PlannedImage) -> list[Path]:
    """The files that the image's Dockerfile reads."""
    folders = [f"images/{image.id}", *(f"templates/{name}" for name in image.components)]
    found = [root / name for name in COMMON_INPUTS if (root / name).is_file()]
    for folder in folders:
        found += digest.tree(root / folder)
    return sorted(set(found))


def make(root: Path, image: PlannedImage, lent: Mapping[str, bytes]) -> bytes:
    """A tar of `paths` and of `lent` (path in the context -> content, from `builder.host`)."""
    entries = {path.relative_to(root).as_posix(): path for path in paths(root, image)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted({*entries, *lent}):
            if name not in lent and entries[name].is_symlink():
                link = tarfile.TarInfo(name)
                link.type, link.linkname, link.mode = tarfile.SYMTYPE, str(entries[name].readlink()), 0o777
                tar.addfile(link)
                continue
            if name in lent:
                content, executable = lent[name], False
            else:
                content, executable = entries[name].read_bytes(), bool(entries[name].stat().st_mode & 0o100)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o755 if executable else 0o644
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
