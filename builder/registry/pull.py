"""Downloads blobs of a registry to the store, several at a time, each checked against its digest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import as_completed
from typing import BinaryIO

from builder.common import threads
from builder.layers.blobs import Descriptor
from builder.layers.store import Store
from builder.registry.client import Registry

PARALLEL = 4


def fetch(
    registry: Registry, store: Store, blobs: Iterable[Descriptor], progress: Callable[[int], None] = lambda _: None
) -> int:
    """Downloads the blobs that the store lacks, the largest first; returns their number of bytes.

    `progress` is called with numbers of bytes. Raises RegistryError, DiskError.
    """
    missing = {blob.digest: blob for blob in blobs if not store.has(blob.digest, blob.size)}.values()
    stop = threading.Event()
    source = registry.stoppable(stop)
    with threads.pool(PARALLEL, "pull") as pool:
        futures = [
            pool.submit(_fetch, source, store, blob, progress) for blob in sorted(missing, key=lambda blob: -blob.size)
        ]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            raise
    return sum(blob.size for blob in missing)


def _fetch(registry: Registry, store: Store, blob: Descriptor, progress: Callable[[int], None]) -> None:
    def write(out: BinaryIO) -> Descriptor:
        registry.download(blob.digest, blob.size, out, progress)
        return blob

    store.write(write)
