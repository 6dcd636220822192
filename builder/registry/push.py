"""Pushes one image: its blobs in parallel, largest first, then its manifest by digest."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from builder.common.errors import DamagedError, RegistryError, of_file
from builder.layers.blobs import REPAIR
from builder.registry.client import Manifest, Registry
from builder.registry.failures import RejectedError
from builder.registry.parallel import TRANSFERS, transfer

DAMAGED = ("DIGEST_INVALID", "SIZE_INVALID")
State = Literal["sent", "mounted", "present"]


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A layer or a configuration.

    `path` is None if it is not in the store: the registry must have it, or `fetch` downloads it and returns its path.
    """

    digest: str
    size: int
    path: Path | None
    fetch: Callable[[], Path] | None = None


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The manifest's digest, and bytes that were sent, mounted from another repository, or already present."""

    digest: str
    sent: int
    mounted: int
    present: int


def push(
    registry: Registry,
    manifest: Manifest,
    blobs: Iterable[Blob],
    *,
    mount_from: Sequence[str] = (),
    progress: Callable[[int], None] = lambda _: None,
    parallel: int = TRANSFERS,
) -> Pushed:
    """Pushes an image by digest; sets no tag. The first failure ends the push. Creates the repository if necessary.

    `mount_from` are repositories of the same registry that may have some of the blobs. `progress` is called with the
    number of bytes gained, negative for bytes lost; they add up to the size of all blobs.
    """
    registry.create_missing()
    lock = threading.Lock()

    def report(count: int) -> None:
        with lock:
            progress(count)

    unique = {blob.digest: blob for blob in blobs}.values()
    largest_first = sorted(unique, key=lambda blob: blob.size, reverse=True)
    states = transfer(registry, lambda target, blob: _push(target, blob, mount_from, report), largest_first, parallel)
    sizes: Counter[State] = Counter()
    for blob, state in zip(largest_first, states, strict=True):
        sizes[state] += blob.size
    digest = registry.put_manifest(manifest.digest, manifest.content, manifest.media_type)
    return Pushed(digest=digest, sent=sizes["sent"], mounted=sizes["mounted"], present=sizes["present"])


def _push(registry: Registry, blob: Blob, mount_from: Sequence[str], report: Callable[[int], None]) -> State:
    """Pushes one blob in the cheapest way."""
    is_present = registry.has_blob(blob.digest)
    if is_present or any(registry.mount(blob.digest, source) for source in mount_from):
        report(blob.size)
        return "present" if is_present else "mounted"
    path = blob.path or (blob.fetch() if blob.fetch else None)
    if path is None:
        raise RegistryError(
            f"{registry.name}: blob {blob.digest} is missing in the registry and in the store",
            hint="Build the image again.",
        )
    try:
        if path.stat().st_size != blob.size:
            raise _damaged(blob, path, f"its size is not {blob.size} bytes")
        registry.upload(blob.digest, path, blob.size, report)
    except RejectedError as error:
        if error.code in DAMAGED and _hash(path) != blob.digest:
            raise _damaged(blob, path, f"its SHA-256 is not {blob.digest}") from error
        raise
    except OSError as error:
        raise of_file(error) from error
    return "sent"


def _damaged(blob: Blob, path: Path, reason: str) -> DamagedError:
    return DamagedError(f"damaged: {reason} ({path})", hint=REPAIR, blob=blob.digest)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
