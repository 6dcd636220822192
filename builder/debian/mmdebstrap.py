"""Installs mmdebstrap and Debian's keys."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from builder.common.console import View
from builder.index.host import KEYRING

INSTALL_S = 600
PACKAGES = ("mmdebstrap", "debian-archive-keyring")
APT_WAITS = ("-o", "DPkg::Lock::Timeout=120")  # s, for another apt: Ubuntu upgrades itself after it starts


def install_mmdebstrap(view: View) -> str:
    """Installs mmdebstrap with apt, as root, if it is missing.

    Returns the reason that it is not installed, or an empty string.
    """
    if is_installed():
        return ""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "it is not installed"
    view.say(f"installing {' and '.join(PACKAGES)} with apt-get")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    error = ""
    for arguments in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *PACKAGES]):
        try:
            done = subprocess.run(
                ["apt-get", *APT_WAITS, *arguments],
                env=environment, timeout=INSTALL_S, capture_output=True, text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"apt-get {arguments[0]} took more than {INSTALL_S} s"
        error = done.stderr.strip().rpartition("\n")[2] if done.returncode else error
    return "" if is_installed() else f"apt-get cannot install it: {error}"


def is_installed() -> bool:
    """True if mmdebstrap and Debian's keys are on this machine."""
    return shutil.which("mmdebstrap") is not None and Path(KEYRING).exists()
