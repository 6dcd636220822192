"""The layers and the configuration of an image that is made of another one by adding to it."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from builder.common.tasks import thread_pool
from builder.index.download import CONNECTIONS, Fetcher
from builder.index.wheels import LockedWheel, Wheel
from builder.layers import oci, splice, stored_images, stored_layers, wheel
from builder.layers.estargz import TocEntry
from builder.layers.oci import Image, Layer
from builder.layers.splice import Entry
from builder.layers.store import Store
from builder.matrix.tags import ADDED_LABEL, CELL_LABEL, OCI, PARENT_CELL_LABEL, PARENT_LABEL, PLAN_LABEL
from builder.plan import layer_order
from builder.plan.layer_order import MTIME, PlannedLayer
from builder.registry import transfer
from builder.release.additions import BASE_NAME, Addition
from builder.release.image_sources import RegistrySource
from builder.release.parent import Parent

ADDED, COPIED = "added", "copied"  # the component and the layer of small wheels; the layer of --copy
# They describe the image of the parent alone. GPU checks need the other ones.
OF_PARENT = (CELL_LABEL, PLAN_LABEL, f"{OCI}.title", f"{OCI}.version", f"{OCI}.source")


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
    return [_added_layer(store, each, layer) for each in planned if (layer := stored[each.inputs])]


def copied_layer(store: Store, parent: Parent, addition: Addition) -> AddedLayer | None:
    """The layer of the copied files, or that of the earlier image; None if there are none."""
    planned = PlannedLayer(kind="files", name=COPIED, component=ADDED, inputs="")
    if earlier := addition.earlier.get(parent.arch):
        layers = zip(earlier.image.history, earlier.image.layers, earlier.tocs, strict=True)
        line = oci.history_line(planned)
        found = [AddedLayer(planned=planned, layer=layer, toc=toc) for name, layer, toc in layers if name == line]
        if found and isinstance(earlier.source, RegistrySource):
            transfer.fetch_blobs(earlier.source.repository, store, [found[-1].layer.descriptor])
        return found[-1] if found else None
    if not addition.files:
        return None
    entries: list[Entry] = []
    seen: set[str] = set()
    for path, entry in sorted(addition.files.items()):
        for folder in wheel.new_folders(path, seen):
            _, present = parent.files.get(folder.path, (None, None))
            info = tarfile.TarInfo(folder.path)
            info.type, info.mtime, info.mode = tarfile.DIRTYPE, MTIME, wheel.ENVIRONMENT_FOLDER_MODE
            if present:  # a layer replaces mode and owner of the folders that it has
                info.mode, info.uid, info.gid = present.mode, present.uid, present.gid
            entries.append(Entry(path=folder.path, mode=info.mode, header=info))
        entries.append(entry)
    with store.new_blob() as blob:
        layer = splice.write_layer(entries, blob.file)
        blob.digest = layer.digest
    return _added_layer(store, planned, layer)


def _added_layer(store: Store, planned: PlannedLayer, layer: Layer) -> AddedLayer:
    return AddedLayer(planned=planned, layer=layer, toc=stored_layers.read_toc(store, layer))


def write_image(
    store: Store, parent: Parent, addition: Addition, wheels: Sequence[LockedWheel], added: Sequence[AddedLayer]
) -> Image:
    """Writes the configuration and the manifest. The same request, lock and parent give the same bytes."""
    image, layers, history = parent.image, [each.layer for each in added], [each.line for each in added]
    lock = {"wheels": [[wheel.file, wheel.sha256, wheel.size] for wheel in wheels]}
    labels = {
        **{name: value for name, value in image.labels.items() if name not in OF_PARENT},
        PARENT_CELL_LABEL: parent.cell,
        PARENT_LABEL: image.manifest.digest,
        ADDED_LABEL: json.dumps({"request": addition.request, "lock": lock}, sort_keys=True, separators=(",", ":")),
        BASE_NAME: str(addition.parent),
        f"{OCI}.base.digest": image.manifest.digest,
    }
    content = parent.source.read_blob(image.config.digest)
    config = oci.derived_config(content, layers, history, env=addition.env, labels=labels)
    return stored_images.put_image(
        store, config, [*image.layers, *layers], history=[*image.history, *history], labels=labels
    )
