"""How many images are processed at the same time follows from the machine, within the limits of a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from builder.common import machine

GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 processors and 256 GiB of memory, which has no control group of its own."""
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    (tmp_path / "meminfo").write_text(f"MemTotal: {256 * GIB >> 10} kB\nMemAvailable: {200 * GIB >> 10} kB\n")
    return tmp_path


def test_a_large_machine_is_used(folder: Path) -> None:
    """It was two images on every machine."""
    assert (machine.processors(), machine.memory()) == (64, 256 * GIB)
    assert machine.default_jobs() == machine.MOST_JOBS


@pytest.mark.parametrize(
    ("quota", "memory", "jobs"),
    [
        ("max 100000", "max", 32),
        ("350000 100000", "max", 4),
        ("50000 100000", "max", 1),
        ("max 100000", str(33 * GIB), 8),
        ("max 100000", str(GIB), 1),
    ],
)
def test_the_limits_of_a_container_count(folder: Path, quota: str, memory: str, jobs: int) -> None:
    (folder / "cpu.max").write_text(f"{quota}\n")
    (folder / "memory.max").write_text(f"{memory}\n")
    (folder / "memory.current").write_text("0\n")
    assert machine.default_jobs() == jobs
