"""One builder at a time in one checkout."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from builder import runlock
from builder.errors import BusyError


def quiet(_: str) -> None:
    return


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    with (
        runlock.held(tmp_path, "builder images", wait=False, say=quiet),
        pytest.raises(BusyError) as caught,
        runlock.held(tmp_path, "builder lock", wait=False, say=quiet),
    ):
        pytest.fail("two hold it")
    assert f"`builder images` (pid {os.getpid()}, since " in str(caught.value)
    assert "--wait" in caught.value.hint


def test_refusal_leaves_the_name_of_the_holder(tmp_path: Path) -> None:
    with runlock.held(tmp_path, "first", wait=False, say=quiet):
        for _ in range(2):
            with pytest.raises(BusyError, match="`first`"), runlock.held(tmp_path, "x", wait=False, say=quiet):
                pytest.fail("two hold it")


def work(state: Path, command: str, *, fail: bool = False) -> list[str]:
    done = []
    with runlock.held(state, command, wait=False, say=quiet):
        if fail:
            raise RuntimeError
        done.append(command)
    return done


def test_free_again_after_the_end(tmp_path: Path) -> None:
    assert work(tmp_path / "new", "first") == ["first"]
    assert work(tmp_path / "new", "second") == ["second"]


def test_free_again_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        work(tmp_path, "first", fail=True)
    assert work(tmp_path, "second") == ["second"]


def test_waiting(tmp_path: Path) -> None:
    said: list[str] = []
    waits, order = threading.Event(), []

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    def second() -> None:
        with runlock.held(tmp_path, "second", wait=True, say=say):
            order.append("second")

    thread = threading.Thread(target=second)
    with runlock.held(tmp_path, "first", wait=False, say=quiet):
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert len(said) == 1
    assert said[0].startswith("waiting for another builder: `first` (pid ")


@pytest.mark.parametrize("content", ["", '{"pid": 1', "[]", "1", '{"pid": 1}', "é"])
def test_a_holder_that_has_not_written_its_name(tmp_path: Path, content: str) -> None:
    with runlock.held(tmp_path, "first", wait=False, say=quiet):
        (tmp_path / "lock").write_text(content, encoding="latin-1")
        with (
            pytest.raises(BusyError, match="one that has just begun"),
            runlock.held(tmp_path, "second", wait=False, say=quiet),
        ):
            pytest.fail("two hold it")
