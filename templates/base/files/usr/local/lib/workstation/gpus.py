"""The GPUs that this container may use, told in a line each, by NVML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .refusal import UNAVAILABLE, Refusal


@dataclass(frozen=True)
class Gpu:
    """`memory` in bytes, 0 where NVML does not tell; `cuda` is the newest that the driver runs."""

    name: str
    uuid: str
    memory: int

    def line(self, driver: str, cuda: str) -> str:
        memory = f", {self.memory / 2**30:.0f} GiB" if self.memory else ""
        return f"{self.name}{memory}, driver {driver}, CUDA up to {cuda}"


@dataclass(frozen=True)
class Found:
    """`trouble` is NVML's reason if a driver is there that does not answer."""

    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""


def read() -> Found:
    """What NVML tells. No driver is a normal state."""
    try:
        import pynvml  # noqa: PLC0415  40 ms, which images without CUDA need not pay
    except ImportError as error:  # somebody's derived image without it; what it is for must start all the same
        return Found(trouble=str(error))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return Found()
    except pynvml.NVMLError as error:
        return Found(trouble=str(error))
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Found(
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            cuda=f"{version // 1000}.{version % 1000 // 10}",
            gpus=tuple(
                Gpu(_text(pynvml.nvmlDeviceGetName(one)), _text(pynvml.nvmlDeviceGetUUID(one)), _memory(pynvml, one))
                for one in handles
            ),
        )
    except pynvml.NVMLError as error:
        return Found(trouble=str(error))
    finally:
        pynvml.nvmlShutdown()


def visible(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; the first entry that names none ends the list.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return gpus
    result: list[Gpu] = []
    for entry in (part.strip() for part in environ["CUDA_VISIBLE_DEVICES"].split(",")):
        if entry.isascii() and entry.isdecimal() and int(entry) < len(gpus):
            found = gpus[int(entry)]
        elif entry.startswith("MIG-") and gpus:  # a slice, which NVML lists below its GPU
            found = Gpu(f"a slice of {gpus[0].name if len(gpus) == 1 else 'a GPU'}", entry, 0)
        else:
            named = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
            if len(named) != 1:
                break
            found = named[0]
        if found in result:
            return ()  # CUDA shows none if one is named twice
        result.append(found)
    return tuple(result)


def tell(found: Found, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Lines and warnings for people. Raises Refusal if GPU_REQUIRED=1 and no GPU can be used."""
    if "NVIDIA_VISIBLE_DEVICES" not in environ:  # an image without CUDA
        if environ.get("GPU_REQUIRED") == "1":
            raise Refusal("GPU_REQUIRED=1, but this image is for the CPU alone", UNAVAILABLE)
        return ["no GPU: this image is for the CPU"], []
    usable = visible(found.gpus, environ)
    needed = needed_driver(environ)
    trouble = ""
    if not usable:
        trouble = _why_none(found, environ)
    elif needed and _numbers(found.driver) < _numbers(needed):
        trouble = (
            f"driver {found.driver} is too old for the CUDA of this image, which needs {needed} or newer: "
            "update the driver of the machine, or take an image with an older CUDA"
        )
    if trouble and environ.get("GPU_REQUIRED") == "1":
        raise Refusal(f"GPU_REQUIRED=1, but {trouble}", UNAVAILABLE)
    lines = [f"GPU {index}: {gpu.line(found.driver, found.cuda)}" for index, gpu in enumerate(usable)]
    if len(usable) < len(found.gpus) and usable:
        lines.append(f"CUDA_VISIBLE_DEVICES hides {len(found.gpus) - len(usable)} more")
    return lines, [trouble] if trouble else []


def needed_driver(environ: Mapping[str, str]) -> str:
    """The driver that the image's CUDA needs, as it tells NVIDIA's container toolkit."""
    found = re.search(r"driver>=([0-9.]+)", environ.get("NVIDIA_REQUIRE_CUDA", ""))
    return found[1] if found else ""


def _why_none(found: Found, environ: Mapping[str, str]) -> str:
    if found.trouble:
        return f"no GPU: CPU only. The NVIDIA driver does not answer: {found.trouble}"
    if found.gpus:
        hiding = f"CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES')!r}"
        return f"no GPU: CPU only. {hiding} hides all {len(found.gpus)}"
    if found.driver:
        return f"no GPU: CPU only. The driver {found.driver} sees none"
    return "no GPU: CPU only. If the machine has one: `docker run --gpus all` (with NVIDIA's container toolkit)"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version))


def _memory(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
