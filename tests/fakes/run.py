"""Makes the `Run` of a test."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import date

from builder.common.console import View
from builder.common.errors import EngineError
from builder.debian.apt import AptRunner
from builder.engine.client import Engine
from builder.engine.run import Run
from builder.index.host import Host, RunProgram
from builder.layers.store import Store
from builder.matrix.project import Project
from tests.fakes.engine import FakeEngine, MemoryConsole


def new_run(
    project: Project,
    *,
    engine: Engine | None = None,
    store: Store | None = None,
    host: Host | None = None,
    console: MemoryConsole | None = None,
    today: date = date(2026, 11, 22),
) -> Run:
    """A run with a fake engine, and a store of its own beside the state of the project."""
    connected = engine or FakeEngine()
    return Run(
        checkout=project,
        host=host or Host(),
        store=store or Store(project.state / "store"),
        view=View(console or MemoryConsole()),
        connect=lambda: connected,
        today=today,
    )


class FakeApt(AptRunner):
    """apt in a container that `start` starts; without it, there is no engine."""

    def __init__(self, start: Callable[[], AbstractContextManager[RunProgram]] | None = None) -> None:
        self.console = MemoryConsole()
        super().__init__(View(self.console))
        self._start = start

    def container(self) -> AbstractContextManager[RunProgram]:
        if self._start is None:
            raise EngineError("no Docker Engine answers")
        return self._start()

    @property
    def said(self) -> list[str]:
        return self.console.text.splitlines()
