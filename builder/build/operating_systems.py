"""The operating systems of one run: taken from the store or a registry, or made with mmdebstrap from locked packages.

Each is made once. `layer` raises the error of one that failed.
"""

from __future__ import annotations

import fcntl
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from builder.build import locked_packages
from builder.build.layer_lookup import LayerLookup
from builder.build.mmdebstrap import Mmdebstrap, read_steps
from builder.build.work import Work
from builder.common import digest, errors
from builder.common.errors import BuildError
from builder.index.host import Host
from builder.layers import known_layers, os_layer
from builder.layers.os_layer import OsLayer
from builder.layers.store import Store
from builder.plan import layer_order
from builder.plan.plan import PlannedImage

LOCK_S = 1.0  # between two attempts to lock an operating system that another builder makes
ROW = "os-"  # begins the name of every operating system in the view


def row(image: PlannedImage) -> str:
    """The name of an image's operating system in the view, and of its log."""
    return f"{ROW}{image.debian}-py{image.cell.python}-{digest.short(image.os)[:6]}"


class SystemLayers:
    """The `os` layers of one run. `jobs` of them are made at the same time.

    More at once would delay the first image: four took 64-96 s each on two processors, one alone 27 s.
    """

    def __init__(self, work: Work, store: Store, lookup: LayerLookup, mmdebstrap: Mmdebstrap, jobs: int) -> None:
        self._work = work
        self._store = store
        self._lookup = lookup
        self._mmdebstrap = mmdebstrap
        self._layers: dict[str, Future[OsLayer]] = {}
        self._pool = ThreadPoolExecutor(jobs, "system")
        self._stopped = threading.Event()

    def missing(self, images: Iterable[PlannedImage]) -> list[PlannedImage]:
        """One image for each operating system that neither the store nor a registry has."""
        return [
            image
            for image in {image.os: image for image in images}.values()
            if not self._lookup.system_in_store(image.os) and not self._lookup.system_in_registry(image.os)
        ]

    def start(self, images: Iterable[PlannedImage]) -> None:
        """Begins to download or make what the store lacks, in the order of the images.

        Reads the files of the checkout now: one that is edited during the build belongs to the next plan.
        """
        for image in {image.os: image for image in images}.values():
            if stored := self._lookup.system_in_store(image.os):
                self._layers[image.os] = Future()
                self._layers[image.os].set_result(stored)
                continue
            try:
                files = self._read_inputs(image)
            except OSError as error:
                self._layers[image.os] = Future()
                self._layers[image.os].set_exception(errors.of_file(error))
                continue
            known = self._lookup.system_in_registry(image.os)
            self._layers[image.os] = self._pool.submit(self._provide, image, files, known)

    def pending(self, image: PlannedImage) -> list[Future[OsLayer]]:
        """The operating system of an image, if it is being made or downloaded."""
        return [self._layers[image.os]] if image.os in self._layers and not self._layers[image.os].done() else []

    def layer(self, inputs: str) -> OsLayer:
        """The operating system with these inputs; waits until it is made. Raises what making it raised."""
        return self._layers[inputs].result()

    def first_ready(self, preferred: str, others: Iterable[str]) -> OsLayer:
        """The first operating system that is ready, by their inputs; those that the store has are.

        Raises what making the preferred one raised if none is made.
        """
        inputs = [preferred, *sorted({*others} - {preferred})]
        if stored := next(filter(None, map(self._lookup.system_in_store, inputs)), None):
            return stored
        started = [self._layers[each] for each in inputs if each in self._layers]
        ready = next((future for future in as_completed(started) if not future.exception()), self._layers[preferred])
        return ready.result()

    def close(self, *, wait: bool) -> None:
        """With `wait`, returns when those that are being made are finished; else stops them."""
        self._pool.shutdown(wait=wait, cancel_futures=True)
        if not wait:
            self._stopped.set()
            self._mmdebstrap.stop()

    def _read_inputs(self, image: PlannedImage) -> dict[str, bytes]:
        """The files that mmdebstrap.sh reads."""
        root = self._work.project.root
        files = {**read_steps(root), "packages.json": (root / image.system.path).read_bytes()}
        if image.uv:  # the locked one: the builder itself was installed with it
            files["uv"] = (Path(sys.executable).parent / "uv").read_bytes()
        return files

    def _provide(self, image: PlannedImage, files: dict[str, bytes], known: OsLayer | None) -> OsLayer:
        """Downloads the operating system that a registry has; otherwise, or if that fails, makes it.

        Waits while another builder that shares the store makes it.
        """
        view, name = self._work.view, row(image)
        if known:
            view.begin(name, "downloading")
            if self._lookup.download_system(name, image.os, known):
                view.end(name, "done", f"layer {digest.short(known.digest)}, from the registry")
                return known
        path = self._store.downloads / f"{image.os.removeprefix('sha256:')}.lock"
        is_waiting = False
        with path.open("a") as file:
            while True:
                if self._stopped.is_set():
                    raise BuildError(f"{name}: stopped")
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not is_waiting:
                        view.begin(name, "waiting for another builder")
                    is_waiting = True
                    time.sleep(LOCK_S)
            system = self._lookup.system_in_store(image.os)
            by_another = ", made by another builder" if system else ""
            system = system or self._make(image, files)
            path.unlink(missing_ok=True)
        view.end(name, "done", f"layer {digest.short(system.digest)}{by_another}")
        return system

    def _make(self, image: PlannedImage, files: dict[str, bytes]) -> OsLayer:
        """Makes an operating system and records it. Raises BuildError if it is not the known one."""
        work, name = self._work, row(image)
        known = self._lookup.known.system(image.os)
        arguments = [image.debian, str(layer_order.MTIME), image.interpreter, *([image.uv] if image.uv else [])]

        def attempt(host: Host) -> OsLayer:
            work.view.begin(name, "building")
            with work.project.scratch() as scratch:
                tar = self._mmdebstrap.run(host, name, arguments, files, Path(scratch))
                work.view.note(name, "compressing")
                with self._store.new_blob() as blob:
                    layer = os_layer.write_system(tar, blob.file)
                    if known:
                        known_layers.check_system(image.os, known, layer)
                    blob.digest = layer.digest
                return layer

        layer = locked_packages.with_snapshot_fallback(work, image, attempt)
        self._store.put_record(image.os, asdict(layer))
        return layer
