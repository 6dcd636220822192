"""The GPUs of this machine, read with NVML, and their leases to image tests. No NVIDIA driver is a normal state."""

from __future__ import annotations

import os
import threading
import time
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
PATIENCE = 5  # reads of the GPUs until the memory of a finished test must be free again


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
    """Leases this machine's GPUs to image tests, all that are free to one image at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._was_leased = False

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
        if self._lock.locked():
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
    def lease(self, fits: Callable[[Gpu], bool], stopped: Callable[[], bool]) -> Iterator[tuple[Gpu, ...]]:
        """Leases the GPUs with room that `fits` accepts until the block ends; waits while another image has them.

        The GPUs with the most free memory come first, because other programs may use the rest. Yields no GPU if none
        has room, or if `stopped` became true.
        """
        while not self._lock.acquire(timeout=GPU_POLL_S):
            if stopped():
                yield ()
                return
        try:
            free: list[Gpu] = []
            # A test that has just ended may not have freed its memory yet.
            for attempt in range(PATIENCE if self._was_leased else 1):
                if attempt:
                    time.sleep(GPU_POLL_S)
                free = [gpu for gpu in self.read()[1] if fits(gpu) and gpu.has_room]
                if free or stopped():
                    break
            self._was_leased |= bool(free)
            yield tuple(sorted(free, key=lambda gpu: -gpu.free))
        finally:
            self._lock.release()
