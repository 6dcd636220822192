"""GPUs and driver, from NVML. Needs only the driver's own library and any Python."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, replace
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Gpu:
    """A GPU. `index` is by PCI address; `memory` and `free` are in bytes, 0 if unknown."""

    index: int
    name: str
    uuid: str
    capability: str
    memory: int
    free: int
    mig: bool = False


@dataclass(frozen=True)
class System:
    """The driver and its GPUs. `cuda` is the newest CUDA that it supports; `error` is the reason for no visible GPU."""

    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    visible: tuple[Gpu, ...] = ()
    error: str = ""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read(selected: str | None = None) -> System:
    """Reads NVML. `selected` is CUDA_VISIBLE_DEVICES, by default that of this process."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return System(error=f"{LIBRARY} cannot be loaded: there is no NVIDIA driver")
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    if code := nvml.nvmlInit_v2():
        return System(error=f"NVML: {nvml.nvmlErrorString(code).decode()}")
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        gpus = tuple(_gpu(nvml, index) for index in range(count.value))
        cuda = ctypes.c_int()
        has_cuda = nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)) == 0
        system = System(
            driver=_text(nvml.nvmlSystemGetDriverVersion),
            cuda=f"{cuda.value // 1000}.{cuda.value % 1000 // 10}" if has_cuda else "",
            gpus=gpus,
            error="" if gpus else "NVML: the driver has no GPU",
        )
    finally:
        nvml.nvmlShutdown()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") if selected is None else selected
    remaining = visible(gpus, devices)
    if gpus and not remaining:
        return replace(system, error=f"CUDA_VISIBLE_DEVICES={devices} hides every GPU")
    return replace(system, visible=remaining)


def visible(gpus: tuple[Gpu, ...], selected: str | None) -> tuple[Gpu, ...]:
    """The GPUs in CUDA_VISIBLE_DEVICES; CUDA ignores everything after the first invalid entry."""
    if selected is None:
        return gpus
    chosen: list[Gpu] = []
    for word in selected.split(","):
        text = word.strip()
        match = [gpu for gpu in gpus if str(gpu.index) == text or (text[:4] == "GPU-" and gpu.uuid.startswith(text))]
        if text.startswith("MIG-"):  # a slice, which NVML lists below its GPU
            match = [gpu for gpu in gpus if gpu.mig and gpu not in chosen][:1]
        if len(match) != 1:
            break
        chosen += match
    return tuple(chosen)


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = ctypes.c_void_p()
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
    capability = ""
    if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0:
        capability = f"{major.value}.{minor.value}"
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        memory = _Memory()
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    mig_mode = getattr(nvml, "nvmlDeviceGetMigMode", None)  # since driver 450
    mig = mig_mode is not None and mig_mode(handle, ctypes.byref(current), ctypes.byref(pending)) == 0
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName, handle),
        uuid=_text(nvml.nvmlDeviceGetUUID, handle),
        capability=capability,
        memory=memory.total,
        free=memory.free,
        mig=mig and current.value == 1,
    )


def _text(function: Any, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(96)
    return "" if function(*arguments, buffer, ctypes.c_uint(96)) else buffer.value.decode()
