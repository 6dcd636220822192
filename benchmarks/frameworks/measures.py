"""The measures: names, units, and whether more or less is better. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from builder.common.text import size

GPU_SIZE, CPU_SIZE = 8192, 2048  # default size of the matrices that are multiplied
_MIB = 1 << 20


@dataclass(frozen=True)
class Measure:
    """`title` may contain `{size}` and `{workers}`."""

    key: str
    title: str
    unit: Literal["s", "B", "GFLOP/s", "samples/s"]
    gpu_only: bool = False

    @property
    def more_is_better(self) -> bool:
        return self.unit in ("GFLOP/s", "samples/s")

    def shown(self, value: float) -> str:
        """A value as text. The unit of a rate is in the title."""
        if self.unit == "B":
            return "0" if abs(value) < _MIB else size(round(value))  # NVML's own figure varies by some kB
        if self.unit == "s":
            return f"{_three_digits(value)} s" if value >= 0.9995 else f"{_three_digits(value * 1000)} ms"
        return _three_digits(value)


MEASURES = (
    Measure("container", "container start and exit", "s"),
    Measure("python", "Python start and exit", "s"),
    Measure("import", "import", "s"),
    Measure("first", "first operation after import", "s"),
    Measure("memory_import", "host memory after import", "B"),
    Measure("memory_first", "host memory after the first operation", "B"),
    Measure("memory_peak", "peak host memory until then", "B"),
    Measure("gpu_import", "GPU memory after import", "B", gpu_only=True),
    Measure("gpu_first", "GPU memory after the first operation", "B", gpu_only=True),
    Measure("gpu_frugal", "GPU memory without preallocation", "B", gpu_only=True),
    Measure("product_float32", "matrix product {size}x{size}, float32, GFLOP/s", "GFLOP/s"),
    Measure("product_tf32", "matrix product {size}x{size}, TF32, GFLOP/s", "GFLOP/s", gpu_only=True),
    Measure("product_bfloat16", "matrix product {size}x{size}, bfloat16, GFLOP/s", "GFLOP/s", gpu_only=True),
    Measure("train_float32", "training step, float32", "s"),
    Measure("train_tf32", "training step, TF32", "s", gpu_only=True),
    Measure("train_bfloat16", "training step, bfloat16", "s", gpu_only=True),
    Measure("compiled_float32", "training step, compiled, float32", "s"),
    Measure("train_first", "first training step", "s"),
    Measure("compile_first", "first training step, compiled", "s"),
    Measure("load_0", "data loading, no workers, samples/s", "samples/s"),
    Measure("load_n", "data loading, {workers} workers, samples/s", "samples/s"),
)
BY_KEY = {measure.key: measure for measure in MEASURES}


def of_device(*, gpu: bool) -> tuple[Measure, ...]:
    """The measures with, or without, a GPU."""
    return tuple(measure for measure in MEASURES if gpu or not measure.gpu_only)


def _three_digits(value: float) -> str:
    """Three significant digits without an exponent: 0.0123, 1.23, 123, 12300."""
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
