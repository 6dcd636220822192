"""Finds and frees the garbage of a store, files that no image uses, and makes room for layers.

Frees nothing while a named image is incomplete: without its manifest, its other blobs look like garbage.
"""

from __future__ import annotations

import fcntl
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from builder.common.errors import FREE_STORE, DamagedError, DiskError
from builder.common.files import TEMPORARY_SUFFIX
from builder.common.text import counted, size
from builder.layers import store, stored_images, stored_layers
from builder.layers.store import PACKAGES, Store
from builder.plan.plan import PlannedImage

MOST_DAMAGED = 5  # damaged images that an error names


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """The files that no image of the store uses, with their sizes in bytes.

    `blobs` are unused blobs; `leftovers` are downloads, temporary files and records of layers. `packages` are kept: the
    Debian packages from which the operating systems of the images were made. Debian's archives delete a package when it
    has a newer version, and this machine can still make the same operating system from the kept ones.
    """

    blobs: Mapping[Path, int]
    leftovers: Mapping[Path, int]
    packages: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.blobs.values()) + sum(self.leftovers.values())


@dataclass(frozen=True, kw_only=True)
class Use:
    """An image of the store. `bytes` is the size of all blobs, `own` the size of blobs that no other image has."""

    name: str
    manifest: str
    bytes: int
    own: int


def image_uses(stored: Store, *, without: Collection[str] = ()) -> list[Use]:
    """Every image by name, except for `without`. An incomplete image counts with the sizes in its manifest."""
    names = {name: manifest.digest for name, manifest in stored.images().items() if name not in without}
    blobs: dict[str, dict[str, int]] = {}
    for manifest in names.values():
        try:
            blobs[manifest] = stored_images.blobs(stored, manifest)
        except DamagedError:
            blobs[manifest] = {}
    users = Counter(blob for sizes in blobs.values() for blob in sizes)
    return [
        Use(
            name=name,
            manifest=manifest,
            bytes=sum(blobs[manifest].values()),
            own=sum(count for blob, count in blobs[manifest].items() if users[blob] == 1),
        )
        for name, manifest in sorted(names.items())
    ]


def incomplete_images(stored: Store, *, without: Collection[str] = ()) -> dict[str, str]:
    """Name -> fault of every image with an unreadable manifest or a missing blob."""
    faults = {}
    for name, manifest in sorted(stored.images().items()):
        if name in without:
            continue
        try:
            if missing := stored_images.missing(stored, manifest.digest):
                faults[name] = f"{counted(len(missing), 'blob')} missing or truncated: {missing[0]}"
        except DamagedError as error:
            faults[name] = str(error)
    return faults


def find_garbage(stored: Store, *, without: Collection[str] = ()) -> Garbage:
    """Finds the garbage, as if the images in `without` were removed already. Writes nothing.

    Layers kept for the next build are garbage. Raises DamagedError if another named image is incomplete.
    """
    stored.require()
    if faults := incomplete_images(stored, without=without):
        lines = [f"  {name}: {fault}" for name, fault in list(faults.items())[:MOST_DAMAGED]]
        lines += [f"  ... and {len(faults) - MOST_DAMAGED} more"] if len(faults) > MOST_DAMAGED else []
        raise DamagedError(
            "nothing was freed, because images of the store are damaged\n" + "\n".join(lines),
            hint="Build them again, or remove them: builder gc --forget NAME",
        )
    kept = {blob for use in image_uses(stored, without=without) for blob in stored_images.blobs(stored, use.manifest)}
    records = map(store.read_record, (stored.root / "layers").iterdir())
    named = {blob for record in records if record.get("digest") in kept for blob in record.get(PACKAGES, ())}
    packages = {blob: stored.path(blob).stat().st_size for blob in named if stored.path(blob).exists()}
    kept |= packages.keys()
    folder = stored.root / "blobs/sha256"
    blobs = store.sizes(path for path in folder.iterdir() if f"sha256:{path.name}" not in kept)
    unused = {f"sha256:{path.name}" for path in blobs}
    files = [path for name in ("tmp", "downloads") for path in (stored.root / name).iterdir()]
    files += [
        path for path in (stored.root / "layers").iterdir() if store.read_record(path).get("digest") in {*unused, None}
    ]
    files += stored.root.rglob(f".*{TEMPORARY_SUFFIX}")
    return Garbage(blobs=blobs, leftovers=store.sizes(files), packages=packages)


def remove_garbage(stored: Store, *, without: Collection[str] = ()) -> Garbage:
    """Removes the images named in `without`, deletes the garbage, and returns a record of what was deleted.

    Raises BusyError if another process uses the store, or DamagedError, before anything is changed.
    """
    stored.require()
    with stored.locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
        garbage = find_garbage(stored, without=without)
        if without:
            stored.remove_names(without)
        for path in (*garbage.leftovers, *garbage.blobs):
            path.unlink(missing_ok=True)
    return garbage


def missing_bytes(stored: Store, images: Iterable[PlannedImage]) -> int:
    """The bytes to download for missing layers: all their wheels and Debian packages, even if the store has some."""
    layers = {layer.inputs: layer.bytes for image in images for layer in image.layers if layer.bytes}
    return sum(count for inputs, count in layers.items() if not stored_layers.stored_layer(stored, inputs))


def make_room(stored: Store, images: Iterable[PlannedImage]) -> None:
    """Removes garbage if the store would exceed its limit. Raises DiskError if that or the disk has too little room."""
    planned = list(images)
    missing = missing_bytes(stored, planned)
    if missing and stored.limit and stored.size() + missing > stored.limit:
        remove_garbage(stored)
        missing = missing_bytes(stored, planned)  # layers of an interrupted build may have been garbage
        if stored.size() + missing > stored.limit:
            raise DiskError(
                f"{size(missing)} must be written to the store {stored.root}: it has {size(stored.size())}, and its "
                f"limit is {size(stored.limit)}",
                hint=FREE_STORE,
            )
    require_free(stored, missing)


def require_free(stored: Store, count: int) -> None:
    """Raises DiskError if the disk of the store has fewer bytes free."""
    if count > (free := shutil.disk_usage(stored.root).free):
        raise DiskError(
            f"{size(count)} must be written to the store {stored.root}: its disk has {size(free)} free", hint=FREE_STORE
        )
