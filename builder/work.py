"""What every step that touches the outside needs."""

from __future__ import annotations

from dataclasses import dataclass

from builder.engine import Engine
from builder.host import Host
from builder.project import Project
from builder.view import View


@dataclass(frozen=True, kw_only=True)
class Work:
    engine: Engine
    project: Project
    host: Host
    view: View
