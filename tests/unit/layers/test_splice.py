"""Layers can be read by gzip and tar, have correct digests, and never contain damaged entries."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import tarfile
import threading
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import strategies as st

from builder.common.errors import VerifyError
from builder.layers import estargz, splice, wheel
from builder.layers.estargz import CHUNK, TocEntry
from builder.layers.oci import Layer
from builder.layers.splice import Entry, SpliceError, Zipped
from builder.plan import layer_order
from tests.unit.layers.toc import check_by_specification, prefetched

LONG = "/".join(["a-folder-with-a-name"] * 12) + "/file.txt"
NOISE = random.Random(1).randbytes(CHUNK)
MODULE = b'"""A module."""\n\nVALUE = 1\n' * 40


def deflate(content: bytes, level: int = 6) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


def zipped(stream: bytes, content: bytes, *, is_deflated: bool = True) -> Zipped:
    """`stream` between other bytes, declared to inflate to `content`."""
    return Zipped(
        file=io.BytesIO(b"before" + stream + b"after"),
        offset=6,
        length=len(stream),
        is_deflated=is_deflated,
        crc=zlib.crc32(content),
        size=len(content),
        name="some.whl: a/bad",
    )


def deflated(content: bytes, level: int = 6) -> Zipped:
    return zipped(deflate(content, level), content)


def stored(content: bytes) -> Zipped:
    return zipped(content, content, is_deflated=False)


def write(entries: Sequence[Entry]) -> tuple[bytes, Layer]:
    """The blob and the layer, which must describe it correctly, as must its table of contents."""
    out = io.BytesIO()
    layer = splice.write_layer(entries, out)
    blob = out.getvalue()
    plain = gzip.decompress(blob)
    assert (layer.size, layer.unpacked) == (len(blob), len(plain))
    assert layer.digest == "sha256:" + hashlib.sha256(blob).hexdigest()
    assert layer.diff_id == "sha256:" + hashlib.sha256(plain).hexdigest()
    check_by_specification(blob, layer)
    return blob, layer


def content_of(entry: Entry) -> bytes:
    return splice.read_zipped(entry.content) if isinstance(entry.content, Zipped) else entry.content or b""


def toc(blob: bytes) -> tuple[TocEntry, ...]:
    """Files of a layer, without the landmark, which is the last one."""
    *files, landmark = estargz.read_toc(io.BytesIO(blob))
    assert landmark.name == estargz.NO_PREFETCH_LANDMARK
    return tuple(files)


def unpack(blob: bytes) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    """Path -> header and content, as read by tarfile; paths are unique. Without the files that every layer has."""
    files: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:gz") as tar:
        for info in tar:
            assert info.name not in files
            content = tar.extractfile(info) if info.isreg() else None
            files[info.name] = info, content.read() if content else b""
    reserved = [estargz.NO_PREFETCH_LANDMARK, estargz.TOC]
    assert list(files)[-2:] == reserved
    assert files[estargz.NO_PREFETCH_LANDMARK][1] == b"\x0f"
    for path in reserved:
        assert (files[path][0].mode, files[path][0].mtime) == (0o444, layer_order.MTIME)
    return {path: file for path, file in files.items() if path not in reserved}


def members(blob: bytes) -> list[bytes]:
    """The gzip members of a blob."""
    parts = []
    while blob:
        stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        stream.decompress(blob)
        assert stream.eof
        rest = stream.unused_data
        parts.append(blob[: len(blob) - len(rest)])
        blob = rest
    return parts


def bomb(size: int) -> bytes:
    """A deflate stream of at least `size` zeros, made without compressing all of them."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * (size // (1 << 24) + 1) + deflate(b"")


ENTRIES = [
    Entry(path="opt", mode=0o755),
    Entry(path="opt/plain.txt", mode=0o644, content=b"plain\n"),
    Entry(path="opt/deflated.txt", mode=0o640, content=deflated(MODULE)),
    Entry(path="opt/stored.bin", mode=0o755, content=stored(bytes(range(256)) * 9)),
    Entry(path="opt/link", mode=0o777, link="/opt/else where"),
    Entry(path="opt/empty", mode=0o600, content=b""),
    Entry(path="opt/empty-deflated", mode=0o644, content=deflated(b"")),
    Entry(path="opt/empty-stored", mode=0o644, content=stored(b"")),
    Entry(path="opt/naïve-文字-🐍.py", mode=0o644, content=deflated(b"x = 1\n")),
    Entry(path=LONG, mode=0o755, content=b"deep"),
    Entry(path="opt/long-link", mode=0o777, link="/" + LONG),
    Entry(path="opt/ a name\nof 'two' \"lines\"", mode=0o644, content=b"odd"),
]


