"""The table of contents (TOC) of a layer, with which a node mounts the layer before it has downloaded it. Pure.

In an eStargz layer, the content of each file is one gzip member or several (chunks). The TOC is the last entry of the
tar, and lists each file with its metadata, the position of its members in the blob, and their SHA-256. A footer of 51
bytes at the end of the blob has the position of the TOC, and the manifest has its SHA-256. Every other reader sees a
gzipped tar with two more files in the root folder. Source: docs/estargz.md of containerd/stargz-snapshotter.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import struct
import tarfile
import time
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Annotated, Any, BinaryIO, Literal, cast

from isal import isal_zlib
from pydantic import BaseModel, Field, ValidationError

from builder.common.errors import VerifyError
from builder.common.files import digest_of_bytes

CHUNK = 1 << 20  # bytes that are read or written at a time
InflateError = cast("type[Exception]", isal_zlib.error)  # its stub declares an instance
TOC = "stargz.index.json"
# A node downloads what is before the first of these files, in one request, when it mounts the layer. A layer in which
# there is nothing to download early has the second.
PREFETCH_LANDMARK = ".prefetch.landmark"
NO_PREFETCH_LANDMARK = ".no.prefetch.landmark"
LANDMARK_CONTENT = b"\x0f"
RESERVED = (TOC, PREFETCH_LANDMARK, NO_PREFETCH_LANDMARK)  # files of a layer that are not files of the image
TOC_ANNOTATION = "containerd.io/snapshot/stargz/toc.digest"
SIZE_ANNOTATION = "io.containers.estargz.uncompressed-size"  # with it, Podman can reuse files that it has
FOOTER = 51  # bytes
LARGEST = 32 << 20  # bytes of a TOC; the longest known one has 2 MB. Reading takes 30 times as much memory
_VARIABLE = re.compile(r"x86_64|aarch64|[0-9]+(?:\.[0-9]+)*")
_HEX = re.compile(rb"[0-9a-f]{16}")
_XATTR = "SCHILY.xattr."
TYPES = {
    tarfile.DIRTYPE: "dir",
    tarfile.REGTYPE: "reg",
    tarfile.SYMTYPE: "symlink",
    tarfile.LNKTYPE: "hardlink",
    tarfile.CHRTYPE: "char",
    tarfile.BLKTYPE: "block",
    tarfile.FIFOTYPE: "fifo",
}


class TocEntry(BaseModel, frozen=True):
    """A file, folder or link of a layer, or a `chunk` of a file after the first; `offset` in the blob, for content."""

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    type: Literal["dir", "reg", "symlink", "hardlink", "char", "block", "fifo", "chunk"]
    mode: int = 0
    size: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    link: str = Field("", alias="linkName")
    digest: str = ""
    offset: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    uid: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    gid: Annotated[int, Field(ge=0, lt=1 << 32)] = 0


class _Toc(BaseModel, frozen=True):
    version: Literal[1]
    entries: tuple[TocEntry, ...]


def without_versions(path: str) -> str:
    """A path with `*` for each number and architecture: the same for a file in most releases of its package."""
    return _VARIABLE.sub("*", path)


def prefetch_order(paths: Iterable[str], prefetch: Collection[str]) -> list[str]:
    """The paths of a layer, those to prefetch first, with their folders; then the landmark, then the others.

    `prefetch` are paths `without_versions`. Without a match, the paths as they are.
    """
    paths, prefetch = list(paths), frozenset(prefetch)
    first = {path for path in paths if without_versions(path) in prefetch}
    if not first:
        return paths
    for path in list(first):
        while path := path.rpartition("/")[0]:
            first.add(path)
    return [*(p for p in paths if p in first), PREFETCH_LANDMARK, *(p for p in paths if p not in first)]


def describe_file(info: tarfile.TarInfo) -> dict[str, Any]:
    """The entry of the TOC for a tar header, without content."""
    entry: dict[str, Any] = {
        "name": info.name.rstrip("/") + ("/" if info.isdir() else ""),
        "type": TYPES.get(info.type, "reg"),
        "modtime": _rfc3339(int(info.mtime)),
        "mode": info.mode,
        "uid": info.uid,
        "gid": info.gid,
    }
    if info.issym() or info.islnk():
        entry["linkName"] = info.linkname
    if info.isdev() and not info.isfifo():
        entry |= {"devMajor": info.devmajor, "devMinor": info.devminor}
    xattrs = {key: value for key, value in info.pax_headers.items() if key.startswith(_XATTR)}
    if xattrs:
        entry["xattrs"] = {
            key.removeprefix(_XATTR): base64.b64encode(value.encode("utf-8", "surrogateescape")).decode()
            for key, value in sorted(xattrs.items())
        }
    return entry


@cache
def _rfc3339(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def dump_toc(entries: Sequence[dict[str, Any]]) -> bytes:
    return json.dumps({"version": 1, "entries": entries}, separators=(",", ":"), ensure_ascii=True).encode()


def footer(offset: int) -> bytes:
    """The end of a blob: an empty gzip member whose header has the offset of the TOC's gzip member."""
    field = b"%016xSTARGZ" % offset
    extra = b"SG" + struct.pack("<H", len(field)) + field
    header = b"\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\xff" + struct.pack("<H", len(extra)) + extra
    return header + b"\x01\x00\x00\xff\xff" + bytes(8)


