"""Makes sure that there is room for the layers that the store lacks, before anything is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from builder.common.errors import FREE_STORE, DiskError
from builder.common.text import size
from builder.layers import garbage, stored_layers
from builder.layers.store import Store
from builder.plan.plan import PlannedImage


def missing_bytes(store: Store, images: Iterable[PlannedImage]) -> int:
    """The bytes of the wheels and Debian packages of the layers that the store lacks, of which it may have some."""
    layers = {layer.inputs: layer.bytes for image in images for layer in image.layers if layer.bytes}
    return sum(count for inputs, count in layers.items() if not stored_layers.stored_layer(store, inputs))


def make_room(store: Store, images: Iterable[PlannedImage], *, wait: bool = False) -> None:
    """Removes garbage if the store would exceed its limit. Raises DiskError if that or the disk has too little room."""
    planned = list(images)
    missing = missing_bytes(store, planned)
    if missing and store.limit and store.size() + missing > store.limit:
        garbage.remove_garbage(store, wait=wait)
        missing = missing_bytes(store, planned)  # layers of an interrupted build may have been garbage
        if store.size() + missing > store.limit:
            has = f"it has {size(store.size())}, and its limit is {size(store.limit)}"
            raise DiskError(f"{size(missing)} must be written to the store {store.root}: {has}", hint=FREE_STORE)
    require_free(store, missing)


def require_free(store: Store, count: int) -> None:
    """Raises DiskError if the disk of the store has fewer bytes free."""
    if count > (free := shutil.disk_usage(store.root).free):
        has = f"its disk has {size(free)} free"
        raise DiskError(f"{size(count)} must be written to the store {store.root}: {has}", hint=FREE_STORE)
