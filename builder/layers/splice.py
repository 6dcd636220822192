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
import queue
import struct
import tarfile
import threading
import zlib
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
    tar_hash, blob_hash = hashlib.sha256(), hashlib.sha256()
    position = unpacked = 0  # in the blob and in the tar

    def hash_tar(batch: list[tuple[_Inflater | None, bytes]]) -> None:
        for inflater, data in batch:
            if inflater and not data:
                inflater.end()
            for plain in inflater.feed(data) if inflater and data else [data]:
                if not diff_id:
                    tar_hash.update(plain)

    def write_blob(batch: list[tuple[bytes | Future[bytes], _Chunk | None]]) -> None:
        nonlocal position
        parts = []
        for data, chunk in batch:
            part = data.result() if isinstance(data, Future) else data
            if chunk:
                chunk.offset = position
            parts.append(part)
            position += len(part)
        joined = b"".join(parts)
        blob_hash.update(joined)
        out.write(joined)

    threads = min(os.cpu_count() or 1, _THREADS)
    # For the TOC: each file, its digest once it is known, and its chunks.
    files: list[tuple[dict[str, Any], str | _Inflater, list[_Chunk]]] = []
    with (
        ThreadPoolExecutor(threads, "deflate") as pool,
        _Worker(hash_tar) as tar,
        _Worker(write_blob, waiting=2 * threads) as blob,
    ):

        def put(plain: bytes, chunk: _Chunk | None = None) -> None:
            """Compresses plain bytes of the tar as one member."""
            tar.put((None, plain), len(plain))
            member = pool.submit(_member, plain) if len(plain) >= _IN_BACKGROUND else _member(plain)
            blob.put((member, chunk), len(plain))

        headers = bytearray()  # and padding, for the next member
        for entry in _with_landmark(entries):
            info = entry.header or _header(entry)
            content, size = entry.content, entry.size
            header = info.tobuf(format=tarfile.PAX_FORMAT)
            headers += header
            unpacked += len(header) + size + -size % tarfile.BLOCKSIZE
            described, chunks = estargz.describe_file(info), list[_Chunk]()
            digest: str | _Inflater = entry.sha256
            if isinstance(content, Zipped) and content.is_deflated:
                if size:
                    put(bytes(headers))
                    headers.clear()
                    chunks = [_Chunk(size=size)]
                    blob.put((GZIP_HEADER, chunks[0]), len(GZIP_HEADER))
                # An empty file has no member, but its stream is checked, too.
                inflater = None if diff_id and (entry.sha256 or not size) else _Inflater(content, entry.sha256)
                for data in _raw_pieces(content):
                    if size:
                        blob.put((data, None), len(data))
                    if inflater:
                        tar.put((inflater, data), len(data))
                if inflater:
                    tar.put((inflater, b""), 0)  # the end, where the content is checked
                    digest = inflater
                if size:
                    trailer = struct.pack("<II", content.crc, size & 0xFFFFFFFF)
                    blob.put((trailer, None), len(trailer))
            elif content is not None:
                content_hash = hashlib.sha256()
                for plain in _split(content):
                    if not chunks:
                        put(bytes(headers))
                        headers.clear()
                    content_hash.update(plain)
                    chunks.append(_Chunk(size=len(plain), digest=hashlib.sha256(plain).hexdigest()))
                    put(plain, chunks[-1])
                digest = content_hash.hexdigest()
                if entry.sha256 not in ("", digest):
                    name = content.name if isinstance(content, Zipped) else f"/{entry.path}"
                    raise SpliceError(f"{name}: content does not match the SHA-256 in RECORD")
            files.append((described, digest, chunks))
            headers += bytes(-size % tarfile.BLOCKSIZE)
            if len(headers) >= MEMBER:
                put(bytes(headers))
                headers.clear()
        put(bytes(headers))  # the padding of the last file

    # All positions are known now. The TOC, the end of the tar, and the footer.
    toc = estargz.dump_toc(
        [
            line
            for described, digest, chunks in files
            for line in estargz.describe_content(
                described,
                digest if isinstance(digest, str) else digest.sha256,
                [(chunk.offset, chunk.size, chunk.digest) for chunk in chunks],
            )
        ]
    )
    if len(toc) > estargz.LARGEST:
        raise SpliceError(f"{len(files)} files in one layer are too many: their table of contents has {len(toc)} bytes")
    header = _header(Entry(path=estargz.TOC, mode=0o444, content=toc)).tobuf(format=tarfile.PAX_FORMAT)
    tail = header + toc + bytes(-len(toc) % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)
    tar_hash.update(tail)
    end = _member(tail) + estargz.footer(position)
    blob_hash.update(end)
    out.write(end)
    return Layer(
        digest=f"sha256:{blob_hash.hexdigest()}",
        diff_id=diff_id or f"sha256:{tar_hash.hexdigest()}",
        size=position + len(end),
        unpacked=unpacked + len(tail),
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


@dataclass(kw_only=True)
class _Chunk:
    """A part of a file's content, which is one member. `digest` is empty if it is the digest of the whole content."""

    size: int
    digest: str = ""
    offset: int = 0  # in the blob, once it is written


def _split(content: Zipped | bytes) -> Iterator[bytes]:
    """The content in parts of MEMBER bytes, one for each chunk; raises SpliceError as `_checked_pieces`."""
    if isinstance(content, bytes):
        for at in range(0, len(content), MEMBER):
            yield content[at : at + MEMBER]
        return
    part = bytearray()
    for data in _checked_pieces(content):
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
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(waiting)  # batches that may wait: reading must not fill the memory
        self._batch: list[Any] = []
        self._held = 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def put(self, job: Any, size: int) -> None:
        """Adds a job. Batches have a megabyte: switching threads costs more than a small file."""
        self._batch.append(job)
        self._held += size
        if self._held >= CHUNK:
            self._dispatch()

    def _dispatch(self) -> None:
        if self._failure:
            raise self._failure
        self._room.acquire()
        self._jobs.put(self._batch)
        self._batch, self._held = [], 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._dispatch()
        finally:  # leaves no thread behind, even if the wait for room is interrupted
            self._jobs.put(None)
            self._thread.join()
        if self._failure and kind is None:
            raise self._failure

    def _run(self) -> None:
        while (batch := self._jobs.get()) is not None:
            if self._failure is None:
                try:
                    self._work(batch)
                except Exception as error:  # noqa: BLE001  raised again by the writer
                    self._failure = error
            self._room.release()


def read_zipped(content: Zipped) -> bytes:
    """All of a small content; raises SpliceError."""
    return b"".join(_plain(content))


def sha256(content: Zipped | bytes) -> str:
    """Hex digest of a content of any size; raises SpliceError."""
    content_hash = hashlib.sha256()
    for plain in _plain(content):
        content_hash.update(plain)
    return content_hash.hexdigest()


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
