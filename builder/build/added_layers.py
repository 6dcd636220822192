"""The layers and the configuration of an image that is made of another one by adding to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from builder.build.added_wheels import CONFLICT
from builder.common.errors import BuildError, RefusedError
from builder.common.files import digest_of_data
from builder.common.tasks import thread_pool
from builder.engine.run import Run
from builder.index.download import CONNECTIONS, Fetcher
from builder.index.wheels import LockedWheel, Wheel
from builder.layers import oci, stored_images, stored_layers, wheel
from builder.layers.estargz import TocEntry
from builder.layers.oci import Image, Layer
from builder.layers.splice import Entry
from builder.layers.store import Store
from builder.plan import layer_order
from builder.plan.layer_order import LAYER_FORMAT, PlannedLayer
from builder.release.additions import Addition
from builder.release.parent import WHITEOUT, Parent, hidden_paths, without

ADDED = "added"  # the component and the layer of small wheels
REPLACED = "replaced packages"  # the layer that hides them


@dataclass(frozen=True, kw_only=True)
class AddedLayer:
    """A new layer: as planned, as it is, and its files."""

    planned: PlannedLayer
    layer: Layer
    toc: tuple[TocEntry, ...]

    @property
    def line(self) -> str:
        return oci.history_line(self.planned)


def make_layers(run: Run, fetcher: Fetcher, parent: Parent, wheels: Sequence[LockedWheel]) -> list[AddedLayer]:
    """The layers of wheels, from the store or made now, above a layer that hides the packages that they replace.

    Wheels are downloaded several at a time. Raises FetchError, VerifyError.
    """
    planned = layer_order.wheel_layers(
        [Wheel(**vars(wheel), component=ADDED) for wheel in wheels], parent.python, cuda_name=ADDED, name=ADDED
    )
    stored = {
        planned_layer.inputs: stored_layers.stored_layer(run.store, planned_layer.inputs) for planned_layer in planned
    }
    missing = [planned_layer for planned_layer in planned if not stored[planned_layer.inputs]]
    largest_first = sorted(
        (wheel for planned_layer in missing for wheel in planned_layer.wheels), key=lambda wheel: -wheel.size
    )
    with thread_pool(CONNECTIONS, "fetch") as pool:
        downloads = {wheel.sha256: pool.submit(fetcher.fetch, wheel) for wheel in largest_first}
        try:
            for planned_layer in missing:
                paths = [downloads[wheel.sha256].result() for wheel in planned_layer.wheels]
                stored[planned_layer.inputs] = stored_layers.store_wheels(run.store, planned_layer, paths)
        except BaseException:
            fetcher.stop()
            raise
    for each_wheel in largest_first:
        fetcher.drop(each_wheel)
    if hidden := parent.own_paths([wheel.name for wheel in wheels if wheel.name in parent.packages]):
        lowest = PlannedLayer(
            kind="files", name=REPLACED, component=ADDED, inputs=digest_of_data([LAYER_FORMAT, sorted(hidden)])
        )
        whiteouts = (f"{folder}/{WHITEOUT}{name}" for folder, _, name in (path.rpartition("/") for path in hidden))
        files = {path: Entry(path=path, mode=wheel.FILE_MODE, content=b"") for path in whiteouts}
        planned.insert(0, lowest)
        stored[lowest.inputs] = stored_layers.store_layer(
            run.store, lowest, stored_layers.component_file_entries(files, ())
        )
    return [
        AddedLayer(planned=planned_layer, layer=layer, toc=stored_layers.read_stored_toc(run.store, layer))
        for planned_layer in planned
        if (layer := stored[planned_layer.inputs])
    ]


def check_added_paths(name: str, parent: Parent, added: Sequence[AddedLayer]) -> list[str]:
    """Returns warnings. Raises RefusedError if a layer has another file for a path of the parent that is not hidden."""
    hidden = {path for added_layer in added for path in hidden_paths(added_layer.toc)}
    files = [entry for _, entry in without(parent.files, hidden).values()]
    planned = PlannedLayer(kind="files", name="the parent", component="", inputs=parent.image.manifest.digest)
    of_wheels = [(added_layer.planned, added_layer.toc) for added_layer in added if added_layer.planned.wheels]
    try:
        return stored_layers.check_paths(name, [(planned, files), *of_wheels], ())
    except BuildError as error:
        raise RefusedError(str(error), hint=CONFLICT) from error


def write_added_image(
    store: Store, parent: Parent, addition: Addition, wheels: Sequence[LockedWheel], added: Sequence[AddedLayer]
) -> Image:
    """Writes the configuration and the manifest. The same request, lock and parent give the same bytes."""
    layers, history = [added_layer.layer for added_layer in added], [added_layer.line for added_layer in added]
    labels = addition.labels(parent, wheels)
    config = oci.derived_config(parent.config, layers, history, env=addition.request.env, labels=labels)
    image = parent.image
    return stored_images.put_image(
        store, config, [*image.layers, *layers], history=[*image.history, *history], labels=labels
    )
