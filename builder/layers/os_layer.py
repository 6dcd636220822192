"""The `os` layer: a tar of a file system, the same bytes for the same files.

Times are those of the packages, at most the newest of them: files written during the build would differ from one build
to the next. Source: OCI image specification, "Image Layer Filesystem Changeset".
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tarfile
import time
import zlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Self, cast

from pydantic import Field, TypeAdapter, ValidationError

from builder.layers.oci import TIME, Layer
from builder.layers.splice import GZIP_HEADER
from builder.layers.store import Store

LEVEL = 4  # of zlib: half the time of level 6 and 3 % more bytes, measured for Debian 12 with Python
MEMBER = 4 << 20  # bytes that are compressed as one gzip member


@dataclass(frozen=True, kw_only=True)
class OsLayer(Layer):
    """An `os` layer. `created` is RFC 3339: the time of its newest package.

    `taken` are the paths below /opt that are not folders, `folders` the folders that are not 0755 root:root.
    """

    created: Annotated[str, Field(pattern=TIME)]
    taken: tuple[str, ...]
    folders: tuple[str, ...]


_OS_LAYER = TypeAdapter(OsLayer)


def stored_system(store: Store, inputs: str, known: OsLayer | None) -> OsLayer | None:
    """The operating system that was last made from these inputs, if it is in the store and has the known contents."""
    record = store.get_record(inputs)
    try:
        stored = None if record is None else _OS_LAYER.validate_json(json.dumps(record))
    except ValidationError:  # an older builder wrote it
        return None
    return None if stored and known and stored.diff_id != known.diff_id else stored


def write_system(path: Path, out: BinaryIO, *, processors: int = 0) -> OsLayer:
    """Writes the file system of a tar as a layer; a pure function of its files. Raises tarfile.TarError, OSError.

    Compresses in this many threads; 0: one for each processor.
    """
    with tarfile.open(path) as source:
        files = {name: info for info in source if (name := _plain(info.name))}
        newest = _newest(source, files)
        with (
            _GzipFile(out, processors or os.cpu_count() or 1) as packed,
            tarfile.open(fileobj=cast("BinaryIO", packed), mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            # Links last: a hard link needs its target before it.
            for name in sorted(files, key=lambda name: (files[name].islnk(), name)):
                info, entry = files[name], tarfile.TarInfo(name)
                entry.type = tarfile.REGTYPE if info.isreg() else info.type
                entry.mode, entry.uid, entry.gid = info.mode & 0o7777, info.uid, info.gid
                # Folders have the time of the build; dpkg keeps a link to a folder that another version of the package
                # made.
                entry.mtime = newest if info.isdir() or info.issym() else min(int(info.mtime), newest)
                xattrs = {key: value for key, value in info.pax_headers.items() if key.startswith("SCHILY.xattr.")}
                entry.pax_headers = xattrs
                entry.devmajor, entry.devminor = info.devmajor, info.devminor
                entry.size = info.size if info.isreg() else 0
                entry.linkname = _plain(info.linkname) if info.islnk() else info.linkname
                tar.addfile(entry, source.extractfile(info) if entry.isreg() else None)
    folders = {name: (info.mode & 0o7777, info.uid, info.gid) for name, info in files.items() if info.isdir()}
    return OsLayer(
        digest=f"sha256:{packed.hash.hexdigest()}",
        diff_id=f"sha256:{packed.plain_hash.hexdigest()}",
        size=packed.size,
        unpacked=packed.unpacked,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(newest)),
        taken=tuple(sorted(name for name, info in files.items() if name.startswith("opt/") and not info.isdir())),
        folders=tuple(sorted(name for name, attributes in folders.items() if attributes != (0o755, 0, 0))),
    )


def _plain(name: str) -> str:
    """A path without a slash at either end; empty for the root."""
    return "" if name == "." else name.removeprefix("./").strip("/")


def _newest(source: tarfile.TarFile, files: Mapping[str, tarfile.TarInfo]) -> int:
    """Time of the newest file of a Debian package. Files in /etc are left out: the build may have edited them."""
    times = [0]
    for path, info in files.items():
        if path.startswith("var/lib/dpkg/info/") and path.endswith(".list") and (content := source.extractfile(info)):
            for line in content.read().decode("utf-8", "replace").splitlines():
                owned = files.get(line.strip("/"))
                if owned and owned.isreg() and not line.startswith("/etc/"):
                    times.append(int(owned.mtime))
    return max(times)


class _GzipFile:
    """A gzip file to write to, compressed in several threads: hashes and sizes of both sides are complete at the end.

    It has several members, so that it has the same bytes on any number of processors. Source: RFC 1952, section 2.2.
    """

    def __init__(self, out: BinaryIO, threads: int) -> None:
        self.hash, self.plain_hash = hashlib.sha256(), hashlib.sha256()
        self.size = self.unpacked = 0
        self._out = out
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "gzip")
        self._members: deque[Future[bytes]] = deque()
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._submit(bytes(self._buffer), waiting=0)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def write(self, data: bytes) -> int:
        self.plain_hash.update(data)
        self.unpacked += len(data)
        self._buffer += data
        while len(self._buffer) >= MEMBER:
            self._submit(
                bytes(self._buffer[:MEMBER]), waiting=2 * self._threads
            )  # no more than these are kept in memory
            del self._buffer[:MEMBER]
        return len(data)

    def tell(self) -> int:
        return self.unpacked

    def _submit(self, chunk: bytes, *, waiting: int) -> None:
        """Compresses a chunk in the background. Writes earlier members until at most so many are waiting."""
        self._members.append(self._pool.submit(_member, chunk))
        while len(self._members) > waiting:
            data = self._members.popleft().result()
            self.hash.update(data)
            self.size += len(data)
            self._out.write(data)


def _member(chunk: bytes) -> bytes:
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    trailer = struct.pack("<II", zlib.crc32(chunk), len(chunk))
    return b"".join([GZIP_HEADER, deflate.compress(chunk), deflate.flush(), trailer])
