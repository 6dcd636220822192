"""No login, proxy or network of this machine counts in tests of the registry client."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.fakes.wire import Answers, Wire

Lay = Callable[[Answers], Wire]
START = subprocess.Popen.__init__


@pytest.fixture(autouse=True)
def docker_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Docker's configuration file, which does not exist yet."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return tmp_path / "config.json"


@pytest.fixture
def lay(monkeypatch: pytest.MonkeyPatch) -> Lay:
    """Answers requests without a network."""
    return partial(Wire.install, monkeypatch)


@pytest.fixture
def programs(_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test start programs."""
    monkeypatch.setattr(subprocess.Popen, "__init__", START)
