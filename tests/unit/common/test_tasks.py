"""Threads end with their block, except after an interrupt. The delays between tries of a request."""

from __future__ import annotations

import threading

import pytest

from builder.common.tasks import RetryPolicy, thread_pool


class Work:
    """A task that runs until it is released, in a pool of one thread, and one that waits for it."""

    def __init__(self) -> None:
        self.begun, self.released, self.second = threading.Event(), threading.Event(), threading.Event()
        self.ended = False

    def first(self) -> None:
        self.begun.set()
        assert self.released.wait(timeout=30)
        self.ended = True

    def run(self, error: BaseException) -> None:
        with thread_pool(1, "test") as pool:
            pool.submit(self.first)
            pool.submit(self.second.set)
            assert self.begun.wait(timeout=30)
            raise error


def test_all_work_is_done_at_the_end() -> None:
    with thread_pool(2, "test") as pool:
        futures = [pool.submit(pow, 2, power) for power in range(20)]
    assert [future.result(timeout=0) for future in futures] == [2**power for power in range(20)]


def test_after_an_error_only_what_runs_is_waited_for() -> None:
    work = Work()
    threading.Timer(0.2, work.released.set).start()
    with pytest.raises(ValueError, match="wrong"):
        work.run(ValueError("wrong"))
    assert work.ended
    assert not work.second.is_set()


def test_after_an_interrupt_nothing_is_waited_for() -> None:
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        work.run(KeyboardInterrupt())
    assert not work.ended, "nothing releases it before the block ends"
    work.released.set()
    assert not work.second.wait(timeout=0.2)


def test_delays_grow_to_a_limit_and_are_never_shorter_than_asked_for() -> None:
    policy = RetryPolicy(first_delay_s=1, longest_delay_s=10)
    for failed, most in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (99, 10)):
        delays = [policy.delay(failed) for _ in range(200)]
        assert most / 2 <= min(delays) < max(delays) <= most
    assert policy.delay(1, 7) == 7
