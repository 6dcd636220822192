"""Runs the command line in this process, in the tiny project."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import NoReturn

import pytest

from builder import cli
from builder.cli.context import Context
from builder.index.host import Host
from builder.layers import oci
from builder.layers.oci import CONFIG_TYPE, MANIFEST_TYPE
from builder.layers.store import Store
from builder.lock.lockfile import GROUP_LOCKS
from builder.matrix.project import Project
from tests.fakes import locks

CELL = "qz-0.5-cu129-py311"
UNLOCKED = "em-1.9-cu129-py39"
TODAY = date(2026, 11, 22)


@dataclass
class Result:
    """`code` is the exit code."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(tiny: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Calls `main` with arguments, on a day. The store is beside the project; the machine has no settings."""
    monkeypatch.chdir(tiny.root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny.root.parent / "cache"))
    monkeypatch.delenv("GPU_IMAGES_STORE", raising=False)
    monkeypatch.delenv("GPU_IMAGES_STORE_LIMIT", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("builder.index.host.read_host", Host)
    before = signal.getsignal(signal.SIGTERM)

    def exit_(code: int) -> NoReturn:
        raise SystemExit(code)

    def call(*arguments: str, today: date = TODAY) -> Result:
        monkeypatch.setattr(sys, "argv", ["builder", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main(obj=Context(today=today))
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, out, err)

    monkeypatch.setattr(os, "_exit", exit_)
    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def locked(tiny: Project) -> Project:
    """The tiny project with a lock for every cell."""
    for group, cells in tiny.groups.items():
        (tiny.root / GROUP_LOCKS.path(group)).write_text(GROUP_LOCKS.dump(locks.lock_of(tiny, cells)))
    return tiny


def store_of(tiny: Project, *names: str) -> Store:
    """The store of the tiny project, with an image under each of the names."""
    store = Store(tiny.root.parent / "cache/gpu-images")
    store.prepare()
    for name in names:
        config = store.put(json.dumps({"rootfs": {"diff_ids": []}, "name": name}).encode(), CONFIG_TYPE)
        store.name(name, store.put(oci.manifest(config, []), MANIFEST_TYPE))
    return store
