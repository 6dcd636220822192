"""Installs mmdebstrap and Debian's keys, and reads the addresses of Debian's archives from it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from builder.common.console import View
from builder.index.host import KEYRING, AptSource, parse_targets

INSTALL_S = 600
SOURCES_S = 60
_MARK = "sources.list: "
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


def sources(release: str) -> tuple[AptSource, ...]:
    """Debian's own archives, as mmdebstrap writes them for a release; none if it cannot run."""
    # The hook stops mmdebstrap before it downloads or installs packages: a mode without root or namespaces is enough.
    hook = f'sed "s/^/{_MARK}/" "$1/etc/apt/sources.list" >&2; exit 1'
    command = ["mmdebstrap", "--quiet", "--mode=chrootless", "--variant=custom", "--format=null"]
    try:
        done = subprocess.run(
            [*command, f"--setup-hook={hook}", release, "/dev/null"],
            capture_output=True,
            text=True,
            timeout=SOURCES_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ()
    lines = [line.removeprefix(_MARK) for line in done.stderr.splitlines() if line.startswith(_MARK)]
    return parse_targets("".join(re.sub(r"^deb (?:\[[^]]*\] )?(\S+)", r"\1 Debian", line) + "\n" for line in lines))
