"""Writes a layer (tar+gzip) from zip entries without compressing anything again.

A zip entry is a raw deflate stream with its CRC-32 and length; a gzip file may consist of many members (RFC 1952,
section 2.2). So each deflated entry becomes a gzip member of its own. The bytes between them (tar headers, padding,
generated files) become members of stored deflate blocks (RFC 1951, section 3.2.4), which every decoder reads and no
version of a compressor can change. The remaining work is hashing, and inflating for the diff id.

The result is a pure function of the entries: no clock, no owner, no compressor.
"""

from __future__ import annotations

import hashlib
import queue
import struct
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, cast

from isal import igzip, isal_zlib

from builder.common.errors import VerifyError
from builder.layers.blobs import InflateError
from builder.layers.oci import Layer
from builder.plan.layer_order import MTIME

CHUNK = 1 << 20
# A change of any byte below needs a new builder.plan.layer_order.LAYER_FORMAT.
SOURCES = (".py", ".pyc")  # files whose offset in the layer is recorded, to compile bytecode from them
GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # gzip, deflate, no flags, no time, unknown system
_STORED_MAX = 65535  # bytes of a stored block, whose length has 16 bits (RFC 1951, section 3.2.4)
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
    """One path of a layer, relative to the root, without a leading slash. A directory has neither content nor link."""

    path: str
    mode: int
    content: Zipped | bytes | None = None
    link: str = ""

    @property
    def size(self) -> int:
        return self.content.size if isinstance(self.content, Zipped) else len(self.content or b"")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The gzip members of a Python file in a blob: `length` bytes at `offset`; no bytes if the file is empty."""

    path: str
    offset: int
    length: int


File = tuple[str, int, int, int]  # path, mode, size and CRC-32 of the content; for a link, CRC-32 of its target


class SpliceError(ValueError):
    """The content of a zip entry does not match the zip's directory."""


def write_layer(
    entries: Iterable[Entry], out: BinaryIO, *, diff_id: str = ""
) -> tuple[Layer, tuple[Source, ...], tuple[File, ...]]:
    """Writes the layer of `entries`, in their order, to `out`; returns it with its Python files and its paths without
    folders. Memory: some 100 MB at most, whatever the sizes.

    Raises SpliceError for an entry whose content does not match its CRC-32 and size, and whatever writing raises. With
    a `diff_id`, deflated content is not inflated, and so not checked: the layer's digest must be compared.
    """
    tar_hash, blob_hash = hashlib.sha256(), hashlib.sha256()

    def hash_tar(batch: list[tuple[_Inflater | None, bytes]]) -> None:
        for inflater, data in batch:
            if inflater is None:
                tar_hash.update(data)
            elif data:
                for plain in inflater.feed(data):
                    tar_hash.update(plain)
            else:
                inflater.end()

    def write_blob(batch: list[bytes]) -> None:
        data = b"".join(batch)
        blob_hash.update(data)
        out.write(data)

    with nullcontext() if diff_id else _Worker(hash_tar) as tar, _Worker(write_blob) as blob:
        writer = _Writer(tar, blob)
        for entry in entries:
            writer.add(entry)
        writer.plain += bytes(2 * tarfile.BLOCKSIZE)  # the end of a tar
        writer.flush()
    layer = Layer(
        digest="sha256:" + blob_hash.hexdigest(),
        diff_id=diff_id or "sha256:" + tar_hash.hexdigest(),
        size=blob.size,
        unpacked=writer.unpacked + 2 * tarfile.BLOCKSIZE,
    )
    return layer, tuple(writer.sources), tuple(writer.files)


def read_files(layer: BinaryIO) -> Iterator[File]:
    """The paths in a layer, as `write_layer` returns them. Raises VerifyError if it is no tar in gzip."""
    try:
        plain = cast("BinaryIO", igzip.open(layer))  # type: ignore[no-untyped-call]
        with plain, tarfile.open(fileobj=plain, mode="r|") as tar:
            for member in tar:
                if member.islnk() or member.issym():
                    yield member.name, member.mode, 0, zlib.crc32(member.linkname.encode())
                elif content := tar.extractfile(member):
                    crc = 0
                    while chunk := content.read(CHUNK):
                        crc = zlib.crc32(chunk, crc)
                    yield member.name, member.mode, member.size, crc
    except (tarfile.TarError, EOFError, OSError, InflateError) as error:
        raise VerifyError(f"the layer cannot be read: {error}") from error


