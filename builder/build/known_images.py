"""Images of known layers that a registry has: assembled without an engine, without wheels, and without tests.

Only the layer of plain files is made. Whether two wheels have different files for one path is checked when the image is
built, not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from builder.build.registry_layers import RegistryLayers
from builder.common.errors import BuildError, RegistryError
from builder.common.reference import ImageRef
from builder.layers import files, images, os_layer, splice, wheel, wheel_layers
from builder.layers.blobs import Descriptor
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Image, Layer
from builder.layers.os_layer import OsLayer
from builder.layers.store import Store
from builder.lock.document import KNOWN_LAYERS
from builder.matrix.project import Project
from builder.plan.layer_order import PlannedLayer
from builder.plan.plan import PlannedImage
from builder.registry import pull


@dataclass(frozen=True, kw_only=True)
class KnownImages:
    """Assembles images in the store, except for the layers in `remote`."""

    project: Project
    store: Store
    known: KnownLayers
    remote: RegistryLayers

    def assemble(self, image: PlannedImage) -> Image:
        """The image, whose blobs are in the store or in the registry.

        Raises BuildError for a layer that is not known, or that no registry has.
        """
        system = os_layer.get(self.store, image.os) or self.remote.system(image.os)
        if system is None:
            raise self._missing(image, f"no registry has its operating system, or it is not listed in {KNOWN_LAYERS}")
        layers = [self._layer(layer, image, system) for layer in image.layers]
        return images.write(self.store, image, system, layers)

    def repositories(self) -> list[ImageRef]:
        """Repositories that may have the layers."""
        return list(self.remote.references())

    def fetch(self, blob: Descriptor) -> Path:
        """Downloads a blob to the store, for a registry that cannot mount it. Raises RegistryError."""
        if (registry := self.remote.find(blob.digest)) is None:
            raise RegistryError(f"no registry has blob {blob.digest}", hint="Run this again.")
        pull.fetch(registry, self.store, [blob])
        return self.store.path(blob.digest)

    def _layer(self, layer: PlannedLayer, image: PlannedImage, system: OsLayer) -> Layer:
        if layer.kind == "os":
            return system.built(layer)
        if layer.kind == "files" and not layer.compiled:
            read = files.read(self.project.root, image, wheel.environment(image.cell.python))
            entries = files.entries(read, system.folders)
            return wheel_layers.put(self.store, layer, lambda out: splice.write(entries, out))
        known = self.known.get(layer)
        if known is None:
            raise self._missing(image, f"layer {layer.name} is not listed in {KNOWN_LAYERS}")
        if self.remote.find(known.digest) is None:
            raise self._missing(image, f"no registry has layer {layer.name}")
        return known.built(layer)

    def _missing(self, image: PlannedImage, reason: str) -> BuildError:
        return BuildError(
            f"{image.id}: {reason}",
            hint=f"Build and test it on this machine: builder images {image.id}",
        )
