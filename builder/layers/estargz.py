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
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, BinaryIO, Literal, cast

from isal import isal_zlib
from pydantic import BaseModel, Field, ValidationError

from builder.common.errors import VerifyError
from builder.common.files import digest_of_bytes
from builder.layers.blobs import CHUNK, InflateError

TOC = "stargz.index.json"
# A node downloads what is before the first of these files, in one request, when it mounts the layer. A layer in which
# there is nothing to download early has the second.
PREFETCH_LANDMARK = ".prefetch.landmark"
NO_PREFETCH_LANDMARK = ".no.prefetch.landmark"
LANDMARK_CONTENT = b"\x0f"
RESERVED = (TOC, PREFETCH_LANDMARK, NO_PREFETCH_LANDMARK)  # files that a layer has beside those of its image
TOC_ANNOTATION = "containerd.io/snapshot/stargz/toc.digest"
SIZE_ANNOTATION = "io.containers.estargz.uncompressed-size"  # with it, Podman can reuse files that it has
FOOTER = 51  # bytes
SMALL = 16 << 20  # bytes of a file whose content `LayerReader` returns
LARGEST = 32 << 20  # bytes of a TOC; the longest known one has 2 MB. Reading takes 30 times as much memory
HEADER = 4 * CHUNK  # bytes of the headers of one file, which tarfile reads as a whole
HEADERS = 256 << 20  # bytes of all headers of a layer; the longest known one has 30 MB. They take twice as much memory
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


def describe_content(
    entry: dict[str, Any], sha256: str, chunks: Sequence[tuple[int, int, str]]
) -> Iterator[dict[str, Any]]:
    """The entries of the TOC for a file: `entry` with its first chunk, if it has content, and one for each other chunk.

    `sha256` is that of the content. `chunks` are position in the blob, size and SHA-256 of each, empty for the same.
    """
    if not chunks:
        yield entry
        return
    content = {"size": sum(size for _, size, _ in chunks), "digest": f"sha256:{sha256}"}
    at = 0
    for offset, size, chunk_sha256 in chunks:
        line = {**entry, **content} if not at else {"name": entry["name"], "type": "chunk", "chunkOffset": at}
        line |= {"offset": offset, "chunkDigest": f"sha256:{chunk_sha256 or sha256}"}
        if len(chunks) > 1 and offset != chunks[-1][0]:  # the size of the last chunk is left out
            line["chunkSize"] = size
        yield line
        at += size


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


def prefetched(blob: BinaryIO) -> frozenset[str]:
    """The files of a layer that a node prefetches, for `prefetch_order`. Raises VerifyError if it has no TOC."""
    toc = read_toc(blob)
    end = next((number for number, entry in enumerate(toc) if entry.name == PREFETCH_LANDMARK), 0)
    return frozenset(without_versions(entry.name) for entry in toc[:end] if entry.type == "reg")


def read_content(blob: BinaryIO, entry: TocEntry) -> bytes:
    """The content of a small file, whose members follow each other. Raises VerifyError if its digest differs."""
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


