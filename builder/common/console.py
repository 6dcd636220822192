"""Progress of a run: a live table on a terminal, plain lines elsewhere.

Progress goes to standard error; standard output is for the result of a command.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from builder.common.text import counted, duration, printable, size


@dataclass
class Row:
    """The progress of one image, operating system or download. `state` is waiting, building, testing, done or failed.

    An image waits until `began` is set. `is_over`: this state is the last state.
    """

    state: str = "waiting"
    note: str = ""
    began: float = 0.0
    is_over: bool = False


@dataclass
class View:
    """The progress of images and of what they need, in rows by name. Thread-safe.

    `begin` and `add_images` add rows. The total counts only the images of `add_images`.
    """

    console: Console
    rows: dict[str, Row] = field(default_factory=dict)
    _images: dict[str, None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _printed: set[str] = field(default_factory=set)

    @contextmanager
    def live(self) -> Iterator[None]:
        """On a terminal, shows a line for each image in progress, and a total, while the block runs."""
        table = Live(get_renderable=self._table, console=self.console, refresh_per_second=8, transient=True)
        with table if self.console.is_terminal else nullcontext():
            yield

    def add_images(self, images: Iterable[str]) -> None:
        """Adds rows of images, which wait unless they have begun. An image that is done waits for its next step."""
        with self._lock:
            self._images = dict.fromkeys(images)
            self.rows |= {image: Row() for image in self._images if image not in self.rows or self.rows[image].is_over}

    def say(self, text: str) -> None:
        """Prints a line above the table."""
        # Without the lock: Live draws the table in a thread, which holds Live's lock and waits for this one.
        self.console.print(Text(printable(text)), highlight=False, soft_wrap=True)

    def begin(self, image: str, state: str) -> None:
        """Sets the state of the image, and starts to count its time."""
        with self._lock:
            row = self.rows.get(image)
            began = row.began if row and row.began and not row.is_over else time.monotonic()
            self.rows[image] = Row(state=state, began=began)
        if not self.console.is_terminal:
            self.say(f"{image}: {state}")

    def say_once(self, text: str) -> None:
        """Prints a line above the table, unless the same line was printed before."""
        with self._lock:
            is_new = text not in self._printed
            self._printed.add(text)
        if is_new:
            self.say(text)

    def end(self, image: str, state: str, note: str = "") -> None:
        """Sets the last state of the image, such as done or failed; `note` gives details."""
        with self._lock:
            row = self.rows.setdefault(image, Row())
            row.state, row.note, row.is_over = state, note, True
            took = f" in {duration(time.monotonic() - row.began)}" if row.began else ""
        self.console.print(
            Text(f"{image}: "), Text(state, style="bold red" if state == "failed" else "green"),
            Text(f"{took}{': ' + note if note else ''}"),
            sep="", highlight=False, soft_wrap=True,
        )  # fmt: skip

    def note(self, image: str, note: str) -> None:
        """Shows `note` beside the state of the image on a terminal, prints it elsewhere."""
        with self._lock:
            self.rows.setdefault(image, Row()).note = note
        if not self.console.is_terminal:
            self.say(f"{image}: {note}")

    def _table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2), expand=True)  # a narrow terminal shortens the notes alone
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        with self._lock:
            for name, row in self.rows.items():
                if row.is_over or not (row.began or row.note):
                    continue  # only what runs has a line: a terminal has no room for 60 images
                # A download of unknown size has only a note.
                state, elapsed = (row.state, duration(time.monotonic() - row.began)) if row.began else ("", "")
                table.add_row(Text(name, style="bold"), Text(state, style="cyan"), elapsed, Text(printable(row.note)))
            rows = [self.rows[image] for image in self._images]
        if rows:
            states = Counter(row.state for row in rows if row.is_over or not row.began)
            counts = ", ".join(f"{count} {state}" for state, count in states.items())
            table.add_row("total", "", "", f"{counted(len(rows), 'image')}{counts and ': '}{counts}")
        return table


class Meter:
    """A count of bytes, shown in a row of a view: often on a terminal, at most every 15 s elsewhere. Thread-safe.

    `total` is 0 if it is unknown. `verb` is a participle, such as "downloaded". With `ends_row`, the row has no other
    work, and ends with the last byte.
    """

    PLAIN_S, LIVE_S = 15.0, 0.2  # every 5 s, a log of CI had 40 lines while one image was loaded

    def __init__(self, view: View, row: str, verb: str, total: int, *, ends_row: bool = False) -> None:
        self._view, self._row, self._verb, self._total, self._ends_row = view, row, verb, total, ends_row
        self._count, self._text = 0, ""
        self._ended = False
        self._shown = time.monotonic()
        self._lock = threading.Lock()
        if total:
            view.begin(row, f"{size(total)} to be {verb}")

    def add(self, count: int) -> None:
        with self._lock:
            self._count += count
            now, pause = time.monotonic(), self.LIVE_S if self._view.console.is_terminal else self.PLAIN_S
            is_complete = bool(self._total) and self._count >= self._total
            text = f"{size(self._count)} of {size(self._total)}" if self._total else f"{size(self._count)} {self._verb}"
            is_news = now - self._shown >= pause and self._count and text != self._text
            if self._ended or not (is_complete or is_news):
                return
            self._ended, self._shown, self._text = is_complete, now, text
        if is_complete and self._ends_row:
            self._view.end(self._row, self._verb, size(self._total))
        else:
            self._view.note(self._row, text)
