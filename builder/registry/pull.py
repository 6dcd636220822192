"""Downloads blobs of a registry to the store, several at a time, each checked against its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from builder.layers.blobs import Descriptor
from builder.layers.store import Store
from builder.registry.client import Registry
from builder.registry.parallel import TRANSFERS, transfer


def fetch(
    registry: Registry, store: Store, blobs: Iterable[Descriptor], progress: Callable[[int], None] = lambda _: None
) -> int:
    """Downloads the blobs that the store lacks, the largest first; returns their number of bytes.

    `progress` is called with numbers of bytes. Raises RegistryError, DiskError.
    """
    missing = {blob.digest: blob for blob in blobs if not store.has(blob.digest, blob.size)}.values()

    def fetch_blob(source: Registry, blob: Descriptor) -> int:
        with store.new_blob() as written:
            source.download(blob.digest, blob.size, written.file, progress)
            written.digest = blob.digest
        return blob.size

    return sum(transfer(registry, fetch_blob, sorted(missing, key=lambda blob: -blob.size), TRANSFERS))
