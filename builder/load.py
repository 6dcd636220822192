"""Loads an image of the store into Docker Engine, with only the layers that the engine lacks.

The archive has both forms that engines read: `manifest.json` (overlay2; the image's id is then the digest of its
configuration) and an OCI layout (containerd store; the id is the digest of its manifest).
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from builder import oci
from builder.engine import RUN_LABEL, Engine
from builder.errors import EngineError, FileError
from builder.layers import PlannedLayer
from builder.oci import BuiltLayer
from builder.store import CONFIG_TYPE, INDEX_TYPE, LAYOUT, MANIFEST_TYPE, Descriptor, Store

CHUNK = 1 << 20
CONTAINERD = "containerd"


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """An image of the store."""

    config: Descriptor
    manifest: Descriptor
    layers: tuple[BuiltLayer, ...]

    def image_id(self, kind: str) -> str:
        """The id that an engine with this kind of store gives it."""
        return (self.manifest if kind == CONTAINERD else self.config).digest


def read(store: Store, digest: str, planned: Sequence[PlannedLayer]) -> Assembled | None:
    """The image of a manifest in the store, if all of its blobs are there."""
    manifest = store.read(digest)
    data, config = json.loads(manifest), None
    blob = data["config"]
    if store.has(blob["digest"], blob["size"]):
        config = json.loads(store.read(blob["digest"]))
    if config is None or not all(store.has(one["digest"], one["size"]) for one in data["layers"]):
        return None
    layers = [
        BuiltLayer(planned=layer, digest=one["digest"], diff_id=diff_id, size=one["size"])
        for layer, one, diff_id in zip(planned, data["layers"], config["rootfs"]["diff_ids"], strict=True)
    ]
    return Assembled(
        config=Descriptor(media_type=CONFIG_TYPE, digest=blob["digest"], size=blob["size"]),
        manifest=Descriptor(media_type=MANIFEST_TYPE, digest=digest, size=len(manifest)),
        layers=tuple(layers),
    )


def image_ids(store: Store) -> set[str]:
    """Every id that an engine may know a whole image of the store by: digests of manifest and configuration."""
    found: set[str] = set()
    for manifest in store.images().values():
        try:
            data = json.loads(store.read(manifest.digest))
        except FileError:
            continue
        if all(store.has(one["digest"], one["size"]) for one in (data["config"], *data["layers"])):
            found |= {manifest.digest, data["config"]["digest"]}
    return found


def load_bare(engine: Engine, store: Store, layer: BuiltLayer, checkout: str) -> str:
    """An image of one layer, to run a program of ours in; returns its id. It is this checkout's alone, see `sweep`."""
    config = store.put(oci.bare_config(layer, {RUN_LABEL: checkout}), CONFIG_TYPE)
    manifest = store.put(oci.manifest(config, [layer]), MANIFEST_TYPE)
    return load(engine, store, Assembled(config=config, manifest=manifest, layers=(layer,)))


def load(engine: Engine, store: Store, image: Assembled, sent: Callable[[int], None] = lambda _: None) -> str:
    """Has the image in the engine, untagged; returns its id. Raises EngineError, DiskError, FileError for a bad blob.

    `sent` is told of bytes as they go.
    """
    kind = engine.info().store
    image_id = image.image_id(kind)
    if engine.image(image_id):
        return image_id
    known = _known(engine, store, image, kind)
    try:
        engine.load(archive(store, image, known, sent))
    except EngineError:
        engine.info()  # raises EngineError if that is why
        store.check([image.config.digest, *(layer.digest for layer in image.layers)])
        if not known:
            raise
        engine.load(archive(store, image, set(), sent))  # an image that had them was removed meanwhile
    if not engine.image(image_id):
        raise EngineError(f"Docker Engine loaded an image but does not know it as {image_id}")
    return image_id


def _known(engine: Engine, store: Store, image: Assembled, kind: str) -> set[str]:
    """Digests of the image's layers that the engine has."""
    if kind == CONTAINERD:  # blobs by digest, whatever lies below them
        return {
            layer["digest"]
            for manifest in store.images().values()
            if manifest.digest != image.manifest.digest and engine.image(manifest.digest)
            for layer in json.loads(store.read(manifest.digest))["layers"]
        } & {layer.digest for layer in image.layers}
    count = common([layer.diff_id for layer in image.layers], engine.chains())
    return {layer.digest for layer in image.layers[:count]}


def common(diff_ids: Sequence[str], chains: set[tuple[str, ...]]) -> int:
    """How many layers from the lowest one upwards some other image begins with too."""
    longest = 0
    for chain in chains:
        count = 0
        for ours, theirs in zip(diff_ids, chain, strict=False):
            if ours != theirs:
                break
            count += 1
        longest = max(longest, count)
    return longest


def archive(store: Store, image: Assembled, known: set[str], sent: Callable[[int], None]) -> Iterator[bytes]:
    """What `docker load` reads, without the layers in `known`."""
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [image.manifest.as_data()]}
    docker = [
        {
            "Config": _path(image.config.digest),
            "RepoTags": None,
            "Layers": [_path(layer.digest) for layer in image.layers],
        }
    ]
    for name, data in (
        ("oci-layout", LAYOUT),
        ("index.json", json.dumps(index)),
        ("manifest.json", json.dumps(docker)),
    ):
        yield _member(name, len(data)) + data.encode() + _padding(len(data))
    for blob in dict.fromkeys([image.manifest, image.config, *(layer.descriptor for layer in image.layers)]):
        if blob.digest in known:
            continue
        yield _member(_path(blob.digest), blob.size)
        with store.path(blob.digest).open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
                sent(len(chunk))
        yield _padding(blob.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _path(blob: str) -> str:
    return "blobs/" + blob.replace(":", "/")


def _member(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)
