"""Layers are eStargz by its specification, and a hostile table of contents does no harm.

Source: docs/estargz.md of containerd/stargz-snapshotter.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from builder.common.errors import VerifyError
from builder.layers import estargz, splice
from builder.layers.estargz import CHUNK
from builder.layers.splice import Entry
from tests.unit.layers.test_splice import LONG, PATHS, bomb, content_of, deflated, stored, write
from tests.unit.layers.toc import TYPES, check_by_specification, toc_content, toc_position

MEMBER = 1000  # bytes of a member in these tests


@pytest.fixture(autouse=True)
def small_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splice, "MEMBER", MEMBER)


def in_tar(content: bytes, name: str = estargz.TOC, **fields: Any) -> bytes:
    """Header and content of a file."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(format=tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512)


# ---- what is written


def test_the_footer_is_that_of_the_specification() -> None:
    """An empty gzip member whose header has the position of the table of contents."""
    written = estargz.footer(0x1234ABCDEF)
    assert written == (
        b"\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\xff" + b"\x1a\x00" + b"SG\x16\x00" + b"0000001234abcdefSTARGZ"
        b"\x01\x00\x00\xff\xff" + bytes(8)
    )
    assert len(written) == 51
    assert gzip.decompress(written) == b""


def test_the_content_of_a_large_file_has_chunks() -> None:
    contents = {"a": b"x" * MEMBER, "b": b"x" * (MEMBER + 1), "c": random.Random(1).randbytes(3 * MEMBER)}
    entries = [Entry(path=path, mode=0o644, content=content) for path, content in contents.items()]
    entries += [Entry(path="d", mode=0o644, content=stored(b"y" * (2 * MEMBER + 9)))]
    entries += [Entry(path="deflated", mode=0o644, content=deflated(b"z" * 9 * MEMBER))]  # copied as it is
    blob, _ = write(entries)
    lines = [(entry["name"], entry.get("chunkOffset", 0)) for entry in json.loads(toc_content(blob))["entries"]]
    assert lines == [
        ("a", 0), ("b", 0), ("b", MEMBER), ("c", 0), ("c", MEMBER), ("c", 2 * MEMBER),
        ("d", 0), ("d", MEMBER), ("d", 2 * MEMBER), ("deflated", 0), (estargz.NO_PREFETCH_LANDMARK, 0),
    ]  # fmt: skip


