"""Several requests to registries at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from typing import TypeVar

from builder.common import threads
from builder.registry.client import Registry
from builder.registry.failures import StoppedError

LOOKUPS = 8
TRANSFERS = 4  # of blobs
_Input = TypeVar("_Input")
_Output = TypeVar("_Output")


def look_up(function: Callable[[_Input], _Output], inputs: Iterable[_Input]) -> list[tuple[_Input, _Output]]:
    """Each input with what the function returns for it, in order. Raises the first error of the function."""
    listed = list(inputs)
    with threads.pool(LOOKUPS, "lookup") as pool:
        return list(zip(listed, pool.map(function, listed), strict=True))


def transfer(
    registry: Registry, function: Callable[[Registry, _Input], _Output], inputs: Iterable[_Input], parallel: int
) -> list[_Output]:
    """What the function returns for each input, in order. Raises its first error, which stops all other transfers.

    The registry that the function gets raises StoppedError then, as it does after an interrupt.
    """
    stop = threading.Event()
    stoppable = registry.stoppable(stop)
    failures: list[BaseException] = []

    def run(each: _Input) -> _Output:
        try:
            if stop.is_set():
                raise StoppedError(f"{registry.name}: stopped")
            return function(stoppable, each)
        except BaseException as error:
            failures.append(error)  # the first is the cause, later ones result from the stop
            stop.set()
            raise

    with threads.pool(parallel, "transfer") as pool:
        try:
            futures = [pool.submit(run, each) for each in inputs]
            wait(futures)
        finally:
            stop.set()
    if failures:
        raise failures[0]
    return [future.result() for future in futures]
