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
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from builder.common.errors import VerifyError
from builder.layers import splice, wheel_zip
from builder.layers.oci import Layer
from builder.layers.splice import Entry, File, Source, SpliceError, Zipped
from builder.plan import layer_order

LONG = "/".join(["a-folder-with-a-name"] * 12) + "/file.txt"
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


def write(entries: Sequence[Entry]) -> tuple[bytes, Layer, tuple[Source, ...], tuple[File, ...]]:
    """The blob, the layer, which must describe it correctly, its Python files and its files."""
    out = io.BytesIO()
    layer, sources, files = splice.write_layer(entries, out)
    blob = out.getvalue()
    assert layer.size == len(blob)
    assert layer.digest == "sha256:" + hashlib.sha256(blob).hexdigest()
    assert layer.diff_id == "sha256:" + hashlib.sha256(gzip.decompress(blob)).hexdigest()
    known = io.BytesIO()
    again = splice.write_layer(entries, known, diff_id=layer.diff_id)
    assert again == (layer, sources, files), "it is the same without inflating"
    assert known.getvalue() == blob
    return blob, layer, sources, files


def unpack(blob: bytes) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    """Path -> header and content, as read by tarfile; paths are unique."""
    files: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:gz") as tar:
        for info in tar:
            assert info.name not in files
            content = tar.extractfile(info) if info.isreg() else None
            files[info.name] = info, content.read() if content else b""
    return files


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
        expected = (
            entry.content if isinstance(entry.content, bytes) else entry.content and splice.read_zipped(entry.content)
        )
        assert content == (expected or b"")
        assert (info.mode, info.linkname) == (entry.mode, entry.link)
        assert (info.uid, info.gid, info.uname, info.gname) == (0, 0, "", "")
        assert info.mtime == layer_order.MTIME
        kind = tarfile.SYMTYPE if entry.link else tarfile.DIRTYPE if entry.content is None else tarfile.REGTYPE
        assert info.type == kind


def test_the_size_of_the_tar() -> None:
    blob, layer, *_ = write(ENTRIES)
    assert layer.unpacked == len(gzip.decompress(blob))


def test_files_have_size_and_crc_and_no_folders() -> None:
    files = write(ENTRIES)[3]
    link = b"/opt/else where"
    assert files[0] == ("opt/plain.txt", 0o644, 6, zlib.crc32(b"plain\n"))
    assert files[1] == ("opt/deflated.txt", 0o640, len(MODULE), zlib.crc32(MODULE))
    assert files[3] == ("opt/link", 0o777, 0, zlib.crc32(link))
    assert [path for path, *_ in files] == [entry.path for entry in ENTRIES[1:]]


def test_the_files_of_a_blob_are_those_that_were_recorded() -> None:
    long = Entry(path=LONG, mode=0o755, content=deflated(MODULE))
    link = Entry(path="a/link", mode=0o777, link="../target")
    blob, *_, files = write([Entry(path="a", mode=0o755), Entry(path="a/empty", mode=0o644, content=b""), link, long])
    assert tuple(splice.read_files(io.BytesIO(blob))) == files


@pytest.mark.parametrize(
    "blob",
    [b"", b"no gzip", gzip.compress(b"no tar"), gzip.compress(bytes(2000))[:-9]],
    ids=["empty", "no gzip", "no tar", "cut short"],
)
def test_the_files_of_a_damaged_blob(blob: bytes) -> None:
    with pytest.raises(VerifyError, match="the layer cannot be read"):
        list(splice.read_files(io.BytesIO(blob)))


def test_a_layer_without_entries() -> None:
    blob, _, sources, files = write([])
    assert unpack(blob) == {}
    assert gzip.decompress(blob) == bytes(1024)
    assert (sources, files) == ((), ())


