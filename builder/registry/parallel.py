"""Several requests to registries at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import TypeVar

from builder.common import errors
from builder.common.errors import BuilderError, NoRegistryError
from builder.common.tasks import thread_pool
from builder.registry.client import Repository
from builder.registry.failures import StoppedError

LOOKUPS = 8  # small requests, which mostly wait for the registry
CHECKS = 4  # of images: a check starts programs of its own, cosign or a scanner
FINISHES = 4  # of images, which mostly wait for the registry
NOTICE_S = 1  # seconds until an interrupt is noticed, at most
GRACE_S = 5  # seconds for requests that wait for a response when the command is interrupted
_Input = TypeVar("_Input")
_Begun = TypeVar("_Begun")
_Output = TypeVar("_Output")


def look_up(
    function: Callable[[_Input], _Output], inputs: Iterable[_Input], parallel: int = LOOKUPS
) -> list[tuple[_Input, _Output]]:
    """Calls the function for all inputs at once; returns inputs and results, in order. Raises the first error."""
    listed = list(inputs)
    with thread_pool(parallel, "lookup") as pool:
        return list(zip(listed, pool.map(function, listed), strict=True))


def transfer_each(
    repository: Repository, function: Callable[[Repository, _Input], _Output], inputs: Iterable[_Input]
) -> list[_Output]:
    """Calls the function for `transfers` inputs at once; returns the results, in order.

    The first error stops all other transfers, and is raised. The registry that the function gets raises StoppedError
    then, as it does after an interrupt.
    """
    stop = threading.Event()
    stoppable = repository.stoppable(stop)
    failures: list[BaseException] = []

    def run(item: _Input) -> _Output:
        try:
            if stop.is_set():
                raise StoppedError(f"{repository.name}: stopped")
            return function(stoppable, item)
        except BaseException as error:
            failures.append(error)  # the first is the cause, later ones result from the stop
            stop.set()
            raise

    with thread_pool(repository.transfers, "transfer") as pool:
        try:
            futures = [pool.submit(run, item) for item in inputs]
            # A signal that arrives just before a wait begins is noticed when the wait ends.
            while wait(futures, timeout=NOTICE_S).not_done:
                pass
        finally:
            stop.set()
    if failures:
        raise failures[0]
    return [future.result() for future in futures]


def pipeline(
    begin: Callable[[_Input], _Begun],
    finish: Callable[[_Input, _Begun, threading.Event], _Output],
    inputs: Iterable[_Input],
    on_failure: Callable[[_Input], None],
) -> list[_Output]:
    """Calls `begin` for one input at a time, and `finish` for it and its result in a thread, while the next one begins.

    Returns the results of `finish`, in order. Calls `on_failure` for each input with an error, and raises one error for
    all of them at the end. No more inputs begin when a registry cannot be reached. `finish` also gets an event, which
    an interrupt sets.
    """
    stop, is_unreachable = threading.Event(), threading.Event()

    def fail(item: _Input, error: BuilderError) -> None:
        if isinstance(error, NoRegistryError):
            is_unreachable.set()
        on_failure(item)

    def end(item: _Input, begun: _Begun) -> _Output:
        try:
            return finish(item, begun, stop)
        except BuilderError as error:
            if not stop.is_set():
                fail(item, error)
            raise

    finishing: list[Future[_Output]] = []
    with thread_pool(FINISHES, "finish") as pool:
        try:
            for item in inputs:
                if is_unreachable.is_set():
                    break  # without this, a command tried an unreachable registry again for each of 75 images
                try:
                    finishing.append(pool.submit(end, item, begin(item)))
                except BuilderError as error:
                    fail(item, error)
                    finishing.append(Future())  # in order, with the errors of the threads
                    finishing[-1].set_exception(error)
            return errors.collect(lambda future: future.result(), finishing)
        except BaseException:
            stop.set()
            wait(finishing, timeout=GRACE_S)
            raise
