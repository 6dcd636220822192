"""GPUs of this machine, by NVML. No NVIDIA driver is a normal state, not an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from builder.runson import Device


@dataclass(frozen=True, kw_only=True)
class Gpu(Device):
    """`memory` in bytes, 0 where the GPU has none of its own or does not tell."""

    memory: int


def read() -> tuple[str, tuple[Gpu, ...]]:
    """Driver version and GPUs; an empty version where no driver is."""
    import pynvml  # noqa: PLC0415  0.05 s, which every command would pay

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(
            Gpu(
                name=_text(pynvml.nvmlDeviceGetName(handle)),
                capability=_capability(pynvml, handle),
                memory=_memory(pynvml, handle),
            )
            for handle in handles
        )
        return _text(pynvml.nvmlSystemGetDriverVersion()), gpus
    finally:
        pynvml.nvmlShutdown()


def count() -> int:
    return len(read()[1])


def _capability(nvml: Any, handle: Any) -> str:
    """Empty from a driver too old to be asked (before 384)."""
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError:
        return ""
    return f"{major}.{minor}"


def _memory(nvml: Any, handle: Any) -> int:
    """NVML refuses to tell for GPUs that share the memory of the CPU."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return 0


def _text(value: str | bytes) -> str:
    """NVML's Python binding gave bytes in some releases."""
    return value.decode() if isinstance(value, bytes) else value
