"""One rank: a process of its own that computes with the framework, and tells what it does by events."""

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

# Values are 0 to 4 and repeat, so the exact sum is known without adding up, and every type below can hold it.
PERIOD = 5
# The largest whole number up to which a type holds all of them.
HOLDS = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53, "int32": 2**31 - 1, "int64": 2**53}
ELEMENTS = (1, 1000, 65537, 2**20)
SECONDS_PER_SIZE = 0.5
LONGEST_OPERATION = 2.0


class Group(Protocol):
    """All ranks, as the framework's part in dist_check_backends sees them."""

    device: str
    types: Sequence[str]

    def put(self, numbers: np.ndarray[Any, Any], dtype: str) -> Any:
        """On the device, with this type."""

    def add(self, values: Any) -> Any:
        """The sum over all ranks; may reuse `values`, need not wait."""

    def wait(self, values: Any) -> None:
        """Until it is computed."""

    def get(self, values: Any) -> np.ndarray[Any, Any]:
        """As float64."""


def pattern(elements: int, rank: int) -> np.ndarray[Any, Any]:
    return np.resize((7 * np.arange(PERIOD) + 3 * rank) % PERIOD, elements)


def exact_sum(elements: int, world: int) -> np.ndarray[Any, Any]:
    once = sum(((7 * np.arange(PERIOD) + 3 * rank) % PERIOD for rank in range(world)), np.zeros(PERIOD, np.int64))
    return np.resize(once, elements)


def compare(group: Group, rank: int, world: int, dtype: str, elements: int) -> dict[str, Any]:
    got = group.get(group.add(group.put(pattern(elements, rank), dtype)))
    expected = exact_sum(elements, world)
    result: dict[str, Any] = {
        "dtype": dtype,
        "elements": elements,
        "wrong": elements if got.shape != expected.shape else 0,
    }
    if got.shape == expected.shape:
        differs = np.flatnonzero(got != expected)
        result["wrong"] = len(differs)
        if len(differs):
            at = int(differs[0])
            result["sample"] = f"element {at} is {got[at]:g}, not {expected[at]:g}"
    return result


def measure(group: Group, size: int, world: int) -> tuple[float, bool]:
    """Seconds for one all-reduce of `size` bytes, and whether a larger one would take too long, on which all agree."""
    values = group.put(np.zeros(max(size // 4, 1)), "float32")
    for _ in range(2):
        group.wait(group.add(values))
    started = time.perf_counter()
    group.wait(group.add(values))
    own = time.perf_counter() - started
    # How often to repeat must be the same number everywhere: the mean of what the ranks measured.
    mean = float(group.get(group.add(group.put(np.array([own]), "float32")))[0]) / world
    repeats = max(3, min(50, round(SECONDS_PER_SIZE / max(mean, 1e-6))))
    started = time.perf_counter()
    for _ in range(repeats):
        group.wait(group.add(values))
    return (time.perf_counter() - started) / repeats, mean * 4 > LONGEST_OPERATION


def main(events: int) -> int:
    """Reads what to do from standard input, writes events to the descriptor; ends when standard input does."""
    order = json.loads(sys.stdin.readline())

    def tell(**event: Any) -> None:
        os.write(events, json.dumps(event).encode() + b"\n")

    # Whoever started us may be killed: then nobody waits for us any more.
    finished = threading.Event()

    def leave_with_parent() -> None:
        sys.stdin.read()
        os._exit(0 if finished.is_set() else 1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        _compute(order, tell)
    except BaseException as error:
        traceback.print_exc()
        # Some errors are pages; what happened stands last.
        last = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
        tell(stage="failed", error=f"{type(error).__name__}: {last.strip()}"[:500])
        sys.stderr.flush()
        os._exit(1)
    finished.set()
    # A rank that leaves early looks like a failure to the others: all wait here for the end.
    threading.Event().wait()
    return 0


def _compute(order: dict[str, Any], tell: Any) -> None:
    tell(stage="loading the framework")
    backend = importlib.import_module(f"dist_check_backends.{order['framework']}")
    module = importlib.import_module(f"{backend.__name__}.group")
    tell(stage="connecting")
    group: Group = module.connect(order)
    tell(stage="adding up", device=group.device)
    rank, world = order["rank"], order["world"]
    for dtype in group.types:
        if world * (PERIOD - 1) > HOLDS[dtype]:
            continue  # not every sum of so many ranks is exact in this type
        for elements in ELEMENTS:
            tell(check=compare(group, rank, world, dtype, elements))
    # Where ranks find one another at a place of its own, that connection says nothing about the data's way.
    apart = [int(order["addresses"][0].rsplit(":", 1)[1])] if backend.MEETS_APART else []
    tell(stage="measuring", connections=machine.connections(ignore=apart))
    for size in order["sizes"]:
        seconds, slow = measure(group, size, world)
        tell(measured={"bytes": size, "seconds": seconds})
        if slow:
            break
    tell(stage="done")
