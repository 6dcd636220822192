"""GPUs of this machine, by NVML, and who tests on which. No NVIDIA driver is a normal state, not an error."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from builder.runson import Device

# What is done about GPU tests: they must run, they run where they can, they do not run.
Mode = Literal["require", "auto", "off"]
REQUIRE: Mode = "require"
AUTO: Mode = "auto"
OFF: Mode = "off"
MODES: tuple[Mode, ...] = (REQUIRE, AUTO, OFF)

# Bytes that must be free for a GPU to be tested on: the largest check takes 1 GiB, libraries and contexts as much, and
# what is taken by somebody may grow.
NEEDED = 8 * 10**9
POLL_S = 1.0
PATIENCE = 5  # polls until the memory of a test that has ended must be back


@dataclass(frozen=True, kw_only=True)
class Gpu(Device):
    """`memory` in bytes, 0 where the GPU has none of its own or does not tell; `free` likewise.

    `index` is NVML's, in the order of PCI addresses; `uuid` names the GPU to the engine.
    """

    memory: int
    free: int = 0
    index: int = 0
    uuid: str = ""

    @property
    def has_room(self) -> bool:
        """Whether it can be tested on now. Where nobody knows its memory it is tried."""
        return not self.memory or self.free >= NEEDED


def read() -> tuple[str, tuple[Gpu, ...]]:
    """Driver version and GPUs; an empty version where no driver is."""
    import pynvml  # noqa: PLC0415  0.05 s, which every command would pay

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", ()
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # one that fell off the bus; the others are of use
                gpus.append(_gpu(pynvml, index))
        return _text(pynvml.nvmlSystemGetDriverVersion()), tuple(gpus)
    finally:
        pynvml.nvmlShutdown()


def allowed(gpus: tuple[Gpu, ...], chosen: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES names by index or the beginning of a UUID; all if it is not set."""
    if chosen is None:
        return gpus
    words = [word.strip() for word in chosen.split(",")]
    named = [word for word in words if word.startswith("GPU-")]
    return tuple(one for one in gpus if str(one.index) in words or any(one.uuid.startswith(word) for word in named))


class Pool:
    """Lends this machine's GPUs to image tests, each GPU to one image at a time. For many threads.

    `images` are tested at once at most: each gets its share of the GPUs, so that on four GPUs two images run with two
    each, and one alone with four. So images spread over the GPUs, and collectives run over several where there are.
    """

    def __init__(
        self, images: int = 1, *, ask: Callable[[], tuple[str, tuple[Gpu, ...]]] | None = None, poll: float = POLL_S
    ) -> None:
        self._images = max(images, 1)
        self._ask = ask
        self._poll = poll
        self._lent: set[int] = set()
        self._was_lent = False
        self._change = threading.Condition()

    def read(self) -> tuple[str, tuple[Gpu, ...]]:
        """As the module's `read`, at this moment, but for GPUs that CUDA_VISIBLE_DEVICES leaves to others."""
        driver, gpus = (self._ask or read)()
        return driver, allowed(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def why_not(self) -> str:
        """Why nobody could test on a GPU now, or once others of this run are done; empty if somebody could."""
        with self._change:
            return "" if self._lent else _why_none(*self.read())

    @contextmanager
    def lease(
        self, fits: Callable[[Gpu], bool] = lambda _: True, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Gpu, ...]]:
        """GPUs with room that fit, for one image, given back at the end; waits while all such are lent.

        Empty if no GPU has room and none is lent, or if `stopped` became true.
        """
        taken = self._take(fits, stopped)
        try:
            yield taken
        finally:
            with self._change:
                self._lent -= {one.index for one in taken}
                self._change.notify_all()

    def _take(self, fits: Callable[[Gpu], bool], stopped: Callable[[], bool]) -> tuple[Gpu, ...]:
        patience = PATIENCE
        with self._change:
            while not stopped():
                gpus = [one for one in self.read()[1] if fits(one)]
                free = [one for one in gpus if one.index not in self._lent and one.has_room]
                if free:
                    share = max(len(gpus) // self._images, 1)
                    # The emptiest first: what others use stays theirs.
                    taken = tuple(sorted(free, key=lambda one: -one.free)[:share])
                    self._lent |= {one.index for one in taken}
                    self._was_lent = True
                    return taken
                if not self._lent:
                    if not (self._was_lent and patience):
                        break
                    patience -= 1
                self._change.wait(self._poll)
        return ()


def _why_none(driver: str, gpus: tuple[Gpu, ...]) -> str:
    if not driver:
        return "no NVIDIA driver answers on this machine"
    if not gpus:
        return f"driver {driver} has no GPU"
    if any(one.has_room for one in gpus):
        return ""
    told = ", ".join(f"{one.name} has {one.free / 1e9:.1f} GB free" for one in gpus)
    return f"no GPU has {NEEDED / 1e9:.0f} GB free: {told}"


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory, free = _memory(nvml, handle)
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=_capability(nvml, handle),
        memory=memory,
        free=free,
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
    )


def _capability(nvml: Any, handle: Any) -> str:
    """Empty from a driver too old to be asked (before 384)."""
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError:
        return ""
    return f"{major}.{minor}"


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """All and free. NVML refuses to tell for GPUs that share the memory of the CPU."""
    try:
        told = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return 0, 0
    return int(told.total), int(told.free)


def _text(value: str | bytes) -> str:
    """NVML's Python binding gave bytes in some releases."""
    return value.decode() if isinstance(value, bytes) else value
