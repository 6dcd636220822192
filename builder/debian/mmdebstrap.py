"""What mmdebstrap needs: the program, Debian's keys, and a local repository of locked packages, without the network.

apt needs the control file of each package, its size and its hash. The builder has checked the hashes against the lock,
so the repository is not signed. Sources: deb(5); Debian's wiki, "DebianRepository/Format".
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from builder.common.console import View
from builder.common.errors import BuildError
from builder.debian.os_lock import OsLock
from builder.index.host import KEYRING

INSTALL_S = 600
PACKAGES = ("mmdebstrap", "debian-archive-keyring")
APT_WAITS = ("-o", "DPkg::Lock::Timeout=120")  # s, for another apt: Ubuntu upgrades itself after it starts
_MAGIC, _HEADER = b"!<arch>\n", 60  # of an ar archive: the first bytes, and the size of the header of each member


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


def repository_lists(lock: OsLock, paths: Mapping[str, Path]) -> dict[str, bytes]:
    """The lists of a flat repository of the locked packages: name -> content. `paths` are their files, by SHA-256.

    Raises BuildError for a file that is not a Debian package.
    """
    paragraphs = []
    for package in lock.packages:
        fields = _control(paths[package.sha256], package.file).strip("\n")
        paragraphs.append(f"{fields}\nFilename: ./{package.file}\nSize: {package.size}\nSHA256: {package.sha256}\n\n")
    listed = "".join(paragraphs).encode()
    # apt selects the release's essential packages by its codename: mmdebstrap's `?essential` is limited to it.
    head = f"Origin: Debian\nSuite: {lock.debian}\nCodename: {lock.debian}\n"
    head += f"Architectures: all {lock.arch}\nComponents: main\n"
    hashes = f"SHA256:\n {hashlib.sha256(listed).hexdigest()} {len(listed)} Packages\n"
    return {"Packages": listed, "Release": f"{head}{hashes}".encode()}


def _control(path: Path, name: str) -> str:
    """The control file of a Debian package."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError("not an ar archive")
            while header := file.read(_HEADER):
                member, size = header[:16].decode("ascii").strip().rstrip("/"), int(header[48:58])
                if not member.startswith("control.tar"):
                    file.seek(size + size % 2, io.SEEK_CUR)
                    continue
                with tarfile.open(fileobj=io.BytesIO(file.read(size))) as tar:
                    for entry in tar:
                        content = tar.extractfile(entry) if entry.name.removeprefix("./") == "control" else None
                        if content:
                            return content.read().decode("utf-8")
        raise ValueError("it has no control file")
    except (ValueError, tarfile.TarError) as error:
        raise BuildError(f"{name} is not a Debian package: {error}") from error
