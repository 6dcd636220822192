"""The `os` layer: one tar of the file system that the layers of an image give, the same bytes for the same files.

The layers of the image are merged as a runtime does (with whiteouts), because this layer is not stacked on the ones it
was built on. Times are those of the packages, at most the newest of them: files written during the build would differ
from one build to the next. Source: OCI image specification, "Image Layer Filesystem Changeset".
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import struct
import tarfile
import time
import zlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, BinaryIO, Protocol, Self, cast

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as model

from builder.index.wheels import STRICT
from builder.layers.oci import TIME, KnownLayer
from builder.layers.splice import GZIP_HEADER
from builder.layers.store import Store

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
LEVEL = 4  # of zlib: half the time of level 6 and 3 % more bytes, measured for Debian 12 with Python
MEMBER = 4 << 20  # bytes that are compressed as one
_ROOT_FOLDER = (0o755, 0, 0)


@model(frozen=True, kw_only=True, config=STRICT)
class OsLayer(KnownLayer):
    """An `os` layer, as the store records it. `created` is RFC 3339: the time of its newest package.

    `base` is the name of the image below it, `taken` the paths below /opt that are not folders, `folders` those that
    are not 0755 root:root.
    """

    created: Annotated[str, Field(pattern=TIME)]
    base: str
    taken: tuple[str, ...]
    folders: tuple[str, ...]


_OS_LAYER = TypeAdapter(OsLayer)


def get(store: Store, inputs: str) -> OsLayer | None:
    """The layer that was last made from these inputs."""
    record = store.get_record(inputs)
    try:
        return None if record is None else _OS_LAYER.validate_json(json.dumps(record))
    except ValidationError:
        return None


def saved_layers(archive: Path, scratch: Path) -> list[Path]:
    """Unpacks the layers, lowest first, of an archive by `docker save`, in the format of either engine store."""
    with tarfile.open(archive) as tar:
        manifest = tar.extractfile("manifest.json")
        assert manifest is not None
        paths = []
        for number, name in enumerate(json.load(manifest)[0]["Layers"]):
            path = scratch / f"layer-{number}.tar"
            source = tar.extractfile(name)
            assert source is not None
            is_packed = source.read(2) == b"\x1f\x8b"
            source.seek(0)
            plain = cast("IO[bytes]", gzip.GzipFile(fileobj=source)) if is_packed else source
            with path.open("wb") as out:
                shutil.copyfileobj(plain, out, 1 << 20)
            paths.append(path)
    return paths


@dataclass(frozen=True)
class _File:
    tar: tarfile.TarFile
    info: tarfile.TarInfo


_Files = dict[str, _File]  # by path without a leading slash


def write(layers: Iterable[Path], out: BinaryIO) -> OsLayer:
    """Writes the merged `layers` as one; `base` is empty.

    The result is a pure function of the files.
    """
    with ExitStack() as stack:
        files = _merge([stack.enter_context(tarfile.open(path)) for path in layers])
        newest = _newest(files)
        packed = _HashedFile(out)
        with _Packer(packed) as packer:
            plain = _HashedFile(packer)
            with tarfile.open(fileobj=cast("BinaryIO", plain), mode="w", format=tarfile.PAX_FORMAT) as tar:
                # Links last: a hard link needs its target before it.
                for path in sorted(files, key=lambda path: (files[path].info.islnk(), path)):
                    tar.addfile(*_entry(files, path, newest))
        return OsLayer(
            digest=packed.digest,
            diff_id=plain.digest,
            size=packed.size,
            unpacked=plain.size,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(newest)),
            base="",
            taken=tuple(sorted(path for path in files if path.startswith("opt/") and not files[path].info.isdir())),
            folders=tuple(sorted(path for path, file in files.items() if _is_special_folder(file.info))),
        )


def _is_special_folder(info: tarfile.TarInfo) -> bool:
    return info.isdir() and (info.mode & 0o7777, info.uid, info.gid) != _ROOT_FOLDER


def _merge(tars: Iterable[tarfile.TarFile]) -> _Files:
    files: _Files = {}
    for tar in tars:
        added: _Files = {}
        for info in tar:
            path = _plain(info.name)
            folder, _, name = path.rpartition("/")
            if name == OPAQUE:
                _remove(files, folder, itself=False)
            elif name.startswith(WHITEOUT):
                _remove(files, f"{folder}/{name.removeprefix(WHITEOUT)}".lstrip("/"), itself=True)
            elif path:
                if path in files and files[path].info.isdir() and not info.isdir():
                    _remove(files, path, itself=True)
                added[path] = _File(tar, info)
        files |= added  # a whiteout hides files of the layers below, wherever it is in its own layer
    return files


def _remove(files: _Files, path: str, *, itself: bool) -> None:
    inside = f"{path}/" if path else ""
    for other in [other for other in files if other.startswith(inside) or (itself and other == path)]:
        del files[other]


def _entry(files: _Files, path: str, newest: int) -> tuple[tarfile.TarInfo, IO[bytes] | None]:
    file = files[path]
    source = _linked(file) if file.info.islnk() else file.info
    info = tarfile.TarInfo(path)
    info.mode, info.uid, info.gid = file.info.mode & 0o7777, file.info.uid, file.info.gid
    # Whether a layer has a folder of which only the time changed depends on the engine's store. dpkg keeps a link to a
    # folder that another version of the package made.
    has_time = not (file.info.isdir() or file.info.issym())
    info.mtime = min(int(file.info.mtime), newest) if has_time else newest
    headers = {**source.pax_headers, **file.info.pax_headers}
    info.pax_headers = {key: value for key, value in headers.items() if key.startswith("SCHILY.xattr.")}
    target = _plain(source.name)
    if source is not file.info and target in files and files[target].info is source:
        info.type, info.linkname = tarfile.LNKTYPE, target
        return info, None
    # A link whose target was replaced by a layer above becomes a file.
    info.type = source.type if not source.isreg() else tarfile.REGTYPE
    info.devmajor, info.devminor = source.devmajor, source.devminor
    if source.issym():
        info.linkname = source.linkname
    if not source.isreg():
        return info, None
    info.size = source.size
    return info, file.tar.extractfile(source)


def _linked(file: _File) -> tarfile.TarInfo:
    """The target of a hard link: an earlier member of its layer, possibly through other links."""
    info, members = file.info, file.tar.getmembers()
    while info.islnk():
        name = _plain(info.linkname)
        earlier = members[: members.index(info)]
        info = next(member for member in reversed(earlier) if _plain(member.name) == name)
    return info


def _plain(name: str) -> str:
    """A path without a slash at either end; empty for the root."""
    return "" if name == "." else name.removeprefix("./").strip("/")


def _newest(files: _Files) -> int:
    """Time of the newest file of a Debian package. Files in /etc are left out: the build may have edited them."""
    times = [0]
    for path in files:
        if path.startswith("var/lib/dpkg/info/") and path.endswith(".list"):
            for line in _text(files, path).splitlines():
                owned = files.get(line.strip("/"))
                if owned and owned.info.isreg() and not line.startswith("/etc/"):
                    times.append(int(owned.info.mtime))
    return max(times)


def _text(files: _Files, path: str) -> str:
    file = files.get(path)
    content = file.tar.extractfile(file.info) if file and file.info.isreg() else None
    return content.read().decode("utf-8", "replace") if content else ""


class _Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...


class _HashedFile:
    """A file to write to, hashed and counted on the way."""

    def __init__(self, out: _Writable) -> None:
        self._out = out
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        self._out.write(data)
        return len(data)

    def tell(self) -> int:
        return self.size


class _Packer:
    """Compresses what is written to it, with all processors.

    The result is one gzip stream of several members, which has the same bytes on any number of processors. Source: RFC
    1952, section 2.2.
    """

    def __init__(self, out: _Writable) -> None:
        self._out = out
        self._jobs = os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._jobs, "gzip")
        self._members: deque[Future[bytes]] = deque()
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._submit(bytes(self._buffer))
                self._emit(0)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def write(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= MEMBER:
            self._submit(bytes(self._buffer[:MEMBER]))
            del self._buffer[:MEMBER]

    def _submit(self, chunk: bytes) -> None:
        self._members.append(self._pool.submit(_member, chunk))
        self._emit(2 * self._jobs)  # no more than these are kept in memory

    def _emit(self, remaining: int) -> None:
        while len(self._members) > remaining:
            self._out.write(self._members.popleft().result())


def _member(chunk: bytes) -> bytes:
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    trailer = struct.pack("<II", zlib.crc32(chunk), len(chunk))
    return b"".join([GZIP_HEADER, deflate.compress(chunk), deflate.flush(), trailer])
