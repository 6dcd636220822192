"""What the steps of one command work with: the checkout, this machine, the store, the progress, and the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import cached_property

from builder.common.console import View
from builder.common.errors import UsageError
from builder.engine.client import Engine
from builder.index.host import Host
from builder.layers.store import Store
from builder.matrix.project import Project


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a command. Most commands need no engine: it is connected to on first use.

    `checkout` is None outside a checkout, where some commands work too. `connect` may install and start an
    engine. `today` is the day, in UTC.
    """

    checkout: Project | None
    host: Host
    store: Store
    view: View
    connect: Callable[[], Engine] = Engine.connect
    today: date = field(default_factory=lambda: datetime.now(UTC).date())

    @property
    def project(self) -> Project:
        """The checkout. Raises UsageError outside a checkout."""
        if self.checkout is None:
            raise UsageError("no matrix.yaml here or in a folder above", hint="Run this in a checkout.")
        return self.checkout

    @cached_property
    def engine(self) -> Engine:
        """The engine. Raises EngineError if none is running, or cannot be started."""
        return self.connect()
