"""Assembles images from layers: the default way to build. Every layer is made once, whatever images want it.

Wheels are fetched several at a time, each layer is spliced when its last wheel has come, the operating systems are
built meanwhile. What the store already has is not made again.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

from builder import atomic, base, budget, build, bytecode, digest, files, load, made, oci, osstage, plan, splice, wheel
from builder.errors import BuilderError
from builder.fetch import CONNECTIONS, Fetcher
from builder.layers import PlannedLayer
from builder.load import Assembled
from builder.lock import Wheel
from builder.oci import BuiltLayer
from builder.osstage import OsLayer
from builder.plan import PlannedImage
from builder.settings import OCI
from builder.splice import Entry
from builder.store import CONFIG_TYPE, MANIFEST_TYPE, Store
from builder.view import Meter
from builder.work import Work

_LOADED = build.UNPACKED + 1  # the engine keeps the archive until it has unpacked it
UNTESTED = ".untested"  # ends the name that an image has in the store until its tests passed
ATTEMPTS = 3  # at splicing wheels that another builder takes away
_WITH_WHEELS = 1.5  # wheels are removed when their layer is there; the first ones go while the last ones come


class Assembler:
    """Makes the images of one run. `prepare` begins what images share, `build` waits for what one of them needs."""

    def __init__(self, work: Work, store: Store, *, fresh: bool = False) -> None:
        self._work = work
        self._store = store
        self._fresh = fresh
        self._kind = work.engine.info().store
        self._os: dict[str, Future[OsLayer]] = {}
        self._layers: dict[str, Future[BuiltLayer]] = {}
        self._os_images: dict[str, str] = {}
        self._fetcher: Fetcher | None = None
        self._program = b""
        self._files: dict[str, dict[str, Entry]] = {}
        self._contexts: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._os_lock = threading.Lock()
        self._loading = threading.Lock()
        # A splice keeps two processors busy and takes up to 150 MB.
        self._splicing = ThreadPoolExecutor(max(1, min(2, (os.cpu_count() or 1) // 2)), "splice")
        self._fetching = ThreadPoolExecutor(CONNECTIONS, "fetch")
        self._running = ThreadPoolExecutor(4, "container")

    def find(self, image: PlannedImage) -> str:
        """Id of the image in the engine, if store and engine both have it as planned; empty if not."""
        if self._fresh and image.os not in self._os:
            return ""
        found = find(self._store, image)
        if found is None:
            return ""
        image_id = found.image_id(self._kind)
        return image_id if self._work.engine.image(image_id) else ""

    def prepare(self, images: Sequence[PlannedImage]) -> None:
        """Begins everything that the images need and the store lacks."""
        self._check_room(images)
        self._read(images)
        systems = {image.os: image for image in images}
        self._contexts = {inputs: osstage.context_of(self._work, image) for inputs, image in systems.items()}
        releases = sorted(
            {image.debian for image in images if self._fresh or not osstage.recall(self._store, image.os)}
        )
        work = self._work
        bases = {
            release: base.ensure(work.engine, work.project, release, work.host, work.view.say, fresh=self._fresh)
            for release in releases
        }
        for inputs, image in systems.items():
            self._os[inputs] = self._running.submit(self._make_os, image, bases)
        planned = {layer.inputs: layer for image in images for layer in image.layers if layer.kind == "wheels"}
        missing = {}
        for inputs, layer in planned.items():
            self._layers[inputs] = Future()
            if known := made.recall(self._store, layer):
                self._layers[inputs].set_result(known)
            else:
                missing[inputs] = layer
        self._fetch(missing)
        for image in images:
            for layer in image.layers:
                if layer.compiled and self._compiled_key(layer, image) not in self._layers:
                    key = self._compiled_key(layer, image)
                    self._layers[key] = self._running.submit(self._compile, layer, image)

    def _read(self, images: Sequence[PlannedImage]) -> None:
        """Reads what people write, now: a file that is edited while images are built belongs to the next plan."""
        work = self._work
        self._program = (work.project.root / plan.COMPILER).read_bytes()
        for image in images:
            self._files[image.id] = files.read(work.project.root, image, wheel.environment(image.cell.python))

    def _check_room(self, images: Sequence[PlannedImage]) -> None:
        """Raises DiskError if the engine has no room for what it lacks, before anything is begun."""
        info = self._work.engine.info()
        if not info.is_local:  # of an engine elsewhere we cannot know
            return
        there = {diff_id for chain in self._work.engine.chains() for diff_id in chain}
        wanted = 0
        same_disk = Path(info.root).stat().st_dev == self._store.root.stat().st_dev
        for layer in {layer.inputs: layer for image in images for layer in image.layers if layer.wheels}.values():
            known = made.recall(self._store, layer)
            if known is None or known.diff_id not in there:
                wanted += layer.bytes
        needed = engine_bytes(wanted) + (missing_bytes(self._store, images) if same_disk else 0)
        build.check_room(shutil.disk_usage(info.root).free, needed, len(images), info.root)

    def build(self, image: PlannedImage) -> str:
        """Puts the image together and has it in the engine; returns its id."""
        work = self._work
        work.view.begin(image.id, "assembling")
        assembled = self.assemble(image)
        with self._loading:  # one after another: the second then needs only what the first did not bring
            work.view.begin(image.id, "loading")
            meter = Meter(work.view, image.id, "loaded", 0)
            image_id = load.load(work.engine, self._store, assembled, meter.add)
        # For `clean`, which removes no image that is not ours.
        atomic.write_text(build.record(work.project.state, f"assembled-{image_id}"), image_id + "\n")
        return image_id

    def assemble(self, image: PlannedImage) -> Assembled:
        """The image in the store, under its full tag. Raises what making one of its layers raised."""
        system = self._os[image.os].result()
        # Another image may have the same layer under another name, and this one's history has its own.
        stack = tuple(replace(self._layer(layer, image, system), planned=layer) for layer in image.layers)
        made.check_paths(self._store, image.id, [layer for layer in stack if layer.key], set(system.taken))
        budget.check_built(self._work.project.matrix, image.cell, stack)
        labels = {f"{OCI}.base.name": system.base}
        config = oci.config(image.settings, stack, created=system.created, labels=labels)
        config_blob = self._store.put(config, CONFIG_TYPE)
        manifest = self._store.put(oci.manifest(config_blob, stack), MANIFEST_TYPE)
        self._store.name(image.references[0] + UNTESTED, manifest)
        assembled = Assembled(config=config_blob, manifest=manifest, layers=stack)
        self._store.remember(_image_key(image, system), asdict(assembled.manifest))
        return assembled

    def tagged(self, image: PlannedImage) -> None:
        """The image passed its tests and has its tags: now it has its name in the store too."""
        if found := find(self._store, image):
            name = image.references[0]
            self._store.name(name, found.manifest, instead_of=name + UNTESTED)

    def close(self) -> None:
        """Waits for what still runs in containers, which needs the images that are removed here. Not if interrupted."""
        wait = isinstance(sys.exception(), Exception | None)
        if self._fetcher:
            self._fetcher.stop()
        for pool in (self._fetching, self._running, self._splicing):
            pool.shutdown(wait=wait, cancel_futures=True)
        for image_id in list(self._os_images.values()):
            with suppress(BuilderError):  # what was raised before says more; `sweep` finds the image
                self._work.engine.remove_image(image_id)

    # ---- layers

    def _layer(self, layer: PlannedLayer, image: PlannedImage, system: OsLayer) -> BuiltLayer:
        if layer.kind == "os":
            return system.built(layer)
        if layer.kind == "wheels":
            return self._layers[layer.inputs].result()
        if layer.compiled:
            return self._layers[self._compiled_key(layer, image)].result()

        def write(out: BinaryIO) -> splice.Layer:
            return splice.write(files.entries(self._files[image.id], system.folders), out)

        return made.remember(self._store, layer, write)

    def _make_os(self, image: PlannedImage, bases: Mapping[str, base.Base]) -> OsLayer:
        known = None if self._fresh else osstage.recall(self._store, image.os)
        if known:
            return known
        work = self._work
        layer = osstage.make(work, self._store, image, self._contexts[image.os], bases[image.debian], fresh=self._fresh)
        work.view.end(osstage.row(image), "done", f"layer {digest.short(layer.digest)}")
        return layer

    def _fetch(self, missing: Mapping[str, PlannedLayer]) -> None:
        """Begins to fetch the wheels of layers; each layer is spliced when all of its wheels are there."""
        wanted = {one.sha256: one for layer in missing.values() for one in layer.wheels}
        if not wanted:
            return
        meter = Meter(self._work.view, "wheels", "fetched", sum(one.size for one in wanted.values()))
        fetcher = self._fetcher = Fetcher(self._work.host.index, self._store.downloads, got=meter.add)
        waiting = {inputs: len(layer.wheels) for inputs, layer in missing.items()}
        users: dict[str, list[str]] = {}
        for inputs, layer in missing.items():
            for one in layer.wheels:
                users.setdefault(one.sha256, []).append(inputs)

        def spliced(one: Wheel) -> None:
            with self._lock:
                users[one.sha256].pop()
                if users[one.sha256]:
                    return
            fetcher.drop(one)

        def begin(layer: PlannedLayer) -> None:
            try:
                future = self._splicing.submit(self._splice, fetcher, layer)
            except RuntimeError:  # closed meanwhile
                self._layers[layer.inputs].cancel()
                return
            future.add_done_callback(lambda future: self._spliced(layer, future, spliced))

        def come(one: Wheel, future: Future[Any]) -> None:
            for inputs in tuple(users[one.sha256]):
                if future.cancelled():
                    self._layers[inputs].cancel()
                elif error := future.exception():
                    self._fail(inputs, error)
                else:
                    with self._lock:
                        waiting[inputs] -= 1
                        ready = waiting[inputs] == 0
                    if ready:
                        begin(missing[inputs])

        for one in sorted(wanted.values(), key=lambda one: -one.size):
            self._fetching.submit(fetcher.fetch, one).add_done_callback(lambda future, one=one: come(one, future))  # type: ignore[misc]

    def _splice(self, fetcher: Fetcher, layer: PlannedLayer) -> BuiltLayer:
        """A builder that shares the store may have had the same wheels, and dropped them when its layers were there."""
        for _ in range(ATTEMPTS):
            try:
                return made.wheels(self._store, layer, [fetcher.path(one) for one in layer.wheels])
            except FileNotFoundError:
                if known := made.recall(self._store, layer):
                    return known
                for one in layer.wheels:
                    fetcher.fetch(one)
        return made.wheels(self._store, layer, [fetcher.path(one) for one in layer.wheels])

    def _fail(self, inputs: str, error: BaseException) -> None:
        with self._lock:
            if not self._layers[inputs].done():
                self._layers[inputs].set_exception(error)

    def _spliced(self, layer: PlannedLayer, future: Future[BuiltLayer], done: Callable[[Wheel], None]) -> None:
        if future.cancelled():
            self._layers[layer.inputs].cancel()
        elif error := future.exception():
            self._fail(layer.inputs, error)
        else:
            self._layers[layer.inputs].set_result(future.result())
            for one in layer.wheels:
                done(one)

    def _compiled_key(self, layer: PlannedLayer, image: PlannedImage) -> str:
        return digest.of_data([layer.inputs, image.os])

    def _compile(self, layer: PlannedLayer, image: PlannedImage) -> BuiltLayer:
        system = self._os[image.os].result()
        key = digest.of_data([layer.inputs, system.python])
        if known := made.recall(self._store, layer, key):
            return known
        below = [self._layers[inputs].result() for inputs in layer.compiled]
        sources = [(one.digest, made.sources_of(self._store, one.planned)) for one in below]
        os_image = self._os_image(image, system)
        work = self._work
        work.view.note(osstage.row(image), f"compiles {layer.component}")

        def write(out: BinaryIO) -> splice.Layer:
            place = wheel.environment(layer.python)
            return bytecode.make(work.engine, work.project, self._store, os_image, self._program, place, sources, out)

        return made.remember(self._store, layer, write, key)

    def _os_image(self, image: PlannedImage, system: OsLayer) -> str:
        """An image of the operating system alone, to run its Python."""
        with self._os_lock:
            if system.digest not in self._os_images:
                layer = next(layer for layer in image.layers if layer.kind == "os")
                self._os_images[system.digest] = load.load_bare(
                    self._work.engine, self._store, system.built(layer), str(self._work.project.root)
                )
            return self._os_images[system.digest]


def engine_bytes(wheels: int) -> int:
    """About how many bytes of disk an engine takes to load so many bytes of wheels."""
    return int(wheels * _LOADED) + build.SPARE


def missing_bytes(store: Store, images: Sequence[PlannedImage]) -> int:
    """About how many bytes the store will grow by: wheels are there twice while their layer is spliced."""
    planned = {layer.inputs: layer for image in images for layer in image.layers if layer.kind == "wheels"}
    wheels = {
        one.sha256: one.size for layer in planned.values() if not made.recall(store, layer) for one in layer.wheels
    }
    return int(sum(wheels.values()) * _WITH_WHEELS)


def find(store: Store, image: PlannedImage) -> Assembled | None:
    """The image as planned, on the operating system that the store has now; None if it was not assembled yet."""
    system = osstage.recall(store, image.os)
    found = store.recall(_image_key(image, system)) if system else None
    return load.read(store, found["digest"], image.layers) if found else None


def _image_key(image: PlannedImage, system: OsLayer) -> str:
    return digest.of_data(["image", image.digest, system.digest, system.base])
