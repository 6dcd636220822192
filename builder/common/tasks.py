"""A thread pool that an interrupted command does not wait for, and the timeouts and retries of requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass


@contextmanager
def thread_pool(workers: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A thread pool that is shut down when the `with` block exits.

    After an error, cancels the tasks that have not begun. After an interrupt (Ctrl-C, SIGTERM), does not wait for
    running tasks either, since a server may not respond for a minute: they end with the process.
    """
    threads = ThreadPoolExecutor(workers, name)
    try:
        yield threads
    except BaseException as error:
        threads.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        raise
    threads.shutdown()


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Timeouts of a request, and the number of its repetitions after failures, with growing delays."""

    connect_s: float = 20
    read_s: float = 60
    commit_s: float = 180  # at the end of an upload: some registries copy gigabytes before they answer
    retries: int = 5
    first_delay_s: float = 0.5
    longest_delay_s: float = 60

    @property
    def timeouts(self) -> tuple[float, float]:
        """The timeouts of a request, as the requests library takes them."""
        return self.connect_s, self.read_s

    def delay(self, failures: int, at_least: float = 0) -> float:
        """Seconds to wait after so many consecutive failures, with jitter: many builders do not retry at once."""
        delay: float = min(self.first_delay_s * 2 ** (failures - 1), self.longest_delay_s)
        return max(delay * random.uniform(0.5, 1), at_least)  # noqa: S311  no secret depends on it


class Retries:
    """Counts the failures in a row of one transfer.

    A failure with more progress than at any failure before begins a new row: a proxy that limits the time of a
    connection cuts a large file many times.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._best = 0
        self.failures = 0

    def delay(self, progress: int, at_least: float = 0) -> float | None:
        """Seconds until the next attempt, after a failure; None after too many."""
        if progress > self._best:
            self._best, self.failures = progress, 0
        self.failures += 1
        return self._policy.delay(self.failures, at_least) if self.failures <= self._policy.retries else None
