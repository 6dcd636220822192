"""Limits every Python process to GPU_MEMORY_LIMIT of each GPU. On the path only if that variable is set.

Only JAX reads such a limit from its environment, so for the others it is set when the framework is imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def limit() -> int:
    """The limit in bytes. The launcher has already checked that the variable is a size."""
    text = os.environ["GPU_MEMORY_LIMIT"].replace(" ", "")
    for unit, factor in (("MiB", 2**20), ("GiB", 2**30), ("MB", 10**6), ("GB", 10**9)):
        if text.endswith(unit):
            return round(float(text[: -len(unit)]) * factor)
    return 0


def limit_torch(torch: Any) -> None:
    """Sets the limit when CUDA is first used: reading the GPUs' sizes earlier would start CUDA in every process."""

    def apply() -> None:
        current = torch.cuda.current_device()  # setting a fraction changes the current GPU
        for index in range(torch.cuda.device_count()):
            total = torch.cuda.get_device_properties(index).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit() / total), index)
        torch.cuda.set_device(current)

    if torch.version.cuda:
        torch.cuda._lazy_call(apply)


def limit_tensorflow(tensorflow: Any) -> None:
    """Sets the size of TensorFlow's pool on each GPU."""
    config = tensorflow.config
    for gpu in config.list_physical_devices("GPU"):
        size = config.LogicalDeviceConfiguration(memory_limit=max(1, limit() // 2**20))
        config.set_logical_device_configuration(gpu, [size])


def limit_jax(_: Any) -> None:
    """Sets a fraction of the smallest GPU, because XLA uses the same fraction for all."""
    try:
        import pynvml  # noqa: PLC0415  only in processes that import JAX
    except ImportError:  # a virtual environment without pynvml
        return
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        totals = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    except pynvml.NVMLError:
        return
    if totals:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{min(1.0, limit() / min(totals)):.4f}")


# JAX needs its variable before it looks for GPUs; the functions of torch and TensorFlow exist only after the import.
BEFORE: dict[str, Callable[[Any], None]] = {"jaxlib": limit_jax}
AFTER: dict[str, Callable[[Any], None]] = {"torch": limit_torch, "tensorflow": limit_tensorflow}


class Watch(MetaPathFinder):
    """Runs a function at the import of a framework; not when a library only checks whether it is installed."""

    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in BEFORE:
            BEFORE.pop(fullname)(None)
        if fullname not in AFTER or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_limit(module: ModuleType) -> None:
                execute(module)
                AFTER.pop(fullname, lambda _: None)(module)

            spec.loader.exec_module = execute_and_limit  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Watch())
