"""How much disk images need, whether there is enough, and freeing it.

With --max-disk, groups of cells are built one after another, and images of this checkout are removed from the engine
before the next group needs the room. The store keeps every layer once, and loads those images again in a minute.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from builder.build.work import RunContext, built_ids
from builder.common.errors import FREE_DISK, DamagedError, DiskError
from builder.common.text import counted, size
from builder.layers import images as stored_image
from builder.layers import os_layer, stored_layers
from builder.layers.blobs import Descriptor
from builder.layers.oci import CONTAINERD, Image
from builder.layers.store import Store
from builder.matrix import tags
from builder.matrix.tags import CELL_LABEL, CUDA_LABEL, PLAN_LABEL
from builder.plan.layer_order import PlannedLayer
from builder.plan.plan import Plan, PlannedImage
from builder.registry import evidence
from builder.registry.evidence import Requirement
from builder.registry.suite import Suite

# Bytes on disk for each byte of wheels. Measured for torch 2.9.1: 4.2 GB of wheels unpack to 7.5 GB.
UNPACKED = 1.8
# In both kinds of store: overlay2 keeps an archive until it has unpacked it (a pull takes less), containerd keeps the
# layers as they were pulled, beside what it unpacked.
_LOADED = UNPACKED + 1
_BUILT = UNPACKED * 2  # in uv's cache and in the image
_SPLICED = 1.5  # a wheel is removed after its layer is written: the first are gone before the last are downloaded
SPARE = 2_000_000_000  # bytes in reserve: all sizes here are estimates


def engine_bytes(wheels: int) -> int:
    """About how many bytes of disk an engine takes while it loads so many bytes of wheels."""
    return int(wheels * _LOADED) + SPARE


def store_bytes(store: Store, images: Iterable[PlannedImage]) -> int:
    """About how many bytes the store grows by, at its peak, while the layers that it lacks are made.

    Counts the Debian packages, which the store keeps, but not the operating systems that are made of them.
    """
    incomplete = [image for image in images if _stored(store, image) is None]
    missing = [layer for layer in _wheel_layers(incomplete) if not stored_layers.stored_layer(store, layer, None)]
    wheels = {wheel.sha256: wheel.size for layer in missing for wheel in layer.wheels}
    systems = [image for image in incomplete if not os_layer.stored_system(store, image.os_inputs, None)]
    packages = {
        package.sha256: package.size
        for image in systems
        for package in image.os_lock.packages
        if not store.has(f"sha256:{package.sha256}", package.size)
    }
    return int(sum(wheels.values()) * _SPLICED) + sum(packages.values())


def _stored(store: Store, image: PlannedImage) -> Image | None:
    """The image, if the store has all of it. Faster than reading the record of each of its layers."""
    try:
        return stored_image.find_stored_image(store, image)
    except DamagedError:
        return None


def peak_bytes(store: Store, images: Sequence[PlannedImage], diff_ids: Collection[str]) -> int:
    """Bytes that these images add, at their peak, to the store and to an engine that has the layers `diff_ids`."""
    wheels = _unloaded(store, images, diff_ids)
    return (engine_bytes(wheels) if wheels else 0) + store_bytes(store, images)


def dockerfile_bytes(plan: Plan, kind: str, cached: int = 0) -> int:
    """Bytes of disk that the method `dockerfile` takes in an engine with this kind of store.

    `cached` of them are in BuildKit's cache already.
    """
    return max(int(plan.unique_bytes * (_BUILT + _kept(kind))) - cached, 0) + SPARE


def download_bytes(missing: int, kind: str, *, is_shared: bool) -> int:
    """Bytes that an image adds to an engine with this kind of store if `missing` bytes of its blobs are missing there.

    With `is_shared`, also what it adds to the store of this machine.
    """
    return int(missing * (UNPACKED + _kept(kind) + is_shared)) + SPARE


def _kept(kind: str) -> int:
    """How often a store keeps layers compressed, beside what it unpacked."""
    return int(kind == CONTAINERD)


def check_assemble(work: RunContext, store: Store, images: Sequence[PlannedImage]) -> None:
    """Raises DiskError if a local engine has too little room to load these images."""
    info = work.engine.info()
    if not info.is_local:  # the disk of a remote engine cannot be measured
        return
    diff_ids = {diff_id for chain in work.engine.chains() for diff_id in chain}
    needed = engine_bytes(_unloaded(store, images, diff_ids))
    if Path(info.root).stat().st_dev == store.root.stat().st_dev:
        needed += store_bytes(store, images)
    _check_free(info.root, needed, f"building {counted(len(images), 'image')}")


def check_dockerfile(work: RunContext, images: Sequence[PlannedImage]) -> None:
    """Raises DiskError if a local engine has too little room to build these images from their Dockerfiles."""
    info = work.engine.info()
    if info.is_local:
        needed = dockerfile_bytes(Plan(images=tuple(images)), info.store, work.engine.cache_bytes())
        _check_free(info.root, needed, f"building {counted(len(images), 'image')}")


def check_download(work: RunContext, store: Store, blobs: Sequence[Descriptor]) -> None:
    """Raises DiskError if a local engine and the store have too little room for an image of these blobs."""
    info = work.engine.info()
    missing = sum(blob.size for blob in blobs if not store.has(blob.digest, blob.size))
    if missing and info.is_local:
        is_shared = Path(info.root).stat().st_dev == store.root.stat().st_dev
        _check_free(info.root, download_bytes(missing, info.store, is_shared=is_shared), "downloading an image")


def _check_free(folder: str, needed: int, action: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskError(
            f"{action} takes about {size(needed)} in {folder}, which has {size(free)} free",
            hint=FREE_DISK,
        )


def _wheel_layers(images: Iterable[PlannedImage]) -> Collection[PlannedLayer]:
    return {layer.inputs: layer for image in images for layer in image.layers if layer.wheels}.values()


def _unloaded(store: Store, images: Iterable[PlannedImage], diff_ids: Collection[str]) -> int:
    """Bytes of wheels in layers that an engine with the layers `diff_ids` lacks."""
    needed = 0
    for layer in _wheel_layers(images):
        built = stored_layers.stored_layer(store, layer, None)
        if built is None or built.diff_id not in diff_ids:
            needed += layer.bytes
    return needed


def groups(plan: Plan) -> list[Plan]:
    """One plan for each group of cells. Groups of one CUDA follow each other: they share most of their layers."""
    images: dict[tuple[str, str], list[PlannedImage]] = {}
    for image in plan.images:
        images.setdefault((image.cell.cuda, image.cell.group), []).append(image)
    cudas = list(dict.fromkeys(cuda for cuda, _ in images))
    return [Plan(images=tuple(images[key])) for key in sorted(images, key=lambda key: cudas.index(key[0]))]


def outstanding(work: RunContext, store: Store, plan: Plan, *, test: bool) -> Plan:
    """The images that the store lacks, or with `test` that have no valid passing evidence.

    All other images are done, even if they were removed from the engine since.
    """
    suite = Suite.of(work.project.root)

    def is_done(image: PlannedImage) -> bool:
        assembled = _stored(store, image)
        if assembled is None or not test:
            return assembled is not None
        requirement = Requirement.of(image, assembled.manifest.digest, suite)
        return not evidence.local_coverage(work.project.state, requirement).failure

    return Plan(images=tuple(image for image in plan.images if not is_done(image)))


def free_limit(work: RunContext, store: Store) -> int:
    """Bytes that store and engine may take together: their present size and the free space of their disks, less a
    reserve.
    """
    info = work.engine.info()
    free = shutil.disk_usage(store.root).free
    if info.is_local:
        free = min(free, shutil.disk_usage(info.root).free)
    return store.size() + work.engine.disk_bytes() + max(free - SPARE, 0)


def make_room(work: RunContext, store: Store, plan: Plan, limit: int, *, prune_cache: bool = False) -> None:
    """Frees disk until what `plan` adds fits under `limit`, bytes of store and engine together.

    Images that share the plan's CUDA are removed last: their layers would have to be loaded again. The build cache,
    which other projects use too, is emptied after them, and only with `prune_cache`. Raises DiskError, before anything
    is freed, if freeing everything is not enough.
    """
    engine, images = work.engine, plan.images
    layers = engine.layers()  # by image id: each layer, as the diff ids from the lowest one up to it -> its bytes

    def needed(layers: Mapping[str, Mapping[tuple[str, ...], int]]) -> int:
        return peak_bytes(store, images, {chain[-1] for chains in layers.values() for chain in chains})

    def shortage() -> int:
        return store.size() + engine.disk_bytes() + needed(layers) - limit

    def error(short: int, could: str = "", hint: str = "") -> DiskError:
        ids = ", ".join(image.id for image in images)
        return DiskError(
            f"{ids}: --max-disk {size(limit)} is {size(short)} too small: the store holds {size(store.size())}, "
            f"the engine {size(engine.disk_bytes())}{could}",
            hint="Raise --max-disk, or push finished images and remove them: builder push, builder gc --forget NAME."
            + hint,
        )

    short = shortage()
    if short <= 0:
        return

    # Images that this checkout built and the store can load again, oldest first. Not those that a container uses, or
    # that have a tag which is not in the matrix: a user set it.
    project = work.project
    ids = (built_ids(project.state) & stored_image.image_ids(store)) - engine.used_images()
    own_tags = {str(tag) for names in tags.compute(project.matrix, project.cells).values() for tag in names}
    in_engine = [image for image in reversed(engine.images(PLAN_LABEL)) if image.id in ids]
    cudas = {image.cell.cuda for image in images}
    removable = sorted(
        (image for image in in_engine if set(image.tags) <= own_tags),
        key=lambda image: image.labels.get(CUDA_LABEL) in cudas,
    )

    # The most bytes that removing the first of them, or more, frees. That is less than their sizes: a layer stays as
    # long as another image has it, and a layer that the plan needs is loaded again. `--max-disk 1GB` once removed every
    # image and emptied the cache, and then failed for lack of room.
    before, gains = needed(layers), [0]
    for count in range(1, len(removable) + 1):
        removed = [image.id for image in removable[:count]]
        kept = {image_id: chains for image_id, chains in layers.items() if image_id not in removed}
        shared = {chain for chains in kept.values() for chain in chains}
        freed = {chain: length for image_id in removed for chain, length in layers.get(image_id, {}).items()}
        own = sum(length for chain, length in freed.items() if chain not in shared)
        gains.append(own + before - needed(kept))
    cache = engine.cache_bytes()
    freeable = max(*gains, gains[-1] + (cache if prune_cache else 0))
    if short > freeable:
        raise error(
            short,
            could=f", and only {size(freeable)} of it can be freed" if freeable else "",
            hint=f" --prune-cache also empties the build cache, {size(cache)}." if cache and not prune_cache else "",
        )

    work.view.say(f"disk: freeing {size(short)} to keep store and engine below {size(limit)}")
    for image in removable:
        for tag in image.tags:
            engine.remove_image(tag)
        if engine.remove_image(image.id):
            layers.pop(image.id, None)
            name = image.labels.get(CELL_LABEL, image.id)
            work.view.say(f"disk: removed {name} from the engine (still in the store)")
        if shortage() <= 0:
            return
    if prune_cache:
        engine.prune_cache()
        work.view.say(f"disk: emptied the build cache, {size(cache)}")
    if (short := shortage()) > 0:
        raise error(short)
