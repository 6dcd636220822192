"""Fixtures of the unit tests. None of them reaches a network, an engine or another program.

Snapshots are files in snapshots/ (and the locks of the tiny project). After a wanted change:

    UPDATE_SNAPSHOTS=1 pytest tests/unit      # writes them, and fails where it wrote something
    git diff tests/unit                       # look
    pytest tests/unit
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from builder import strict_yaml
from builder.project import Project
from builder.strict_yaml import Located
from tests.unit.fakes import MemoryConsole

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PARSE = strict_yaml.parse

settings.register_profile("unit", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches out fails. `pytest.fail` raises no Exception, so nothing under test can catch it."""

    def blocked(what: str) -> Callable[..., Any]:
        return lambda *_, **__: pytest.fail(f"a unit test called {what}")

    monkeypatch.setattr(socket.socket, "connect", blocked("socket.connect"))
    monkeypatch.setattr(socket.socket, "connect_ex", blocked("socket.connect_ex"))
    monkeypatch.setattr(socket, "create_connection", blocked("socket.create_connection"))
    monkeypatch.setattr(socket, "getaddrinfo", blocked("socket.getaddrinfo"))
    monkeypatch.setattr(subprocess.Popen, "__init__", blocked("subprocess.Popen"))
    monkeypatch.setattr(os, "system", blocked("os.system"))
    for name in ("DOCKER_HOST", "PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "SSL_CERT_FILE", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)


@cache
def _parse(blob: bytes, name: str) -> Located:
    """As the real one; to parse the same bytes for every test would take most of the suite's time."""
    return PARSE(blob, name)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A writable copy of the tiny project, with the real templates."""
    monkeypatch.setattr(strict_yaml, "parse", _parse)
    root = tmp_path / "project"
    shutil.copytree(HERE / "tiny", root)
    # What a person put into templates/host is not part of the project.
    other = shutil.ignore_patterns("host", "__pycache__")
    shutil.copytree(ROOT / "templates", root / "templates", symlinks=True, ignore=other)
    (root / "templates/host").mkdir()
    shutil.copy2(ROOT / "templates/host/env.sh", root / "templates/host/env.sh")
    shutil.copy2(ROOT / "locks/uv.txt", root / "locks/uv.txt")
    return Project(root)


@pytest.fixture
def edit(tiny: Project) -> Callable[[str, str], Project]:
    """Replaces text that occurs once in the tiny matrix; returns the project, read anew."""

    def replace(old: str, new: str) -> Project:
        path = tiny.root / "matrix.yaml"
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the tiny matrix"
        path.write_text(text.replace(old, new), encoding="utf-8")
        return Project(tiny.root)

    return replace


@pytest.fixture
def on_cpu(edit: Callable[[str, str], Project]) -> Project:
    """The tiny project, with quartz on the cpu too: its extra is for CUDA alone."""
    edit('  "12.9": {}\n', '  cpu: {}\n  "12.9": {}\n')
    edit("image: quartz-cuda\n", "image: quartz-cuda\n    cpu_image: quartz\n")
    edit("package: quartz[cuda]\n", 'package: quartz\n    package_on: {"12": "quartz[cuda]"}\n')
    return edit('{release: 0.5.3, cuda: ["12.9"]', '{release: 0.5.3, cuda: ["12.9", cpu]')


@pytest.fixture
def snapshot() -> Callable[[str, str], None]:
    """Compares a text with a stored file, by its path below tests/unit; see the head of this file."""

    def compare(name: str, text: str) -> None:
        path = HERE / name
        stored = path.read_text(encoding="utf-8") if path.exists() else None
        if os.environ.get("UPDATE_SNAPSHOTS") == "1" and stored != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            pytest.fail(f"{name}: written, look at git diff")
        assert stored is not None, f"{name} is missing; UPDATE_SNAPSHOTS=1 writes it"
        assert text == stored

    return compare


@pytest.fixture
def console() -> MemoryConsole:
    return MemoryConsole()