@pytest.mark.parametrize("size", [1, 511, 512, 513, 65023, 65024, 65535, 65536, 131070, splice.CHUNK, splice.CHUNK + 1])
def test_sizes_around_block_sizes(size: int) -> None:
    content = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    kinds: list[Zipped | bytes] = [content, stored(content), deflated(content)]
    entries = [Entry(path=f"{number}", mode=0o644, content=kind) for number, kind in enumerate(kinds)]
    assert [files for _, files in unpack(write(entries)[0]).values()] == [content] * 3


def test_streams_larger_than_what_is_inflated_at_once() -> None:
    zeros = bytes(3 * splice.CHUNK + 7)
    noise = random.Random(1).randbytes(2 * splice.CHUNK + 5)
    entries = [
        Entry(path="zeros", mode=0o644, content=deflated(zeros)),
        Entry(path="noise", mode=0o644, content=deflated(noise)),
        Entry(path="again", mode=0o644, content=stored(noise)),
    ]
    assert [content for _, content in unpack(write(entries)[0]).values()] == [zeros, noise, noise]


CONTENTS = st.binary(max_size=200) | st.integers(0, 3000).map(lambda size: (b"abcdefg" * 500)[:size])
KINDS: dict[str, Callable[[bytes], Zipped | bytes]] = {"plain": bytes, "deflated": deflated, "stored": stored}
PATHS = st.lists(
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"), min_size=1, max_size=60).filter(
        lambda part: part not in (".", "..")
    ),
    min_size=1,
    max_size=6,
).map("/".join)


@given(
    st.dictionaries(
        PATHS, st.tuples(st.sampled_from([0o644, 0o755, 0o600]), CONTENTS, st.sampled_from([*KINDS])), max_size=6
    ),
    st.sampled_from([9, 300, splice.CHUNK]),
)
def test_random_entries_can_be_read_back(files: dict[str, tuple[int, bytes, str]], chunk: int) -> None:
    entries = [Entry(path=path, mode=mode, content=KINDS[how](data)) for path, (mode, data, how) in files.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splice, "CHUNK", chunk)
        blob, layer, sources, _ = write(entries)
    assert {path: (info.mode, data) for path, (info, data) in unpack(blob).items()} == {
        path: (mode, data) for path, (mode, data, _) in files.items()
    }
    assert layer.diff_id == write(entries)[1].diff_id
    assert {source.path for source in sources} == {path for path in files if path.endswith((".py", ".pyc"))}


# ---- the same bytes


def test_a_layer_is_these_bytes() -> None:
    """A change here needs a new `layers.LAYER_FORMAT`: layers of older builders could not be found or rebuilt."""
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
    assert layer_order.LAYER_FORMAT == 4
    assert layer.digest == "sha256:e44595cb6d7a52f3fd97f8c13b17664750673616bd40d55c3640372df11dd997"
    assert layer.diff_id == "sha256:9be4966ff1ad1e25b9a9289174f63622efb254f777d7d3276df7cacde09c9ab8"
    assert layer.size == 81033


