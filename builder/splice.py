"""Writes a layer (tar+gzip) from zip entries without compressing anything again.

A zip entry is a raw deflate stream with its CRC-32 and length; a gzip file may consist of many members (RFC 1952,
section 2.2). So each deflated entry becomes a gzip member of its own, and what lies between (tar headers, padding,
small files that we make) becomes members of stored deflate blocks (RFC 1951, section 3.2.4), which every decoder reads
and no version of a compressor can change. What is left to do is hashing, and inflating for the diff id.

The result is a pure function of the entries: no clock, no owner, no compressor.
"""

from __future__ import annotations

import hashlib
import queue
import struct
import tarfile
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from isal import isal_zlib

FORMAT = 1  # of layers; a change of any byte that this module or `builder.wheel` writes makes it another one
MTIME = 946684800  # 2000-01-01, of every file: a constant, after 1980 for those who zip what they find
CHUNK = 1 << 20
SOURCES = (".py", ".pyc")  # files whose place in the layer is kept: bytecode is made from them
_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # gzip, deflate, no flags, no time, unknown system
_STORED_MAX = 65535
_InflateError = cast("type[Exception]", isal_zlib.error)  # its stub says that it is an instance
_PIECE = 2 * CHUNK  # of what is inflated, at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Zipped:
    """Content as it lies in a zip file: `length` bytes at `offset`, deflated or stored, and what they come to.

    `name` is what errors call it.
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
    """One path of a layer, relative to the root, without a leading slash. A directory has neither content nor link."""

    path: str
    mode: int
    content: Zipped | bytes | None = None
    link: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where in a blob a Python file lies: gzip members of `length` bytes at `offset`; none if it is empty."""

    path: str
    offset: int
    length: int


File = tuple[str, int, int, int]  # path, mode, size and CRC-32 of the content; of a link, of where it leads


@dataclass(frozen=True, kw_only=True)
class Layer:
    """`digest` and `size` of the compressed blob, `diff_id` of the tar inside; both digests as `sha256:<hex>`.

    `files` are its paths without folders.
    """

    digest: str
    diff_id: str
    size: int
    sources: tuple[Source, ...] = ()
    files: tuple[File, ...] = ()


class SpliceError(ValueError):
    """A zip entry does not come to what the zip's directory says."""


def write(entries: Iterable[Entry], out: BinaryIO) -> Layer:
    """Writes the layer of `entries`, in their order, to `out`. Memory: some 100 MB at most, whatever the sizes.

    Raises SpliceError for an entry whose content is not what its CRC-32 and size say, and whatever writing raises.
    """
    with _Tar() as tar, _Blob(out) as blob:
        writer = _Writer(tar, blob)
        for entry in entries:
            writer.add(entry)
        writer.close()
    return Layer(
        digest="sha256:" + blob.hash.hexdigest(),
        diff_id="sha256:" + tar.hash.hexdigest(),
        size=writer.size,
        sources=tuple(writer.sources),
        files=tuple(writer.files),
    )


class _Writer:
    """Reads entries and lays out both sides: the compressed one to `blob`, what it has to inflate to, to `tar`."""

    def __init__(self, tar: _Tar, blob: _Blob) -> None:
        self._tar = tar
        self._blob = blob
        self._plain = bytearray()  # tar bytes that wait for a member of stored blocks
        self.size = 0
        self.sources: list[Source] = []
        self.files: list[File] = []

    def add(self, entry: Entry) -> None:
        content = entry.content
        size = content.size if isinstance(content, Zipped) else len(content or b"")
        self._plain += _tar_header(entry, size)
        if entry.link or content is not None:
            crc = content.crc if isinstance(content, Zipped) else zlib.crc32(content or entry.link.encode())
            self.files.append((entry.path, entry.mode, size, crc))
        is_source = entry.path.endswith(SOURCES) and not entry.link and content is not None
        if is_source or (isinstance(content, Zipped) and content.is_deflated and size):
            self._flush()
        start = self.size
        if isinstance(content, Zipped):
            self._zipped(content)
        elif content:
            self._stored(content)
        if is_source:
            self._flush()
            self.sources.append(Source(path=entry.path, offset=start, length=self.size - start))
        self._plain += bytes(-size % tarfile.BLOCKSIZE)

    def close(self) -> None:
        self._plain += bytes(2 * tarfile.BLOCKSIZE)
        self._flush()

    def _emit(self, data: bytes) -> None:
        self._blob.put(data)
        self.size += len(data)

    def _zipped(self, content: Zipped) -> None:
        if content.is_deflated:
            emit = self._emit if content.size else lambda _: None  # an empty file is checked, but has no member
            emit(_HEADER)
            inflater = _Inflater(content)
            for chunk in _chunks(content):
                emit(chunk)
                self._tar.put(inflater, chunk)
            self._tar.put(inflater, b"")
            emit(struct.pack("<II", content.crc, content.size & 0xFFFFFFFF))
            return
        crc = size = 0
        for chunk in _chunks(content):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
            self._stored(chunk)
        if (crc, size) != (content.crc, content.size):
            raise SpliceError(f"{content.name}: holds other bytes than its entry says")

    def _stored(self, content: bytes) -> None:
        self._plain += content
        if len(self._plain) >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        """What has gathered, as one member of stored blocks."""
        if not self._plain:
            return
        plain = bytes(self._plain)
        self._plain.clear()
        self._tar.put(None, plain)
        parts = [_HEADER]
        for at in range(0, len(plain), _STORED_MAX):
            block = plain[at : at + _STORED_MAX]
            last = at + len(block) == len(plain)
            parts += (struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF), block)
        parts.append(struct.pack("<II", zlib.crc32(plain), len(plain) & 0xFFFFFFFF))
        self._emit(b"".join(parts))


