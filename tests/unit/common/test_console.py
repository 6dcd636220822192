"""Progress: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from builder.common.console import Meter, View
from tests.fakes.engine import MemoryConsole


def test_plain_lines(console: MemoryConsole) -> None:
    view = View(console)
    assert not view.console.is_terminal
    with view.live():
        view.add_images(["a", "b"])
        view.begin("a", "building")
        view.note("a", "half way")
        view.begin("a", "testing")
        view.end("a", "done", "12 tests passed")
        view.end("b", "blocked")
        view.say("[not markup] x" + " word" * 100)
    lines = console.text.splitlines()
    assert lines[:3] == ["a: building", "a: half way", "a: testing"]
    assert lines[3].startswith("a: done in 0.")
    assert lines[3].endswith(" s: 12 tests passed")
    assert lines[4:] == ["b: blocked", "[not markup] x" + " word" * 100]
    assert "\x1b" not in console.text


def test_the_table_on_a_terminal() -> None:
    console = MemoryConsole(terminal=True)
    view = View(console)
    with view.live():
        view.begin("wheels", "2 kB to be downloaded")
        view.add_images(["first-cell", "second-cell"])
        view.end("wheels", "downloaded", "2 kB")
        view.begin("first-cell", "building")
        view.note("first-cell", "RUN it")
        table = MemoryConsole()
        table.print(view._table())
        view.end("first-cell", "done", "12 tests passed")
        rest = MemoryConsole()
        rest.print(view._table())
    first, total = table.text.splitlines()
    assert first.split()[:2] == ["first-cell", "building"]
    assert first.rstrip().endswith("RUN it")
    assert total.split() == ["total", "2", "images:", "1", "waiting"]
    assert rest.text.split() == ["total", "2", "images:", "1", "done,", "1", "waiting"]
    assert "12 tests passed" in console.text
    view.add_images(["first-cell"])  # for the next step, such as staging
    assert view.rows["first-cell"].state == "waiting"


class DrawingConsole(MemoryConsole):
    """Draws the table in another thread before it prints, as Live does. `is_free` is False if that thread waits."""

    view: View
    is_free = True

    def print(self, *objects: object, **options: Any) -> None:
        drawing = threading.Thread(target=self.view._table, daemon=True)
        drawing.start()
        drawing.join(5)
        self.is_free &= not drawing.is_alive()
        super().print(*objects, **options)


def test_printing_never_waits_for_the_thread_that_draws_the_table() -> None:
    """That thread has the lock of Live, which printing needs: both waited for ever."""
    console = DrawingConsole()
    console.view = view = View(console)
    view.add_images(["cell"])
    view.begin("cell", "building")
    view.say("a line")
    view.say_once("another")
    view.end("cell", "done")
    assert console.is_free
    assert console.text.splitlines()[:3] == ["cell: building", "a line", "another"]


def test_notes_are_neither_markup_nor_escape_sequences() -> None:
    """A step of buildx begins with its stage in brackets, which the table left out; `[/x]` ended the run."""
    console, terminal = MemoryConsole(), MemoryConsole(terminal=True)
    for output in (console, terminal):
        view = View(output)
        view.begin("a", "building")
        view.note("a", "[image 2/9] RUN [/x] \x1b[2Jhere")
        table = MemoryConsole()
        table.print(view._table())
        assert table.text.split() == ["a", "building", "0.0", "s", "[image", "2/9]", "RUN", "[/x]", "here"]
    assert console.text == "a: building\na: [image 2/9] RUN [/x] here\n"


class Clock:
    """Stands in for time.monotonic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("total", "added", "lines"),
    [
        (
            3_000_000,
            [(1.0, 100_000), (13.9, 100_000), (0.2, 100_000), (1.0, 100_000), (13.9, 100_000)],
            ["wheels: 3.0 MB to be downloaded", "wheels: 300 kB of 3.0 MB"],
        ),
        (
            2000,
            [(0, 1999), (1, 1)],
            ["wheels: 2 kB to be downloaded", "wheels: downloaded in 1.0 s: 2 kB"],
        ),
        (9000, [(0, 5000), (0, -3000), (15, 0)], ["wheels: 9 kB to be downloaded", "wheels: 2 kB of 9 kB"]),
        (0, [(0, 7_000_000), (15, 1_000_000)], ["wheels: 8.0 MB downloaded"]),
        (0, [(16, 0), (16, 7_000_000), (16, 0), (16, 1)], ["wheels: 7.0 MB downloaded"]),
    ],
    ids=["every 15 seconds", "the last byte", "bytes that are lost", "unknown total", "nothing new"],
)
def test_a_meter_prints_plain_lines(
    console: MemoryConsole, clock: Clock, total: int, added: list[tuple[float, int]], lines: list[str]
) -> None:
    meter = Meter(View(console), "wheels", "downloaded", total, ends_row=True)
    for pause, count in added:
        clock.now += pause
        meter.add(count)
    assert console.text.splitlines() == lines


def test_a_meter_on_a_terminal_is_updated_often(clock: Clock) -> None:
    view = View(MemoryConsole(terminal=True))
    meter = Meter(view, "wheels", "downloaded", 9000)
    notes = []
    for pause in (0.125, 0.125, 0.125, 0.125):
        clock.now += pause
        meter.add(1000)
        notes.append(view.rows["wheels"].note)
    assert notes == ["", "2 kB of 9 kB", "2 kB of 9 kB", "4 kB of 9 kB"]


def test_a_download_of_unknown_size_has_a_line(clock: Clock) -> None:
    """`builder add` showed nothing while it downloaded."""
    view = View(MemoryConsole(terminal=True))
    meter = Meter(view, "wheels", "downloaded", 0)
    clock.now += 1
    meter.add(3000)
    table = MemoryConsole()
    table.print(view._table())
    assert table.text.split() == ["wheels", "3", "kB", "downloaded"]
