"""Takes one kind of measure of one framework; prints a JSON line for each.

    python -m benchmarks.inside.child '{"framework": "jax", "kind": "import", "gpu": false, "size": 2048}'

Runs in the images, on Python 3.9 and newer.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.inside import shared
from benchmarks.inside.shared import emit

FIRST_SIZE = 512
PRODUCTS = 7
EPOCHS = 3
# By whether there is a GPU: timed blocks and the steps of each. The steps of one block, and at least `shared.CHECKED`,
# precede them untimed.
BLOCKS = {True: (10, 20), False: (5, 2)}


def main() -> None:
    request = json.loads(sys.argv[1])
    KINDS[request["kind"]](importlib.import_module(f"benchmarks.inside.on_{request['framework']}"), request)


def importing(module: Any, request: dict[str, Any]) -> None:
    """Import, then a first operation; host memory and GPU memory after each."""
    before = gpu_memory(request)
    began = time.perf_counter()
    importlib.import_module(module.MODULE)
    emit(measure="import", value=time.perf_counter() - began)
    emit(measure="memory_import", value=process_bytes("VmRSS"))
    emit_gpu_memory("gpu_import", request, before)
    began = time.perf_counter()
    framework = module.Framework(request["gpu"])
    framework.product(FIRST_SIZE, "float32")()
    emit(measure="first", value=time.perf_counter() - began)
    emit(measure="memory_first", value=process_bytes("VmRSS"))
    emit(measure="memory_peak", value=process_bytes("VmHWM"))
    emit_gpu_memory("gpu_first", request, before)
    emit(version=framework.version)


def frugal(module: Any, request: dict[str, Any]) -> None:
    """GPU memory after a first operation, where the environment disables preallocation."""
    before = gpu_memory(request)
    module.Framework(request["gpu"]).product(FIRST_SIZE, "float32")()
    emit_gpu_memory("gpu_frugal", request, before)


def products(module: Any, request: dict[str, Any]) -> None:
    """Square matrix products, in GFLOP/s."""
    framework, size = module.Framework(request["gpu"]), request["size"]
    for precision in precisions(request):
        product = framework.product(size, precision)
        product()
        product()
        gflops = 2 * size**3 / shared.median_s(product, PRODUCTS) / 1e9
        emit(measure=f"product_{precision}", value=gflops, size=size)


def training(module: Any, request: dict[str, Any]) -> None:
    framework = module.Framework(request["gpu"])
    for precision in precisions(request):
        first, step = train(framework, request, precision)
        emit(measure=f"train_{precision}", way=module.USUAL, **step)
        if precision == "float32":
            emit(measure="train_first", value=first, way=module.USUAL)


def compiled(module: Any, request: dict[str, Any]) -> None:
    framework = module.Framework(request["gpu"])
    if reason := framework.no_compiler():
        for measure in ("compile_first", "compiled_float32"):
            emit(measure=measure, absent=reason)
        return
    first, step = train(framework, request, "float32", compiled=True)
    emit(measure="compile_first", value=first, way=module.COMPILED)
    emit(measure="compiled_float32", way=module.COMPILED, **step)


def train(
    framework: Any, request: dict[str, Any], precision: str, *, compiled: bool = False
) -> tuple[float, dict[str, Any]]:
    """Seconds of the first step, and of a later one with the losses after the first step and after `shared.CHECKED`."""
    count, steps = BLOCKS[request["gpu"]]
    step, wait = framework.trainer(precision, compiled=compiled)
    began = time.perf_counter()
    losses = [float(step())]
    wait()
    first = time.perf_counter() - began
    losses += [float(step()) for _ in range(max(shared.CHECKED, steps) - 1)]
    wait()
    seconds = shared.step_s(step, wait, count=count, steps=steps)
    return first, {"value": seconds, "losses": [losses[0], losses[shared.CHECKED - 1]]}


def loading(module: Any, request: dict[str, Any]) -> None:
    """Samples per second after a first epoch, without workers and with some, until each batch is in host memory."""
    framework = module.Framework(False)
    for name, workers in (("load_0", 0), ("load_n", request["workers"])):
        with framework.loader(workers) as loader:
            epoch = partial(shared.drain, loader)
            epoch()
            emit(measure=name, value=shared.SAMPLES / shared.median_s(epoch, EPOCHS), way=module.LOADER)


def precisions(request: dict[str, Any]) -> tuple[str, ...]:
    return ("float32", "tf32", "bfloat16") if request["gpu"] else ("float32",)


def process_bytes(field: str) -> int:
    """A field of this process in /proc/self/status, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(match[1]) * 1024


def gpu_memory(request: dict[str, Any]) -> int:
    """Bytes in use on the first GPU, by all processes: inside a container, NVML cannot identify this process."""
    if not request["gpu"] or importlib.util.find_spec("pynvml") is None:
        return 0
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        nvml.nvmlShutdown()


def emit_gpu_memory(measure: str, request: dict[str, Any], before: int) -> None:
    """How much more of the GPU's memory is in use than `before`."""
    if not request["gpu"]:
        return
    if importlib.util.find_spec("pynvml") is None:
        emit(measure=measure, absent="the image has no pynvml to measure GPU memory")
    else:
        emit(measure=measure, value=gpu_memory(request) - before)


KINDS = {
    "import": importing,
    "frugal": frugal,
    "product": products,
    "train": training,
    "compiled": compiled,
    "load": loading,
}

if __name__ == "__main__":
    main()
