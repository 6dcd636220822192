"""Programs that tests need, from Debian's packages."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.integration.checkout import ROOT

TIMEOUT_S = 300


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """A lock: tests run in several processes, but apt in only one."""
    lock = ROOT / ".builder/test-cache/apt.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(program: str) -> None:
    """Installs the package of this name if the program is missing, without starting its services."""
    with one_at_a_time():
        if shutil.which(program):
            return
        for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-y", "-q", program]):
            subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert shutil.which(program), f"`apt-get install {program}` did not install it"