# ---- reading back


def test_entries_can_be_read_back() -> None:
    files = unpack(write(ENTRIES)[0])
    assert list(files) == [entry.path for entry in ENTRIES]
    for entry in ENTRIES:
        info, content = files[entry.path]
        assert content == content_of(entry)
        assert (info.mode, info.linkname) == (entry.mode, entry.link)
        assert (info.uid, info.gid, info.uname, info.gname) == (0, 0, "", "")
        assert info.mtime == layer_order.MTIME
        kind = tarfile.SYMTYPE if entry.link else tarfile.DIRTYPE if entry.content is None else tarfile.REGTYPE
        assert info.type == kind


FOLDERS, FILES = ["lib", "lib/python3.11"], ["lib/x1.so", "lib/python3.11/a.py", "lib/python3.11/b.py", "z"]
MARK, NO_MARK = estargz.PREFETCH_LANDMARK, estargz.NO_PREFETCH_LANDMARK


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (["lib/python*/b.py"], [*FOLDERS, "lib/python3.11/b.py", MARK, "lib/x1.so", "lib/python3.11/a.py", "z"]),
        (
            ["lib/x*.so", "z"],
            ["lib", "lib/x1.so", "z", MARK, "lib/python3.11", "lib/python3.11/a.py", "lib/python3.11/b.py"],
        ),
        # Nothing matches: a list has `*` for numbers.
        *((paths, [*FOLDERS, *FILES, NO_MARK]) for paths in ([], ["lib/python3.11/a.py"], ["lib/c.py"])),
    ],
)
def test_listed_files_come_first_with_their_folders(prefetch: list[str], expected: list[str]) -> None:
    entries = [Entry(path=path, mode=0o755) for path in FOLDERS]
    entries += [Entry(path=path, mode=0o644, content=b"x") for path in FILES]
    blob, _ = write([*splice.prefetched_first(entries, prefetch)])
    assert [entry.name.rstrip("/") for entry in estargz.read_toc(io.BytesIO(blob))] == expected
    assert prefetched(blob) == (set(prefetch) if MARK in expected else set())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("usr/lib/x86_64-linux-gnu/libcrypto.so.3.0.17", "usr/lib/*-linux-gnu/libcrypto.so.*"),
        ("usr/lib/aarch64-linux-gnu/libcrypto.so.3", "usr/lib/*-linux-gnu/libcrypto.so.*"),
        ("a/__pycache__/b.cpython-311.pyc", "a/__pycache__/b.cpython-*.pyc"),
        ("a/jinja2-3.1.6.dist-info/RECORD", "a/jinja*-*.dist-info/RECORD"),
    ],
)
def test_a_path_without_versions(path: str, expected: str) -> None:
    assert estargz.without_versions(path) == expected


KINDS: dict[str, Callable[[bytes], Zipped | bytes]] = {"plain": bytes, "deflated": deflated, "stored": stored}


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 65023, 65024, 65535, 65536, 131070, CHUNK, 3 * CHUNK + 7])
def test_sizes_around_those_of_blocks_and_pieces(size: int) -> None:
    content = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    entries = [Entry(path=name, mode=0o644, content=kind(content)) for name, kind in KINDS.items()]
    assert [read for _, read in unpack(write(entries)[0]).values()] == [content] * 3
    for entry in entries:
        assert content_of(entry) == content


PATHS = st.lists(
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"), min_size=1, max_size=60).filter(
        lambda part: part not in (".", "..")
    ),
    min_size=1,
    max_size=6,
).map("/".join)


# ---- the same bytes


