"""The folder for what a running container needs to remember: tokens, host keys' configuration, which services run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

TOP = Path("/run/workstation")
SERVICES = "services"  # file with the names of the services that were started, one a line


def make() -> Path:
    """A folder of this process's user alone: in /run, or in /tmp where /run cannot be written."""
    for folder in _places(str(os.getuid())):
        try:
            if folder.parent == TOP:
                TOP.mkdir(mode=0o755, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        if _is_ours(folder, os.getuid()) and os.access(folder, os.W_OK):
            return folder
    raise OSError("neither /run/workstation nor /tmp can be written: with --read-only add --tmpfs /tmp")


def find() -> Path | None:
    """The folder of the services that run: this user's, or any if this is root, whose health check may ask."""
    uid = os.getuid()
    for place in _places(str(uid) if uid else "*"):
        for folder in sorted(place.parent.glob(place.name)):
            owner = folder.name.rpartition("-")[2]
            if owner.isdecimal() and _is_ours(folder, int(owner)) and (folder / SERVICES).is_file():
                return folder
    return None


def _places(uid: str) -> tuple[Path, Path]:
    return TOP / f"of-{uid}", Path(f"/tmp/workstation-of-{uid}")


def write(path: Path, text: str) -> None:
    """A file that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)


def _is_ours(folder: Path, uid: int) -> bool:
    """Nobody else made it: /tmp is open to all."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022
