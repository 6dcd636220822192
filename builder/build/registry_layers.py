"""Known layers of operating systems and of bytecode that a registry has: they are downloaded, not made again.

Layers of wheels are made from the index: they have as many bytes as their wheels, and take little more time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property

from builder.common.console import Meter, View
from builder.common.errors import RegistryError
from builder.common.reference import ImageRef
from builder.common.retry import RetryPolicy
from builder.index.host import Host
from builder.layers import wheel_layers
from builder.layers.blobs import LAYER_TYPE, Descriptor
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import KnownLayer, Layer
from builder.layers.os_layer import OsLayer
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan.layer_order import PlannedLayer
from builder.registry import pull
from builder.registry.client import Registry
from builder.registry.failures import RejectedError
from builder.registry.staging import Place

POLICY = RetryPolicy(connect_s=5, read_s=30, retries=1)  # a build does not need the registry


class RegistryLayers:
    """The known layers in staging and in the public repositories of matrix.yaml. Thread-safe.

    After an error of a registry, none is used for the rest of the run: layers are then built here.
    """

    def __init__(self, project: Project, host: Host, view: View, store: Store, known: KnownLayers) -> None:
        self._matrix = project.matrix
        self._host = host
        self._view = view
        self._store = store
        self._known = known
        self._failed = threading.Event()

    def bytecode(self, planned: PlannedLayer) -> Layer | None:
        """A layer of bytecode, if a registry has it."""
        known = self._known.get(planned)
        if known is None or not self._download(planned.component, known):
            return None
        return wheel_layers.put_known(self._store, planned, known)

    def system(self, inputs: str) -> OsLayer | None:
        """A known operating system that a registry reports; it is not downloaded."""
        return next((system for system in self._known.systems(inputs) if self.find(system.digest)), None)

    def download_system(self, name: str, inputs: str, system: OsLayer) -> bool:
        """Downloads and records a system that a registry reported; `name` is its row in the view."""
        if not self._download(name, system):
            return False
        self._store.put_record(inputs, asdict(system))
        return True

    def _download(self, name: str, known: KnownLayer) -> bool:
        registry = self.find(known.digest)
        if registry is None:
            return False
        blob = Descriptor(media_type=LAYER_TYPE, digest=known.digest, size=known.size)
        try:
            pull.fetch(registry, self._store, [blob], Meter(self._view, name, "downloaded", known.size).add)
        except RegistryError as error:
            self._give_up(error)
            return False
        return True

    def find(self, digest: str) -> Registry | None:
        """A repository that has the blob; None without one."""
        if self._failed.is_set():
            return None
        for registry in self._repositories:
            try:
                if registry.has_blob(digest):
                    return registry
            except RejectedError:
                continue  # no such repository, or no permission to read it
            except RegistryError as error:
                self._give_up(error)
                return None
        return None

    def _give_up(self, error: RegistryError) -> None:
        if not self._failed.is_set():
            self._failed.set()
            self._view.say(f"the registry is not used for the rest of this run: {error}")

    @cached_property
    def _repositories(self) -> list[Registry]:
        return [Registry(reference, host=self._host, write=False, policy=POLICY) for reference in self.references()]

    def references(self) -> Iterator[ImageRef]:
        """Where layers are looked for."""
        matrix = self._matrix
        if matrix.staging:
            place = Place(matrix.staging, matrix.registry, self._host)
            yield from map(place.repository, matrix.image_names)
        if matrix.registry:
            for name in matrix.image_names:
                yield ImageRef(registry=matrix.registry, repository=f"{matrix.namespace}/{name}")
