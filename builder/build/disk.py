"""Estimates the disk space that images need, and checks that there is enough."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from builder.common.errors import FREE_DISK, DamagedError, DiskError
from builder.common.text import counted, size
from builder.engine.run import Run
from builder.layers import stored_images, stored_layers
from builder.layers.blobs import Descriptor
from builder.layers.oci import CONTAINERD
from builder.layers.store import Store
from builder.matrix.tags import PLAN_LABEL
from builder.plan.layer_order import PlannedLayer
from builder.plan.plan import Plan, PlannedImage

# Bytes on disk for each byte of wheels. Measured for torch 2.9.1: 4.2 GB of wheels unpack to 7.5 GB.
UNPACKED = 1.8
# In both kinds of store: overlay2 keeps an archive until it has unpacked it (a pull takes less), containerd keeps the
# layers as they were pulled, beside what it unpacked.
_LOADED = UNPACKED + 1
_BUILT = UNPACKED * 2  # in uv's cache and in the image
_SPLICED = 1.5  # a wheel is removed after its layer is written: the first are gone before the last are downloaded
SPARE = 2_000_000_000  # bytes in reserve: all sizes here are estimates


def engine_bytes(wheels: int) -> int:
    """The approximate bytes of disk that an engine needs while it loads `wheels` bytes of wheels."""
    return int(wheels * _LOADED) + SPARE


def store_bytes(store: Store, images: Iterable[PlannedImage]) -> int:
    """The approximate bytes by which the store grows, at its peak, while the layers that it lacks are made.

    Counts the Debian packages, which the store keeps, but not the operating systems that are made of them.
    """
    incomplete = []
    for image in images:  # faster than reading the record of each layer
        with suppress(DamagedError):
            if stored_images.find_stored_image(store, image):
                continue
        incomplete.append(image)
    missing = [layer for layer in _wheel_layers(incomplete) if not stored_layers.stored_layer(store, layer.inputs)]
    wheels = {wheel.sha256: wheel.size for layer in missing for wheel in layer.wheels}
    systems = [image for image in incomplete if not stored_layers.stored_layer(store, image.os_inputs)]
    packages = {
        package.sha256: package.size
        for image in systems
        for package in image.os_lock.packages
        if not store.has(f"sha256:{package.sha256}", package.size)
    }
    return int(sum(wheels.values()) * _SPLICED) + sum(packages.values())


def dockerfile_bytes(plan: Plan, kind: str, cached: int = 0) -> int:
    """Bytes of disk that the method `dockerfile` takes in an engine with this kind of store.

    `cached` of them are in BuildKit's cache already.
    """
    return max(int(plan.unique_bytes * (_BUILT + _kept(kind))) - cached, 0) + SPARE


def download_bytes(missing: int, kind: str, *, is_shared: bool) -> int:
    """Bytes that an image adds to an engine with this kind of store if `missing` bytes of its blobs are missing there.

    With `is_shared`, also those that it adds to the store of this machine.
    """
    return int(missing * (UNPACKED + _kept(kind) + is_shared)) + SPARE


def _kept(kind: str) -> int:
    """The number of compressed copies of its layers that a kind of store keeps, beside the unpacked files."""
    return int(kind == CONTAINERD)


def check_assemble(run: Run, images: Sequence[PlannedImage]) -> None:
    """Raises DiskError if a local engine has too little room to load these images."""
    info = run.engine.info()
    if not info.is_local:  # the disk of a remote engine cannot be measured
        return
    # Other images have none of these layers, and the containerd store adds up the size of each image that it lists.
    diff_ids = {diff_id for image in run.engine.images(PLAN_LABEL) for diff_id in image.layers}
    built = {layer.inputs: stored_layers.stored_layer(run.store, layer.inputs) for layer in _wheel_layers(images)}
    loaded = {inputs for inputs, layer in built.items() if layer and layer.diff_id in diff_ids}
    needed = engine_bytes(sum(layer.bytes for layer in _wheel_layers(images) if layer.inputs not in loaded))
    if Path(info.root).stat().st_dev == run.store.root.stat().st_dev:
        needed += store_bytes(run.store, images)
    _check_free(info.root, needed, f"building {counted(len(images), 'image')}")


def check_dockerfile(run: Run, images: Sequence[PlannedImage]) -> None:
    """Raises DiskError if a local engine has too little room to build these images from their Dockerfiles."""
    info = run.engine.info()
    if info.is_local:
        needed = dockerfile_bytes(Plan(images=tuple(images)), info.store, run.engine.cache_bytes())
        _check_free(info.root, needed, f"building {counted(len(images), 'image')}")


def check_download(run: Run, blobs: Sequence[Descriptor]) -> None:
    """Raises DiskError if a local engine and the store have too little room for an image of these blobs."""
    info = run.engine.info()
    missing = sum(blob.size for blob in blobs if not run.store.has(blob.digest, blob.size))
    if missing and info.is_local:
        is_shared = Path(info.root).stat().st_dev == run.store.root.stat().st_dev
        _check_free(info.root, download_bytes(missing, info.store, is_shared=is_shared), "downloading an image")


def _check_free(folder: str, needed: int, action: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskError(f"{action} takes about {size(needed)} in {folder}, which has {size(free)} free", hint=FREE_DISK)


def _wheel_layers(images: Iterable[PlannedImage]) -> Collection[PlannedLayer]:
    layers = (layer for image in images for layer in image.layers if layer.wheels)
    return {layer.inputs: layer for layer in layers}.values()
