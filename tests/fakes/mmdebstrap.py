"""A fake of `DebianRunner`, and the file systems that it makes."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from builder.build.operating_systems import DebianRunner
from builder.common.files import write_atomically
from builder.debian.os_lock import DebianPackage, OsLock
from builder.engine.run import Run
from builder.index.download import Fetcher
from builder.lock.python_lock import LockedPython

DAY = 1_767_225_600  # 2026-01-01T00:00:00Z

MakeTar = Callable[[str, Sequence[str], Mapping[str, bytes]], bytes]


class FakeDebian(DebianRunner):
    """Calls `make` with the name, the arguments and the files of each system, in place of mmdebstrap. `debs` are the
    packages of each. Every release has a base image.
    """

    def __init__(self, run: Run, make: MakeTar = lambda *_: file_system()) -> None:
        super().__init__(run)
        self.make = make
        self.debs: list[tuple[OsLock, Mapping[str, Path]]] = []

    def make_system(
        self, name: str, arguments: Sequence[str], files: Mapping[str, bytes], folder: Path, lock: OsLock,
        debs: Mapping[str, Path],
    ) -> Path:  # fmt: skip
        self.debs.append((lock, debs))
        (folder / "root.tar").write_bytes(self.make(name, arguments, files))
        return folder / "root.tar"

    def base_image(self, release: str) -> str:
        return f"local/{release}"


class FakeFetcher(Fetcher[DebianPackage | LockedPython]):
    """Has every Debian package and every Python without a download; its content is its file name."""

    def fetch(self, locked: DebianPackage | LockedPython) -> Path:
        write_atomically(self.path(locked), locked.file)
        self._progress(locked.size)
        return self.path(locked)


def file_system(
    content: bytes = b"program",
    taken: Sequence[str] = ("opt/venv/bin/python",),
    folders: Sequence[str] = (),
    day: int = DAY,
) -> bytes:
    """A tar with a package of one file, files at `taken`, and folders with permissions of their own."""
    buffer = io.BytesIO()
    files = {
        "usr/bin/python3": content,
        "var/lib/dpkg/info/python3.list": b"/usr/bin/python3\n",
        **dict.fromkeys(taken, b""),
    }
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in folders:
            info = tarfile.TarInfo(path)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(info)
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size, info.mtime = len(data), day
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
