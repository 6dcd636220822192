"""What is measured: names, units, and which end is the good one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from builder.view import size

Unit = Literal["s", "B", "GFLOP/s", "samples/s"]
GPU_SIZE, CPU_SIZE = 8192, 2048
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Measure:
    """`title` may have `{size}` and `{workers}` in it; `must_exist` is false for what an image may lack."""

    key: str
    title: str
    unit: Unit
    gpu_only: bool = False
    must_exist: bool = True

    @property
    def more_is_better(self) -> bool:
        return self.unit in ("GFLOP/s", "samples/s")

    def shown(self, value: float) -> str:
        """A value as people write it; a rate without its unit, which stands in the title."""
        if self.unit == "B":
            return "0" if abs(value) < _MIB else size(round(value))  # NVML's own figure moves by some kB
        if self.unit == "s":
            return f"{_three(value)} s" if value >= 0.9995 else f"{_three(value * 1000)} ms"
        return _three(value)


MEASURES = (
    Measure(key="container", title="start and end of a container", unit="s"),
    Measure(key="python", title="start of Python", unit="s"),
    Measure(key="import", title="import", unit="s"),
    Measure(key="first", title="first operation after import", unit="s"),
    Measure(key="memory_import", title="host memory after import", unit="B"),
    Measure(key="memory_first", title="host memory after the first operation", unit="B"),
    Measure(key="memory_peak", title="host memory at most, till then", unit="B"),
    Measure(key="gpu_import", title="GPU memory after import", unit="B", gpu_only=True),
    Measure(key="gpu_first", title="GPU memory after the first operation", unit="B", gpu_only=True),
    Measure(key="gpu_frugal", title="GPU memory, nothing reserved in advance", unit="B", gpu_only=True),
    Measure(key="product_float32", title="matrix product {size}x{size}, float32, GFLOP/s", unit="GFLOP/s"),
    Measure(key="product_tf32", title="matrix product {size}x{size}, TF32, GFLOP/s", unit="GFLOP/s", gpu_only=True),
    Measure(
        key="product_bfloat16", title="matrix product {size}x{size}, bfloat16, GFLOP/s", unit="GFLOP/s", gpu_only=True
    ),
    Measure(key="train_float32", title="training step, float32", unit="s"),
    Measure(key="train_tf32", title="training step, TF32", unit="s", gpu_only=True),
    Measure(key="train_bfloat16", title="training step, bfloat16", unit="s", gpu_only=True),
    Measure(key="compiled_float32", title="training step, compiled, float32", unit="s", must_exist=False),
    Measure(key="train_first", title="first training step", unit="s"),
    Measure(key="compile_first", title="first training step, compiled", unit="s", must_exist=False),
    Measure(key="load_0", title="data loading, no workers, samples/s", unit="samples/s"),
    Measure(key="load_n", title="data loading, {workers} workers, samples/s", unit="samples/s"),
)
BY_KEY = {measure.key: measure for measure in MEASURES}


def of_device(*, gpu: bool) -> tuple[Measure, ...]:
    """Those that are taken with, or without, a GPU."""
    return tuple(measure for measure in MEASURES if gpu or not measure.gpu_only)


def _three(value: float) -> str:
    """Three digits that say something, and no exponent: 0.0123, 1.23, 123, 12300."""
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
