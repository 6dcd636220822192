"""`builder catalog`."""

from __future__ import annotations

import pytest

from builder.matrix.project import Project
from builder.release import status
from tests.fakes.registry import MemoryRegistry
from tests.unit.cli.conftest import CELL, Run


def test_the_command_writes_a_file(run: Run, tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "Repository", lambda *_, **__: MemoryRegistry())
    result = run("catalog", CELL)
    assert result.out.startswith("# Images\n\n1 images on 2026-11-22.")
    path = tiny.root / "out/catalog.md"
    assert run("catalog", CELL, "--output", str(path)).out == ""
    assert path.read_text(encoding="utf-8") == result.out
