"""What a person sees while images are built: a live table on a terminal, plain lines elsewhere.

Everything goes to standard error; standard output is for what a command was asked to print.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from builder.progress import BuildProgress, Step, describe, short_name

# Steps that take time; copies and settings do not.
_WORTH_A_LINE = re.compile(r"\bRUN\b|\binstall\b|^exporting")
_STYLES = {"done": "green", "failed": "bold red", "waiting": "dim"}


def size(count: int) -> str:
    """Bytes as people write them: 4.1 GB (decimal, as registries and disks count)."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < (999.5 if unit in ("B", "kB") else 999.95) or unit == "GB":
            return f"{value:.0f} {unit}" if unit in ("B", "kB") else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """3.2 s, 75 s or 4 min 5 s."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


@dataclass
class Row:
    """One image's line. `state` is waiting, building, testing, done or failed."""

    state: str = "waiting"
    note: str = ""
    began: float = 0.0
    ended: float = 0.0
    progress: BuildProgress | None = None


@dataclass
class View:
    """Rows by image id; safe to call from several threads."""

    console: Console
    rows: dict[str, Row] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _told: set[str] = field(default_factory=set)

    @property
    def is_live(self) -> bool:
        return self.console.is_terminal

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the table while the block runs, if there is a terminal."""
        if not self.is_live:
            yield
            return
        with Live(get_renderable=self._table, console=self.console, refresh_per_second=8, transient=True):
            yield

    def wait_for(self, images: Iterable[str]) -> None:
        """Lists images that will come."""
        with self._lock:
            for image in images:
                self.rows.setdefault(image, Row())

    def say(self, text: str) -> None:
        """One line above the table."""
        with self._lock:
            self.console.print(Text(text), highlight=False, soft_wrap=True)

    def begin(self, image: str, state: str, progress: BuildProgress | None = None) -> None:
        with self._lock:
            row = self.rows.setdefault(image, Row())
            if row.state in ("done", "failed"):
                row.began = 0.0  # it is for something else now
            row.state, row.progress, row.note = state, progress, ""
            row.began = row.began or time.monotonic()
        if not self.is_live:
            self.say(f"{image}: {state}")

    def steps(self, image: str, changed: list[Step]) -> None:
        """A build's steps that began or ended."""
        if self.is_live:
            return
        for step in changed:
            name = short_name(step.vertex.name)
            if not _WORTH_A_LINE.search(name):
                continue
            line = f"{image}: {name} {describe(step.vertex) if step.vertex.completed else '...'}"
            with self._lock:
                told = line in self._told  # BuildKit tells of a step again when another build shares it
                self._told.add(line)
            if not told:
                self.say(line)

    def end(self, image: str, state: str, note: str = "") -> None:
        """The image is done or failed; `note` says more."""
        with self._lock:
            row = self.rows.setdefault(image, Row())
            row.state, row.note, row.ended = state, note, time.monotonic()
            took = f" in {duration(row.ended - row.began)}" if row.began else ""
        self.console.print(
            Text(f"{image}: "), Text(state, style=_STYLES.get(state, "")), Text(f"{took}{': ' + note if note else ''}"),
            sep="", highlight=False, soft_wrap=True,
        )  # fmt: skip

    def note(self, image: str, note: str) -> None:
        with self._lock:
            self.rows.setdefault(image, Row()).note = note
        if not self.is_live:
            self.say(f"{image}: {note}")

    def _table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        with self._lock:
            for image, row in self.rows.items():
                if row.state in ("done", "failed"):
                    continue  # has its own line above
                elapsed = duration(time.monotonic() - row.began) if row.began else ""
                table.add_row(
                    Text(image, style="bold"),
                    Text(row.state, style=_STYLES.get(row.state, "cyan")),
                    elapsed,
                    _what(row),
                )
        return table


class Meter:
    """Bytes that come or go, shown in a row of a view: often on a terminal, every few seconds elsewhere.

    `total` 0 is one that nobody knows. Safe to call from several threads.
    """

    PLAIN_S, LIVE_S = 5.0, 0.2

    def __init__(self, view: View, row: str, verb: str, total: int) -> None:
        self._view, self._row, self._verb, self._total = view, row, verb, total
        self._count = 0
        self._ended = False
        self._told = time.monotonic()
        self._lock = threading.Lock()
        if total:
            view.begin(row, f"{size(total)} to be {verb}")

    def add(self, count: int) -> None:
        with self._lock:
            self._count += count
            now, pause = time.monotonic(), self.LIVE_S if self._view.is_live else self.PLAIN_S
            if self._ended or (now - self._told < pause and self._count < (self._total or math.inf)):
                return
            self._ended = is_whole = bool(self._total) and self._count >= self._total
            self._told = now
            text = f"{size(self._count)}{f' of {size(self._total)}' if self._total else ''} {self._verb}"
        if is_whole:
            self._view.end(self._row, "done", text)
        else:
            self._view.note(self._row, text)


def _what(row: Row) -> str:
    step = row.progress.running if row.progress else None
    if step is None:
        return row.note
    text = short_name(step.vertex.name)
    if step.total:
        text += f"  {size(step.current)} of {size(step.total)}"
    elif step.current:
        text += f"  {size(step.current)}"
    return f"{text}  {step.tail[-1]}" if step.tail else text
