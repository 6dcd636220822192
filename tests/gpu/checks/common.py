"""Figures with limits, and the verdict on them. Imports no framework.

A check is a function of its framework and a device that returns figures. It passes if at least one figure has a limit
and all figures are within their limits. NaN is never within a limit.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .nvml import System


class Failed(Exception):  # noqa: N818  an outcome, like the next class
    """The check failed; the message has the reason."""


class NotApplicable(Exception):  # noqa: N818
    """There is nothing to check on this machine; the message has the reason."""


@dataclass(frozen=True)
class Figure:
    """A measured value. `least` and `most` are its limits, None without a limit."""

    name: str
    value: Any
    least: float | None = None
    most: float | None = None

    @property
    def has_limit(self) -> bool:
        return self.least is not None or self.most is not None

    @property
    def is_good(self) -> bool:
        """Whether it is within its limits. NaN never is, because comparisons with it are false."""
        if not self.has_limit:
            return True
        high = self.most is None or self.value <= self.most
        return high and (self.least is None or self.value >= self.least)

    def __str__(self) -> str:
        if not self.has_limit:
            return f"{self.name} {_short(self.value)}"
        if self.least == self.most:
            limits = f"= {_short(self.most)}"
        else:
            limits = " and ".join(
                f"{sign} {_short(limit)}"
                for sign, limit in ((">=", self.least), ("<=", self.most))
                if limit is not None
            )
        return f"{self.name} {_short(self.value)} ({'' if self.is_good else 'must be '}{limits})"


def at_most(name: str, value: float, most: float) -> Figure:
    return Figure(name, value, most=most)


def at_least(name: str, value: float, least: float) -> Figure:
    return Figure(name, value, least=least)


def between(name: str, value: float, least: float, most: float) -> Figure:
    return Figure(name, value, least=least, most=most)


def equal(name: str, value: float, expected: float) -> Figure:
    return Figure(name, value, least=expected, most=expected)


def note(name: str, value: Any) -> Figure:
    """A figure without limits, which is only shown."""
    return Figure(name, value)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check. `state` is passed, failed or not applicable; `detail` is the reason, if not passed."""

    state: str
    figures: list[Figure] = field(default_factory=list)
    detail: str = ""

    def as_data(self) -> dict[str, Any]:
        """For JSON. NaN and infinity become text, because JSON has neither."""
        return {
            "state": self.state,
            "figures": [{key: _plain(value) for key, value in asdict(figure).items()} for figure in self.figures],
            "figure": "; ".join(map(str, self.figures)),
            "detail": self.detail,
        }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def judge(figures: list[Figure]) -> Outcome:
    """The outcome of a check with these figures."""
    if not any(figure.has_limit for figure in figures):
        return Outcome("failed", figures, "nothing was measured")
    if bad := [figure for figure in figures if not figure.is_good]:
        return Outcome("failed", figures, "; ".join(map(str, bad)))
    return Outcome("passed", figures)


@dataclass(frozen=True)
class Check:
    """A check. With `uses_all`, it uses all visible GPUs instead of only the first one."""

    name: str
    run: Callable[[Any, Any], list[Figure]]
    uses_all: bool = False

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or "").strip().splitlines()[0]


class Checks(dict[str, Check]):
    """The checks of a framework by name, in the order of their definition."""

    def add(
        self, name: str, *, uses_all: bool = False
    ) -> Callable[[Callable[[Any, Any], list[Figure]]], Callable[[Any, Any], list[Figure]]]:
        def register(run: Callable[[Any, Any], list[Figure]]) -> Callable[[Any, Any], list[Figure]]:
            self[name] = Check(name, run, uses_all)
            return run

        return register


@dataclass(frozen=True)
class Setup:
    """A framework with a GPU: its module, its first device, its version, and the CUDA version that it is built for."""

    module: Any
    device: Any
    version: str
    cuda: str = ""


def load(package: str) -> Any:
    """Imports the framework. Raises Failed with the error of the import."""
    try:
        return importlib.import_module(package)
    except Exception as error:
        raise Failed(f"`import {package}` failed: {type(error).__name__}: {error}") from error


def no_gpu(framework: str, built_for: str, system: System) -> Failed:
    """The error if NVML has a GPU and the framework has not, with possible causes."""
    built = f"was built for CUDA {built_for}" if built_for else "was built without CUDA"
    driver = f"driver {system.driver}" + (f" runs CUDA {system.cuda} at most" if system.cuda else "")
    return Failed(f"{framework} finds no GPU: it {built}; {driver}")


def relative_error(result: Any, expected: Any) -> float:
    """The norm of the difference, divided by the norm of `expected`; for float64 arrays of any framework on the CPU.

    Not the largest error of an element, because the relative error of an element near zero has no meaning.
    """
    if tuple(result.shape) != tuple(expected.shape):
        raise Failed(f"the result has shape {tuple(result.shape)}, not {tuple(expected.shape)}")
    difference = result - expected
    norm = math.sqrt(float((expected * expected).sum()))
    if not norm > 0:
        raise Failed("the expected result is zero everywhere, so the relative error is undefined")
    return math.sqrt(float((difference * difference).sum())) / norm


def loaded(name: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """File names of loaded libraries that begin with `name`, as proof that they were used."""
    paths = {line.split()[-1] for line in maps.read_text(encoding="utf-8").splitlines() if "/" in line}
    return sorted(Path(path).name for path in paths if Path(path).name.startswith(name))


def cudnn_at_work() -> list[str]:
    """The libraries that cuDNN loads at its first convolution; libcudnn itself only loads the others."""
    return loaded("libcudnn_cnn") + loaded("libcudnn_engines")


def same_devices(devices: list[dict[str, Any]], system: System) -> list[Figure]:
    """Compares a framework's GPUs with those of NVML, in the order of their PCI addresses.

    `devices` has name, capability and memory of each, if the framework has them.
    """
    if any(gpu.mig for gpu in system.visible):
        raise NotApplicable("MIG is on: NVML has whole GPUs, a framework has one slice")
    figures = [equal("GPUs", len(devices), len(system.visible))]
    for number, gpu in enumerate(system.visible[: len(devices)]):
        device = devices[number]
        for key in ("name", "capability"):
            if device.get(key) and device[key] != getattr(gpu, key):
                raise Failed(f"GPU {number}: {key} is {getattr(gpu, key)} in NVML, {device[key]} in the framework")
        if device.get("memory") and gpu.memory:
            # The driver reserves a part of the memory in NVML (0.5 to 1 GiB, also for ECC): 8 % of a small GPU.
            figures.append(between(f"memory of GPU {number} / NVML's", device["memory"] / gpu.memory, 0.88, 1.001))
        figures.append(note(f"GPU {number}", gpu.name))
    return figures
