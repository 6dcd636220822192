"""Layers are eStargz by its specification, a table of contents that differs is refused, and hostile ones do no harm.

Source: docs/estargz.md of containerd/stargz-snapshotter.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import random
import struct
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from builder.common.errors import VerifyError
from builder.layers import estargz, splice
from builder.layers.oci import Layer
from builder.layers.splice import Entry
from tests.unit.layers.test_splice import LONG, PATHS, bomb, deflated, members, stored

TYPES = {
    tarfile.DIRTYPE: "dir", tarfile.REGTYPE: "reg", tarfile.SYMTYPE: "symlink", tarfile.LNKTYPE: "hardlink",
    tarfile.CHRTYPE: "char", tarfile.BLKTYPE: "block", tarfile.FIFOTYPE: "fifo",
}  # fmt: skip
MEMBER = 1000  # bytes of a member in these tests


@pytest.fixture(autouse=True)
def small_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splice, "MEMBER", MEMBER)


def write(entries: list[Entry]) -> tuple[bytes, Layer]:
    out = io.BytesIO()
    layer = splice.write_layer(entries, out)
    return out.getvalue(), layer


def toc_position(blob: bytes) -> int:
    return int(blob[-51:][16:32], 16)


def toc_content(blob: bytes) -> bytes:
    """The table of contents, found as the specification says."""
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(blob[toc_position(blob) :]))) as tar:
        assert tar.getnames() == [estargz.TOC]
        file = tar.extractfile(estargz.TOC)
        assert file
        return file.read()


def in_tar(content: bytes, name: str = estargz.TOC, **fields: Any) -> bytes:
    """Header and content of a file."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(format=tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512)


def with_toc(blob: bytes, content: bytes, *, after: bytes = b"") -> bytes:
    """A blob with another table of contents, and with files `after` it in the tar."""
    position = toc_position(blob)
    end = gzip.compress(in_tar(content) + after + bytes(1024), mtime=0)
    return blob[:position] + end + estargz.footer(position)


def replace_toc(blob: bytes, change: Callable[[list[dict[str, Any]]], object]) -> tuple[bytes, str]:
    """A forgery: the blob with a changed table of contents, and the digest of that table for the manifest."""
    toc = json.loads(toc_content(blob))
    change(toc["entries"])
    content = json.dumps(toc, separators=(",", ":")).encode()
    return with_toc(blob, content), digest(content)


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def check_by_specification(blob: bytes, layer: Layer) -> None:
    """Reads a layer with tarfile and zlib alone, and compares its table of contents with what they read."""
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:gz") as tar:
        files = [(info, _read(tar, info)) for info in tar]
    *files, (last, content) = files
    assert (last.name, content) == (estargz.TOC, toc_content(blob))
    assert digest(content) == layer.toc
    toc = json.loads(content)
    assert toc["version"] == 1
    entries = [entry for entry in toc["entries"] if entry["type"] != "chunk"]
    for (info, plain), entry in zip(files, entries, strict=True):
        is_folder, is_device = info.isdir(), info.type in (tarfile.CHRTYPE, tarfile.BLKTYPE)
        xattrs = {
            key.removeprefix("SCHILY.xattr."): base64.b64encode(value.encode("utf-8", "surrogateescape")).decode()
            for key, value in info.pax_headers.items()
            if key.startswith("SCHILY.xattr.")
        }
        described: dict[str, Any] = {
            "name": info.name + "/" * is_folder,
            "type": TYPES[info.type],
            "mode": info.mode,
            "uid": info.uid,
            "gid": info.gid,
            "modtime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(info.mtime))),
            **({"linkName": info.linkname} if info.issym() or info.islnk() else {}),
            **({"devMajor": info.devmajor, "devMinor": info.devminor} if is_device else {}),
            **({"size": info.size, "digest": digest(plain)} if plain else {}),
            **({"xattrs": xattrs} if xattrs else {}),
        }
        assert {key: value for key, value in entry.items() if key not in CHUNK_KEYS} == described
    _check_chunks(blob, toc["entries"], {info.name: plain for info, plain in files if plain})


CHUNK_KEYS = ("offset", "chunkOffset", "chunkSize", "chunkDigest")


