"""The `os` layer: one tar of the file system that an image's layers come to, the same bytes for the same files.

The layers of the image are put together as a runtime would (whiteouts included), because this layer will not lie on the
ones it was built on. Times are what packages brought, at most the newest of them: files that were written during the
build would otherwise differ from one build to the next. Pure but for reading and writing files.
Source: OCI image specification, "Image Layer Filesystem Changeset".
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
LEVEL = 4  # of zlib: half the time of level 6 and 3 % more bytes, measured for Debian 12 with Python
_ROOT_FOLDER = (0o755, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Flattened:
    """Digests as `sha256:<hex>`, `size` of the blob, `newest` the time of the newest file of a package.

    `taken` are the paths below /opt that are no folders, `folders` those that are not 0755 root:root.
    """

    digest: str
    diff_id: str
    size: int
    newest: int
    python: str
    taken: tuple[str, ...]
    folders: tuple[str, ...]


@dataclass(frozen=True)
class _Item:
    tar: tarfile.TarFile
    info: tarfile.TarInfo


def saved_layers(archive: Path, scratch: Path) -> list[Path]:
    """Unpacked layers, lowest first, of an archive that `docker save` wrote, in either store's form."""
    with tarfile.open(archive) as tar:
        listed = tar.extractfile("manifest.json")
        assert listed is not None
        paths = []
        for number, name in enumerate(json.load(listed)[0]["Layers"]):
            path = scratch / f"layer-{number}.tar"
            source = tar.extractfile(name)
            assert source is not None
            packed = source.read(2) == b"\x1f\x8b"
            source.seek(0)
            with path.open("wb") as out:
                shutil.copyfileobj(cast("IO[bytes]", gzip.GzipFile(fileobj=source)) if packed else source, out, 1 << 20)
            paths.append(path)
    return paths


def write(layers: Iterable[Path], python: str, out: BinaryIO) -> Flattened:
    """Writes the one layer that `layers` come to; `python` is the version whose Debian package is looked up."""
    tars = [tarfile.open(path) for path in layers]  # noqa: SIM115  closed below
    try:
        return _write(merge(tars), python, out)
    finally:
        for tar in tars:
            tar.close()


def merge(tars: Iterable[tarfile.TarFile]) -> dict[str, _Item]:
    """Path without a leading slash -> what is there in the end."""
    found: dict[str, _Item] = {}
    for tar in tars:
        added: dict[str, _Item] = {}
        for info in tar:
            path = _path(info)
            folder, _, name = path.rpartition("/")
            if name == OPAQUE:
                _remove(found, folder, itself=False)
            elif name.startswith(WHITEOUT):
                _remove(found, f"{folder}/{name.removeprefix(WHITEOUT)}".lstrip("/"), itself=True)
            elif path:
                if path in found and found[path].info.isdir() and not info.isdir():
                    _remove(found, path, itself=True)
                added[path] = _Item(tar, info)
        found |= added  # whiteouts hide what lies below, wherever in the layer they stand
    return found


def _remove(found: dict[str, _Item], path: str, *, itself: bool) -> None:
    inside = f"{path}/" if path else ""
    for other in [other for other in found if other.startswith(inside) or (itself and other == path)]:
        del found[other]


def _write(found: dict[str, _Item], python: str, out: BinaryIO) -> Flattened:
    newest = _newest(found)
    plain, packed = hashlib.sha256(), hashlib.sha256()
    blob = _Tee(out, packed)
    with gzip.GzipFile(filename="", mode="wb", fileobj=cast("BinaryIO", blob), compresslevel=LEVEL, mtime=0) as stream:
        tee = _Tee(cast("BinaryIO", stream), plain)
        with tarfile.open(fileobj=cast("BinaryIO", tee), mode="w", format=tarfile.PAX_FORMAT) as tar:
            # Links last: a hard link needs its target before it.
            for path in sorted(found, key=lambda path: (found[path].info.islnk(), path)):
                info, content = _entry(found, path, newest)
                tar.addfile(info, content)
    return Flattened(
        digest="sha256:" + packed.hexdigest(),
        diff_id="sha256:" + plain.hexdigest(),
        size=blob.size,
        newest=newest,
        python=" ".join(_package_version(found, name) for name in (f"python{python}-minimal", "zlib1g")),
        taken=tuple(sorted(path for path in found if path.startswith("opt/") and not found[path].info.isdir())),
        folders=tuple(
            sorted(
                path
                for path, item in found.items()
                if item.info.isdir() and (item.info.mode & 0o7777, item.info.uid, item.info.gid) != _ROOT_FOLDER
            )
        ),
    )


def _entry(found: dict[str, _Item], path: str, newest: int) -> tuple[tarfile.TarInfo, IO[bytes] | None]:
    item = found[path]
    source = _linked(item) if item.info.islnk() else item.info
    info = tarfile.TarInfo(path)
    info.mode, info.uid, info.gid = item.info.mode & 0o7777, item.info.uid, item.info.gid
    # Of a folder whose time alone changed, a layer tells or not: it depends on the engine's store.
    info.mtime = newest if item.info.isdir() else min(int(item.info.mtime), newest)
    headers = {**source.pax_headers, **item.info.pax_headers}
    info.pax_headers = {key: value for key, value in headers.items() if key.startswith("SCHILY.xattr.")}
    target = _path(source)
    if source is not item.info and target in found and found[target].info is source:
        info.type, info.linkname = tarfile.LNKTYPE, target
        return info, None
    # A link whose target was replaced by a layer above is a file of its own.
    info.type = source.type if not source.isreg() else tarfile.REGTYPE
    info.devmajor, info.devminor = source.devmajor, source.devminor
    if source.issym():
        info.linkname = source.linkname
    if not source.isreg():
        return info, None
    info.size = source.size
    return info, item.tar.extractfile(source)


def _linked(item: _Item) -> tarfile.TarInfo:
    """What a hard link leads to: an earlier member of its layer, maybe by way of other links."""
    info, members = item.info, item.tar.getmembers()
    while info.islnk():
        name = _plain(info.linkname)
        earlier = members[: members.index(info)]
        info = next(other for other in reversed(earlier) if _path(other) == name)
    return info


def _path(info: tarfile.TarInfo) -> str:
    """Without a slash at either end; empty for the root."""
    return _plain(info.name)


def _plain(name: str) -> str:
    return "" if name == "." else name.removeprefix("./").strip("/")


def _newest(found: dict[str, _Item]) -> int:
    """Time of the newest file that a Debian package brought."""
    times = [0]
    for path in found:
        if path.startswith("var/lib/dpkg/info/") and path.endswith(".list"):
            for line in _text(found, path).splitlines():
                owned = found.get(line.strip("/"))
                if owned and owned.info.isreg():
                    times.append(int(owned.info.mtime))
    return max(times)


def _package_version(found: dict[str, _Item], package: str) -> str:
    status = _text(found, "var/lib/dpkg/status")
    entry = re.search(rf"^Package: {re.escape(package)}\n(?:.+\n)*?Version: (\S+)", status, re.MULTILINE)
    return entry[1] if entry else ""


def _text(found: dict[str, _Item], path: str) -> str:
    item = found.get(path)
    content = item.tar.extractfile(item.info) if item and item.info.isreg() else None
    return content.read().decode("utf-8", "replace") if content else ""


class _Tee:
    """A file to write to, hashed and counted on the way."""

    def __init__(self, out: BinaryIO, hashed: hashlib._Hash) -> None:
        self._out = out
        self._hash = hashed
        self.size = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        self._out.write(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._out.flush()