def _chunks(content: Zipped) -> Iterable[bytes]:
    content.file.seek(content.offset)
    left = content.length
    while left:
        chunk = content.file.read(min(CHUNK, left))
        if not chunk:
            raise SpliceError(f"{content.name}: the zip file ends in the middle of it")
        left -= len(chunk)
        yield chunk


class _Inflater:
    """Inflates one entry, chunk by chunk, into the hash of the tar."""

    def __init__(self, content: Zipped) -> None:
        self._content = content
        self._stream = isal_zlib.decompressobj(-zlib.MAX_WBITS)
        self._crc = self._size = 0

    def feed(self, chunk: bytes, tar_hash: Any) -> None:
        """Raises SpliceError as soon as there is more than there may be."""
        try:
            while True:  # a deflate stream may grow a thousandfold: never all at once
                plain = self._stream.decompress(chunk, _PIECE)
                self._crc = isal_zlib.crc32(plain, self._crc)
                self._size += len(plain)
                tar_hash.update(plain)
                chunk = self._stream.unconsumed_tail
                if self._size > self._content.size or self._stream.unused_data:
                    raise self._wrong()
                if not chunk and len(plain) < _PIECE:
                    return
        except _InflateError as error:
            raise SpliceError(f"{self._content.name}: {error}") from error

    def end(self) -> None:
        if not self._stream.eof or (self._size, self._crc) != (self._content.size, self._content.crc):
            raise self._wrong()

    def _wrong(self) -> SpliceError:
        return SpliceError(f"{self._content.name}: inflates to other bytes than its entry says")


class _Worker:
    """A thread for work that releases the interpreter's lock. Its failure is raised by `put`, or at the end."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(4)
        self._batch: list[Any] = []
        self._held = 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _send(self, job: Any, size: int) -> None:
        """Jobs go over in batches of a megabyte: a switch of threads costs more than a small file."""
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._dispatch()
        finally:  # whatever interrupts the wait for room: no thread stays behind
            self._jobs.put(None)
            self._thread.join()
        if self._failure and kind is None:
            raise self._failure

    def _run(self) -> None:
        while (batch := self._jobs.get()) is not None:
            if self._failure is None:
                try:
                    self._work(batch)
                except Exception as error:  # noqa: BLE001  handed to the writer, which raises it
                    self._failure = error
            self._room.release()

    def _work(self, batch: list[Any]) -> None:
        raise NotImplementedError


class _Tar(_Worker):
    """Hashes the tar side."""

    def __enter__(self) -> _Tar:
        self._thread.start()
        return self

    def put(self, inflater: _Inflater | None, data: bytes) -> None:
        self._send((inflater, data), len(data))

    def _work(self, batch: list[tuple[_Inflater | None, bytes]]) -> None:
        for inflater, data in batch:
            if inflater is None:
                self.hash.update(data)
            elif data:
                inflater.feed(data, self.hash)
            else:
                inflater.end()


class _Blob(_Worker):
    """Writes and hashes the compressed side."""

    def __init__(self, out: BinaryIO) -> None:
        super().__init__()
        self._out = out

    def __enter__(self) -> _Blob:
        self._thread.start()
        return self

    def put(self, data: bytes) -> None:
        self._send(data, len(data))

    def _work(self, batch: list[bytes]) -> None:
        data = b"".join(batch) if len(batch) > 1 else batch[0] if batch else b""
        self.hash.update(data)
        self._out.write(data)


def _tar_header(entry: Entry, size: int) -> bytes:
    """The entry's header block(s); names that ustar cannot hold get a PAX header."""
    info = tarfile.TarInfo(entry.path)
    info.mode = entry.mode
    info.mtime = MTIME
    if entry.link:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
    elif entry.content is None:
        info.type = tarfile.DIRTYPE
    else:
        info.size = size
    return info.tobuf(format=tarfile.PAX_FORMAT)


def read(content: Zipped) -> bytes:
    """The whole of a small content; raises SpliceError."""
    collected = _Collected()
    _feed(content, collected)
    return bytes(collected.data)


def sha256(content: Zipped) -> str:
    """Hex digest of a content of any size; raises SpliceError."""
    hashed = hashlib.sha256()
    _feed(content, hashed)
    return hashed.hexdigest()


class _Collected:
    """Takes what it is given, as a hash does."""

    def __init__(self) -> None:
        self.data = bytearray()

    def update(self, data: bytes) -> None:
        self.data += data


def _feed(content: Zipped, taker: Any) -> None:
    if content.is_deflated:
        inflater = _Inflater(content)
        for chunk in _chunks(content):
            inflater.feed(chunk, taker)
        inflater.end()
        return
    crc = size = 0
    for chunk in _chunks(content):
        crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        taker.update(chunk)
    if (crc, size) != (content.crc, content.size):
        raise SpliceError(f"{content.name}: holds other bytes than its entry says")
