"""The layers and the configuration of an image that is made of another one by adding to it."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from pydantic import BaseModel

from builder.common.errors import BuildError, RefusedError, VerifyError
from builder.common.tasks import thread_pool
from builder.common.text import size
from builder.debian.os_lock import OsLock
from builder.index.download import CONNECTIONS, Fetcher
from builder.index.wheels import LockedWheel, Wheel
from builder.layers import estargz, installed, oci, splice, stored_images, stored_layers, wheel
from builder.layers.estargz import TocEntry
from builder.layers.installed import InstalledPackage
from builder.layers.oci import Image, Layer, OptionalDigest
from builder.layers.splice import Entry
from builder.layers.store import Store
from builder.lock.requirements import PYTHON
from builder.matrix.tags import ADDED_LABEL
from builder.plan import layer_order
from builder.plan.layer_order import MTIME, PlannedLayer
from builder.registry import transfer
from builder.release.additions import LARGEST_COPY, PLACES, Addition, derive_config
from builder.release.image_sources import RegistrySource
from builder.release.parent import Parent

ADDED, COPIED = "added", "copied"  # the component and the layer of small wheels; the layer of --copy and --service
SERVICES = "etc/services.d"  # see docs/components.md
CONFLICT = (
    "The packages of the parent stay as they are. Choose versions that fit them, or another parent. A Dockerfile with "
    "FROM can replace packages."
)


class _Copied(BaseModel, frozen=True):
    copied: OptionalDigest = ""


@dataclass(frozen=True, kw_only=True)
class AddedLayer:
    """A new layer: as planned, as it is, and its files."""

    planned: PlannedLayer
    layer: Layer
    toc: tuple[TocEntry, ...]

    @property
    def line(self) -> str:
        return oci.history_line(self.planned)


def make_layers(
    store: Store, fetcher: Fetcher, parent: Parent, wheels: Sequence[LockedWheel], warn: Callable[[str], object]
) -> list[AddedLayer]:
    """The layers of wheels, from the store or made now. Wheels are downloaded several at a time. Raises FetchError."""
    planned = layer_order.wheel_layers(
        [Wheel(**vars(wheel), component=ADDED) for wheel in wheels], parent.python, cuda_name=ADDED, name=ADDED
    )
    stored = {each.inputs: stored_layers.stored_layer(store, each.inputs) for each in planned}
    missing = [each for each in planned if not stored[each.inputs]]
    largest_first = sorted((wheel for each in missing for wheel in each.wheels), key=lambda wheel: -wheel.size)
    with thread_pool(CONNECTIONS, "fetch") as pool:
        downloads = {wheel.sha256: pool.submit(fetcher.fetch, wheel) for wheel in largest_first}
        try:
            for each in missing:
                paths = [downloads[wheel.sha256].result() for wheel in each.wheels]
                stored[each.inputs] = stored_layers.store_wheels(store, each, paths, warn=warn)
        except BaseException:
            fetcher.stop()
            raise
    for each_wheel in largest_first:
        fetcher.drop(each_wheel)
    return [added_layer(store, each, layer) for each in planned if (layer := stored[each.inputs])]


def copied_layer(store: Store, parent: Parent, addition: Addition) -> AddedLayer | None:
    """The layer of the copied files, or that of the earlier image; None if there are none."""
    planned = PlannedLayer(kind="files", name=COPIED, component=ADDED, inputs="")
    earlier = addition.earlier.get(parent.arch)
    files = _earlier_files(store, earlier) if earlier else dict(addition.files)
    for name, command in addition.services.items():
        path = f"{SERVICES}/{name}/run"
        files[path] = Entry(path=path, mode=wheel.PROGRAM_MODE, content=f"#!/bin/sh\nexec {command}\n".encode())
    if not files:
        return None
    entries: list[Entry] = []
    seen: set[str] = set()
    for path, entry in sorted(files.items()):
        for folder in wheel.new_folders(path, seen):
            _, present = parent.files.get(folder.path, (None, None))
            info = tarfile.TarInfo(folder.path)
            info.type, info.mtime, info.mode = tarfile.DIRTYPE, MTIME, wheel.ENVIRONMENT_FOLDER_MODE
            if path.startswith(f"{SERVICES}/"):  # a container may run as root
                info.mode = wheel.FOLDER_MODE
            if present:  # a layer replaces mode and owner of the folders that it has
                info.mode, info.uid, info.gid = present.mode, present.uid, present.gid
            entries.append(Entry(path=folder.path, mode=info.mode, header=info))
        entries.append(entry)
    with store.new_blob() as blob:
        layer = splice.write_layer(entries, blob.file)
        blob.digest = layer.digest
    return added_layer(store, planned, layer)


def check_paths(name: str, parent: Parent, added: Sequence[AddedLayer]) -> list[str]:
    """Returns warnings. Raises RefusedError if a layer has another file for a path of the parent.

    Debian's packages may replace files of its operating system, such as dpkg's records.
    """
    replaced: set[str] = set()
    for each in added:
        if each.planned.kind == "apt":
            replaced |= {entry.name for entry in each.toc if entry.type not in ("dir", "chunk")} - {*estargz.RESERVED}
    for path in sorted(replaced & parent.files.keys()):
        if parent.files[path][0].digest not in parent.systems:
            raise RefusedError(f"{name}: Debian's packages have another file for /{path} of the parent", hint=CONFLICT)
    files = [entry for path, (_, entry) in parent.files.items() if path not in replaced]
    planned = PlannedLayer(kind="files", name="the parent", component="", inputs=parent.image.manifest.digest)
    try:
        return stored_layers.check_paths(name, [(planned, files), *((each.planned, each.toc) for each in added)], ())
    except BuildError as error:
        raise RefusedError(str(error), hint=CONFLICT) from error


def debian_packages(store: Store, parent: Parent, added: Sequence[AddedLayer]) -> Collection[InstalledPackage]:
    """The Debian packages of the new image: those of the parent, or as a new layer of packages records them."""
    for each in added:
        for entry in each.toc:
            if each.planned.kind == "apt" and entry.name == installed.DPKG:
                with store.path(each.layer.digest).open("rb") as blob:
                    return installed.debian_packages(estargz.read_content(blob, entry))
    return parent.debian


def _earlier_files(store: Store, earlier: Parent) -> dict[str, Entry]:
    """The copied files of an image that `add` made, by path. Raises VerifyError for anything that it does not copy."""
    digest = oci.parse_document(_Copied, earlier.image.labels.get(ADDED_LABEL, "").encode(), "label").copied
    if not digest:
        return {}
    layer = next((each for each in earlier.image.layers if each.digest == digest), None)
    if layer is None:
        raise VerifyError(f"the image has no layer {digest}, which its label {ADDED_LABEL} names")
    if isinstance(earlier.source, RegistrySource):
        transfer.fetch_blobs(earlier.source.repository, store, [layer.descriptor])
    files: dict[str, Entry] = {}
    toc = stored_layers.read_toc(store, layer)
    if sum(entry.size for entry in toc if entry.type == "reg") > LARGEST_COPY:
        raise VerifyError(f"the layer of copied files is larger than {size(LARGEST_COPY)}")
    with store.path(layer.digest).open("rb") as blob:
        for entry in toc:
            if entry.type in ("dir", "chunk") or entry.name in estargz.RESERVED:
                continue  # folders are those of the parent, or new ones
            if entry.name.startswith(f"{SERVICES}/"):
                continue  # made again, of the request
            # The files of whoever made the image: only where --copy may write, and without setuid and links.
            is_below = any(f"/{entry.name}".startswith(f"{place}/") for place in PLACES)
            if entry.type != "reg" or not is_below or ".." in PurePosixPath(entry.name).parts:
                raise VerifyError(f"the layer of copied files has {entry.name[:200]!a}, which --copy does not write")
            mode = 0o775 if entry.mode & 0o100 else 0o664
            files[entry.name] = Entry(path=entry.name, mode=mode, content=estargz.read_content(blob, entry))
    return files


def added_layer(store: Store, planned: PlannedLayer, layer: Layer) -> AddedLayer:
    return AddedLayer(planned=planned, layer=layer, toc=stored_layers.read_toc(store, layer))


def write_image(
    store: Store, parent: Parent, addition: Addition, wheels: Sequence[LockedWheel], added: Sequence[AddedLayer],
    debian: OsLock | None = None,
) -> Image:  # fmt: skip
    """Writes the configuration and the manifest. The same request, lock and parent give the same bytes."""
    image, layers, history = parent.image, [each.layer for each in added], [each.line for each in added]
    lock = {"wheels": [[wheel.file, wheel.sha256, wheel.size] for wheel in wheels]}
    if debian:
        lock["debian"] = [[package.file, package.sha256, package.size] for package in debian.packages]
    copied = next((each.layer.digest for each in added if each.planned.name == COPIED), "")
    # uv.lock has versions for everything that the project needs; those of the parent's packages do not count.
    names = {PYTHON, *(wheel.name for wheel in wheels)}
    needed = replace(addition, constraints=[each for each in addition.constraints if each.name in names])
    record = {"request": needed.request, "lock": lock, **({"copied": copied} if copied else {})}
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    config, labels = derive_config(parent, str(addition.parent), text, layers, history)
    return stored_images.put_image(
        store, config, [*image.layers, *layers], history=[*image.history, *history], labels=labels
    )
