"""Each unit test is alone: it cannot use a network or another program, and no other test sees its templates."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from filecmp import dircmp
from pathlib import Path
from typing import TYPE_CHECKING

import docker
import pytest
import requests

from tests.paths import ROOT

if TYPE_CHECKING:
    from tests.unit.conftest import SpareTemplates

REACHING: dict[str, Callable[[], object]] = {
    "socket": lambda: socket.socket().connect(("127.0.0.1", 9)),
    "local socket": lambda: socket.socket(socket.AF_UNIX).connect("/nowhere.sock"),
    "connection": lambda: socket.create_connection(("127.0.0.1", 9)),
    "name": lambda: socket.getaddrinfo("example.test", 80),
    "HTTP": lambda: requests.get("http://example.test/", timeout=1),
    "program": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "shell": lambda: os.system("true"),
    "engine": lambda: docker.from_env().ping(),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("reach", REACHING.values(), ids=REACHING.keys())
def test_network_and_programs_fail_the_test(reach: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match="a unit test called"):
        reach()


CHANGES: dict[str, Callable[[Path], object]] = {
    "edited": lambda folder: (folder / "os.j2").write_text("x"),
    "mode": lambda folder: (folder / "os.j2").chmod(0o700),
    "added": lambda folder: (folder / "base/files/new").write_text(""),
    "removed": lambda folder: (folder / "base/files/etc/profile.d/10-venv.sh").unlink(),
    "renamed": lambda folder: (folder / "os.j2").rename(folder / "other.j2"),
    "deleted": shutil.rmtree,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_templates_that_a_test_changes_are_not_used_again(
    spare_templates: SpareTemplates, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    with spare_templates.moved_to(first):
        inode = (first / "os.j2").stat().st_ino
    with spare_templates.moved_to(second):
        assert (second / "os.j2").stat().st_ino == inode, "copied though nothing was changed"
        change(second)
    with spare_templates.moved_to(third):
        assert differences(dircmp(ROOT / "templates", third, ignore=["host", "__pycache__"])) == []


def differences(folders: dircmp[str]) -> list[str]:
    names = [*folders.left_only, *folders.right_only, *folders.diff_files, *folders.funny_files]
    names += [name for name in folders.common_files if mode(folders.left, name) != mode(folders.right, name)]
    return names + [name for below in folders.subdirs.values() for name in differences(below)]


def mode(folder: str, name: str) -> int:
    return Path(folder, name).lstat().st_mode