class _Writer:
    """Lays out both sides of entries: compressed bytes for `blob`, the bytes they inflate to for `tar`."""

    def __init__(self, tar: _Worker | None, blob: _Worker) -> None:
        self._tar = tar
        self._blob = blob
        self.plain = bytearray()  # tar bytes for the next member of stored blocks
        self.unpacked = 0
        self.sources: list[Source] = []
        self.files: list[File] = []

    def add(self, entry: Entry) -> None:
        content, size = entry.content, entry.size
        header = _tar_header(entry)
        padding = bytes(-size % tarfile.BLOCKSIZE)
        self.plain += header
        self.unpacked += len(header) + size + len(padding)
        if entry.link or content is not None:
            crc = content.crc if isinstance(content, Zipped) else zlib.crc32(content or entry.link.encode())
            self.files.append((entry.path, entry.mode, size, crc))
        is_source = entry.path.endswith(SOURCES) and not entry.link and content is not None
        has_member = isinstance(content, Zipped) and content.is_deflated and size > 0
        if is_source or has_member:  # what was collected so far precedes it
            self.flush()
        start = self._blob.size
        if isinstance(content, Zipped) and content.is_deflated:
            if has_member:  # an empty file is checked, but has no member
                self._blob.put(GZIP_HEADER, len(GZIP_HEADER))
            inflater = _Inflater(content)
            for chunk in _chunks(content):
                if has_member:
                    self._blob.put(chunk, len(chunk))
                if self._tar:
                    self._tar.put((inflater, chunk), len(chunk))
            if self._tar:
                self._tar.put((inflater, b""), 0)  # the end, where the content is checked
            if has_member:
                trailer = struct.pack("<II", content.crc, size & 0xFFFFFFFF)
                self._blob.put(trailer, len(trailer))
        elif content:
            for chunk in _checked_chunks(content) if isinstance(content, Zipped) else (content,):
                self.plain += chunk
                if len(self.plain) >= CHUNK:
                    self.flush()
        if is_source:  # it can be read without what is before and after it
            self.flush()
            self.sources.append(Source(path=entry.path, offset=start, length=self._blob.size - start))
        self.plain += padding

    def flush(self) -> None:
        """Writes the collected bytes as one member of stored blocks."""
        if not self.plain:
            return
        plain = bytes(self.plain)
        self.plain.clear()
        if self._tar:
            self._tar.put((None, plain), len(plain))
        parts = [GZIP_HEADER]
        for at in range(0, len(plain), _STORED_MAX):
            block = plain[at : at + _STORED_MAX]
            last = at + len(block) == len(plain)
            parts += (struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF), block)
        parts.append(struct.pack("<II", zlib.crc32(plain), len(plain) & 0xFFFFFFFF))
        member = b"".join(parts)
        self._blob.put(member, len(member))


def _chunks(content: Zipped) -> Iterator[bytes]:
    content.file.seek(content.offset)
    left = content.length
    while left:
        chunk = content.file.read(min(CHUNK, left))
        if not chunk:
            raise SpliceError(f"{content.name}: the zip file is truncated here")
        left -= len(chunk)
        yield chunk


def _checked_chunks(content: Zipped) -> Iterator[bytes]:
    """The chunks of stored content; raises SpliceError after the last one if they do not match."""
    crc = size = 0
    for chunk in _chunks(content):
        crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        yield chunk
    if (crc, size) != (content.crc, content.size):
        raise SpliceError(f"{content.name}: content does not match the CRC-32 and size of its entry")


class _Inflater:
    """Inflates one entry, chunk by chunk."""

    def __init__(self, content: Zipped) -> None:
        self._content = content
        self._stream = isal_zlib.decompressobj(-zlib.MAX_WBITS)
        self._crc = self._size = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The bytes that a chunk inflates to. Raises SpliceError as soon as there are more than expected."""
        try:
            while True:  # a deflate stream may grow a thousandfold: never inflate all of it at once
                plain = self._stream.decompress(chunk, _PIECE)
                self._crc = isal_zlib.crc32(plain, self._crc)
                self._size += len(plain)
                yield plain
                chunk = self._stream.unconsumed_tail
                if self._size > self._content.size or self._stream.unused_data:
                    raise self._wrong()
                if not chunk and len(plain) < _PIECE:
                    return
        except InflateError as error:
            raise SpliceError(f"{self._content.name}: {error}") from error

    def end(self) -> None:
        if not self._stream.eof or (self._size, self._crc) != (self._content.size, self._content.crc):
            raise self._wrong()

    def _wrong(self) -> SpliceError:
        return SpliceError(f"{self._content.name}: inflated content does not match the CRC-32 and size of its entry")


class _Worker:
    """A thread for work that releases the interpreter's lock: calls `work` with batches of the jobs that are put.

    Its failure is raised by `put`, or at the end. `size` is the sum of the sizes of the jobs.
    """

    def __init__(self, work: Callable[[list[Any]], None]) -> None:
        self.size = 0
        self._work = work
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(4)  # batches that may wait: reading must not fill the memory
        self._batch: list[Any] = []
        self._held = 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def put(self, job: Any, size: int) -> None:
        """Adds a job. Batches have a megabyte: switching threads costs more than a small file."""
        self.size += size
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


def _tar_header(entry: Entry) -> bytes:
    """The entry's header block(s); names that ustar cannot hold get a PAX header."""
    info = tarfile.TarInfo(entry.path)
    info.mode = entry.mode
    info.mtime = MTIME
    if entry.link:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
    elif entry.content is None:
        info.type = tarfile.DIRTYPE
    else:
        info.size = entry.size
    return info.tobuf(format=tarfile.PAX_FORMAT)


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
        for chunk in _chunks(content):
            yield from inflater.feed(chunk)
        inflater.end()
    else:
        yield from _checked_chunks(content)
