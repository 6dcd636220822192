"""Writes a layer (tar+gzip, eStargz) from zip entries without compressing their contents again.

A zip entry is a raw deflate stream with its CRC-32 and length; a gzip file may consist of many members (RFC 1952,
section 2.2). So each deflated entry becomes a gzip member of its own. The rest (tar headers, generated files, files of
the operating system, the TOC) is compressed by libdeflate: the version in locks/builder.txt gives the same bytes on
every machine. zlib does not: its successors, which some distributions use in its place, compress to other bytes.

The result is a pure function of the entries: no clock, no owner. The remaining work for wheels is hashing, and
inflating for the diff id.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

import deflate
from isal import isal_zlib

from builder.layers import estargz
from builder.layers.estargz import CHUNK, InflateError
from builder.layers.oci import Layer
from builder.plan.layer_order import MTIME

# A change of any byte below needs a new builder.plan.layer_order.LAYER_FORMAT.
GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # gzip, deflate, no flags, no time, unknown system
# With a gzip member for each file, libdeflate's level 6 makes Debian's files 2 % smaller than level 4 of zlib in
# members of 4 MB, in 80 % of its time (142 MB of files of Debian 12).
LEVEL = 6
MEMBER = 4 << 20  # bytes of content in one member at most; a node downloads all of them to read any of them
_IN_BACKGROUND = 1 << 16  # bytes that are worth another thread
_THREADS = 8  # at most: a thread has up to two members in memory
_PIECE = 2 * CHUNK  # inflated at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Zipped:
    """Content in a zip file: `length` bytes at `offset`, deflated or stored, with CRC-32 and size of the plain content.

    `name` is for messages.
    """

    file: BinaryIO
    offset: int
    length: int
    is_deflated: bool
    crc: int
    size: int
    name: str = "an entry"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One path of a layer, relative to the root, without a leading slash. A directory has neither content nor link.

    `sha256` (hex) of the content is checked when the content is inflated; empty if it is unknown. `header` is that of a
    file which is not root's or has another time than MTIME.
    """

    path: str
    mode: int
    content: Zipped | bytes | None = None
    link: str = ""
    sha256: str = ""
    header: tarfile.TarInfo | None = None

    @property
    def size(self) -> int:
        return self.content.size if isinstance(self.content, Zipped) else len(self.content or b"")


NO_PREFETCH = Entry(path=estargz.NO_PREFETCH_LANDMARK, mode=0o444, content=estargz.LANDMARK_CONTENT)
PREFETCH = Entry(path=estargz.PREFETCH_LANDMARK, mode=0o444, content=estargz.LANDMARK_CONTENT)


class SpliceError(ValueError):
    """The content of a zip entry does not match the zip's directory."""


def prefetched_first(entries: Iterable[Entry], prefetch: Collection[str]) -> Iterable[Entry]:
    """The entries in the order of `estargz.prefetch_order`."""
    if not prefetch:
        return entries
    by_path = {entry.path: entry for entry in entries}
    return [by_path.get(path, PREFETCH) for path in estargz.prefetch_order(by_path, prefetch)]


def write_layer(entries: Iterable[Entry], out: BinaryIO, *, diff_id: str = "") -> Layer:
    """Writes the layer of `entries`, in their order, to `out`. Memory: some 100 MB at most, whatever the sizes.

    Entries before PREFETCH are downloaded when a node mounts the layer; without PREFETCH, none are.

    Raises SpliceError for an entry whose content does not match its CRC-32, size and SHA-256, and whatever writing
    raises. With a `diff_id`, deflated content of a known SHA-256 is not inflated, and so not checked: the layer's
    digest must be compared.
    """
    writer = _LayerWriter(out, diff_id)
    with writer.pool, writer.tar_worker, writer.blob_worker:
        for entry in _with_landmark(entries):
            writer.add(entry)
        writer.put_headers()  # only the padding of the last file
    return writer.end()


