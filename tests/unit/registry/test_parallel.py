"""Several requests at once: what is begun, finished and reported."""

from __future__ import annotations

import threading

import pytest

from builder.common.errors import NoRegistryError, RegistryError
from builder.registry import transfer
from builder.registry.transfer import pipeline

WAIT_S = 10


def ignore(_: object) -> None:
    """For inputs that do not fail."""


def test_the_next_begins_while_the_last_is_finished() -> None:
    begun: list[int] = []
    third_has_begun = threading.Event()

    def begin(number: int) -> int:
        begun.append(number)
        if number == 3:
            third_has_begun.set()
        return number

    def finish(_: int, number: int, stop: threading.Event) -> str:
        assert third_has_begun.wait(WAIT_S), "it waits for the first to be finished"
        return f"finished {number}"

    assert pipeline(begin, finish, [1, 2, 3], ignore) == ["finished 1", "finished 2", "finished 3"]
    assert begun == [1, 2, 3]


def test_all_failures_are_one_error() -> None:
    """Of both steps, in the order of the inputs; the others are finished."""
    failed: list[int] = []
    finished: list[int] = []

    def begin(number: int) -> int:
        if number == 3:
            raise RegistryError("cannot begin 3")
        return number

    def finish(_: int, number: int, stop: threading.Event) -> None:
        if number == 1:
            raise RegistryError("cannot finish 1")
        finished.append(number)

    with pytest.raises(RegistryError, match="2 images failed\ncannot finish 1\ncannot begin 3"):
        pipeline(begin, finish, [1, 2, 3, 4], failed.append)
    assert sorted(failed) == [1, 3]
    assert sorted(finished) == [2, 4]


@pytest.mark.parametrize("step", ["begin", "finish"])
def test_nothing_more_begins_without_the_registry(step: str) -> None:
    """An unreachable registry was tried again for each of 75 images."""
    begun: list[int] = []
    second_has_failed = threading.Event()

    def begin(number: int) -> int:
        if number == 3:
            assert second_has_failed.wait(WAIT_S)
        begun.append(number)
        if number == 1:
            raise RegistryError("damaged")
        if number == 2 and step == "begin":
            raise NoRegistryError("connection refused")
        return number

    def finish(_: int, number: int, stop: threading.Event) -> None:
        if number == 2:
            raise NoRegistryError("connection refused")

    def fail(number: int) -> None:
        if number == 2:
            second_has_failed.set()

    with pytest.raises(RegistryError, match=r"^2 images failed\ndamaged\nconnection refused$"):
        pipeline(begin, finish, range(1, 75), fail)
    assert len(begun) <= 4, "what had begun meanwhile"


def test_an_interrupt_stops_what_is_being_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "GRACE_S", WAIT_S)
    failed: list[int] = []
    stopped = threading.Event()

    def begin(number: int) -> int:
        if number == 2:
            raise KeyboardInterrupt
        return number

    def finish(number: int, _: int, stop: threading.Event) -> None:
        assert stop.wait(WAIT_S), "the event is not set"
        stopped.set()
        raise RegistryError("stopped")

    with pytest.raises(KeyboardInterrupt):
        pipeline(begin, finish, [1, 2, 3], failed.append)
    assert stopped.is_set()
    assert failed == [], "an interrupted image has not failed"
