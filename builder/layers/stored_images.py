"""Images of the store: by the plan that they were built from, and by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase

from builder.common.errors import DamagedError, VerifyError
from builder.common.files import digest_of_data
from builder.layers import oci, stored_layers
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import CONFIG_TYPE, Image, Layer, Manifest
from builder.layers.store import REPAIR, Store
from builder.matrix import cells
from builder.plan.plan import PlannedImage
from builder.plan.settings import built_labels

UNTESTED = ".untested"  # suffix of an image's name in the store until its tests pass


def read_stored_image(store: Store, manifest: str) -> Image:
    """The image with this manifest. Raises DamagedError if its manifest or configuration is missing or invalid."""
    try:
        return oci.read_image(store.read(manifest), store.read)
    except VerifyError as error:
        raise _damaged(store, manifest, error) from error


def blobs(store: Store, manifest: str) -> dict[str, int]:
    """Digest -> size of every blob of an image: manifest, configuration, layers.

    Raises DamagedError as `read_stored_image` does.
    """
    content = store.read(manifest)
    try:
        return {manifest: len(content), **oci.read_blobs(content)}
    except VerifyError as error:
        raise _damaged(store, manifest, error) from error


def missing(store: Store, manifest: str) -> list[str]:
    """Blobs of an image that the store lacks or has in another size.

    Raises DamagedError as `read_stored_image` does.
    """
    return [blob for blob, size in blobs(store, manifest).items() if not store.has(blob, size)]


def _damaged(store: Store, manifest: str, error: VerifyError) -> DamagedError:
    return DamagedError(f"{store.path(manifest)}: {error}", hint=REPAIR, blob=manifest)


# ---- by plan


def find_stored_image(store: Store, planned: PlannedImage, known: KnownLayers | None = None) -> Image | None:
    """The image as planned, on the operating system that the store has; None if it is not assembled or incomplete.

    With `known`, also None if a layer is not the known one. Raises DamagedError for a manifest or configuration that
    does not match its digest.
    """
    system = stored_layers.stored_layer(store, planned.os_inputs, known.get(planned.os_inputs) if known else None)
    record = store.get_record(_key(planned, system)) if system else None
    if record is None or missing(store, record["digest"]):
        return None
    image = read_stored_image(store, record["digest"])
    for layer, stored in zip(planned.layers, image.layers, strict=False):
        if known and (expected := known.get(layer.inputs)) and expected.digest != stored.digest:
            return None
    return image


def write_image(store: Store, planned: PlannedImage, system: Layer, layers: Sequence[Layer]) -> Image:
    """Writes the configuration and the manifest of an image of these layers, without a name."""
    labels = built_labels(planned.plan, system.created)
    history = tuple(map(oci.history_line, planned.layers))
    config = oci.config(planned.settings, layers, history, created=system.created, labels=labels)
    return put_image(store, config, layers, history=history, labels={**planned.settings.labels, **labels})


def put_image(
    store: Store, config: bytes, layers: Sequence[Layer], *, history: Sequence[str] = (), labels: Mapping[str, str] = {}
) -> Image:
    """Stores the configuration and the manifest of an image of these layers, without a name."""
    config_blob = store.put(config, CONFIG_TYPE)
    manifest = Manifest.of(oci.manifest(config_blob, layers))
    store.put(manifest.content, manifest.media_type)
    return Image(config=config_blob, manifest=manifest, layers=tuple(layers), history=tuple(history), labels=labels)


def put_name(
    store: Store, planned: PlannedImage, system: Layer, image: Image, name: str, *, instead_of: str = ""
) -> None:
    """Names an image in the store and records it, so that `find_stored_image` returns it."""
    manifest = image.manifest.descriptor
    store.name(name, manifest, instead_of=instead_of)
    store.put_record(_key(planned, system), asdict(manifest))


def _key(planned: PlannedImage, system: Layer) -> str:
    return digest_of_data(["image", planned.plan, system.digest])


# ---- by name


def match_names(names: Iterable[str], word: str, references: Mapping[str, Sequence[str]]) -> list[str]:
    """The names that match a word: a name, the id of a cell, a tag of a cell, or a pattern of these.

    `references` are the tags of each cell of the matrix, by the cell's id; the first is the name in the store. A tested
    image precedes an untested one of the same name.
    """
    ordered = sorted(names)
    direct = [name for name in ordered if fnmatchcase(name, word) or fnmatchcase(name.removesuffix(UNTESTED), word)]
    if direct:
        return direct
    tags = {tags[0] for tags in references.values() if any(fnmatchcase(tag, word) for tag in tags)}
    tags |= {references[cell][0] for cell in cells.match(word, references)}
    return [name for name in ordered if name.removesuffix(UNTESTED) in tags]
