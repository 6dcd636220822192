"""uv's builds of Python: lists them, locks one by its hash, and downloads it.

The pinned uv contains the list of builds with their hashes, one build for each release. Builds are downloaded from uv's
mirror setting (`UV_PYTHON_INSTALL_MIRROR`, `python-install-mirror`), or from uv's default address.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote, unquote

from builder.common.errors import FetchError, LockError
from builder.index.download import Address, FileSource
from builder.index.host import Host, RunProgram
from builder.index.session import IndexSession
from builder.lock.python_lock import ARCHIVE, LockedPython, python_key

TIMEOUT_S = 120
LIST = "UV_PYTHON_DOWNLOADS_JSON_URL"  # another list than that of the pinned uv
_EXPECTED = re.compile(r"Expected:\s+([0-9a-f]{64})\b")
_LIST_HINT = "`.venv/bin/uv python list --only-downloads` shows why. `make .venv/.ready` installs the pinned uv."


def uv_program() -> str:
    """The locked uv, if the builder was set up with it."""
    beside = Path(sys.executable).parent / "uv"
    return str(beside) if beside.exists() else "uv"


class PythonBuilds:
    """uv's list of its builds for the images' platform; `run` runs uv."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.run: RunProgram = subprocess.run
        # Without the user's settings of uv, which may turn off downloads. With UV_PYTHON_CACHE_DIR, the empty archive
        # of `lock` would stay in that cache.
        others = {name: value for name, value in os.environ.items() if not name.startswith("UV_") or name == LIST}
        self._environ = others | host.index.environment()

    def lock(self, release: str, present: LockedPython | None) -> LockedPython:
        """The lock of a release; `present`, if uv still has that build. Raises LockError and FetchError."""
        address = self.addresses.get(release, "")
        file = unquote(address.rpartition("/")[2])
        if present and present.file == file:
            return present
        if not re.fullmatch(ARCHIVE, file):
            minor = release.rpartition(".")[0]
            others = [version for version in self.addresses if version.startswith(f"{minor}.")]
            raise LockError(
                f"uv has no build of Python {release} that images can use",
                hint=f'Change `uv` of python."{minor}" in matrix.yaml. '
                + (f"uv's newest release of it is {others[0]}." if others else f"uv has no Python {minor}."),
            )
        # uv prints the hash only if an archive has another one: here, an empty archive in a mirror on this machine.
        with TemporaryDirectory(prefix="builder-uv-") as folder:
            mirror = Path(folder) / "mirror"
            archive = mirror / address.split("/")[-2] / file
            archive.parent.mkdir(parents=True)
            tarfile.open(archive, "w:gz").close()
            done = self._uv(
                "install", "--no-cache", "--no-bin", "--mirror", mirror.as_uri(), "--install-dir",
                f"{folder}/installed", python_key(release),
            )  # fmt: skip
        if not (expected := _EXPECTED.search(done.stderr)):
            raise LockError(f"uv's list has no SHA-256 of its build of Python {release}", hint=_LIST_HINT)
        return LockedPython(release=release, file=file, sha256=expected[1])

    @cached_property
    def addresses(self) -> dict[str, str]:
        """The address of the archive of each release, the newest first. Raises FetchError."""
        done = self._uv(
            "list", "--only-downloads", "--all-versions", "--show-urls", "--output-format", "json",
            "cpython-any-linux-x86_64-gnu",
        )  # fmt: skip
        try:
            addresses = {
                str(entry["version"]): str(entry["url"])
                for entry in json.loads(done.stdout)
                if entry["key"] == python_key(entry["version"])  # that of a free-threaded build has more
            }
        except (ValueError, KeyError, TypeError):
            addresses = {}
        if done.returncode or not addresses:
            raise FetchError("uv cannot list its builds of Python", hint=_LIST_HINT)
        return addresses

    def archives(self) -> FileSource[LockedPython]:
        """The archives of locked builds on the mirror."""
        session = IndexSession(self.host.index, server="uv's mirror of Python builds")
        return FileSource(
            addresses=lambda locked: [Address(url=self._address(locked), session=session)],
            absent_hint="The mirror may lack this build: set UV_PYTHON_INSTALL_MIRROR to one that has it. If it was "
            "withdrawn, change `uv` of this Python in matrix.yaml.",
            different_hint="A build never changes without a new date in its name: do not use this mirror "
            "(UV_PYTHON_INSTALL_MIRROR), or this lock, until the difference is explained.",
        )

    def _address(self, locked: LockedPython) -> str:
        # A newer uv may have another build of the release, or no build of it, but all are below the same address.
        address = self.addresses.get(locked.release) or next(iter(self.addresses.values()))
        date = re.fullmatch(ARCHIVE, locked.file)
        assert date
        return f"{address.rsplit('/', 2)[0]}/{date[1]}/{quote(locked.file)}"

    def _uv(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return self.run(
                [uv_program(), "python", *arguments, "--no-config", "--color", "never"],
                env=self._environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise FetchError(f"uv python {arguments[0]} took more than {TIMEOUT_S} s", hint="Run again.") from None
