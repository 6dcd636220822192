"""Fixtures of the unit tests, which use no network, engine or other program.

Snapshots are files in snapshots/ (and the locks of the tiny project). After an intended change:

    UPDATE_SNAPSHOTS=1 pytest tests/unit      # writes them; tests whose snapshot changed fail
    git diff tests/unit                       # review
    pytest tests/unit
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from builder.common import strict_yaml
from builder.common.strict_yaml import Located
from builder.layers.store import Store
from builder.matrix.project import Project
from tests.fakes.engine import MemoryConsole
from tests.paths import ROOT, UNIT

PARSE = strict_yaml.parse_yaml

settings.register_profile("unit", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that uses the network or a program fails; code under test cannot catch it, as it is no Exception."""

    def blocked(what: str) -> Callable[..., Any]:
        return lambda *_, **__: pytest.fail(f"a unit test called {what}")

    monkeypatch.setattr(socket.socket, "connect", blocked("socket.connect"))
    monkeypatch.setattr(socket.socket, "connect_ex", blocked("socket.connect_ex"))
    monkeypatch.setattr(socket, "create_connection", blocked("socket.create_connection"))
    monkeypatch.setattr(socket, "getaddrinfo", blocked("socket.getaddrinfo"))
    monkeypatch.setattr(subprocess.Popen, "__init__", blocked("subprocess.Popen"))
    monkeypatch.setattr(os, "system", blocked("os.system"))
    for name in (
        "DOCKER_HOST",
        "DOCKER_CONTEXT",
        "PIP_INDEX_URL",
        "UV_DEFAULT_INDEX",
        "UV_INDEX_URL",
        "SSL_CERT_FILE",
        "PIP_CERT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", "/nonexistent")  # a developer's contexts and logins


@cache
def _parse(blob: bytes, name: str) -> Located:
    """The real parser, cached: parsing the same bytes for each test would take most of the suite's time."""
    return PARSE(blob, name)


class SpareTemplates:
    """One copy of templates/ for all tests of a process: a copy for each test would take most of the suite's time.

    A test gets the copy itself, moved into its project, and may change it. A changed copy is not used again.
    """

    def __init__(self, folder: Path) -> None:
        self._spare = folder / "templates"
        self._state: set[tuple[object, ...]] = set()

    @contextmanager
    def moved_to(self, target: Path) -> Iterator[None]:
        if not self._spare.exists():
            # templates/host may have private files of this machine.
            private = shutil.ignore_patterns("host", "__pycache__")
            shutil.copytree(ROOT / "templates", self._spare, symlinks=True, ignore=private)
            (self._spare / "host").mkdir()
            shutil.copy2(ROOT / "templates/host/env.sh", self._spare / "host/env.sh")
            self._state = set(_state(self._spare))
        self._spare.rename(target)
        try:
            yield
        finally:
            if target.is_dir() and set(_state(target)) == self._state:
                target.rename(self._spare)


def _state(folder: str | Path) -> Iterator[tuple[object, ...]]:
    """A tuple for each file and folder below `folder`; any change of content, name or mode changes it."""
    for entry in os.scandir(folder):
        status = entry.stat(follow_symlinks=False)
        yield entry.name, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        if entry.is_dir(follow_symlinks=False):
            yield from _state(entry.path)


@pytest.fixture(scope="session")
def spare_templates(tmp_path_factory: pytest.TempPathFactory) -> SpareTemplates:
    return SpareTemplates(tmp_path_factory.mktemp("spare"))


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_templates: SpareTemplates) -> Iterator[Project]:
    """A writable copy of the tiny project, with the real templates."""
    monkeypatch.setattr(strict_yaml, "parse_yaml", _parse)
    root = tmp_path / "project"
    shutil.copytree(UNIT / "tiny", root)
    shutil.copy2(ROOT / "locks/uv.txt", root / "locks/uv.txt")
    with spare_templates.moved_to(root / "templates"):
        yield Project(root)


@pytest.fixture
def edit(tiny: Project) -> Callable[[str, str], Project]:
    """Replaces text that occurs once in the tiny matrix; returns the project, read again."""

    def replace(old: str, new: str) -> Project:
        path = tiny.root / "matrix.yaml"
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in the tiny matrix"
        path.write_text(text.replace(old, new), encoding="utf-8")
        return Project(tiny.root)

    return replace


@pytest.fixture
def bookworm(tiny: Project) -> Project:
    """The tiny project on a Debian release whose end of support is known. Request it before fixtures that read it."""
    files = [tiny.root / "matrix.yaml", *(tiny.root / "locks").glob("os-newbird-*.json")]
    for path in files:
        text = path.read_text(encoding="utf-8").replace("newbird", "bookworm")
        path.unlink()
        path.with_name(path.name.replace("newbird", "bookworm")).write_text(text, encoding="utf-8")
    return Project(tiny.root)


@pytest.fixture
def on_cpu(edit: Callable[[str, str], Project]) -> Project:
    """The tiny project with quartz on the CPU too, where it has no extra."""
    edit('  "12.9": {}\n', '  cpu: {}\n  "12.9": {}\n')
    edit("image: quartz-cuda\n", "image: quartz-cuda\n    cpu_image: quartz\n")
    edit("package: quartz[cuda]\n", 'package: quartz\n    package_on: {"12": "quartz[cuda]"}\n')
    return edit('{release: 0.5.3, cuda: ["12.9"]', '{release: 0.5.3, cuda: ["12.9", cpu]')


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    store = Store(tmp_path / "store")
    store.prepare()
    return store


@pytest.fixture
def snapshot() -> Callable[[str, str], None]:
    """Compares a text with a snapshot, a path below tests/unit; see the top of this file."""

    def compare(name: str, text: str) -> None:
        path = UNIT / name
        stored = path.read_text(encoding="utf-8") if path.exists() else None
        if os.environ.get("UPDATE_SNAPSHOTS") == "1" and stored != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            pytest.fail(f"{name}: written; review it with git diff")
        assert stored is not None, f"{name} is missing: write it with UPDATE_SNAPSHOTS=1"
        assert text == stored

    return compare


@pytest.fixture
def console() -> MemoryConsole:
    return MemoryConsole()