class LayerReader:
    """Reads a layer from start to end, and then compares its TOC with what it read.

    Layers without a TOC, such as those of other builders, can be read too.
    """

    def __init__(self, blob: BinaryIO) -> None:
        self._members = _Members(blob)
        self._files: list[tuple[tarfile.TarInfo, str]] = []  # with the digest of the content
        self._toc: bytes | None = None  # if it is the last file so far

    def __iter__(self) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
        """Each file, and its content if it is a file of at most 16 MB.

        Raises VerifyError if the layer is no gzipped tar.
        """
        headers = 0
        try:
            with tarfile.open(fileobj=cast("BinaryIO", self._members), mode="r|", bufsize=CHUNK) as tar:
                for info in tar:
                    # tarfile would skip the content of an unknown type, which may have 2**88 bytes by its header, and
                    # would return as many zeros for a sparse file.
                    if info.issparse():
                        raise ValueError(f"{info.name[:200]!a} is a sparse file")
                    if not info.isreg() and info.type not in TYPES:
                        raise ValueError(f"{info.name[:200]!a} has the unknown type {info.type!a}")
                    if tar.pax_headers:  # engines ignore them
                        raise ValueError("it has global headers, which change the names and modes of all files")
                    headers += info.offset_data - info.offset
                    if headers > HEADERS:
                        raise ValueError(f"its headers have more than {HEADERS} bytes")
                    limit = LARGEST if info.name == TOC else SMALL
                    if info.name == TOC and info.size > limit:
                        raise ValueError("its table of contents is too large")
                    content, digest = None, hashlib.sha256()
                    if stream := tar.extractfile(info) if info.isreg() else None:
                        parts = []
                        self._members.allow(HEADER)
                        while part := stream.read(CHUNK):
                            self._members.allow(HEADER)
                            digest.update(part)
                            if info.size <= limit:
                                parts.append(part)
                        content = b"".join(parts) if info.size <= limit else None
                    self._toc = content if info.name == TOC else None
                    self._files.append((info, digest.hexdigest()))
                    self._members.allow(HEADER)
                    yield info, content
            self._members.allow(CHUNK)
            while self._members.read(CHUNK):
                self._members.allow(CHUNK)
        except (tarfile.TarError, EOFError, OSError, InflateError, ValueError, OverflowError, RecursionError) as error:
            raise VerifyError(f"the layer cannot be read: {error}") from error

    def check_toc(self, digest: str) -> None:
        """Raises VerifyError, with the first file that differs, unless the layer has this TOC and the files in it."""
        if self._toc is None:
            if any(info.name == TOC for info, _ in self._files):
                raise VerifyError("the table of contents is not the last file of the layer")
            raise VerifyError("the layer has no table of contents, but its manifest has the digest of one")
        *files, (info, sha256) = self._files
        if f"sha256:{sha256}" != digest:
            raise VerifyError("the table of contents does not match the digest in the manifest")
        if self._members.end != footer(self._members.position(info.offset)):
            raise VerifyError("the footer of the layer does not have the position of its table of contents")
        entries: list[dict[str, Any]] = []
        try:
            for file, sha256 in files:
                chunks = self._members.chunks(file.offset_data, file.size) if file.isreg() else []
                # A table could say that such a file is empty: it would not be compared with anything.
                if file.isreg() and file.size and not chunks:
                    raise VerifyError(f"the content of {file.name[:200]!a} is not in gzip members of its own")
                entries += describe_content(describe_file(file), sha256, chunks)
        except (ValueError, OverflowError, OSError) as error:
            raise VerifyError(f"{file.name[:200]!a} has an invalid header: {error}") from error
        if dump_toc(entries) == self._toc:
            return
        try:
            listed = json.loads(self._toc)["entries"]
        except (ValueError, KeyError, TypeError, RecursionError):
            listed = []
        if not isinstance(listed, list):
            listed = []
        pairs = zip([*entries, None], [*listed, None], strict=False)
        first = next((actual or stated for actual, stated in pairs if actual != stated), None)
        name = str(first.get("name", "") if isinstance(first, dict) else "")[:200]
        raise VerifyError(
            f"the table of contents has wrong data about {name!a}" if name else "invalid table of contents"
        )


def check_layer(blob: BinaryIO, toc: str) -> None:
    """Raises VerifyError unless a layer has a TOC of this digest, which describes its files."""
    reader = LayerReader(blob)
    for _ in reader:
        pass
    reader.check_toc(toc)


class _Members:
    """Reads the plain bytes of a gzip file, and records where each member begins in the blob and in the plain bytes."""

    def __init__(self, blob: BinaryIO) -> None:
        self._blob = blob
        self._rest = b""  # read, and not inflated yet
        self._at = 0  # position of `_rest` in the blob
        self._plain = bytearray()
        self._size = 0  # plain bytes so far
        self._stream: Any = None
        self._start = (0, 0)
        self._hash = hashlib.sha256()
        self._by_start: dict[int, tuple[int, int, str]] = {}  # plain position -> position in the blob, size, digest
        self._allowed = HEADER
        self.end = b""  # the last FOOTER bytes that were read

    def allow(self, size: int) -> None:
        """Sets the number of plain bytes that may be read until the next call.

        tarfile reads a header of any size into memory.
        """
        self._allowed = size

    def read(self, size: int) -> bytes:
        """Plain bytes. Raises ValueError if they are more than allowed."""
        self._allowed -= size
        if self._allowed < 0:
            raise ValueError(f"it has a header of more than {HEADER} bytes")
        while len(self._plain) < size:
            if not self._rest:
                self._rest = self._blob.read(CHUNK)
                if not self._rest:
                    if self._stream is not None:
                        raise EOFError("it is truncated")
                    break
                self.end = (self.end + self._rest[-FOOTER:])[-FOOTER:]
            if self._stream is None:
                self._stream = isal_zlib.decompressobj(16 + isal_zlib.MAX_WBITS)
                self._start, self._hash = (self._size, self._at), hashlib.sha256()
            before = len(self._rest)
            plain = self._stream.decompress(self._rest, 2 * CHUNK)
            self._rest = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
            self._at += before - len(self._rest)
            self._hash.update(plain)
            self._plain += plain
            self._size += len(plain)
            if self._stream.eof:
                start, position = self._start
                self._by_start[start] = (position, self._size - start, self._hash.hexdigest())
                self._stream = None
        data = bytes(self._plain[:size])
        del self._plain[:size]
        return data

    def position(self, start: int) -> int:
        """The position in the blob of the member that begins at a plain position; 0 if none begins there."""
        return self._by_start[start][0] if start in self._by_start else 0

    def chunks(self, start: int, size: int) -> list[tuple[int, int, str]]:
        """The members of a file's content. Empty if the content does not begin and end with a member."""
        chunks = []
        end = start + size
        while start < end:
            member = self._by_start.get(start)
            if member is None or not member[1]:
                return []
            chunks.append(member)
            start += member[1]
        return chunks if start == end else []
