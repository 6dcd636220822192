"""The GPUs that this container can use, one line for each, read with NVML."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from .refusal import BUSY, UNAVAILABLE, Refusal

# Memory in use shows processes of other containers, which NVML does not list (FAQ of NVIDIA's container toolkit: "not
# compatible with the PID namespace"). The driver itself takes some megabytes, a desktop some hundred.
BUSY_BYTES = 500 * 10**6
POLL_S, REPORT_S = 5, 60


@dataclass(frozen=True)
class Gpu:
    """A GPU. `memory` and `used` are in bytes, `processes` are those that compute on it; 0 if unknown."""

    name: str
    uuid: str
    memory: int
    used: int = 0
    processes: int = 0

    def line(self, driver: str, cuda: str) -> str:
        """The line in the log; `cuda` is the newest CUDA that the driver supports."""
        memory = f", {self.memory / 2**30:.0f} GiB" if self.memory else ""
        return f"{self.name}{memory}, driver {driver}, CUDA up to {cuda}"


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver and its GPUs. `cuda` is the newest CUDA that it supports, `error` the error of NVML.

    Without a driver, all fields are empty.
    """

    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


class _NvmlError(Exception):
    """A function of NVML failed; the text is NVML's own."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t; sizes in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _MemoryV2(ctypes.Structure):
    """nvmlMemory_v2_t; sizes in bytes."""

    _fields_ = (
        ("version", ctypes.c_uint), ("total", ctypes.c_ulonglong), ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong),
    )  # fmt: skip


def read(library: str = "libnvidia-ml.so.1") -> Driver:
    """The driver and its GPUs, from NVML. A missing driver is no error.

    Not with pynvml: this may run as root, and users can replace every package. Source: "NVML API Reference Guide".
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return Driver()
    try:
        _call(nvml, "nvmlInit_v2")
    except _NvmlError as error:
        return Driver(error=str(error))
    try:
        count, cuda = ctypes.c_uint(), ctypes.c_int()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        _call(nvml, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(cuda))
        return Driver(
            version=_text(nvml, "nvmlSystemGetDriverVersion"),
            cuda=f"{cuda.value // 1000}.{cuda.value % 1000 // 10}",
            gpus=tuple(_gpu(nvml, index) for index in range(count.value)),
        )
    except _NvmlError as error:
        return Driver(error=str(error))
    finally:
        nvml.nvmlShutdown()  # the launcher runs as long as its services, and would stay a client of each GPU


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    handle, memory = ctypes.c_void_p(), _Memory()
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    with suppress(_NvmlError):  # GPUs that share the memory of the machine have none of their own
        _call(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    name, uuid = _text(nvml, "nvmlDeviceGetName", handle), _text(nvml, "nvmlDeviceGetUUID", handle)
    mig, processes = ctypes.c_uint(), ctypes.c_uint()
    with suppress(_NvmlError):  # of a GPU without MIG
        _call(nvml, "nvmlDeviceGetMigMode", handle, ctypes.byref(mig), ctypes.byref(ctypes.c_uint()))
    if mig.value:  # NVML adds up all slices, also those of others
        return Gpu(name, uuid, memory.total)
    with suppress(_NvmlError):  # if there are processes: "Insufficient Size", because the list has no place for them
        _call(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(processes), None)
    # nvmlMemory_t counts what the driver reserves as used: some hundred MB of a large GPU. So may `used` here: NVML's
    # documents of different years disagree.
    exact = _MemoryV2(version=ctypes.sizeof(_MemoryV2) | 2 << 24)
    with suppress(_NvmlError):  # of drivers before 510, whose nvmlMemory_t is without what is reserved
        _call(nvml, "nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(exact))
    used = exact.total - exact.reserved - exact.free if exact.total else memory.used
    return Gpu(name, uuid, memory.total, used, processes.value)


def _text(nvml: ctypes.CDLL, function: str, *arguments: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(96)  # NVML_DEVICE_UUID_V2_BUFFER_SIZE and ..._NAME_V2_BUFFER_SIZE
    _call(nvml, function, *arguments, text, ctypes.c_uint(len(text)))
    return text.value.decode("utf-8", "replace")


def _call(nvml: ctypes.CDLL, function: str, *arguments: Any) -> None:
    """Calls a function of NVML. Raises _NvmlError."""
    try:
        status = getattr(nvml, function)(*arguments)
    except AttributeError as error:  # of an older driver
        raise _NvmlError(f"the driver has no {function}") from error
    if status:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        raise _NvmlError(nvml.nvmlErrorString(status).decode())


def visible(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs in CUDA_VISIBLE_DEVICES, in its order. As in CUDA, the first invalid entry ends the list.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return gpus
    result: list[Gpu] = []
    for entry in (part.strip() for part in environ["CUDA_VISIBLE_DEVICES"].split(",")):
        if entry.isascii() and entry.isdecimal() and int(entry) < len(gpus):
            gpu = gpus[int(entry)]
        elif entry.startswith("MIG-") and gpus:  # a slice, which NVML lists below its GPU
            gpu = Gpu(f"a slice of {gpus[0].name if len(gpus) == 1 else 'a GPU'}", entry, 0)
        else:
            matches = [candidate for candidate in gpus if entry.startswith("GPU-") and candidate.uuid.startswith(entry)]
            if len(matches) != 1:
                break
            gpu = matches[0]
        if gpu in result:
            return ()  # CUDA shows no GPU if the list has a duplicate
        result.append(gpu)
    return tuple(result)


def describe(driver: Driver, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Lines and warnings for the log. Raises Refusal if GPU_REQUIRED=1 and there is no usable GPU."""
    if "NVIDIA_VISIBLE_DEVICES" not in environ:  # an image without CUDA
        if environ.get("GPU_REQUIRED") == "1":
            raise Refusal("GPU_REQUIRED=1, but this image is for CPUs only: use a CUDA image", UNAVAILABLE)
        return ["no GPU: this image is for CPUs only"], []
    usable = visible(driver.gpus, environ)
    minimum = minimum_driver(environ)
    warning = ""
    if not usable:
        warning = _no_gpu_warning(driver, environ)
    elif minimum and _numbers(driver.version) < _numbers(minimum):
        warning = (
            f"driver {driver.version} is too old for the CUDA of this image, which needs {minimum} or newer: "
            "update the driver on the host, use an image with an older CUDA, or, with a data-center GPU, add NVIDIA's "
            "package cuda-compat to the image"
        )
    if warning and environ.get("GPU_REQUIRED") == "1":
        raise Refusal(f"GPU_REQUIRED=1, but {warning}", UNAVAILABLE)
    lines = [f"GPU {index}: {gpu.line(driver.version, driver.cuda)}" for index, gpu in enumerate(usable)]
    if len(usable) < len(driver.gpus) and usable:
        lines.append(f"CUDA_VISIBLE_DEVICES hides {len(driver.gpus) - len(usable)} more")
    return lines, [warning] if warning else []


def busy(driver: Driver, environ: Mapping[str, str]) -> list[str]:
    """The visible GPUs that others use, as text; also an error of NVML, without which nobody knows."""
    if driver.error:
        return [f"GPUs that are unknown, since NVML failed: {driver.error}"]
    return [
        f"GPU {index} ({gpu.name}): {gpu.used // 10**6} MB used, {gpu.processes or 'no'} visible process"
        + ("" if gpu.processes == 1 else "es")
        for index, gpu in enumerate(visible(driver.gpus, environ))
        if gpu.processes or gpu.used > BUSY_BYTES
    ]


def wait_until_free(
    driver: Driver,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    read: Callable[[], Driver] = read,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """With GPU_BUSY=wait, returns when no visible GPU is in use. Raises Refusal if one is and GPU_BUSY=refuse."""
    for waited in count(0, POLL_S):
        lines = busy(driver, environ) if environ.get("GPU_BUSY") in ("refuse", "wait") else []
        if not lines:
            return
        if environ["GPU_BUSY"] == "refuse":
            text = "\n".join(["GPU_BUSY=refuse, and others use or may use a GPU of this container", *lines])
            raise Refusal(f"{text}\nStart it later, on other GPUs (--gpus device=N), or with GPU_BUSY=wait", BUSY)
        if waited % REPORT_S == 0:
            say(f"GPU_BUSY=wait: waiting for {', '.join(lines)}")
        sleep(POLL_S)
        driver = read()


def minimum_driver(environ: Mapping[str, str]) -> str:
    """The oldest driver for the image's CUDA, from the variable that NVIDIA's container toolkit reads too."""
    match = re.search(r"driver>=([0-9.]+)", environ.get("NVIDIA_REQUIRE_CUDA", ""))
    return match[1] if match else ""


def _no_gpu_warning(driver: Driver, environ: Mapping[str, str]) -> str:
    if driver.error:
        return f"no GPU: CPU only. NVML failed: {driver.error}"
    if driver.gpus:
        variable = f"CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES')!r}"
        return f"no GPU: CPU only. {variable} hides all GPUs ({len(driver.gpus)})"
    if driver.version:
        return f"no GPU: CPU only. Driver {driver.version} has no GPU"
    return (
        "no GPU: CPU only. For GPUs: `docker run --gpus all`, or `--device nvidia.com/gpu=all` (CDI); in Kubernetes, "
        "set the limit nvidia.com/gpu"
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version))
