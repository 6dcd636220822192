"""Finds a layer by its inputs: in the store, or, if locks/layers.json lists it, in a registry.

Ignores a layer of the store that differs from the one in locks/layers.json, so that the build makes it again. Layers of
wheels are never downloaded: they have as many bytes as their wheels, and take little more time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from builder.common.console import Meter
from builder.common.errors import BuildError, RegistryError
from builder.common.lock_text import KNOWN_LAYERS
from builder.common.reference import ImageRef, staged_repository
from builder.common.tasks import RetryPolicy
from builder.engine.run import Run
from builder.layers import stored_images, stored_layers
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Descriptor, Image, Layer
from builder.plan.plan import PlannedImage
from builder.registry import transfer
from builder.registry.client import Repository
from builder.registry.failures import RejectedError

POLICY = RetryPolicy(connect_s=5, read_s=30, retries=1)  # a build does not need the registry


@dataclass
class LayerLookup:
    """Layers in the store, in staging and in the public repositories of matrix.yaml. Thread-safe.

    After an error of a registry, the rest of the run uses no registry: this machine then makes the layers.
    """

    run: Run
    known: KnownLayers
    _failed: threading.Event = field(default_factory=threading.Event, init=False)

    @classmethod
    def of(cls, run: Run) -> LayerLookup:
        """The lookup of a checkout, with the layers that its locks/layers.json lists now."""
        return cls(run, KnownLayers(run.project.root))

    def in_store(self, inputs: str) -> Layer | None:
        """The layer that the store has; None if it differs from the known one."""
        return stored_layers.stored_layer(self.run.store, inputs, self.known.get(inputs))

    def in_registry(self, inputs: str) -> Layer | None:
        """The known layer, if a registry has it; it is not downloaded."""
        known = self.known.get(inputs)
        return known if known and self.find(known.digest) else None

    def download(self, name: str, inputs: str) -> Layer | None:
        """Downloads and records the known layer, if a registry has it; `name` is its row in the view."""
        known = self.known.get(inputs)
        repository = self.find(known.digest) if known else None
        if known is None or repository is None:
            return None
        progress = Meter(self.run.view, name, "downloaded", known.size).add
        try:
            transfer.fetch_blobs(repository, self.run.store, [known.descriptor], progress)
        except RegistryError as error:
            self._give_up(error)
            return None
        self.run.store.put_record(inputs, known.as_record())
        return known

    def find(self, digest: str) -> Repository | None:
        """The first repository that has the blob; None if no repository has it."""
        if self._failed.is_set():
            return None
        for repository in self._repositories:
            try:
                if repository.has_blob(digest):
                    return repository
            except RejectedError:
                continue  # no such repository, or no permission to read it
            except RegistryError as error:
                self._give_up(error)
                return None
        return None

    def _give_up(self, error: RegistryError) -> None:
        if not self._failed.is_set():
            self._failed.set()
            self.run.view.say(f"the registry is not used for the rest of this run: {error}")

    @cached_property
    def _repositories(self) -> list[Repository]:
        return [
            Repository(reference, host=self.run.host, write=False, policy=POLICY) for reference in self.references()
        ]

    def references(self) -> Iterator[ImageRef]:
        """The repositories to search for layers, staging first."""
        matrix = self.run.project.matrix
        if place := matrix.staging_place:
            for name in matrix.image_names:
                yield staged_repository(place, matrix.registry, name)
        if matrix.registry:
            for name in matrix.image_names:
                yield ImageRef(registry=matrix.registry, repository=f"{matrix.namespace}/{name}")

    def assemble_known(self, image: PlannedImage) -> Image:
        """An image whose layers are in the store or in a registry, without an engine, wheels and tests.

        Makes only the layer of plain files. Does not compare the files of its layers: `builder.steps.test` does, which
        downloads them. Raises BuildError for a layer that is not known, or that no registry has.
        """

        def missing(reason: str) -> BuildError:
            hint = f"Build and test it on this machine: builder images {image.id}"
            return BuildError(f"{image.id}: {reason}", hint=hint)

        system = self.in_store(image.os_inputs) or self.in_registry(image.os_inputs)
        if system is None:
            raise missing(f"no registry has its operating system, or it is not listed in {KNOWN_LAYERS}")
        stack: list[Layer] = []
        for layer in image.layers:
            if layer.kind == "os":
                stack.append(system)
            elif layer.kind == "files":
                files = stored_layers.read_component_files(self.run.project, image)
                entries = stored_layers.component_file_entries(files, system.folders)
                stack.append(stored_layers.store_layer(self.run.store, layer, entries))
            elif self.known.get(layer.inputs) is None:
                raise missing(f"layer {layer.name} is not listed in {KNOWN_LAYERS}")
            elif found := self.in_registry(layer.inputs):
                stack.append(found)
            else:
                raise missing(f"no registry has layer {layer.name}")
        return stored_images.write_image(self.run.store, image, system, stack)

    def fetch(self, blob: Descriptor) -> Path:
        """Downloads a blob to the store, for a registry that cannot mount it. Raises RegistryError."""
        if (registry := self.find(blob.digest)) is None:
            raise RegistryError(f"no registry has blob {blob.digest}", hint="Run this again.")
        transfer.fetch_blobs(registry, self.run.store, [blob])
        return self.run.store.path(blob.digest)