class _LayerWriter:
    """Writes one layer. The threads of `pool` compress, `tar_worker` inflates and hashes, `blob_worker` writes."""

    def __init__(self, out: BinaryIO, diff_id: str) -> None:
        threads = min(os.cpu_count() or 1, _THREADS)
        self.pool = ThreadPoolExecutor(threads, "deflate")
        self.tar_worker = _Worker(self._hash_tar)
        self.blob_worker = _Worker(self._write_blob, waiting=2 * threads)
        self._out = out
        self._diff_id = diff_id
        self._tar_hash, self._blob_hash = hashlib.sha256(), hashlib.sha256()
        self._position = self._unpacked = 0  # in the blob and in the tar
        self._headers = bytearray()  # and padding, for the next member
        self._toc: list[dict[str, Any]] = []  # `blob_worker` sets the offsets
        # Entries of the TOC whose digest `tar_worker` computes.
        self._inflated: list[tuple[dict[str, Any], _Inflater]] = []

    def add(self, entry: Entry) -> None:
        info = entry.header or _header(entry)
        header = info.tobuf(format=tarfile.PAX_FORMAT)
        padding = bytes(-entry.size % tarfile.BLOCKSIZE)
        self._headers += header
        self._unpacked += len(header) + entry.size + len(padding)
        toc_entry = estargz.describe_file(info)
        self._toc.append(toc_entry)
        if isinstance(entry.content, Zipped) and entry.content.is_deflated and entry.size:
            self._copy(entry.content, entry.sha256, toc_entry)
        elif entry.content is not None:
            self._compress(entry, entry.content, toc_entry)
        self._headers += padding
        if len(self._headers) >= MEMBER:
            self.put_headers()

    def put_headers(self) -> None:
        """Writes the headers and the padding since the last content as one member."""
        self._put(bytes(self._headers))
        self._headers.clear()

    def _put(self, plain: bytes, toc_entry: dict[str, Any] | None = None) -> None:
        """Compresses plain bytes of the tar as one member; `toc_entry` is the TOC's entry if they are content."""
        self.tar_worker.put((None, plain), len(plain))
        member = self.pool.submit(_member, plain) if len(plain) >= _IN_BACKGROUND else _member(plain)
        self.blob_worker.put((member, toc_entry), len(plain))

    def _copy(self, content: Zipped, sha256: str, toc_entry: dict[str, Any]) -> None:
        """Copies a deflate stream, as one member."""
        self.put_headers()
        digest = f"sha256:{sha256}"
        toc_entry |= {"size": content.size, "digest": digest, "offset": 0, "chunkDigest": digest}
        self.blob_worker.put((GZIP_HEADER, toc_entry), len(GZIP_HEADER))
        inflater = None if self._diff_id and sha256 else _Inflater(content, sha256)
        for data in _raw_pieces(content):
            self.blob_worker.put((data, None), len(data))
            if inflater:
                self.tar_worker.put((inflater, data), len(data))
        if inflater:
            self.tar_worker.put((inflater, b""), 0)  # the end, where the content is checked
            self._inflated.append((toc_entry, inflater))
        trailer = struct.pack("<II", content.crc, content.size & 0xFFFFFFFF)
        self.blob_worker.put((trailer, None), len(trailer))

    def _compress(self, entry: Entry, content: Zipped | bytes, toc_entry: dict[str, Any]) -> None:
        """Compresses a content in chunks of MEMBER bytes; each one is a member and an entry of the TOC.

        An empty file has no member, but its deflate stream is checked, too.
        """
        content_hash, done = hashlib.sha256(), 0
        chunk = toc_entry
        for plain in _split(content):
            if done:
                chunk = {"name": toc_entry["name"], "type": "chunk", "chunkOffset": done}
                self._toc.append(chunk)
            else:
                self.put_headers()
                chunk |= {"size": entry.size, "digest": ""}
            done += len(plain)
            content_hash.update(plain)
            chunk |= {"offset": 0, "chunkDigest": f"sha256:{hashlib.sha256(plain).hexdigest()}"}
            if done < entry.size:  # the size of the last chunk is left out
                chunk["chunkSize"] = len(plain)
            self._put(plain, chunk)
        sha256 = content_hash.hexdigest()
        if entry.sha256 not in ("", sha256):
            name = content.name if isinstance(content, Zipped) else f"/{entry.path}"
            raise SpliceError(f"{name}: content does not match the SHA-256 in RECORD")
        if done:
            toc_entry["digest"] = f"sha256:{sha256}"

    def _hash_tar(self, batch: list[tuple[_Inflater | None, bytes]]) -> None:
        for inflater, data in batch:
            if inflater and not data:
                inflater.end()
            for plain in inflater.feed(data) if inflater and data else [data]:
                if not self._diff_id:
                    self._tar_hash.update(plain)

    def _write_blob(self, batch: list[tuple[bytes | Future[bytes], dict[str, Any] | None]]) -> None:
        parts = []
        for data, toc_entry in batch:
            part = data.result() if isinstance(data, Future) else data
            if toc_entry:
                toc_entry["offset"] = self._position
            parts.append(part)
            self._position += len(part)
        joined = b"".join(parts)
        self._blob_hash.update(joined)
        self._out.write(joined)

    def end(self) -> Layer:
        """Writes the TOC, the end of the tar, and the footer: all positions and digests are known now."""
        for toc_entry, inflater in self._inflated:
            toc_entry["digest"] = toc_entry["chunkDigest"] = f"sha256:{inflater.sha256}"
        toc = estargz.dump_toc(self._toc)
        if len(toc) > estargz.LARGEST:
            raise SpliceError(
                f"{len(self._toc)} files in one layer are too many: their table of contents has {len(toc)} bytes"
            )
        header = _header(Entry(path=estargz.TOC, mode=0o444, content=toc)).tobuf(format=tarfile.PAX_FORMAT)
        tail = header + toc + bytes(-len(toc) % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)
        self._tar_hash.update(tail)
        blob_end = _member(tail) + estargz.footer(self._position)
        self._blob_hash.update(blob_end)
        self._out.write(blob_end)
        return Layer(
            digest=f"sha256:{self._blob_hash.hexdigest()}",
            diff_id=self._diff_id or f"sha256:{self._tar_hash.hexdigest()}",
            size=self._position + len(blob_end),
            unpacked=self._unpacked + len(tail),
            toc=f"sha256:{hashlib.sha256(toc).hexdigest()}",
        )