def test_a_layer_is_these_bytes() -> None:
    """A change here needs a new `layer_order.LAYER_FORMAT`: layers of older builders could not be found or rebuilt.

    A new version of libdeflate (`deflate` in locks/builder.txt) changes them, too.
    """
    hello = bytes.fromhex("cb48cdc9c95728cf2fca49e10200")  # deflated by zlib, once
    entries = [
        Entry(path="opt", mode=0o755),
        Entry(path="opt/hello.txt", mode=0o644, content=zipped(hello, b"hello world\n")),
        Entry(path="opt/hello.py", mode=0o755, content=zipped(hello, b"hello world\n")),
        Entry(path="opt/stored", mode=0o644, content=stored(b"as it is")),
        Entry(path="opt/plain", mode=0o644, content=b"p" * 70000),
        Entry(path="opt/empty.py", mode=0o644, content=b""),
        Entry(path="opt/link", mode=0o777, link="/opt/hello.txt"),
        Entry(path=LONG, mode=0o644, content=b"deep"),
        Entry(path="opt/naïve", mode=0o644, content=b"not ASCII"),
        Entry(path="opt/nothing", mode=0o644, content=zipped(b"\3\0", b"")),
    ]
    layer = write(entries)[1]
    assert layer_order.LAYER_FORMAT == 6
    assert layer.digest == "sha256:5c7ba78b3333b4f9b39608b78a59cf687935a3e7bbec2dbf9bf1a3f533519457"
    assert layer.diff_id == "sha256:92af8fd1198aee3c0cc08fd15eba597ba32e4abfd317c399f2144ede61c1f5cc"
    assert layer.size == 1931


def test_headers_of_many_empty_files_have_members_of_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splice, "MEMBER", 5 * 512)
    blob, _ = write([Entry(path=f"{number}", mode=0o644, content=b"") for number in range(12)])
    sizes = [len(gzip.decompress(member)) for member in members(blob)[:3]]
    assert sizes == [5 * 512, 5 * 512, 3 * 512]  # the last one with the header of the landmark


# ---- files of a layer


def test_the_content_of_a_damaged_file_is_an_error() -> None:
    blob, _ = write([Entry(path="a", mode=0o644, content=MODULE), Entry(path="b", mode=0o644, content=b"b")])
    [entry, *_] = toc(blob)
    for at in range(entry.offset, entry.offset + 40, 3):
        damaged = bytearray(blob)
        damaged[at] ^= 0xFF
        try:
            assert estargz.read_content(io.BytesIO(damaged), entry) == MODULE, "e.g. the time of the member"
        except VerifyError:
            continue
    for wrong in ({"size": len(MODULE) + 1}, {"size": 1 << 60}, {"offset": len(blob)}):
        with pytest.raises(VerifyError):
            estargz.read_content(io.BytesIO(blob), entry.model_copy(update=wrong))


@pytest.mark.parametrize("path", estargz.RESERVED)
def test_a_file_with_a_reserved_name_is_refused(path: str) -> None:
    """Nodes would take it for the table of contents, or ignore it."""
    with pytest.raises(SpliceError):
        write([Entry(path=path, mode=0o644, content=b"x")])
    write([Entry(path=f"a/{path}", mode=0o644, content=b"x")])


# ---- damaged entries


def changed(content: Zipped, **fields: Any) -> Zipped:
    return Zipped(**{name: getattr(content, name) for name in Zipped.__slots__} | fields)


def streams() -> Iterator[tuple[str, Zipped]]:
    whole = deflated(MODULE)
    noise = random.Random(1).randbytes(3 * CHUNK)
    large = deflated(noise)
    plain = stored(MODULE)
    yield "wrong CRC", changed(whole, crc=whole.crc ^ 1)
    yield "too long", changed(whole, size=whole.size - 1)
    yield "too short", changed(whole, size=whole.size + 1)
    yield "declared as empty", changed(whole, size=0, crc=0)
    yield "not empty", changed(deflated(b""), size=1)
    yield "truncated", changed(whole, length=whole.length - 1)
    yield "truncated to nothing", changed(whole, length=0)
    yield "truncated after a piece", changed(large, length=2 * CHUNK)
    yield "too long after a piece", changed(large, size=2 * CHUNK)
    yield "trailing garbage", zipped(deflate(MODULE) + b"garbage", MODULE)
    yield "second stream", zipped(deflate(MODULE) + deflate(b"x"), MODULE)
    yield "not a deflate stream", zipped(b"\xff" * 100, MODULE)
    yield "damaged in the middle", zipped(deflate(noise)[:-9000] + bytes(9000), noise)
    yield "stored, wrong CRC", changed(plain, crc=plain.crc ^ 1)
    yield "stored, too long", changed(plain, size=plain.size - 1)
    yield "stored, too short", changed(plain, size=plain.size + 1)
    yield "stored, declared as empty", changed(plain, size=0, crc=0)
    yield "the file ends", changed(plain, length=plain.length + 1000, size=plain.size + 1000)
    yield "the file ends in a stream", changed(whole, offset=10_000)
    yield "a wrapped gzip", zipped(gzip.compress(MODULE, mtime=0), MODULE)


