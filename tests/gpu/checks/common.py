"""What checks are made of: figures with limits, and how they are judged. No framework is imported here.

A check is a function that is given its framework and a device and returns figures. It passes if at least one figure has
a limit, and every one that has keeps to it: not a number is no pass, and neither is a check that measured nothing.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .nvml import System


class Failed(Exception):  # noqa: N818  an outcome, as the next
    """What was checked is not so; the message says what is wrong."""


class NotApplicable(Exception):  # noqa: N818
    """There is nothing to check on this machine; the message says why. No pass."""


@dataclass(frozen=True)
class Figure:
    """What was measured; `least` and `most` are what it must be within, None where nothing is asked of it."""

    name: str
    value: Any
    least: float | None = None
    most: float | None = None

    @property
    def has_limit(self) -> bool:
        return self.least is not None or self.most is not None

    @property
    def is_good(self) -> bool:
        """Comparisons with NaN are false, so it is never good."""
        if not self.has_limit:
            return True
        high = self.most is None or self.value <= self.most
        return high and (self.least is None or self.value >= self.least)

    def __str__(self) -> str:
        if not self.has_limit:
            return f"{self.name} {_short(self.value)}"
        if self.least == self.most:
            wanted = f"= {_short(self.most)}"
        else:
            wanted = " and ".join(
                f"{sign} {_short(limit)}"
                for sign, limit in ((">=", self.least), ("<=", self.most))
                if limit is not None
            )
        return f"{self.name} {_short(self.value)} ({'' if self.is_good else 'must be '}{wanted})"


def at_most(name: str, value: float, most: float) -> Figure:
    return Figure(name, value, most=most)


def at_least(name: str, value: float, least: float) -> Figure:
    return Figure(name, value, least=least)


def between(name: str, value: float, least: float, most: float) -> Figure:
    return Figure(name, value, least=least, most=most)


def equal(name: str, value: float, wanted: float) -> Figure:
    return Figure(name, value, least=wanted, most=wanted)


def note(name: str, value: Any) -> Figure:
    """Shown, and nothing is asked of it."""
    return Figure(name, value)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Outcome:
    """`state` is passed, failed or not applicable; `detail` says why where it is not passed."""

    state: str
    figures: list[Figure] = field(default_factory=list)
    detail: str = ""

    def as_data(self) -> dict[str, Any]:
        """For JSON, which has neither NaN nor infinity: they become text."""
        return {
            "state": self.state,
            "figures": [{key: _plain(value) for key, value in asdict(one).items()} for one in self.figures],
            "figure": "; ".join(map(str, self.figures)),
            "detail": self.detail,
        }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def judge(figures: list[Figure]) -> Outcome:
    """Whether figures are a pass."""
    if not any(one.has_limit for one in figures):
        return Outcome("failed", figures, "nothing was measured")
    if bad := [one for one in figures if not one.is_good]:
        return Outcome("failed", figures, "; ".join(map(str, bad)))
    return Outcome("passed", figures)


@dataclass(frozen=True)
class Check:
    """`uses_all` says that it works on every GPU that is visible, and not on the first alone."""

    name: str
    run: Callable[[Any, Any], list[Figure]]
    uses_all: bool = False

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or "").strip().splitlines()[0]


class Checks(dict[str, Check]):
    """The checks of a framework by name, in the order in which they are written."""

    def add(
        self, name: str, *, uses_all: bool = False
    ) -> Callable[[Callable[[Any, Any], list[Figure]]], Callable[[Any, Any], list[Figure]]]:
        def keep(run: Callable[[Any, Any], list[Figure]]) -> Callable[[Any, Any], list[Figure]]:
            self[name] = Check(name, run, uses_all)
            return run

        return keep


@dataclass(frozen=True)
class Begun:
    """A framework that has a GPU: its module, the first device in its own words, and what it was built for."""

    module: Any
    device: Any
    version: str
    cuda: str = ""


def load(package: str) -> Any:
    """The framework's module. A Failed with the error that Python met."""
    try:
        return importlib.import_module(package)
    except Exception as error:
        raise Failed(f"`import {package}` failed: {type(error).__name__}: {error}") from error


def no_gpu(framework: str, built_for: str, system: System) -> Failed:
    """NVML sees a GPU and the framework does not; what is known of why."""
    built = f"was built for CUDA {built_for}" if built_for else "was built without CUDA"
    driver = f"driver {system.driver}" + (f" runs CUDA {system.cuda} at most" if system.cuda else "")
    return Failed(f"{framework} finds no GPU: it {built}; {driver}")


def relative_error(found: Any, expected: Any) -> float:
    """Norm of the difference by the norm of what is expected; for arrays of any framework that are float64 on the CPU.

    The norm, and not the largest difference by element: an element near zero has no meaningful relative error.
    """
    if tuple(found.shape) != tuple(expected.shape):
        raise Failed(f"the result has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    difference = found - expected
    norm = math.sqrt(float((expected * expected).sum()))
    if not norm > 0:
        raise Failed("what is expected is zero everywhere: nothing can be compared with it")
    return math.sqrt(float((difference * difference).sum())) / norm


def loaded(name: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Files of this process's libraries that begin with `name`: proof of which library did the work."""
    paths = {line.split()[-1] for line in maps.read_text(encoding="utf-8").splitlines() if "/" in line}
    return sorted(Path(path).name for path in paths if Path(path).name.startswith(name))


def cudnn_at_work() -> list[str]:
    """The libraries that cuDNN loads when it convolves, and not before: libcudnn itself only finds them."""
    return loaded("libcudnn_cnn") + loaded("libcudnn_engines")


def same_devices(seen: list[dict[str, Any]], system: System) -> list[Figure]:
    """Figures on whether a framework's GPUs are those that NVML has, in the order of their PCI addresses.

    `seen` has name, capability and memory of each, as far as the framework tells.
    """
    if any(gpu.mig for gpu in system.visible):
        raise NotApplicable("MIG is on: NVML counts whole GPUs, a framework sees one slice")
    figures = [equal("GPUs", len(seen), len(system.visible))]
    for number, gpu in enumerate(system.visible[: len(seen)]):
        told = seen[number]
        for key in ("name", "capability"):
            if told.get(key) and told[key] != getattr(gpu, key):
                raise Failed(f"GPU {number}: NVML says {key} {getattr(gpu, key)}, the framework {told[key]}")
        if told.get("memory") and gpu.memory:
            # The driver keeps some of what NVML counts for itself (0.5 to 1 GiB, ECC too): 8 % of a small card.
            figures.append(between(f"memory of GPU {number} by NVML's", told["memory"] / gpu.memory, 0.88, 1.001))
        figures.append(note(f"GPU {number}", gpu.name))
    return figures