def _with_landmark(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries; NO_PREFETCH is the last one if they lack PREFETCH. Raises SpliceError for other reserved paths."""
    landmark = NO_PREFETCH
    for entry in entries:
        if entry is PREFETCH:
            landmark = PREFETCH
        elif entry.path in estargz.RESERVED:
            raise SpliceError(f"/{entry.path} is reserved by the layer format (eStargz)")
        yield entry
    if landmark is NO_PREFETCH:
        yield NO_PREFETCH


def _header(entry: Entry) -> tarfile.TarInfo:
    """The header of an entry of root; names that ustar cannot hold get a PAX header when it is written."""
    info = tarfile.TarInfo(entry.path)
    info.mode = entry.mode
    info.mtime = MTIME
    if entry.link:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
    elif entry.content is None:
        info.type = tarfile.DIRTYPE
    else:
        info.size = entry.size
    return info


def _member(plain: bytes) -> bytes:
    """Plain bytes as a gzip member."""
    trailer = struct.pack("<II", zlib.crc32(plain), len(plain) & 0xFFFFFFFF)
    return b"".join([GZIP_HEADER, deflate.deflate_compress(plain, LEVEL), trailer])


def _split(content: Zipped | bytes) -> Iterator[bytes]:
    """The content in parts of MEMBER bytes; raises SpliceError as `_plain`."""
    part = bytearray()
    for data in _plain(content):
        part += data
        while len(part) >= MEMBER:
            yield bytes(part[:MEMBER])
            del part[:MEMBER]
    if part:
        yield bytes(part)


def _raw_pieces(content: Zipped) -> Iterator[bytes]:
    content.file.seek(content.offset)
    left = content.length
    while left:
        piece = content.file.read(min(CHUNK, left))
        if not piece:
            raise SpliceError(f"{content.name}: the zip file is truncated here")
        left -= len(piece)
        yield piece


def _checked_pieces(content: Zipped) -> Iterator[bytes]:
    """The pieces of stored content; raises SpliceError after the last one if they do not match."""
    crc = size = 0
    for piece in _raw_pieces(content):
        crc, size = zlib.crc32(piece, crc), size + len(piece)
        yield piece
    if (crc, size) != (content.crc, content.size):
        raise SpliceError(f"{content.name}: content does not match the CRC-32 and size of its entry")


class _Inflater:
    """Inflates one entry, in pieces. `sha256` is that of the content, empty while it is unknown."""

    def __init__(self, content: Zipped, sha256: str = "") -> None:
        self.sha256 = sha256
        self._content = content
        self._stream = isal_zlib.decompressobj(-zlib.MAX_WBITS)
        self._hash = hashlib.sha256()
        self._crc = self._size = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The bytes that a piece inflates to. Raises SpliceError as soon as there are more than expected."""
        try:
            while True:  # a deflate stream may grow a thousandfold: never inflate all of it at once
                plain = self._stream.decompress(piece, _PIECE)
                self._crc = isal_zlib.crc32(plain, self._crc)
                self._hash.update(plain)
                self._size += len(plain)
                yield plain
                piece = self._stream.unconsumed_tail
                if self._size > self._content.size or self._stream.unused_data:
                    raise self._wrong("CRC-32 and size of its entry")
                if not piece and len(plain) < _PIECE:
                    return
        except InflateError as error:
            raise SpliceError(f"{self._content.name}: {error}") from error

    def end(self) -> None:
        """Checks the content, and sets `sha256`.

        Raises SpliceError if the content is not complete, or not the expected one.
        """
        if not self._stream.eof or (self._size, self._crc) != (self._content.size, self._content.crc):
            raise self._wrong("CRC-32 and size of its entry")
        if self.sha256 not in ("", self._hash.hexdigest()):
            raise self._wrong("SHA-256 in RECORD")
        self.sha256 = self._hash.hexdigest()
        del self._stream  # it keeps its last input, up to a megabyte for each of thousands of files

    def _wrong(self, what: str) -> SpliceError:
        return SpliceError(f"{self._content.name}: inflated content does not match the {what}")


class _Worker:
    """A thread for work that releases the interpreter's lock: calls `work` with batches of the jobs that are put.

    Its failure is raised by `put`, or at the end.
    """

    def __init__(self, work: Callable[[list[Any]], None], *, waiting: int = 4) -> None:
        self._work = work
        self._waiting = waiting
        self._thread = ThreadPoolExecutor(1)
        self._batches: deque[Future[None]] = deque()
        self._batch: list[Any] = []
        self._held = 0

    def put(self, job: Any, size: int) -> None:
        """Adds a job. Batches have a megabyte: switching threads costs more than a small file."""
        self._batch.append(job)
        self._held += size
        if self._held >= CHUNK:
            self._dispatch()

    def _dispatch(self) -> None:
        if len(self._batches) == self._waiting:  # reading must not fill the memory
            self._batches.popleft().result()
        self._batches.append(self._thread.submit(self._work, self._batch))
        self._batch, self._held = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._dispatch()
                for batch in self._batches:
                    batch.result()
        finally:  # leaves no thread behind, even if the wait is interrupted
            self._thread.shutdown(cancel_futures=True)


def read_zipped(content: Zipped) -> bytes:
    """All of a small content; raises SpliceError."""
    return b"".join(_plain(content))


def _plain(content: Zipped | bytes) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
    elif content.is_deflated:
        inflater = _Inflater(content)
        for piece in _raw_pieces(content):
            yield from inflater.feed(piece)
        inflater.end()
    else:
        yield from _checked_pieces(content)