STREAMS = [pytest.param(content, id=name) for name, content in streams()]


@pytest.mark.parametrize("after", [0, 3], ids=["last", "not last"])
@pytest.mark.parametrize("content", STREAMS)
def test_damage_is_an_error(content: Zipped, after: int) -> None:
    threads = threading.active_count()
    entries = [Entry(path="a/good", mode=0o644, content=b"good"), Entry(path="a/bad", mode=0o644, content=content)]
    entries += [Entry(path=f"a/{n}", mode=0o644, content=bytes(CHUNK)) for n in range(after)]
    with pytest.raises(SpliceError):
        splice.write_layer(entries, io.BytesIO())
    assert threading.active_count() == threads
    with pytest.raises(SpliceError):
        splice.read_zipped(content)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("content", [b"", MODULE, bytes(5 * CHUNK)], ids=["empty", "small", "large"])
def test_a_content_with_another_sha256_is_an_error(content: bytes, kind: Callable[[bytes], Zipped | bytes]) -> None:
    entry = Entry(path="a/bad", mode=0o644, content=kind(content), sha256=hashlib.sha256(content).hexdigest())
    splice.write_layer([entry], io.BytesIO())
    with pytest.raises(SpliceError):
        splice.write_layer([replace(entry, sha256="0" * 64)], io.BytesIO())


def test_known_layers_have_the_same_bytes() -> None:
    """They are not inflated if the files have a SHA-256."""
    large = [Entry(path=name, mode=0o644, content=kind(NOISE + NOISE)) for name, kind in KINDS.items()]
    entries = [*ENTRIES, *large]
    blob, layer = write(entries)
    hashed = [replace(entry, sha256=hashlib.sha256(content_of(entry)).hexdigest()) for entry in entries]
    for alternative in (entries, hashed):
        out = io.BytesIO()
        assert splice.write_layer(alternative, out, diff_id=layer.diff_id) == layer
        assert out.getvalue() == blob


def test_known_layers_are_written_without_inflating() -> None:
    """The digest of the layer is compared instead. Without a SHA-256, inflating is the only way to describe a file."""
    stream = deflate(MODULE)
    damaged = zipped(stream[:10] + bytes([stream[10] ^ 0xFF]) + stream[11:], MODULE)
    entry = Entry(path="a", mode=0o644, content=damaged, sha256=hashlib.sha256(MODULE).hexdigest())
    layer = write([replace(entry, content=deflated(MODULE))])[1]
    out = io.BytesIO()
    written = splice.write_layer([entry], out, diff_id=layer.diff_id)
    damaged.file.seek(damaged.offset)
    assert damaged.file.read(damaged.length) in out.getvalue()
    assert written.digest == "sha256:" + hashlib.sha256(out.getvalue()).hexdigest() != layer.digest
    assert written == replace(layer, digest=written.digest)
    for noticed, diff_id in ((entry, ""), (replace(entry, sha256=""), layer.diff_id)):
        with pytest.raises(SpliceError):
            splice.write_layer([noticed], io.BytesIO(), diff_id=diff_id)


