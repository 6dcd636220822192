"""Takes one kind of measure of one framework, in a process of its own; prints a JSON line for each.

    python -m builder.bench.inside.child '{"framework": "jax", "kind": "import", "gpu": false, "size": 2048}'

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

from builder.bench.inside import shared

FIRST_SIZE = 512
PRODUCTS = 7
EPOCHS = 3
# Blocks, and steps in each, that are timed; before them as many steps as one block has, and at least `shared.CHECKED`.
BLOCKS = {True: (10, 20), False: (5, 2)}


def main() -> None:
    asked = json.loads(sys.argv[1])
    KINDS[asked["kind"]](importlib.import_module(f"builder.bench.inside.on_{asked['framework']}"), asked)


def tell(measure: str, value: float, **more: Any) -> None:
    print(json.dumps({"measure": measure, "value": value, **more}), flush=True)


def cannot(measure: str, reason: str) -> None:
    print(json.dumps({"measure": measure, "absent": reason}), flush=True)


def importing(module: Any, asked: dict[str, Any]) -> None:
    """Import, then a first operation; host memory and GPU memory after each."""
    before = gpu_memory(asked)
    began = time.perf_counter()
    importlib.import_module(module.MODULE)
    tell("import", time.perf_counter() - began)
    tell("memory_import", status("VmRSS"))
    tell_gpu("gpu_import", asked, before)
    began = time.perf_counter()
    framework = module.Framework(asked["gpu"])
    framework.product(FIRST_SIZE, "float32")()
    tell("first", time.perf_counter() - began)
    tell("memory_first", status("VmRSS"))
    tell("memory_peak", status("VmHWM"))
    tell_gpu("gpu_first", asked, before)
    print(json.dumps({"version": framework.version}), flush=True)


def frugal(module: Any, asked: dict[str, Any]) -> None:
    """GPU memory after a first operation, where the framework is told to take none in advance."""
    before = gpu_memory(asked)
    framework = module.Framework(asked["gpu"])
    framework.product(FIRST_SIZE, "float32")()
    tell_gpu("gpu_frugal", asked, before)


def products(module: Any, asked: dict[str, Any]) -> None:
    """Square matrix products, in GFLOP/s."""
    framework, size = module.Framework(asked["gpu"]), asked["size"]
    for precision in precisions(asked):
        product = framework.product(size, precision)
        product()
        product()
        tell(f"product_{precision}", 2 * size**3 / shared.each(product, PRODUCTS) / 1e9, size=size)


def training(module: Any, asked: dict[str, Any]) -> None:
    framework = module.Framework(asked["gpu"])
    for precision in precisions(asked):
        train(framework, asked, precision, "", module.USUAL, compiled=False)


def compiled(module: Any, asked: dict[str, Any]) -> None:
    framework = module.Framework(asked["gpu"])
    if reason := framework.no_compiler():
        cannot("compile_first", reason)
        cannot("compiled_float32", reason)
        return
    train(framework, asked, "float32", "compiled", module.COMPILED, compiled=True)


def train(framework: Any, asked: dict[str, Any], precision: str, kind: str, way: str, *, compiled: bool) -> None:
    """The first step by itself, then enough to warm up, then blocks of steps."""
    count, steps = BLOCKS[asked["gpu"]]
    trainer = framework.trainer(precision, compiled=compiled)
    began = time.perf_counter()
    trainer.step()
    losses = [trainer.loss()]
    trainer.wait()
    first = time.perf_counter() - began
    for _ in range(max(shared.CHECKED, steps) - 1):
        trainer.step()
        losses.append(trainer.loss())
    trainer.wait()
    seconds = shared.blocks(trainer.step, trainer.wait, count=count, steps=steps)
    shown = [losses[0], losses[shared.CHECKED - 1]]
    if precision == "float32":
        tell("compile_first" if kind else "train_first", first, way=way)
    tell(f"{kind or 'train'}_{precision}", seconds, way=way, losses=shown)


def loading(module: Any, asked: dict[str, Any]) -> None:
    """Samples per second after a first epoch, without workers and with some, until each batch is in host memory."""
    framework = module.Framework(False)
    for name, workers in (("load_0", 0), ("load_n", asked["workers"])):
        with framework.loader(workers) as loader:
            epoch = partial(shared.drain, loader)
            epoch()
            tell(name, shared.SAMPLES / shared.each(epoch, EPOCHS), way=module.LOADER, workers=workers)


def precisions(asked: dict[str, Any]) -> tuple[str, ...]:
    return ("float32", "tf32", "bfloat16") if asked["gpu"] else ("float32",)


def status(field: str) -> int:
    """Bytes that the kernel counts for this process."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def gpu_memory(asked: dict[str, Any]) -> int:
    """Bytes in use on the first GPU, by whomever: inside a container NVML cannot name this process."""
    if not asked["gpu"] or importlib.util.find_spec("pynvml") is None:
        return 0
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        nvml.nvmlShutdown()


def tell_gpu(measure: str, asked: dict[str, Any], before: int) -> None:
    """How much more of the GPU's memory is in use than `before`."""
    if not asked["gpu"]:
        return
    if importlib.util.find_spec("pynvml") is None:
        cannot(measure, "GPU memory is asked of NVML by pynvml, which the image does not have")
    else:
        tell(measure, gpu_memory(asked) - before)


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
