"""Makes the `Run` of a test."""

from __future__ import annotations

from builder.common.console import View
from builder.engine.client import Engine
from builder.engine.run import Run
from builder.host import Host
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
) -> Run:
    """A run with a fake engine, and a store of its own beside the state of the project."""
    return Run(
        checkout=project,
        host=host or Host(),
        store=store or Store(project.state / "store"),
        view=View(console or MemoryConsole()),
        connected=engine or FakeEngine(),
    )
