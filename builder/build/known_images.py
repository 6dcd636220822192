"""Images of known layers that a registry has: assembled without an engine, without wheels, and without tests.

Only the layer of plain files is made. Whether two layers have different files for one path is checked by
`staged_tests`, which downloads the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from builder.build.layer_lookup import LayerLookup
from builder.common.errors import BuildError, RegistryError
from builder.common.reference import ImageRef
from builder.layers import files, images, stored_layers, wheel
from builder.layers.blobs import Descriptor
from builder.layers.oci import Image, Layer
from builder.layers.store import Store
from builder.lock.document import KNOWN_LAYERS
from builder.matrix.project import Project
from builder.plan.plan import PlannedImage
from builder.registry import pull


@dataclass(frozen=True, kw_only=True)
class KnownImages:
    """Assembles images in the store, except for the layers that `lookup` finds in a registry."""

    project: Project
    store: Store
    lookup: LayerLookup

    def assemble(self, image: PlannedImage) -> Image:
        """The image, whose blobs are in the store or in the registry.

        Raises BuildError for a layer that is not known, or that no registry has.
        """

        def missing(reason: str) -> BuildError:
            hint = f"Build and test it on this machine: builder images {image.id}"
            return BuildError(f"{image.id}: {reason}", hint=hint)

        system = self.lookup.system_in_store(image.os) or self.lookup.system_in_registry(image.os)
        if system is None:
            raise missing(f"no registry has its operating system, or it is not listed in {KNOWN_LAYERS}")
        stack: list[Layer] = []
        for layer in image.layers:
            if layer.kind == "os":
                stack.append(system)
            elif layer.kind == "files" and not layer.compiled:
                read = files.read(self.project.root, image, wheel.environment(image.cell.python))
                stack.append(stored_layers.store_layer(self.store, layer, files.entries(read, system.folders)))
            elif (known := self.lookup.known.get(layer)) is None:
                raise missing(f"layer {layer.name} is not listed in {KNOWN_LAYERS}")
            elif self.lookup.find(known.digest) is None:
                raise missing(f"no registry has layer {layer.name}")
            else:
                stack.append(known)
        return images.write(self.store, image, system, stack)

    def repositories(self) -> list[ImageRef]:
        """Repositories that may have the layers."""
        return list(self.lookup.references())

    def fetch(self, blob: Descriptor) -> Path:
        """Downloads a blob to the store, for a registry that cannot mount it. Raises RegistryError."""
        if (registry := self.lookup.find(blob.digest)) is None:
            raise RegistryError(f"no registry has blob {blob.digest}", hint="Run this again.")
        pull.fetch(registry, self.store, [blob])
        return self.store.path(blob.digest)
