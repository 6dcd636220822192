"""Loads images of the store into Docker Engine: the engine pulls them from this process, or gets an archive.

A pulled image has the name by which it was pulled, and the engine removes an image together with its last name. So the
engine pulls a temporary image with the same layers, then loads an archive of the image without layers, which gives it
no name. Then the temporary image is removed.

The id of an image in the overlay2 store is the digest of its configuration, so its layers can be pulled inflated: the
engine inflates more slowly. In the containerd store it is the digest of the manifest, which names compressed layers.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from builder.common.console import View
from builder.common.errors import BuildError, DamagedError, EngineError
from builder.common.files import digest_of_bytes
from builder.common.lock_text import KNOWN_LAYERS
from builder.engine.client import RUN_LABEL, Engine
from builder.engine.endpoint import Content, Endpoint
from builder.layers import oci, stored_images
from builder.layers.oci import CONFIG_TYPE, CONTAINERD, MANIFEST_TYPE, Descriptor, Image, Layer
from builder.layers.store import REPAIR, Store
from builder.matrix.tags import LABEL

Progress = Callable[[int], None]


class Loader:
    """Loads images of a store into an engine. Thread-safe.

    `checkout` is a label of temporary images, by which `Engine.sweep` removes the images of a killed run.
    """

    def __init__(self, engine: Engine, store: Store, checkout: str, view: View) -> None:
        self._engine = engine
        self._store = store
        self._checkout = checkout
        self._view = view
        # Becomes False when the engine cannot reach this machine's loopback. Always False for Podman, which pulls only
        # over TLS unless its configuration lists the registry as insecure.
        self._can_pull = engine.info().name != "Podman"

    def load_bare(self, layer: Layer) -> str:
        """Loads a temporary image of one layer, to run a program in; returns its id. `sweep` removes it.

        It is for the engine's architecture, even if the layer is for another one.
        """
        config = oci.bare_config([layer], {RUN_LABEL: self._checkout}, self._engine.info().arch)
        return self.load(stored_images.put_image(self._store, config, [layer]))

    def load(self, image: Image, progress: Progress = lambda _: None) -> str:
        """Loads the image untagged, unless the engine has it; returns its id.

        `progress` is called with numbers of bytes. Raises EngineError, DiskError, DamagedError for a bad blob, or
        BuildError for a layer with a wrong record.
        """
        kind = self._engine.info().store
        image_id = image.image_id(kind)
        if self._engine.image(image_id):
            return image_id
        try:
            if not (self._can_pull and self._pull(image, kind, progress)):
                self._can_pull = False
                self._engine.load(docker_archive(self._store, image, progress))
        except EngineError:
            self._engine.check()
            self._check_blobs(image)
            raise
        if not self._engine.image(image_id):
            raise EngineError(f"the engine loaded an image, but not as {image_id}")
        return image_id

    def _pull(self, image: Image, kind: str, progress: Progress) -> bool:
        """Lets the engine pull the layers, and loads the image; False if the engine did not reach this process."""
        is_plain = kind != CONTAINERD
        # The random label gives the temporary image an id of its own: another run may load the same layers meanwhile.
        labels = {RUN_LABEL: self._checkout, f"{LABEL}.loading": secrets.token_hex(8)}
        config = oci.bare_config(image.layers, labels, self._engine.info().arch)
        config_blob = Descriptor.of(config, CONFIG_TYPE)
        manifest = oci.manifest(config_blob, image.layers, is_plain=is_plain)
        contents = {
            config_blob.digest: Content.of(config, CONFIG_TYPE),
            digest_of_bytes(manifest): Content.of(manifest, MANIFEST_TYPE),
        }
        for layer in image.layers:
            blob = layer.plain if is_plain else layer.descriptor
            read = partial(self._store.chunks if blob.digest == layer.digest else self._store.inflated, layer.digest)
            contents[blob.digest] = Content(media_type=blob.media_type, size=blob.size, read=read)
        counter = PullProgress("Extracting" if is_plain else "Downloading")
        with Endpoint(contents) as endpoint:
            reference = endpoint.reference(digest_of_bytes(manifest))
            are_checked = False
            try:
                with closing(self._engine.pull_local(reference)) as messages:
                    for message in messages:
                        progress(counter.feed(message))
                        if not are_checked and (endpoint.is_broken or counter.is_retrying):
                            self._check_blobs(image)  # the engine would retry a damaged blob, with pauses
                            are_checked = True
            except EngineError as error:
                if endpoint.is_used:
                    raise
                self._view.say(f"Docker Engine cannot pull from this machine; sending whole archives instead: {error}")
                return False
        # The engine has the layers now, and keeps them as long as one of the two images has them.
        try:
            self._engine.load(docker_archive(self._store, image, has_layers=False))
        finally:
            self._engine.remove_image(reference)
        return True

    def _check_blobs(self, image: Image) -> None:
        """Raises DamagedError if the store lacks a blob of the image or removed a damaged one.

        Raises BuildError for a layer whose contents differ from the record, after removing the layer's blob.
        """
        self._store.remove_damaged([image.config.digest, *(layer.digest for layer in image.layers)])
        for blob in stored_images.missing(self._store, image.manifest.digest):
            raise DamagedError(f"blob {blob} is missing from the store", hint=REPAIR, blob=blob)
        # The diff id of a known layer is not computed when the layer is made again.
        for layer, name in zip(image.layers, image.history or [layer.digest for layer in image.layers], strict=True):
            contents, size = hashlib.sha256(), 0
            for chunk in self._store.inflated(layer.digest):
                contents.update(chunk)
                size += len(chunk)
            for title, actual, recorded in (
                ("diff id", f"sha256:{contents.hexdigest()}", layer.diff_id),
                ("unpacked size", size, layer.unpacked or size),
            ):
                if actual != recorded:
                    self._store.discard(layer.digest)
                    raise BuildError(
                        f"layer {name[:80]} has the {title} {actual}, but {recorded} is recorded",
                        hint=f"Delete the line with {layer.digest} from {KNOWN_LAYERS}. Then run this again.",
                    )


def docker_archive(
    store: Store, image: Image, progress: Progress = lambda _: None, *, has_layers: bool = True
) -> Iterator[bytes]:
    """The archive for `docker load`; without layers for an engine that has all of them.

    It has both formats that engines read: `manifest.json` (overlay2) and an OCI layout (containerd).
    """
    index = {"schemaVersion": 2, "mediaType": oci.INDEX_TYPE, "manifests": [image.manifest.descriptor.as_data()]}
    digests = [image.config.digest, *(layer.digest for layer in image.layers)]
    config, *layers = ("blobs/" + blob.replace(":", "/") for blob in digests)
    docker = [{"Config": config, "RepoTags": None, "Layers": layers}]  # no tags: an image gets them after its tests
    documents = {"oci-layout": oci.LAYOUT, "index.json": json.dumps(index), "manifest.json": json.dumps(docker)}
    for name, text in documents.items():
        yield _header(name, len(text)) + text.encode() + bytes(-len(text) % tarfile.BLOCKSIZE)
    blobs = [image.manifest.descriptor, image.config, *(layer.descriptor for layer in image.layers if has_layers)]
    for blob in dict.fromkeys(blobs):  # two layers may be the same blob
        yield _header("blobs/" + blob.digest.replace(":", "/"), blob.size)
        for chunk in store.chunks(blob.digest):
            yield chunk
            progress(len(chunk))
        yield bytes(-blob.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


@dataclass
class PullProgress:
    """Counts the bytes of layers in the messages of a pull. Only messages with this `status` count.

    `is_retrying`: a download failed at least once.
    """

    status: str
    is_retrying: bool = False
    _layers: dict[str, int] = field(default_factory=dict)

    def feed(self, message: Mapping[str, Any]) -> int:
        """Counts the bytes in a message; returns the number of bytes since the previous one."""
        status = str(message.get("status", ""))
        self.is_retrying |= status.startswith("Retrying")
        if status != self.status:
            return 0
        layer, current = str(message.get("id", "")), int((message.get("progressDetail") or {}).get("current") or 0)
        before = self._layers.get(layer, 0)
        self._layers[layer] = max(before, current)  # a download that starts over counts once
        return self._layers[layer] - before
