"""Assembles images from layers: the default method. Every layer is made once, for all images that have it.

Layers of wheels, operating systems and bytecode are made side by side. Layers that the store has are not made again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial

from builder.build import bytecode, disk, os_stage
from builder.build.bytecode import Compilation
from builder.build.os_stage import OsStage
from builder.build.programs import Programs
from builder.build.registry_layers import RegistryLayers
from builder.build.wheels import WheelLayers
from builder.build.work import Method, Origin, Work, record_built
from builder.common import digest
from builder.common.console import Meter
from builder.common.errors import BuilderError, DamagedError
from builder.engine.load import Loader
from builder.layers import files, oci, os_layer, splice, wheel, wheel_layers
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

    `os_way` is how operating systems are made.
    """

    def __init__(self, work: Work, store: Store, *, os_way: os_stage.Way = "auto") -> None:
        self._work = work
        self._store = store
        self._os_way = os_way
        self._programs = Programs()
        self._engine_store = work.engine.info().store
        self._loader = Loader(work.engine, store, str(work.project.root), work.view.say)
        self._known = KnownLayers(work.project.root)
        self._wheels = WheelLayers(work, store, self._known)
        self._remote = RegistryLayers(work.project, work.host, work.view, store, self._known)
        self._systems: dict[str, Future[OsLayer]] = {}
        self._compilers: dict[str, set[str]] = {}
        self._bytecode: dict[str, Future[Layer]] = {}
        self._os_images: dict[str, str] = {}
        self._program = b""
        self._files: dict[str, dict[str, Entry]] = {}
        self._os_images_lock = threading.Lock()
        self._loading = threading.Lock()
        self._containers = ThreadPoolExecutor(4, "container")

    def find(self, image: PlannedImage) -> str:
        """Id of the image in the engine, if store and engine both have it as planned; empty if not."""
        try:
            stored = stored_images.find(self._store, image)
        except DamagedError as error:
            self._work.view.say(f"{image.id}: {error}; it will be rebuilt")
            self._store.discard(error.blob)
            return ""
        if stored is None:
            return ""
        image_id = stored.image_id(self._engine_store)
        return image_id if self._work.engine.image(image_id) else ""

    def prepare(self, images: Sequence[PlannedImage]) -> None:
        """Starts everything that the images need and the store lacks.

        Reads the files of the checkout now: one that is edited during the build belongs to the next plan.
        """
        work = self._work
        disk.check_assemble(work, self._store, images)
        self._program = (work.project.root / plan.COMPILER).read_bytes()
        self._compilers = plan.systems(work.project)
        for image in images:
            self._files[image.id] = files.read(work.project.root, image, wheel.environment(image.cell.python))
        self._start_systems({image.os: image for image in images}.values())
        self._wheels.start(layer for image in images for layer in image.layers if layer.kind == "wheels")
        for image in images:
            for layer in image.layers:
                if layer.compiled and layer.inputs not in self._bytecode:
                    self._bytecode[layer.inputs] = self._containers.submit(self._compile, layer, image)

    def _start_systems(self, images: Iterable[PlannedImage]) -> None:
        """Makes the operating systems that the store lacks; `images` are one for each."""
        work = self._work
        missing = []
        for image in images:
            if system := os_layer.get(self._store, image.os):
                self._systems[image.os] = Future()
                self._systems[image.os].set_result(system)
            elif system := self._remote.system(image.os):
                self._systems[image.os] = self._containers.submit(self._download_system, image, system)
            else:
                missing.append(image)
        for stage in os_stage.read(work, missing, self._os_way):
            self._systems[stage.image.os] = self._containers.submit(self._make_system, stage)

    def _download_system(self, image: PlannedImage, system: OsLayer) -> OsLayer:
        """Downloads an operating system that a registry reported; makes it if that fails."""
        name = os_stage.row(image)
        self._work.view.begin(name, "downloading")
        if self._remote.download_system(name, image.os, system):
            self._work.view.end(name, "done", f"layer {digest.short(system.digest)}, from the registry")
            return system
        [stage] = os_stage.read(self._work, [image], self._os_way)
        return self._make_system(stage)

    def _make_system(self, stage: OsStage) -> OsLayer:
        system = os_stage.make(self._work, self._store, stage, self._programs, self._known)
        self._work.view.end(stage.name, "done", f"layer {digest.short(system.digest)}")
        return system

    def build(self, image: PlannedImage) -> tuple[str, Origin]:
        """Assembles the image and loads it into the engine; returns its id, and whether the store had it before."""
        work = self._work
        work.view.begin(image.id, "assembling")
        known = {manifest.digest for manifest in self._store.images().values()}
        assembled = self.assemble(image)
        with self._loading:  # one at a time: two at once were not faster, and take more disk
            work.view.begin(image.id, "loading")
            meter = Meter(work.view, image.id, "loaded", 0)
            image_id = self._loader.load(assembled, meter.add)
        record_built(work.project.state, f"assembled-{image_id}", image_id)
        return image_id, "loaded" if assembled.manifest.digest in known else "built"

    def assemble(self, image: PlannedImage) -> Image:
        """Assembles the image in the store, named as untested. Raises what making one of its layers raised."""
        system = self._systems[image.os].result()
        # The layer may have been made for another image, where it has another name in the history.
        stack = tuple(
            replace(self._layer(layer, image, system), created_by=oci.describe(layer)) for layer in image.layers
        )
        for planned, layer in zip(image.layers, stack, strict=True):
            if planned.wheels or planned.compiled:
                self._known.add(planned, layer)
        self._known.add_system(image.os, system)
        self._known.write()
        wheel_layers.check_paths(self._store, image.id, image.layers, set(system.taken))
        sizes = [(planned.name, layer.size, layer.unpacked) for planned, layer in zip(image.layers, stack, strict=True)]
        budget.check_built(self._work.project.matrix, image.cell, sizes)
        assembled = stored_images.write(self._store, image, system, stack)
        stored_images.put_name(self._store, image, system, assembled.manifest, image.references[0] + UNTESTED)
        return assembled

    def record_tagged(self, image: PlannedImage) -> None:
        """Names the image in the store by its full tag, after it passed its tests and has its tags."""
        stored, system = stored_images.find(self._store, image), os_layer.get(self._store, image.os)
        if stored and system:
            name = image.references[0]
            stored_images.put_name(self._store, image, system, stored.manifest, name, instead_of=name + UNTESTED)

    def close(self) -> None:
        """Stops downloads and removes the images that containers ran in, after those containers ended.

        Does not wait for them after an interrupt.
        """
        wait = isinstance(sys.exception(), Exception | None)
        if not wait:
            self._programs.stop()
        self._wheels.close(wait=wait)
        self._containers.shutdown(wait=wait, cancel_futures=True)
        for image_id in list(self._os_images.values()):
            with suppress(BuilderError):  # an earlier error is more useful; `sweep` removes the image
                self._work.engine.remove_image(image_id)

    # ---- layers

    def _layer(self, layer: PlannedLayer, image: PlannedImage, system: OsLayer) -> Layer:
        if layer.kind == "os":
            return system.built(layer)
        if layer.kind == "wheels":
            return self._wheels.layer(layer.inputs)
        if layer.compiled:
            return self._bytecode[layer.inputs].result()
        entries = files.entries(self._files[image.id], system.folders)
        return wheel_layers.put(self._store, layer, lambda out: splice.write(entries, out))

    def _compile(self, layer: PlannedLayer, image: PlannedImage) -> Layer:
        if built := wheel_layers.get(self._store, layer):
            return built
        if downloaded := self._remote.bytecode(layer):
            return downloaded
        system = self._compiling_system(image)
        below = {inputs: self._wheels.layer(inputs) for inputs in layer.compiled}
        compilation = Compilation(
            os_image=self._os_image(image, system),
            program=self._program,
            place=wheel.environment(layer.python),
            sources=[
                (built.digest, wheel_layers.sources_of(self._store, inputs, built)) for inputs, built in below.items()
            ],
        )
        self._work.view.note(image.id, f"compiling {layer.component}")
        make = partial(bytecode.make, self._work, self._store, compilation)
        return wheel_layers.put(self._store, layer, make, self._known.get(layer))

    def _compiling_system(self, image: PlannedImage) -> OsLayer:
        """The first operating system that is ready, of those with the image's Python: all give the same bytecode."""
        systems = self._compilers.get(image.compiler, set()) | {image.os}
        stored = (
            os_layer.get(self._store, inputs) for inputs in sorted(systems, key=lambda inputs: inputs != image.os)
        )
        if system := next(filter(None, stored), None):
            return system
        # None of them is pending: they were submitted before all bytecode.
        started = [self._systems[inputs] for inputs in systems & self._systems.keys()]
        ready = next((future for future in as_completed(started) if not future.exception()), self._systems[image.os])
        return ready.result()

    def _os_image(self, image: PlannedImage, system: OsLayer) -> str:
        """Id of an image of the operating system alone, to run its Python."""
        with self._os_images_lock:
            if system.digest not in self._os_images:
                layer = next(layer for layer in image.layers if layer.kind == "os")
                self._os_images[system.digest] = self._loader.load_bare(system.built(layer))
            return self._os_images[system.digest]
