"""What the command line says for every command: checkout, locks, consoles, store."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from builder import budget, plan, render, runlock
from builder.engine import Engine
from builder.host import Host
from builder.plan import Plan
from builder.project import Project
from builder.store import Store
from builder.view import View
from builder.work import Work

CELLS_HELP = "CELLS are ids, shell patterns or sets of matrix.yaml; default: the set `default`."
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass
class Context:
    """What the command line says for every command."""

    root: Path | None = None
    wait: bool = False
    store_root: Path | None = None
    store_limit: int = 0
    err: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))
    # A file or a pipe has no width to fold lines to.
    out: Console = field(default_factory=lambda: Console(highlight=False, width=None if sys.stdout.isatty() else 200))

    @property
    def project(self) -> Project:
        return Project.find((self.root or Path.cwd()).resolve())

    def say(self, text: str) -> None:
        self.err.print(Text(text), soft_wrap=True)

    @contextmanager
    def alone(self, project: Project, command: str) -> Iterator[None]:
        """Holds the checkout's lock, after removing what a killed holder left."""
        with runlock.held(project.state, f"builder {command}", wait=self.wait, say=self.say):
            project.sweep()
            yield

    def work(self, project: Project, view: View, lent: Host) -> Work:
        return Work(engine=Engine.connect(), project=project, host=lent, view=view)

    @property
    def store(self) -> Store:
        """The machine's store, shared by all checkouts unless told otherwise."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return Store((self.store_root or cache / "gpu-images").resolve(), limit=self.store_limit)


def cells_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("wanted", metavar="[CELLS]...", nargs=-1)(command)


def jobs_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "-j", "--jobs", type=click.IntRange(1, 32), default=2, show_default=True, help="Images at a time."
    )(command)


class Size(click.ParamType[int]):
    """Bytes as people write them: 40GB, 500M or plain digits."""

    name = "size"

    def __init__(self, *, positive: bool = False) -> None:
        self._positive = positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"([0-9]{1,15})([kMGT]?)B?", str(value), re.ASCII)
        if not found:
            self.fail(f"{value!r} is no size; write 40GB or 500MB", param, ctx)
        if value != 0 and self._positive and not int(found[1]):
            self.fail("expected more than 0", param, ctx)
        return int(found[1]) * _UNITS[found[2]]


def current_plan(project: Project, chosen: Sequence[Any]) -> Plan:
    """The plan, after making sure that images/ is what it would be rendered to, and within the budgets."""
    made = plan.make_locked(project, project.cells)
    render.check(project.root, render.render(project.root, project.matrix, made))
    ids = {cell.id for cell in chosen}
    images = tuple(image for image in made.images if image.id in ids)
    budget.check_plan(project.matrix, images)
    return Plan(images=images)