def read_toc(blob: BinaryIO, digest: str = "") -> tuple[TocEntry, ...]:
    """The entries of a blob's TOC. Raises VerifyError if it has none, or not the one with this digest.

    Reads only the end of the blob.
    """
    size = blob.seek(0, io.SEEK_END)
    blob.seek(max(0, size - FOOTER))
    end = blob.read()
    try:
        offset = int(end[16:32], 16) if _HEX.fullmatch(end[16:32]) else 0
        if not 0 < offset < size - FOOTER or end != footer(offset):
            raise ValueError("it has no table of contents (eStargz)")
        if size - offset > LARGEST:
            raise ValueError("its table of contents is too large")
        blob.seek(offset)
        stream = isal_zlib.decompressobj(16 + isal_zlib.MAX_WBITS)
        plain = stream.decompress(blob.read(size - offset - FOOTER), LARGEST + 1)
        if len(plain) > LARGEST:
            raise ValueError("its table of contents is too large")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r|") as tar:
            info = tar.next()
            content = tar.extractfile(info) if info and info.name == TOC and not info.issparse() else None
            if content is None:
                raise ValueError("its table of contents is not at the position in the footer")
            text = content.read()
            if digest and digest_of_bytes(text) != digest:
                raise ValueError("its table of contents does not match the digest in the manifest")
            return _Toc.model_validate_json(text).entries
    except ValidationError as error:
        raise VerifyError("the layer cannot be read: invalid table of contents") from error
    except (ValueError, tarfile.TarError, EOFError, OSError, InflateError, RecursionError) as error:
        raise VerifyError(f"the layer cannot be read: {error}") from error


def read_content(blob: BinaryIO, entry: TocEntry) -> bytes:
    """The content of a small file, whose members are consecutive. Raises VerifyError if its digest differs."""
    if not entry.size:
        return b""
    blob.seek(entry.offset)
    stream, rest, parts, size = isal_zlib.decompressobj(16 + isal_zlib.MAX_WBITS), b"", list[bytes](), 0
    try:
        while size <= entry.size and (rest := rest or blob.read(min(entry.size + 64, CHUNK))):
            parts.append(stream.decompress(rest, entry.size + 1 - size))
            size += len(parts[-1])
            rest = stream.unconsumed_tail
            if stream.eof:
                if size >= entry.size:
                    break
                stream, rest = isal_zlib.decompressobj(16 + isal_zlib.MAX_WBITS), stream.unused_data
    except InflateError as error:
        raise VerifyError(f"{entry.name!a} cannot be read: {error}") from error
    content = b"".join(parts)
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != entry.digest:
        raise VerifyError(f"{entry.name!a} does not match its digest in the table of contents")
    return content
