"""Programs that tests need, from Debian's packages."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from builder.debian import mmdebstrap
from builder.debian.apt import Archive
from builder.index import host
from tests.integration.checkout import ROOT

TIMEOUT_S = 300


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Holds a lock file: tests run in several processes."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def one_at_a_time() -> AbstractContextManager[None]:
    """apt runs in only one process."""
    return locked(ROOT / ".builder/test-cache/apt.lock")


def install_from(release: str, package: str) -> None:
    """Installs a package of a newer Debian release, which needs no other one from there."""
    with one_at_a_time():
        if shutil.which(package):
            return
        with _downloaded(release, package) as archive:
            subprocess.run(["dpkg", "-i", str(archive)], capture_output=True, check=True)
    assert shutil.which(package), f"`dpkg -i` did not install {package}"


def unpack_from(release: str, package: str, folder: Path) -> Path:
    """Unpacks a package of a newer Debian release, beside an installed one; returns the folder of its programs."""
    with one_at_a_time(), _downloaded(release, package) as archive:
        subprocess.run(["dpkg-deb", "--extract", str(archive), str(folder)], capture_output=True, check=True)
    return folder / "usr/bin"


@contextmanager
def _downloaded(release: str, package: str) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        # Mirrors may lag behind; what they have is signed.
        Archive(release, replace(host.read_host(), expired=frozenset({release})), Path(folder))
        environment = {**os.environ, "APT_CONFIG": f"{folder}/apt.conf"}
        subprocess.run(
            ["apt-get", "download", "-q", package],
            cwd=folder, env=environment, timeout=TIMEOUT_S, capture_output=True, check=True,
        )  # fmt: skip
        [archive] = Path(folder).glob("*.deb")
        yield archive


def install(program: str, package: str = "") -> None:
    """Installs the package of this name, or `package`, if the program is missing, without starting its services."""
    with one_at_a_time():
        if shutil.which(program):
            return
        for command in (["update", "-q"], ["install", "-y", "-q", package or program]):
            apt = ["apt-get", *mmdebstrap.APT_WAITS, *command]
            subprocess.run(apt, capture_output=True, timeout=2 * TIMEOUT_S, check=False)
    assert shutil.which(program), f"`apt-get install {program}` did not install it"
