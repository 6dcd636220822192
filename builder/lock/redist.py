"""NVIDIA's archives of a CUDA release: locks them from NVIDIA's list, and downloads them.

NVIDIA publishes a list for each release, `redistrib_<release>.json`: path, size and SHA-256 of each archive, by
platform. Lists and archives are below one address, or below that of a copy (`NVIDIA_REDIST_MIRROR`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BufferedRandom
from pathlib import Path

import urllib3
from pydantic import ValidationError

from builder.common.errors import LockError
from builder.common.tasks import RetryPolicy
from builder.common.validation import message_of
from builder.host import Host
from builder.index.download import DEFAULT_POLICY, FileFetcher
from builder.index.session import IndexSession, describe
from builder.index.settings import REDIST_MIRROR, IndexSettings
from builder.lock.lockfile import REDIST, REDIST_PLATFORMS, Basis, LockedArchive

LARGEST_LIST = 10_000_000  # bytes; that of CUDA 12.8.1 has 50 kB
_RETRIES = 3


def list_archives(
    host: Host, basis: Basis, names: Sequence[str], present: Iterable[LockedArchive]
) -> tuple[LockedArchive, ...]:
    """The archives of a release; those `present` are kept: a release never changes.

    Raises LockError if the list cannot be read, or has no valid entry of an archive.
    """
    locked = {archive.name: archive for archive in present}
    if locked.keys() >= set(names):
        return tuple(locked[name] for name in names)
    if not basis.toolkit:
        raise LockError(f"cuda.{basis.cuda} of matrix.yaml has no `toolkit`: components need archives of this release")
    session, label = IndexSession(host.index, retries=_RETRIES), f"NVIDIA's list of archives of CUDA {basis.toolkit}"
    try:
        with session.get(f"{_address(host.index)}/redistrib_{basis.toolkit}.json", stream=True) as response:
            response.raise_for_status()
            content = response.raw.read(LARGEST_LIST, decode_content=True)
    except (OSError, urllib3.exceptions.HTTPError) as error:
        hint = f"Set {REDIST_MIRROR} to the address of a copy, or correct `toolkit` of this CUDA in matrix.yaml."
        raise LockError(f"{label}: {describe(error, RedistFetcher.server)}", hint=session.hint(error, hint)) from error
    platform, name, archives = REDIST_PLATFORMS[basis.platform], "", []
    try:
        listed: Mapping[str, Mapping[str, Mapping[str, str]]] = json.loads(content)
        for name in names:
            entry = listed[name][platform]
            archive = LockedArchive(path=entry["relative_path"], size=int(entry["size"]), sha256=entry["sha256"])
            if (archive.name, archive.platform) != (name, platform):
                raise ValueError(f"its path is {archive.path}")
            archives.append(archive)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)[:300]
        if isinstance(error, ValidationError):
            reason = "; ".join(f"{fault['loc'][0]}: {message_of(fault)}" for fault in error.errors())
        raise LockError(
            f"{label} has no valid entry {name} for {platform}: {reason}",
            hint="Correct `redist` of the component in matrix.yaml, exclude these cells, or use another mirror.",
        ) from error
    return tuple(archives)


def _address(settings: IndexSettings) -> str:
    return settings.redist_mirror.rstrip("/") or REDIST


class RedistFetcher(FileFetcher[LockedArchive]):
    """Downloads archives to `blobs`, the folder of the store's blobs, by their SHA-256."""

    server = "the server of NVIDIA's archives"
    again = f"The mirror may lack this release: set {REDIST_MIRROR} to one that has it."
    distrust = (
        f"A release never changes: do not use this mirror ({REDIST_MIRROR}), or this lock, until the difference is "
        "explained."
    )

    def __init__(
        self,
        settings: IndexSettings,
        blobs: Path,
        parts: Path,
        *,
        progress: Callable[[int], None] = lambda _: None,
        policy: RetryPolicy = DEFAULT_POLICY,
        stopped: threading.Event | None = None,
    ) -> None:
        mirror = IndexSession(settings, timeout=(policy.connect_s, policy.read_s))
        super().__init__(blobs, parts, mirror, progress=progress, policy=policy, stopped=stopped)
        self._address = _address(settings)

    def _get(self, locked: LockedArchive, file: BufferedRandom) -> None:
        self._download(locked, file, f"{self._address}/{locked.path}")
