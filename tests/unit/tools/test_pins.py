"""Which pins are old, by the dates of their lines in git."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from tests.fakes.engine import Programs
from tests.paths import ROOT
from tools import pins

PINNED = datetime(2026, 1, 1, tzinfo=UTC)


def blame(command: list[str]) -> tuple[int, str, str]:
    lines = (ROOT / command[-1]).read_text(encoding="utf-8").splitlines()
    head = f"committer-time {PINNED.timestamp():.0f}"
    return 0, "".join(f"{head}\n\t{line}\n" for line in lines), ""


@pytest.mark.parametrize(
    ("days", "names"),
    [
        (90, set()),
        (91, {"debian:bullseye-slim", "debian:bookworm-slim", "debian:trixie-slim", "locks/builder.txt"}),
        (366, {"actions/checkout", "cosign", "uv"}),
    ],
)
def test_an_old_pin_is_named_the_day_after(monkeypatch: pytest.MonkeyPatch, days: int, names: set[str]) -> None:
    monkeypatch.setattr(subprocess, "run", Programs(blame))
    lines = pins.old_pins(PINNED + timedelta(days=days))
    found = {line.split()[0] for line in lines}
    assert found >= names
    assert bool(found) == bool(names)