def test_nothing_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a newer zlib would write other bytes."""
    expected = write(ENTRIES)[0]

    def compress(*_: object, **__: object) -> bytes:
        raise AssertionError("something is compressed")

    for module in (zlib, isal_zlib, gzip):
        for name in ("compress", "compressobj", "GzipFile"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, compress)
    out = io.BytesIO()
    splice.write_layer(ENTRIES, out)
    assert out.getvalue() == expected


def test_deflate_streams_are_copied_and_the_rest_is_stored() -> None:
    first, second = deflate(MODULE, 9), deflate(b"two" * 999, 1)
    entries = [
        Entry(path="one", mode=0o644, content=zipped(first, MODULE)),
        Entry(path="plain", mode=0o644, content=b"p" * 200_000),
        Entry(path="two", mode=0o644, content=zipped(second, b"two" * 999)),
    ]
    parts = members(write(entries)[0])
    assert [member[10:-8] for member in parts[1::2]] == [first, second]
    for member in parts:
        assert member[:10] == bytes.fromhex("1f8b08000000000000ff")  # neither a time nor a system
    for member in parts[::2]:
        at, last = 10, 0
        while not last:
            last, length = member[at], int.from_bytes(member[at + 1 : at + 3], "little")
            assert last in (0, 1), "not a stored block"
            at += 5 + length
        assert at == len(member) - 8


def test_the_diff_id_does_not_depend_on_compression() -> None:
    layers = [write([Entry(path="a", mode=0o644, content=deflated(MODULE, level))])[1] for level in (1, 9)]
    layers += [write([Entry(path="a", mode=0o644, content=content)])[1] for content in (stored(MODULE), MODULE)]
    assert len({layer.diff_id for layer in layers}) == 1
    assert len({layer.digest for layer in layers}) == 3


# ---- offsets of Python files


def test_each_python_file_can_be_read_alone() -> None:
    contents: dict[str, Zipped | bytes] = {
        "a/deflated.py": deflated(MODULE),
        "a/data.txt": b"between",
        "a/stored.py": stored(b"stored = 1\n"),
        "a/plain.py": b"plain = 1\n",
        "a/compiled.pyc": deflated(b"\0\1\2"),
        "a/long.py": b"#" * 200_000,
        "a/module.pyi": deflated(MODULE),
        "a/end": stored(b"end"),
    }
    blob, _, sources, _ = write([Entry(path=path, mode=0o644, content=content) for path, content in contents.items()])
    read = {
        source.path: gzip.decompress(blob[source.offset : source.offset + source.length])
        for source in sources
        if source.length
    }
    assert read == {
        "a/deflated.py": MODULE,
        "a/stored.py": b"stored = 1\n",
        "a/plain.py": b"plain = 1\n",
        "a/compiled.pyc": b"\0\1\2",
        "a/long.py": b"#" * 200_000,
    }


@pytest.mark.parametrize("empty", [b"", stored(b""), deflated(b"")], ids=["plain", "stored", "deflated"])
def test_an_empty_python_file_has_no_bytes(empty: Zipped | bytes) -> None:
    sources = write([Entry(path="a.txt", mode=0o644, content=b"a"), Entry(path="a.py", mode=0o644, content=empty)])[2]
    assert [(source.path, source.length) for source in sources] == [("a.py", 0)]


def test_links_and_folders_are_not_sources() -> None:
    entries = [Entry(path="folder.py", mode=0o755), Entry(path="link.py", mode=0o777, link="x.py")]
    assert write(entries)[2] == ()


# ---- damaged entries


def changed(content: Zipped, **fields: Any) -> Zipped:
    return Zipped(**{name: getattr(content, name) for name in Zipped.__slots__} | fields)


def streams() -> Iterator[tuple[str, Zipped]]:
    whole = deflated(MODULE)
    noise = random.Random(1).randbytes(3 * splice.CHUNK)
    large = deflated(noise)
    plain = stored(MODULE)
    yield "wrong CRC", changed(whole, crc=whole.crc ^ 1)
    yield "too long", changed(whole, size=whole.size - 1)
    yield "too short", changed(whole, size=whole.size + 1)
    yield "declared as empty", changed(whole, size=0, crc=0)
    yield "not empty", changed(deflated(b""), size=1)
    yield "truncated", changed(whole, length=whole.length - 1)
    yield "truncated to nothing", changed(whole, length=0)
    yield "truncated after a piece", changed(large, length=2 * splice.CHUNK)
    yield "too long after a piece", changed(large, size=2 * splice.CHUNK)
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
def test_damage_is_an_error_that_names_the_path(content: Zipped, after: int) -> None:
    threads = threading.active_count()
    entries = [Entry(path="a/good", mode=0o644, content=b"good"), Entry(path="a/bad", mode=0o644, content=content)]
    entries += [Entry(path=f"a/{n}", mode=0o644, content=bytes(splice.CHUNK)) for n in range(after)]
    with pytest.raises(SpliceError, match=r"^some\.whl: a/bad: "):
        splice.write_layer(entries, io.BytesIO())
    assert threading.active_count() == threads


@pytest.mark.parametrize("content", STREAMS)
def test_damage_is_an_error_when_an_entry_is_read_or_hashed(content: Zipped) -> None:
    for read in (splice.read_zipped, splice.sha256):
        with pytest.raises(SpliceError, match=r"^some\.whl: a/bad: "):
            read(content)


@pytest.mark.parametrize("kind", [deflated, stored])
@pytest.mark.parametrize("data", [b"", MODULE, bytes(5 * splice.CHUNK)], ids=["empty", "small", "large"])
def test_an_entry_is_read_or_hashed(kind: Callable[[bytes], Zipped], data: bytes) -> None:
    assert splice.read_zipped(kind(data)) == data
    assert splice.sha256(kind(data)) == hashlib.sha256(data).hexdigest()


def test_garbage_that_begins_with_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the stream and the garbage are then in different chunks."""
    stream = deflate(MODULE)
    monkeypatch.setattr(splice, "CHUNK", len(stream))
    write([Entry(path="a", mode=0o644, content=zipped(stream, MODULE))])
    with pytest.raises(SpliceError):
        write([Entry(path="a", mode=0o644, content=zipped(stream + b"garbage", MODULE))])


