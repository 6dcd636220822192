"""A rank: a process that computes with the framework and reports each step as an event."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from . import machine

# Values are 0 to 4 and repeat, so the exact sum is known in advance, and every type below can represent it.
PERIOD = 5
# The largest integer up to which a type represents all integers.
LARGEST = {
    "float16": 2**11,
    "bfloat16": 2**8,
    "float32": 2**24,
    "float64": 2**53,
    "int32": 2**31 - 1,
    "int64": 2**53,
}
ELEMENTS = (1, 1000, 65537, 2**20)
SECONDS_PER_SIZE = 0.5
LONGEST_OPERATION = 2.0


class Group(Protocol):
    """The interface of the modules in dist_check_backends to the ranks of a framework."""

    device: str
    types: Sequence[str]

    def put(self, numbers: np.ndarray[Any, Any], dtype: str) -> Any:
        """Copies numbers to the device, as this type."""

    def add(self, values: Any) -> Any:
        """The sum over all ranks; may reuse `values` and return before it is computed."""

    def wait(self, values: Any) -> None:
        """Waits until the values are computed."""

    def get(self, values: Any) -> np.ndarray[Any, Any]:
        """The values as float64 on the CPU."""


def pattern(elements: int, rank: int) -> np.ndarray[Any, Any]:
    """The values of a rank."""
    return np.resize((7 * np.arange(PERIOD) + 3 * rank) % PERIOD, elements)


def exact_sum(elements: int, world: int) -> np.ndarray[Any, Any]:
    period = sum(((7 * np.arange(PERIOD) + 3 * rank) % PERIOD for rank in range(world)), np.zeros(PERIOD, np.int64))
    return np.resize(period, elements)


def compare(group: Group, rank: int, world: int, dtype: str, elements: int) -> dict[str, Any]:
    result = group.get(group.add(group.put(pattern(elements, rank), dtype)))
    expected = exact_sum(elements, world)
    check: dict[str, Any] = {
        "dtype": dtype,
        "elements": elements,
        "wrong": elements if result.shape != expected.shape else 0,
    }
    if result.shape == expected.shape:
        differences = np.flatnonzero(result != expected)
        check["wrong"] = len(differences)
        if len(differences):
            at = int(differences[0])
            check["sample"] = f"element {at} is {result[at]:g}, not {expected[at]:g}"
    return check


def measure(group: Group, size: int, world: int) -> tuple[float, bool]:
    """Seconds for one all-reduce of `size` bytes, and whether larger ones take too long (the same on all ranks)."""
    values = group.put(np.zeros(max(size // 4, 1)), "float32")
    for _ in range(2):
        group.wait(group.add(values))
    started = time.perf_counter()
    group.wait(group.add(values))
    own = time.perf_counter() - started
    # The number of repeats must be the same on all ranks: it follows from the mean of their times.
    mean = float(group.get(group.add(group.put(np.array([own]), "float32")))[0]) / world
    repeats = max(3, min(50, round(SECONDS_PER_SIZE / max(mean, 1e-6))))
    started = time.perf_counter()
    for _ in range(repeats):
        group.wait(group.add(values))
    return (time.perf_counter() - started) / repeats, mean * 4 > LONGEST_OPERATION


def main(events: int) -> int:
    """Reads its order from standard input and writes events to the descriptor; ends when standard input is closed."""
    order = json.loads(sys.stdin.readline())

    def emit(**event: Any) -> None:
        os.write(events, json.dumps(event).encode() + b"\n")

    # If the parent is killed, its end of standard input is closed, and this process must end too.
    finished = threading.Event()

    def leave_with_parent() -> None:
        sys.stdin.read()
        os._exit(0 if finished.is_set() else 1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        _compute(order, emit)
    except BaseException as error:
        traceback.print_exc()
        # Some errors are long; the last line has the cause.
        last = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
        emit(stage="failed", error=f"{type(error).__name__}: {last.strip()}"[:500])
        sys.stderr.flush()
        os._exit(1)
    finished.set()
    # A rank that ends early is an error for the others: all wait here until the parent ends them.
    threading.Event().wait()
    return 0


def _compute(order: dict[str, Any], emit: Any) -> None:
    emit(stage="loading the framework")
    backend = importlib.import_module(f"dist_check_backends.{order['framework']}")
    module = importlib.import_module(f"{backend.__name__}.group")
    emit(stage="connecting")
    group: Group = module.connect(order)
    emit(stage="adding up", device=group.device)
    rank, world = order["rank"], order["world"]
    for dtype in group.types:
        if world * (PERIOD - 1) > LARGEST[dtype]:
            continue  # sums of so many ranks are not exact in this type
        for elements in ELEMENTS:
            emit(check=compare(group, rank, world, dtype, elements))
    # Connections to a coordinator are not the path of the data.
    coordinator = [int(order["addresses"][0].rsplit(":", 1)[1])] if backend.HAS_COORDINATOR else []
    emit(stage="measuring", connections=machine.connections(ignore=coordinator))
    for size in order["sizes"]:
        seconds, slow = measure(group, size, world)
        emit(measured={"bytes": size, "seconds": seconds})
        if slow:
            break
    emit(stage="done")
