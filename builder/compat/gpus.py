"""The GPUs of this machine, read with NVML, and their leases to image tests. No NVIDIA driver is a normal state."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from builder.compat.gpu_support import Device

# GPU tests must run, run if they can, do not run.
Mode = Literal["require", "auto", "off"]
REQUIRE: Mode = "require"
AUTO: Mode = "auto"
OFF: Mode = "off"
MODES: tuple[Mode, ...] = (REQUIRE, AUTO, OFF)

# Bytes that must be free on a GPU for tests: the largest check takes 1 GiB, libraries and contexts as much, and what
# other programs use may grow.
NEEDED = 8 * 10**9
GPU_POLL_S = 1.0
PATIENCE = 5  # polls until the memory of a finished test must be free again


@dataclass(frozen=True, kw_only=True)
class Gpu(Device):
    """A GPU of this machine. `memory` and `free` in bytes, 0 if unknown (or if the GPU has no memory of its own).

    `index` is NVML's, in the order of PCI addresses; `uuid` names the GPU to the engine.
    """

    memory: int
    free: int = 0
    index: int = 0
    uuid: str = ""

    @property
    def has_room(self) -> bool:
        """True if tests can run on it now, or if its memory is unknown."""
        return not self.memory or self.free >= NEEDED


def read_gpus() -> tuple[str, tuple[Gpu, ...]]:
    """Driver version and GPUs; an empty version without a driver."""
    import pynvml  # noqa: PLC0415  0.05 s, which every command would pay

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", ()
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):  # a GPU that fell off the bus; the remaining GPUs are usable
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                capability, memory, free = "", 0, 0
                with suppress(pynvml.NVMLError):  # a driver before 384 has no such function
                    capability = "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle))
                with suppress(pynvml.NVMLError):  # not supported on GPUs that share the memory of the CPU
                    info = pynvml.nvmlDeviceGetMemoryInfo(handle)
                    memory, free = int(info.total), int(info.free)
                gpu = Gpu(
                    name=pynvml.nvmlDeviceGetName(handle),
                    capability=capability,
                    memory=memory,
                    free=free,
                    index=index,
                    uuid=pynvml.nvmlDeviceGetUUID(handle),
                )
                gpus.append(gpu)
        return pynvml.nvmlSystemGetDriverVersion(), tuple(gpus)
    finally:
        pynvml.nvmlShutdown()


class Pool:
    """Leases this machine's GPUs to image tests, each GPU to one image at a time. Thread-safe.

    `images` is the number of images that are tested at once: each gets its share of the GPUs, and at least two where
    there are two, so that collectives run over several GPUs. On four GPUs, one image gets four, and two get two each;
    three take turns.
    """

    def __init__(self, images: int = 1) -> None:
        self._images = max(images, 1)
        self._leased: set[int] = set()
        self._was_leased = False
        self._change = threading.Condition()

    def read(self) -> tuple[str, tuple[Gpu, ...]]:
        """Driver version at this moment, and the GPUs that CUDA_VISIBLE_DEVICES names; all if it is not set."""
        driver, gpus = read_gpus()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # indices, or the starts of UUIDs
        if visible is not None:
            words = [word.strip() for word in visible.split(",")]
            uuids = tuple(word for word in words if word.startswith("GPU-"))
            gpus = tuple(gpu for gpu in gpus if str(gpu.index) in words or gpu.uuid.startswith(uuids))
        return driver, gpus

    def why_not(self) -> str:
        """The reason that no test can run on a GPU, now or after the other tests of this run, or an empty string."""
        with self._change:
            if self._leased:
                return ""
            driver, gpus = self.read()
        if not driver:
            return "no NVIDIA driver on this machine"
        if not gpus:
            return f"driver {driver} has no GPU"
        if any(gpu.has_room for gpu in gpus):
            return ""
        free = ", ".join(f"{gpu.name} has {gpu.free / 1e9:.1f} GB free" for gpu in gpus)
        return f"no GPU has {NEEDED / 1e9:.0f} GB free: {free}"

    @contextmanager
    def lease(
        self, fits: Callable[[Gpu], bool] = lambda _: True, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Gpu, ...]]:
        """Leases GPUs with room, those that `fits` accepts, until the block ends; waits while all of them are leased.

        Yields no GPU if none has room and none is leased, or if `stopped` became true.
        """
        patience = PATIENCE
        taken: tuple[Gpu, ...] = ()
        with self._change:
            while not stopped():
                gpus = [gpu for gpu in self.read()[1] if fits(gpu)]
                free = [gpu for gpu in gpus if gpu.index not in self._leased and gpu.has_room]
                share = max(len(gpus) // self._images, min(len(gpus), 2))
                if len(free) >= share or (free and not self._leased):
                    # Most free memory first: other programs keep the GPUs that they use.
                    taken = tuple(sorted(free, key=lambda gpu: -gpu.free)[:share])
                    self._leased |= {gpu.index for gpu in taken}
                    self._was_leased = True
                    break
                if not self._leased:
                    # A test that has just ended may not have freed its memory yet.
                    if not (self._was_leased and patience):
                        break
                    patience -= 1
                self._change.wait(GPU_POLL_S)
        try:
            yield taken
        finally:
            with self._change:
                self._leased -= {gpu.index for gpu in taken}
                self._change.notify_all()