@pytest.mark.parametrize("size", [0, 100, 5 * splice.CHUNK], ids=["nothing", "little", "more than a piece"])
def test_a_zip_bomb_is_detected_while_it_is_inflated(size: int) -> None:
    """20 GB of zeros: inflating all of them would take too long, and too much memory."""
    content = changed(zipped(bomb(20 << 30), bytes(size)))
    out = io.BytesIO()
    tracemalloc.start()
    try:
        with pytest.raises(SpliceError, match=r"some\.whl: a/bad: "):
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
    """Counts writes and fails at the one with this number."""

    def __init__(self, number: int, error: BaseException) -> None:
        super().__init__()
        self.writes = 0
        self._number = number
        self._error = error

    def write(self, data: Any) -> int:
        self.writes += 1
        if self.writes == self._number:
            raise self._error
        return super().write(data)


NOISE = random.Random(1).randbytes(splice.CHUNK)


def much() -> Iterator[Entry]:
    for number in range(12):
        yield Entry(path=f"{number}", mode=0o644, content=stored(NOISE) if number % 2 else deflated(NOISE, 0))


def writes() -> int:
    out = Failing(0, OSError())
    splice.write_layer(much(), out)
    return out.writes


@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_an_error_while_writing_is_raised_and_leaves_no_thread(which: str) -> None:
    total = writes()
    assert total > 6
    threads = threading.enumerate()
    error = OSError(28, "No space left on device")
    out = Failing({"first": 1, "middle": total // 2, "last": total}[which], error)
    with pytest.raises(OSError, match="No space left") as raised:
        splice.write_layer(much(), out)
    assert raised.value is error
    assert threading.enumerate() == threads
    assert out.writes == out._number, "it continued after the error"


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


@pytest.mark.parametrize("number", [1, 2, 5])
def test_ctrl_c_leaves_no_thread(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Each thread has a semaphore; a small layer waits for the first time at its end."""
    waits = 0

    class Interrupted(threading.Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            nonlocal waits
            waits += 1
            if waits == number:
                raise KeyboardInterrupt
            return super().acquire(blocking, timeout)

    monkeypatch.setattr(threading, "Semaphore", Interrupted)
    threads = threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        splice.write_layer(ENTRIES if number < 3 else much(), io.BytesIO())
    assert threading.enumerate() == threads


def test_slow_writing_limits_reading() -> None:
    """Reading is at most a few chunks ahead of writing."""
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
    entries = [Entry(path=item.filename, mode=0o644, content=wheel_zip.zipped(file, item, "x.zip")) for item in items]
    assert {path: content for path, (_, content) in unpack(write(entries)[0]).items()} == {
        "deflated.py": MODULE,
        "stored": MODULE,
    }