NAMES = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=120)
XATTRS = st.dictionaries(
    st.from_regex(r"SCHILY\.xattr\.(user|security)\.[a-z]{1,9}", fullmatch=True),
    st.binary(min_size=1, max_size=30).map(lambda value: value.decode("utf-8", "surrogateescape")),
    max_size=2,
)
CONTENTS = st.binary(max_size=40) | st.integers(0, 3 * MEMBER + 9).map(lambda size: b"abcdefg" * (size // 7))


@st.composite
def layer_entries(draw: st.DrawFn) -> list[Entry]:
    """Files of a wheel, which have no header of their own, and of an operating system."""
    entries = []
    for path in draw(st.lists(PATHS.filter(lambda path: path not in estargz.RESERVED), unique=True, max_size=7)):
        content = draw(CONTENTS)
        mode = draw(st.sampled_from([0o644, 0o755]))
        kind = draw(st.sampled_from(["plain", "deflated", "stored", "link", "folder", "system", "system", "system"]))
        if kind in ("link", "folder"):
            entries.append(Entry(path=path, mode=mode, link=draw(NAMES) if kind == "link" else ""))
        elif kind != "system":
            zipped = {"deflated": deflated, "stored": stored}
            entries.append(Entry(path=path, mode=mode, content=zipped[kind](content) if kind in zipped else content))
        else:
            header = tarfile.TarInfo(path)
            header.type = draw(st.sampled_from([*TYPES]))
            header.mode = draw(st.integers(0, 0o7777))
            header.uid, header.gid = draw(st.integers(0, 1 << 31)), draw(st.integers(0, 1 << 31))
            header.mtime = draw(st.integers(0, 1 << 35))
            header.pax_headers = draw(XATTRS)
            if header.type in (tarfile.CHRTYPE, tarfile.BLKTYPE):
                header.devmajor, header.devminor = draw(st.integers(0, 4095)), draw(st.integers(0, 1 << 20))
            if header.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                header.linkname = draw(NAMES)
            is_file = header.type == tarfile.REGTYPE
            header.size = len(content) if is_file else 0
            entries.append(Entry(path=path, mode=header.mode, header=header, content=content if is_file else None))
    return entries


@given(layer_entries(), st.sampled_from([9, 300, CHUNK]))
@example([], CHUNK)
@example([Entry(path=LONG, mode=0o644, content=b"deep"), Entry(path=LONG + "/x", mode=0o777, link="/" + LONG)], CHUNK)
def test_every_layer_is_described(entries: list[Entry], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splice, "MEMBER", MEMBER)
        patch.setattr(splice, "CHUNK", chunk)
        blob, layer = write(entries)
    landmark = {estargz.NO_PREFETCH_LANDMARK: estargz.LANDMARK_CONTENT}
    expected = {entry.path: content for entry in entries if (content := content_of(entry))}
    assert check_by_specification(blob, layer) == expected | landmark
    file = io.BytesIO(blob)
    toc = [entry for entry in estargz.read_toc(file) if entry.type != "chunk"]
    assert [entry.name.rstrip("/") for entry in toc] == [entry.path for entry in entries] + [*landmark]
    assert {entry.name: estargz.read_content(file, entry) for entry in toc if entry.size} == expected | landmark


# ---- hostile blobs


def with_entry(**fields: object) -> bytes:
    return json.dumps({"version": 1, "entries": [{"name": "a", "type": "reg", **fields}]}).encode()


def of_toc(content: bytes, **fields: Any) -> bytes:
    """A blob with only this table of contents; `fields` are those of its header."""
    return gzip.compress(b"") + gzip.compress(in_tar(content, **fields) + bytes(1024)) + estargz.footer(20)


def chained(count: int) -> bytes:
    """PAX headers that follow each other; tarfile reads each of them inside the one before."""
    return in_tar(b"9 a=b\n", type=tarfile.XHDTYPE) * count


def sparse(size: int, name: str = "a") -> bytes:
    """A file with a hole of this size, as GNU tar writes it. Source: tar(5) of libarchive, "GNU tar archives"."""
    header = bytearray(in_tar(b"", name, type=tarfile.GNUTYPE_SPARSE))
    header[257:265] = b"ustar  \0"
    for at, value in ((386, size), (398, 0), (483, size)):
        header[at : at + 12] = b"\x80" + value.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header)


def hostile_tocs() -> Iterator[tuple[str, bytes]]:
    blob = write([Entry(path="a", mode=0o644, content=b"x")])[0]
    empty = gzip.compress(b"")
    for name, content in {"empty": b"", "a byte": b"x", "short": blob[:50], "only a footer": estargz.footer(0)}.items():
        yield name, content
    for size in (1, 51, 52, 300):
        yield f"{size} bytes cut off", blob[:-size]
    yield "the beginning cut off", blob[1:]
    at = toc_position(blob)
    for position in (0, at + 1, at - 1, 96, len(blob) - 51, len(blob), 1 << 63, (1 << 64) - 1):
        yield f"position {position}", blob[:-51] + estargz.footer(position)
    for text in (
        b"z" * 16,
        b"+000000000000001",
        b"0x00000000000001",
        b" " * 15 + b"1",
        b"0_0_0_0_0_0_0_01",
        b"\xff" * 16,
        b"0000000000000ABC",
    ):
        yield f"position {text!r}", blob[:-51] + estargz.footer(0).replace(b"0" * 16, text)
    yield "a folder", of_toc(b"", type=tarfile.DIRTYPE)
    yield "a link", of_toc(b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
    tars = {
        "another name": in_tar(with_entry(), "other"),
        "a hole": sparse(1 << 60, estargz.TOC),
        "no tar": b"no tar" * 999,
        "empty member": b"",
        "larger than its tar": in_tar(with_entry())[:520],
        "chained headers": chained(3000) + in_tar(with_entry()),
    }
    for name, tar in tars.items():
        yield name, empty + gzip.compress(tar) + estargz.footer(20)
    for content in (b"", b"{", b"\xff", b"null", b"[]", b"{}", b"1" * 5000, b'"' + b"x" * 99, b'{"version":1}'):
        yield f"content {content[:20]!r}", of_toc(content)
    for name, content in (("nested", b"[" * 100_000), ("nested entries", b'{"version":1,"entries":' + b"[" * 100_000)):
        yield name, of_toc(content)
    for version in (2, 0, -1, 1.5, "1", None):
        yield f"version {version}", of_toc(json.dumps({"version": version, "entries": []}).encode())
    lists: list[object] = [{}, "x", [None], ["x"], [[]], [{}], 5, None]
    for entries in lists:
        yield f"entries {entries}", of_toc(json.dumps({"version": 1, "entries": entries}).encode())
    for field in ("size", "offset"):
        values: list[object] = [-1, 1.5, "x", None, [], 10**400]
        for value in values:
            yield f"{field} {str(value)[:9]}", of_toc(with_entry(**{field: value}))
    for fields in ({"name": ""}, {"name": "a" * 5000}, {"name": 5}, {"type": "x"}, {"type": None}, {"linkName": 5}):
        yield f"{str(fields)[:20]}", of_toc(with_entry(**fields))
    yield "surrogate", of_toc(b'{"version":1,"entries":[{"name":"\\udcff","type":"reg"}]}')


def test_a_table_of_contents_must_have_the_digest_in_the_manifest() -> None:
    """Otherwise a node with a snapshotter would mount other files than those of the image."""
    blob, layer = write([Entry(path="a", mode=0o644, content=b"x")])
    assert estargz.read_toc(io.BytesIO(blob), layer.toc)
    with pytest.raises(VerifyError):
        estargz.read_toc(io.BytesIO(blob), layer.digest)


def large_toc(content: bytes) -> bytes:
    return of_toc(content * (estargz.LARGEST // len(content) + 1))


@pytest.mark.parametrize("blob", [pytest.param(blob, id=name) for name, blob in hostile_tocs()])
def test_a_hostile_blob_has_no_table_of_contents(blob: bytes) -> None:
    check_refused(blob)


def check_refused(blob: bytes) -> None:
    """Soon, and in one line."""
    began = time.process_time()
    with pytest.raises(VerifyError) as raised:
        estargz.read_toc(io.BytesIO(blob))
    assert str(raised.value).isprintable()
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: large_toc(b" "),
        lambda: large_toc(b'{"name":"a","type":"dir"},'),
        lambda: gzip.compress(b"") + splice.GZIP_HEADER + bomb(20 << 30) + bytes(8) + estargz.footer(20),
    ],
    ids=["spaces", "entries", "zeros"],
)
def test_a_bomb_is_refused_before_it_is_parsed(make: Callable[[], bytes]) -> None:
    """As objects, 32 MB of entries are 1 GB."""
    check_refused(make())