def test_garbage_that_begins_with_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the stream and the garbage are then in different chunks."""
    stream = deflate(MODULE)
    monkeypatch.setattr(splice, "CHUNK", len(stream))
    write([Entry(path="a", mode=0o644, content=zipped(stream, MODULE))])
    with pytest.raises(SpliceError):
        write([Entry(path="a", mode=0o644, content=zipped(stream + b"garbage", MODULE))])


@pytest.mark.parametrize("size", [0, 100, 5 * CHUNK], ids=["nothing", "little", "more than a piece"])
def test_a_zip_bomb_is_detected_while_it_is_inflated(size: int) -> None:
    """20 GB of zeros: inflating all of them would take too long, and too much memory."""
    content = changed(zipped(bomb(20 << 30), bytes(size)))
    out = io.BytesIO()
    tracemalloc.start()
    try:
        with pytest.raises(SpliceError):
            splice.write_layer([Entry(path="a/bomb", mode=0o644, content=content)], out)
        with pytest.raises(SpliceError):
            splice.read_zipped(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert out.tell() < content.length / 2
    assert peak < 120 << 20


# ---- errors while writing


class Failing(io.BytesIO):
    """Fails at the write with this number; after None, it only counts."""

    def __init__(self, number: int | None, error: BaseException) -> None:
        super().__init__()
        self.writes = 0
        self._number = number
        self._error = error

    def write(self, data: Any) -> int:
        self.writes += 1
        if self.writes == self._number:
            raise self._error
        return super().write(data)


def much() -> Iterator[Entry]:
    for number in range(12):
        yield Entry(path=f"{number}", mode=0o644, content=stored(NOISE) if number % 2 else deflated(NOISE, 0))


@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_an_error_while_writing_is_raised_and_leaves_no_thread(which: str) -> None:
    error = OSError(28, "No space left on device")
    whole = Failing(None, error)
    splice.write_layer(much(), whole)
    assert whole.writes > 6
    numbers = {"first": 1, "middle": whole.writes // 2, "last": whole.writes}
    threads = threading.enumerate()
    with pytest.raises(OSError) as raised:  # noqa: PT011
        splice.write_layer(much(), Failing(numbers[which], error))
    assert raised.value is error
    assert threading.enumerate() == threads


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("from the entries")])
def test_an_error_of_the_entries_is_raised_and_leaves_no_thread(error: BaseException) -> None:
    def entries() -> Iterator[Entry]:
        yield from much()
        raise error

    threads = threading.enumerate()
    with pytest.raises(type(error)) as raised:
        splice.write_layer(entries(), io.BytesIO())
    assert raised.value is error
    assert threading.enumerate() == threads


@pytest.mark.parametrize("processors", [1, 2, 64])
def test_slow_writing_limits_reading(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    """Reading is at most a few chunks ahead of writing, also with many processors."""
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    gate = threading.Event()
    read = 0

    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            assert gate.wait(60)
            return super().write(data)

    def entries() -> Iterator[Entry]:
        nonlocal read
        for number in range(40):
            read += 1
            yield Entry(path=f"{number}", mode=0o644, content=stored(NOISE))

    thread = threading.Thread(target=splice.write_layer, args=(entries(), Slow()))
    thread.start()
    before = -1
    while before != read:
        before = read
        time.sleep(0.2)
    gate.set()
    thread.join(60)
    assert before < 20
    assert read == 40


# ---- entries of real zip files


class Pipe(io.RawIOBase):
    """A file that cannot seek: a zip written to it has its sizes after the data."""

    def __init__(self) -> None:
        self.data = io.BytesIO()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.data.write(data)


def archive(out: BinaryIO, *, force: bool) -> None:
    with zipfile.ZipFile(out, "w", allowZip64=True) as packed:
        for name, how in (("deflated.py", zipfile.ZIP_DEFLATED), ("stored", zipfile.ZIP_STORED)):
            item = zipfile.ZipInfo(name)
            item.compress_type = how
            with packed.open(item, "w", force_zip64=force) as file:
                file.write(MODULE)


@pytest.mark.parametrize("kind", ["plain", "zip64 headers", "zip64 throughout", "sizes after the data", "prepended"])
def test_parts_a_zip_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    if kind == "sizes after the data":
        pipe = Pipe()
        archive(cast("BinaryIO", pipe), force=True)
        file = io.BytesIO(pipe.data.getvalue())
    elif kind == "prepended":
        archive(file, force=False)
        file = io.BytesIO(b"#!/bin/sh\n" * 100 + file.getvalue())
    else:
        with monkeypatch.context() as patch:
            if kind == "zip64 throughout":
                patch.setattr(zipfile, "ZIP64_LIMIT", 10)
            archive(file, force=kind != "plain")
        assert (b"PK\x06\x06" in file.getvalue()) == (kind == "zip64 throughout")
    with zipfile.ZipFile(file) as read:
        items = read.infolist()
    entries = [Entry(path=item.filename, mode=0o644, content=wheel.zipped(file, item, "x.zip")) for item in items]
    assert {path: content for path, (_, content) in unpack(write(entries)[0]).items()} == {
        "deflated.py": MODULE,
        "stored": MODULE,
    }