def _read(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(info) if info.isreg() else None
    return file.read() if file else b""


def _check_chunks(blob: bytes, entries: list[dict[str, Any]], contents: dict[str, bytes]) -> None:
    """Each chunk is one gzip member at its offset; all chunks of a file are its content."""
    read: dict[str, bytes] = {}
    for number, entry in enumerate(entries):
        name = entry["name"]
        if "offset" not in entry:
            assert not set(entry) & set(CHUNK_KEYS)
            assert name not in contents
            continue
        stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        plain = stream.decompress(blob[entry["offset"] :])
        assert stream.eof
        assert plain
        assert digest(plain) == entry["chunkDigest"]
        assert entry.get("chunkOffset", 0) == len(read.get(name, b""))
        assert (name in read) == (entry["type"] == "chunk")
        is_last = number + 1 == len(entries) or entries[number + 1]["type"] != "chunk"
        assert entry.get("chunkSize", 0) == (0 if is_last else len(plain))
        read[name] = read.get(name, b"") + plain
    assert read == contents


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


def test_a_layer_ends_with_its_table_of_contents_and_the_footer() -> None:
    blob, layer = write([Entry(path="a", mode=0o644, content=b"x")])
    *_, toc, footer = members(blob)
    assert blob[toc_position(blob) :] == toc + footer
    assert footer == estargz.footer(len(blob) - len(toc) - 51)
    check_by_specification(blob, layer)


def test_the_content_of_a_large_file_has_chunks() -> None:
    contents = {"a": b"x" * MEMBER, "b": b"x" * (MEMBER + 1), "c": random.Random(1).randbytes(3 * MEMBER)}
    entries = [Entry(path=path, mode=0o644, content=content) for path, content in contents.items()]
    entries += [Entry(path="d", mode=0o644, content=stored(b"y" * (2 * MEMBER + 9)))]
    entries += [Entry(path="deflated", mode=0o644, content=deflated(b"z" * 9 * MEMBER))]  # copied as it is
    blob, layer = write(entries)
    lines = [(entry["name"], entry.get("chunkOffset", 0)) for entry in json.loads(toc_content(blob))["entries"]]
    assert lines == [
        ("a", 0), ("b", 0), ("b", MEMBER), ("c", 0), ("c", MEMBER), ("c", 2 * MEMBER),
        ("d", 0), ("d", MEMBER), ("d", 2 * MEMBER), ("deflated", 0), (estargz.NO_PREFETCH_LANDMARK, 0),
    ]  # fmt: skip
    check_by_specification(blob, layer)
    estargz.check_layer(io.BytesIO(blob), layer.toc)


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


@given(layer_entries())
@example([])
@example([Entry(path=LONG, mode=0o644, content=b"deep"), Entry(path=LONG + "/" + LONG, mode=0o777, link="/" + LONG)])
def test_every_layer_is_described_and_accepted(entries: list[Entry]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splice, "MEMBER", MEMBER)
        blob, layer = write(entries)
    check_by_specification(blob, layer)
    estargz.check_layer(io.BytesIO(blob), layer.toc)
    names = [entry.name.rstrip("/") for entry in estargz.read_toc(io.BytesIO(blob)) if entry.type != "chunk"]
    assert names == [entry.path for entry in entries] + [estargz.NO_PREFETCH_LANDMARK]


# ---- forgeries: every digest is right, and the table of contents is not


@pytest.fixture(scope="module")
def good() -> tuple[bytes, Layer]:
    """Its table of contents has the lines a/, a/run, a/link, a/large (two chunks), and the landmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splice, "MEMBER", MEMBER)
        return write(
            [
                Entry(path="a", mode=0o755),
                Entry(path="a/run", mode=0o755, content=b"#!/bin/sh\n"),
                Entry(path="a/link", mode=0o777, link="run"),
                Entry(path="a/large", mode=0o644, content=random.Random(1).randbytes(MEMBER + 9)),
            ]
        )


ZERO = "sha256:" + "0" * 64
Change = Callable[[list[dict[str, Any]]], object]
FORGERIES: dict[str, tuple[Change, str]] = {
    "digest": (lambda lines: lines[1].update(digest=ZERO), "a/run"),
    "digest of a chunk": (lambda lines: lines[1].update(chunkDigest=ZERO), "a/run"),
    "digest of a later chunk": (lambda lines: lines[4].update(chunkDigest=ZERO), "a/large"),
    "offset": (lambda lines: lines[1].update(offset=lines[1]["offset"] + 1), "a/run"),
    "offset of another file": (lambda lines: lines[1].update(offset=lines[3]["offset"]), "a/run"),
    "size": (lambda lines: lines[1].update(size=lines[1]["size"] - 1), "a/run"),
    "size of a chunk": (lambda lines: lines[3].update(chunkSize=MEMBER - 1), "a/large"),
    "no size": (lambda lines: lines[1].pop("size"), "a/run"),
    "position of a chunk": (lambda lines: lines[4].update(chunkOffset=MEMBER + 1), "a/large"),
    "missing chunk": (lambda lines: lines.pop(4), "a/large"),
    "mode": (lambda lines: lines[1].update(mode=0o4755), "a/run"),
    "owner": (lambda lines: lines[1].update(uid=1000), "a/run"),
    "name of the owner": (lambda lines: lines[1].update(userName="user"), "a/run"),
    "time": (lambda lines: lines[1].update(modtime="2020-01-01T00:00:00Z"), "a/run"),
    "type": (lambda lines: lines[1].update(type="fifo"), "a/run"),
    "attribute": (lambda lines: lines[1].update(xattrs={"security.capability": "AA=="}), "a/run"),
    "name": (lambda lines: lines[1].update(name="a/other"), "a/run"),
    "link": (lambda lines: lines[2].update(linkName="/bin/sh"), "a/link"),
    "missing file": (lambda lines: lines.pop(1), "a/run"),
    "missing last file": (lambda lines: lines.pop(), estargz.NO_PREFETCH_LANDMARK),
    "additional file": (lambda lines: lines.append({"name": "a/.wh.run", "type": "reg"}), "a/.wh.run"),
    "additional first file": (lambda lines: lines.insert(0, dict(lines[1])), "a/"),
    "another order": (lambda lines: lines.insert(1, lines.pop(2)), "a/run"),
    "not a file": (lambda lines: cast("list[Any]", lines).append("x"), ""),
    "name that is no text": (lambda lines: lines.append({"name": {"a": "\x1b[1A"}}), r"{'a': '\x1b[1A'}"),
}


@pytest.mark.parametrize(("change", "name"), FORGERIES.values(), ids=FORGERIES.keys())
def test_a_table_of_contents_that_differs_is_refused_by_the_name_of_the_file(
    good: tuple[bytes, Layer], change: Change, name: str
) -> None:
    """Nodes with a snapshotter would mount other files than those of the image."""
    forged, toc = replace_toc(good[0], change)
    assert digest(toc_content(forged)) == toc
    assert gzip.decompress(forged), "a blob like any other"
    with pytest.raises(VerifyError) as raised:
        estargz.check_layer(io.BytesIO(forged), toc)
    shown = name.replace("\\", "\\\\")
    quoted = f'"{shown}"' if "'" in name else f"'{name}'"
    message = f"the table of contents has wrong data about {quoted}" if name else "invalid table of contents"
    assert str(raised.value) == message


def test_an_unchanged_table_of_contents_is_accepted_when_it_is_written_again(good: tuple[bytes, Layer]) -> None:
    """So it is the changes that are refused above."""
    forged, toc = replace_toc(good[0], lambda _: None)
    assert toc == good[1].toc
    estargz.check_layer(io.BytesIO(forged), toc)


@pytest.mark.parametrize(
    "change",
    [
        lambda toc: toc.replace(b'"version":1', b'"version":2'),
        lambda toc: toc.replace(b'"version":1', b'"version":1.0'),
        lambda toc: json.dumps(json.loads(toc), indent=1).encode(),
        lambda toc: toc + b" ",
        lambda toc: toc.replace(b'"entries"', b'"files"'),
        lambda _: b'{"version":1,"entries":{}}',
        lambda _: b"[" * 100_000,
        lambda _: b"1" * 5000,
        lambda _: b"\xff",
        lambda _: b"null",
        lambda _: b"",
    ],
)
def test_other_forms_of_a_table_of_contents_are_refused(
    good: tuple[bytes, Layer], change: Callable[[bytes], bytes]
) -> None:
    content = change(toc_content(good[0]))
    with pytest.raises(VerifyError, match="table of contents"):
        estargz.check_layer(io.BytesIO(with_toc(good[0], content)), digest(content))


def test_the_digest_in_the_manifest_must_be_that_of_the_table_of_contents(good: tuple[bytes, Layer]) -> None:
    blob, layer = good
    estargz.check_layer(io.BytesIO(blob), layer.toc)
    with pytest.raises(VerifyError, match="does not match the digest in the manifest"):
        estargz.check_layer(io.BytesIO(blob), ZERO)


def test_a_table_of_contents_must_be_the_last_file_and_where_the_footer_says(good: tuple[bytes, Layer]) -> None:
    """Otherwise nodes read another one than the one that was compared."""
    blob, layer = good
    content, position = toc_content(blob), toc_position(blob)
    files = blob[:position]
    cases = {
        "it is not the last": with_toc(blob, content, after=in_tar(b"x", "more")),
        "it is missing": files + gzip.compress(bytes(1024)) + estargz.footer(position),
        "a second one": with_toc(blob, content, after=in_tar(b"x")),
        "no footer": blob[:-51],
        "a footer with another position": blob[:-51] + estargz.footer(position + 1),
        "a footer with the position of another member": blob[:-51] + estargz.footer(96),
        "a member that begins before it": files[: -len(members(files)[-1])]
        + gzip.compress(gzip.decompress(members(files)[-1]) + gzip.decompress(blob[position:-51]))
        + estargz.footer(position),
        "more after the footer": blob + gzip.compress(b""),
    }
    messages = {}
    for name, forged in cases.items():
        with pytest.raises(VerifyError) as raised:
            estargz.check_layer(io.BytesIO(forged), layer.toc)
        messages[name] = str(raised.value)
    last = "the table of contents is not the last file of the layer"
    place = "the footer of the layer does not have the position of its table of contents"
    assert messages == {
        **dict.fromkeys(cases, place),
        "it is not the last": last,
        "it is missing": "the layer has no table of contents, but its manifest has the digest of one",
        "a second one": "the table of contents does not match the digest in the manifest",
    }


def test_an_earlier_table_of_contents_is_a_file_like_any_other(good: tuple[bytes, Layer]) -> None:
    """One that is not listed would hide what it contains."""
    blob, _ = good
    position, another = toc_position(blob), in_tar(b"another")
    first = b"".join(map(gzip.compress, (another[:512], b"another", another[519:])))
    with_first = blob[:position] + first + blob[position:-51] + estargz.footer(position + len(first))
    with pytest.raises(VerifyError, match=f"wrong data about '{estargz.TOC}'"):
        estargz.check_layer(io.BytesIO(with_first), digest(toc_content(with_first)))


def test_a_file_must_begin_with_a_member(good: tuple[bytes, Layer]) -> None:
    """By the specification; the positions of others cannot be compared."""
    plain = gzip.decompress(good[0][: toc_position(good[0])])
    one = gzip.compress(plain)
    content = toc_content(good[0])
    blob = one + gzip.compress(in_tar(content) + bytes(1024)) + estargz.footer(len(one))
    with pytest.raises(VerifyError, match="the content of 'a/run' is not in gzip members of its own"):
        estargz.check_layer(io.BytesIO(blob), digest(content))


def test_a_table_of_contents_cannot_hide_the_content_of_a_file() -> None:
    """A node with a snapshotter would mount an empty file, where engines have the content."""
    info = tarfile.TarInfo("etc/sudoers")
    info.size = 5
    files = gzip.compress(in_tar(b"rule\n", info.name))
    toc = estargz.dump_toc([estargz.describe_file(info)])
    assert b"size" not in toc
    blob = files + gzip.compress(in_tar(toc) + bytes(1024)) + estargz.footer(len(files))
    with pytest.raises(VerifyError, match="the content of 'etc/sudoers' is not in gzip members of its own"):
        estargz.check_layer(io.BytesIO(blob), digest(toc))


def test_any_changed_byte_of_a_blob_is_refused_or_changes_no_file(good: tuple[bytes, Layer]) -> None:
    blob, layer = good
    with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
        expected = [(info.get_info(), _read(tar, info)) for info in tar]
    for at in range(0, len(blob), 7):
        damaged = bytearray(blob)
        damaged[at] ^= 1 + at % 255
        try:
            estargz.check_layer(io.BytesIO(damaged), layer.toc)
        except VerifyError:
            continue
        with tarfile.open(fileobj=io.BytesIO(damaged)) as tar:  # such as the time in the header of a member
            assert [(info.get_info(), _read(tar, info)) for info in tar] == expected


# ---- hostile blobs


def with_entry(**fields: object) -> bytes:
    return json.dumps({"version": 1, "entries": [{"name": "a", "type": "reg", **fields}]}).encode()


def of_toc(content: bytes, **fields: Any) -> bytes:
    """A blob with only this table of contents; `fields` are those of its header."""
    return gzip.compress(b"") + gzip.compress(in_tar(content, **fields) + bytes(1024)) + estargz.footer(20)


def of_end(end: bytes) -> bytes:
    return write([Entry(path="a", mode=0o644, content=b"x")])[0][:-51] + end


def position_as(text: bytes) -> bytes:
    return of_end(estargz.footer(0).replace(b"0" * 16, text))


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
    yield "empty", b""
    yield "a byte", b"x"
    yield "short", blob[:50]
    for size in (1, 51, 52, 300):
        yield f"{size} bytes cut off", blob[:-size]
    yield "the beginning cut off", blob[1:]
    yield "only a footer", estargz.footer(0)
    for name, position in (
        ("at the start", 0),
        ("one more", toc_position(blob) + 1),
        ("one less", toc_position(blob) - 1),
    ):
        yield f"position {name}", of_end(estargz.footer(position))
    for position in (96, len(blob) - 51, len(blob), 1 << 63, (1 << 64) - 1):
        yield f"position {position}", of_end(estargz.footer(position))
    for text in (
        b"z" * 16,
        b"+000000000000001",
        b"0x00000000000001",
        b" " * 15 + b"1",
        b"0_0_0_0_0_0_0_01",
        b"\xff" * 16,
    ):
        yield f"position {text!r}", position_as(text)
    yield "capital letters", of_end(estargz.footer(0xABC).replace(b"abc", b"ABC"))
    yield "another name", gzip.compress(b"") + gzip.compress(in_tar(with_entry(), "other")) + estargz.footer(20)
    yield "a folder", of_toc(b"", type=tarfile.DIRTYPE)
    yield "a link", of_toc(b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
    yield "a hole", gzip.compress(b"") + gzip.compress(sparse(1 << 60, estargz.TOC)) + estargz.footer(20)
    yield "no tar", gzip.compress(b"") + gzip.compress(b"no tar" * 999) + estargz.footer(20)
    yield "empty member", gzip.compress(b"") + gzip.compress(b"") + estargz.footer(20)
    yield "larger than its tar", gzip.compress(b"") + gzip.compress(in_tar(with_entry())[:520]) + estargz.footer(20)
    yield (
        "chained headers",
        gzip.compress(b"") + gzip.compress(chained(3000) + in_tar(with_entry())) + estargz.footer(20),
    )
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


@pytest.mark.parametrize("blob", [pytest.param(blob, id=name) for name, blob in hostile_tocs()])
def test_a_hostile_blob_has_no_table_of_contents(blob: bytes) -> None:
    began = time.process_time()
    with pytest.raises(VerifyError, match=r"^the layer cannot be read: ") as raised:
        estargz.read_toc(io.BytesIO(blob))
    assert str(raised.value).isprintable()
    assert time.process_time() - began < 5


def large_toc(content: bytes) -> bytes:
    return of_toc(content * (estargz.LARGEST // len(content) + 1))


def endless_toc() -> bytes:
    return gzip.compress(b"") + splice.GZIP_HEADER + bomb(20 << 30) + struct.pack("<II", 0, 0) + estargz.footer(20)


@pytest.mark.parametrize(
    "make",
    [lambda: large_toc(b" "), lambda: large_toc(b'{"name":"a","type":"dir"},'), endless_toc],
    ids=["spaces", "entries", "zeros"],
)
def test_a_bomb_is_refused_before_it_is_parsed(make: Callable[[], bytes]) -> None:
    """As objects, 32 MB of entries are 1 GB."""
    blob = make()
    began = time.process_time()
    with pytest.raises(VerifyError, match="its table of contents is too large"):
        estargz.read_toc(io.BytesIO(blob))
    assert time.process_time() - began < 5


def test_a_layer_with_a_large_table_of_contents_is_refused() -> None:
    blob = large_toc(b" ")
    began = time.process_time()
    with pytest.raises(VerifyError, match="its table of contents is too large"):
        estargz.check_layer(io.BytesIO(blob), "")
    assert time.process_time() - began < 5


def hostile_layers() -> Iterator[tuple[str, bytes]]:
    """Tars; each is followed by a right table of contents for no file."""
    number = {"size": 0, "type": tarfile.REGTYPE}
    for mtime in ("1e300", "-1e300", "inf", "nan", "x" * 99, "9" * 5000):
        yield f"time {mtime[:6]}", in_tar(b"", "a", **number, pax_headers={"mtime": mtime})
    for size in ("-512", "1" * 30, "inf"):
        yield f"size {size[:6]}", in_tar(b"", "a", **number, pax_headers={"size": size})
    for kind in (b"Z", b"V", b"D"):
        yield f"type {kind!r}", in_tar(b"", "a", type=kind)
    header = bytearray(in_tar(b"", "a", type=b"Z"))
    header[124:136] = b"\x80" + (1 << 87).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    yield "an endless file of an unknown type", bytes(header)
    yield "a sparse file", sparse(1 << 60)
    sparse_headers = {"GNU.sparse.map": f"{1 << 60},0", "GNU.sparse.size": str(1 << 60)}
    yield "a sparse file of PAX", in_tar(b"", "a", **number, pax_headers=sparse_headers)
    yield "a header of 100 MB", in_tar(bytes(100_000_000), type=tarfile.XHDTYPE)
    yield "a name of 100 MB", in_tar(b"a" * 100_000_000, type=tarfile.GNUTYPE_LONGNAME)
    yield "global headers", tarfile.TarInfo.create_pax_global_header({"path": "b"}) + in_tar(b"", "a")
    yield "chained headers", chained(3000) + in_tar(b"", "a")
    yield "cut short", in_tar(b"x" * 5000, "a")[:3000]


def test_the_headers_of_a_layer_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of a blob may be a million empty files, each with objects in memory."""
    monkeypatch.setattr(estargz, "HEADERS", 10_000)
    assert len(list(estargz.LayerReader(io.BytesIO(gzip.compress(in_tar(b"", "a") * 19))))) == 19
    with pytest.raises(VerifyError, match="its headers have more than 10000 bytes"):
        list(estargz.LayerReader(io.BytesIO(gzip.compress(in_tar(b"", "a") * 20))))


@pytest.mark.parametrize("tar", [pytest.param(tar, id=name) for name, tar in hostile_layers()])
def test_a_hostile_layer_is_refused(tar: bytes) -> None:
    toc = b'{"version":1,"entries":[]}'
    files = gzip.compress(tar)
    blob = files + gzip.compress(in_tar(toc) + bytes(1024)) + estargz.footer(len(files))
    began = time.process_time()
    with pytest.raises(VerifyError):
        estargz.check_layer(io.BytesIO(blob), digest(toc))
    assert time.process_time() - began < 5


def test_layers_without_a_table_of_contents_can_be_read() -> None:
    """Whose plain bytes end anywhere in the pieces that are inflated."""
    for size in (*range(0, 9 * 512, 512), *range((2 << 20) - 20_000, (2 << 20) + 20_000, 1777)):
        plain = in_tar(bytes(size), "a") + bytes(1024)
        [(info, content)] = estargz.LayerReader(io.BytesIO(gzip.compress(plain)))
        assert (info.name, content) == ("a", bytes(size))
