"""Downloads wheels, several at a time, and makes each layer of wheels as soon as its last wheel is there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

from builder.build.layer_lookup import LayerLookup
from builder.build.work import Work
from builder.common.console import Meter
from builder.index.download import CONNECTIONS, Fetcher
from builder.layers import stored_layers
from builder.layers.oci import Layer
from builder.layers.store import Store
from builder.plan.layer_order import PlannedLayer

ATTEMPTS = 4  # at splicing wheels that another builder removes
_WAITING = 64  # layers that wait for their wheels at once, each in a thread


class WheelLayers:
    """The layers of wheels of one run, each made once. A failure is raised to whoever waits for that layer."""

    def __init__(self, work: Work, store: Store, lookup: LayerLookup, jobs: int) -> None:
        self._work = work
        self._store = store
        self._lookup = lookup
        self._stored: dict[str, Layer] = {}
        self._layers: dict[str, Future[Layer]] = {}
        self._fetched: dict[str, Future[Path]] = {}
        self._uses: Counter[str] = Counter()
        self._fetcher: Fetcher | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        # A splice keeps two processors busy and takes up to 150 MB.
        self._splices = threading.Semaphore(max(1, jobs // 2))
        self._fetching = ThreadPoolExecutor(CONNECTIONS, "fetch")
        self._making = ThreadPoolExecutor(_WAITING, "wheels")

    def start(self, layers: Iterable[PlannedLayer]) -> None:
        """Begins to make the layers that the store lacks, the largest wheels first."""
        missing = []
        for layer in {layer.inputs: layer for layer in layers}.values():
            if built := self._lookup.in_store(layer):
                self._stored[layer.inputs] = built
            else:
                missing.append(layer)
        if not missing:
            return
        self._uses = Counter(wheel.sha256 for layer in missing for wheel in layer.wheels)
        wheels = {wheel.sha256: wheel for layer in missing for wheel in layer.wheels}.values()
        view, index = self._work.view, self._work.host.index
        meter = Meter(view, "wheels", "fetched", sum(wheel.size for wheel in wheels))
        fetcher = Fetcher(index, self._store.downloads, progress=meter.add, warn=view.say_once)
        self._fetcher = fetcher
        for wheel in sorted(wheels, key=lambda wheel: -wheel.size):
            self._fetched[wheel.sha256] = self._fetching.submit(fetcher.fetch, wheel)
        for layer in sorted(missing, key=lambda layer: -min(wheel.size for wheel in layer.wheels)):  # as they are ready
            self._layers[layer.inputs] = self._making.submit(self._make, fetcher, layer)

    def pending(self, layers: Iterable[PlannedLayer]) -> list[Future[Layer]]:
        """Those of the layers that must be made, finished or not."""
        return [self._layers[layer.inputs] for layer in layers if layer.inputs in self._layers]

    def layer(self, inputs: str) -> Layer:
        """The layer with these inputs; waits until it is made. Raises what making it raised."""
        return self._stored[inputs] if inputs in self._stored else self._layers[inputs].result()

    def close(self, *, wait: bool) -> None:
        """Stops downloads; with `wait`, returns when layers that are being written are finished."""
        self._stopped.set()
        if self._fetcher:
            self._fetcher.stop()
        for pool in (self._fetching, self._making):
            pool.shutdown(wait=wait, cancel_futures=True)

    def _make(self, fetcher: Fetcher, layer: PlannedLayer) -> Layer:
        for wheel in layer.wheels:
            self._fetched[wheel.sha256].result()
        with self._splices:
            if self._stopped.is_set():
                raise CancelledError
            built = self._splice(fetcher, layer)
        for wheel in layer.wheels:
            with self._lock:
                self._uses[wheel.sha256] -= 1
                is_last = not self._uses[wheel.sha256]
            if is_last:
                fetcher.drop(wheel)
        return built

    def _splice(self, fetcher: Fetcher, layer: PlannedLayer) -> Layer:
        """Another builder that shares the store may make the layer first, and then removes the wheels."""
        attempts = ATTEMPTS
        while True:
            try:
                paths = [fetcher.path(wheel) for wheel in layer.wheels]
                return stored_layers.store_wheels(self._store, layer, paths, self._lookup.known.get(layer))
            except FileNotFoundError:
                if built := self._lookup.in_store(layer):
                    return built
                attempts -= 1
                if not attempts:
                    raise
            for wheel in layer.wheels:
                fetcher.fetch(wheel)
