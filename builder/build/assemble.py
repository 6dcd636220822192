"""Assembles images from layers: the default method. Every layer is made once, for all images that have it.

Layers of wheels, operating systems and bytecode are made side by side. Layers that the store has are not made again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from builder.build import bytecode, disk
from builder.build.bytecode import Compilation
from builder.build.layer_lookup import LayerLookup
from builder.build.mmdebstrap import Mmdebstrap
from builder.build.operating_systems import SystemLayers
from builder.build.wheels import WheelLayers
from builder.build.work import LoadedImage, Method, Origin, Work, record_built
from builder.common import errors
from builder.common.console import Meter
from builder.common.errors import BuilderError, DamagedError
from builder.engine.load import Loader
from builder.layers import files, stored_layers, wheel
from builder.layers import images as stored_images
from builder.layers.images import UNTESTED
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Image, Layer
from builder.layers.os_layer import OsLayer
from builder.layers.splice import Entry
from builder.layers.store import Store
from builder.plan import budget, plan
from builder.plan.layer_order import PlannedLayer
from builder.plan.plan import PlannedImage


class Assembler(Method):
    """Makes the images of one run. `prepare` starts their layers, `build` waits for those of one image.

    `jobs` is how many operating systems are made at the same time; `lookup` is shared by the assemblers of a run, so
    that a registry that does not answer is asked once.
    """

    def __init__(
        self,
        work: Work,
        store: Store,
        *,
        jobs: int = 2,
        lookup: LayerLookup | None = None,
        mmdebstrap: Mmdebstrap | None = None,
    ) -> None:
        self._work = work
        self._store = store
        self._engine_store = work.engine.info().store
        self._loader = Loader(work.engine, store, str(work.project.root), work.view.say)
        self._lookup = lookup or LayerLookup(work.project, work.host, work.view, store, KnownLayers(work.project.root))
        self._wheels = WheelLayers(work, store, self._lookup, jobs)
        self._systems = SystemLayers(work, store, self._lookup, mmdebstrap or Mmdebstrap(work), jobs)
        self._compilers: dict[str, set[str]] = {}
        self._bytecode: dict[str, Future[Layer]] = {}
        self._os_images: dict[str, str] = {}
        self._program = b""
        self._files: dict[str, dict[str, Entry]] = {}
        self._unreadable: dict[str, BuilderError] = {}  # images with files that cannot be used
        self._os_images_lock = threading.Lock()
        self._loading = threading.Lock()
        self._containers = ThreadPoolExecutor(4, "container")

    def find(self, image: PlannedImage) -> LoadedImage | None:
        """The image, if store and engine both have it as planned."""
        try:
            stored = stored_images.find(self._store, image, self._lookup.known)
        except DamagedError as error:
            self._work.view.say(f"{image.id}: {error}; it will be rebuilt")
            self._store.discard(error.blob)
            return None
        if stored is None:
            return None
        loaded = LoadedImage(id=stored.image_id(self._engine_store), digest=stored.manifest.digest)
        return loaded if self._work.engine.image(loaded.id) else None

    def systems_to_make(self, images: Sequence[PlannedImage]) -> list[PlannedImage]:
        """One image for each operating system that neither the store nor a registry has."""
        return self._systems.missing(images)

    def prepare(self, images: Sequence[PlannedImage]) -> None:
        """Starts everything that the images need and the store lacks.

        Reads the files of the checkout now: one that is edited during the build belongs to the next plan.
        """
        work = self._work
        disk.check_assemble(work, self._store, images)
        self._program = (work.project.root / plan.COMPILER).read_bytes()
        self._compilers = plan.systems(work.project)
        for image in images:
            try:
                self._files[image.id] = files.read(work.project.root, image, wheel.environment(image.cell.python))
            except BuilderError as error:
                self._unreadable[image.id] = error
            except OSError as error:
                self._unreadable[image.id] = errors.of_file(error)
        images = [image for image in images if image.id in self._files]
        self._systems.start(images)
        self._wheels.start(layer for image in images for layer in image.layers if layer.kind == "wheels")
        for image in images:
            for layer in image.layers:
                if layer.compiled and layer.inputs not in self._bytecode:
                    self._bytecode[layer.inputs] = self._containers.submit(self._compile, layer, image)

    def pending(self, image: PlannedImage) -> list[Future[Any]]:
        """The layers of the image that are being made now."""
        futures: list[Future[Any]] = [*self._wheels.pending(image.layers)]
        futures += [self._bytecode[layer.inputs] for layer in image.layers if layer.inputs in self._bytecode]
        futures += self._systems.pending(image)
        return [future for future in futures if not future.done()]

    def build(self, image: PlannedImage) -> LoadedImage:
        """Assembles the image and loads it into the engine; its origin is `loaded` if the store had it before."""
        work = self._work
        work.view.begin(image.id, "assembling")
        known = {manifest.digest for manifest in self._store.images().values()}
        assembled = self.assemble(image)
        with self._loading:  # one at a time: two at once were not faster, and take more disk
            work.view.begin(image.id, "loading")
            meter = Meter(work.view, image.id, "loaded", 0)
            image_id = self._loader.load(assembled, meter.add)
        record_built(work.project.state, f"assembled-{image_id}", image_id)
        origin: Origin = "loaded" if assembled.manifest.digest in known else "built"
        return LoadedImage(id=image_id, digest=assembled.manifest.digest, origin=origin)

    def assemble(self, image: PlannedImage) -> Image:
        """Assembles the image in the store, named as untested. Raises what making one of its layers raised."""
        if error := self._unreadable.get(image.id):
            raise error
        system = self._systems.layer(image.os)
        stack = tuple(self._layer(layer, image, system) for layer in image.layers)
        known = self._lookup.known
        for planned, layer in zip(image.layers, stack, strict=True):
            if planned.wheels or planned.compiled:
                known.add(planned, layer)
        known.add_system(image.os, system)
        known.write()
        stored_layers.check_paths(self._store, image.id, image.layers, set(system.taken))
        sizes = [(planned.name, layer.size, layer.unpacked) for planned, layer in zip(image.layers, stack, strict=True)]
        budget.check_built(self._work.project.matrix, image.cell, sizes)
        assembled = stored_images.write(self._store, image, system, stack)
        stored_images.put_name(self._store, image, system, assembled.manifest, image.references[0] + UNTESTED)
        return assembled

    def record_tagged(self, image: PlannedImage) -> None:
        """Names the image in the store by its full tag, after it passed its tests and has its tags."""
        stored = stored_images.find(self._store, image, self._lookup.known)
        system = self._lookup.system_in_store(image.os)
        if stored and system:
            name = image.references[0]
            stored_images.put_name(self._store, image, system, stored.manifest, name, instead_of=name + UNTESTED)

    def close(self) -> None:
        """Stops downloads and removes the images that containers ran in, after those containers ended.

        Does not wait for them after an interrupt.
        """
        wait = isinstance(sys.exception(), Exception | None)
        self._systems.close(wait=wait)
        self._wheels.close(wait=wait)
        self._containers.shutdown(wait=wait, cancel_futures=True)
        for image_id in list(self._os_images.values()):
            with suppress(BuilderError):  # an earlier error is more useful; `sweep` removes the image
                self._work.engine.remove_image(image_id)

    # ---- layers

    def _layer(self, layer: PlannedLayer, image: PlannedImage, system: OsLayer) -> Layer:
        if layer.kind == "os":
            return system
        if layer.kind == "wheels":
            return self._wheels.layer(layer.inputs)
        if layer.compiled:
            return self._bytecode[layer.inputs].result()
        entries = files.entries(self._files[image.id], system.folders)
        return stored_layers.store_layer(self._store, layer, entries)

    def _compile(self, layer: PlannedLayer, image: PlannedImage) -> Layer:
        if built := self._lookup.in_store(layer):
            return built
        if downloaded := self._lookup.download_bytecode(layer):
            return downloaded
        # All operating systems with the image's Python give the same bytecode.
        system = self._systems.first_ready(image.os, self._compilers.get(image.compiler, ()))
        below = {inputs: self._wheels.layer(inputs) for inputs in layer.compiled}
        compilation = Compilation(
            os_image=self._os_image(system),
            program=self._program,
            place=wheel.environment(layer.python),
            sources=[
                (built.digest, stored_layers.sources_of(self._store, inputs, built)) for inputs, built in below.items()
            ],
        )
        self._work.view.note(image.id, f"compiling {layer.component}")
        entries = bytecode.compiled_entries(self._work, self._store, compilation)
        return stored_layers.store_layer(self._store, layer, entries, self._lookup.known.get(layer))

    def _os_image(self, system: OsLayer) -> str:
        """Id of an image of the operating system alone, to run its Python."""
        with self._os_images_lock:
            if system.digest not in self._os_images:
                self._os_images[system.digest] = self._loader.load_bare(system)
            return self._os_images[system.digest]
