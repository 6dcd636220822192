"""The `os` layer: all files of a file system, and the same bytes for the same files."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from builder.layers import estargz, splice, stored_layers
from builder.layers.oci import Layer
from tests.unit.layers.toc import check_by_specification

CAPABILITY = {"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00 \x00\x00"}


def item(name: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A regular file, or a folder for a name with a slash at its end."""
    info = tarfile.TarInfo(name.rstrip("/") or "./")
    info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
    info.mode = 0o755 if name.endswith("/") else 0o644
    content = fields.pop("content", b"")
    for field, value in fields.items():
        setattr(info, field, value)
    info.size = len(content)
    return info, content


def symlink(name: str, to: str) -> tuple[tarfile.TarInfo, bytes]:
    return item(name, type=tarfile.SYMTYPE, linkname=to, mode=0o777)


def hardlink(name: str, to: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return item(name, type=tarfile.LNKTYPE, linkname=to, **fields)


Items = Iterable[tuple[tarfile.TarInfo, bytes]]


def tar_of(items: Items) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in items:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


class Flat:
    """The layer, and the files read back from it, by path."""

    def __init__(self, layer: Layer, blob: bytes) -> None:
        self.layer = layer
        self.blob = blob
        plain = gzip.decompress(blob)
        assert layer.digest == "sha256:" + hashlib.sha256(blob).hexdigest()
        assert layer.diff_id == "sha256:" + hashlib.sha256(plain).hexdigest()
        assert (layer.size, layer.unpacked) == (len(blob), len(plain))
        check_by_specification(blob, layer)
        self.infos: dict[str, tarfile.TarInfo] = {}
        self.contents: dict[str, bytes] = {}
        with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
            for info in tar:
                assert info.name not in self.infos
                if info.name in estargz.RESERVED:
                    continue
                assert not info.islnk() or info.linkname in self.infos, "a hard link before its target"
                self.infos[info.name] = info
                file = tar.extractfile(info) if info.isreg() else None
                self.contents[info.name] = (
                    self.contents[info.linkname] if info.islnk() else file.read() if file else b""
                )


def write(items: Items, prefetch: Sequence[str] = ()) -> Flat:
    """Writes the layer of a tar with these items."""
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(tar_of(items))) as tar:
        entries, facts = stored_layers.read_system(tar, prefetch)
        return Flat(replace(splice.write_layer(entries, out), **facts), out.getvalue())


# ---- order


def test_files_to_prefetch_come_first_and_hard_links_last() -> None:
    items = [
        item("./a/"),
        item("./a/link1", content=b"x"),
        item("./b", content=b"x"),
        item("./c/"),
        item("./c/python3.11", content=b"x"),
        hardlink("./a/other1", "./c/python3.11"),
    ]
    toc = estargz.read_toc(io.BytesIO(write(items, ["c/python*", "a/other*"]).blob))
    assert [entry.name for entry in toc] == [
        "c/", "c/python3.11", estargz.PREFETCH_LANDMARK, "a/", "a/link1", "b", "a/other1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "to"), [("bin/perl5", "bin/perl"), ("./bin/perl5", "./bin/perl"), ("a", "./bin/perl")]
)
def test_a_hard_link_follows_its_target(name: str, to: str) -> None:
    """Sorted by name, it might precede it."""
    flat = write([item("bin/"), item(to, content=b"perl", mode=0o755), hardlink(name, to, mode=0o755), item("zzz")])
    link = flat.infos[name.removeprefix("./")]
    assert (link.islnk(), link.linkname) == (True, "bin/perl")
    assert list(flat.infos)[-1] == link.name
    assert flat.contents[link.name] == b"perl"


def test_a_hard_link_to_a_symbolic_link() -> None:
    flat = write([symlink("link", "/to"), hardlink("link2", "link")])
    assert flat.infos["link2"].linkname == "link"


# ---- times


def packaged(*paths: str) -> Items:
    lists = "".join(f"/{path}\n" for path in paths)
    return [item("var/lib/dpkg/info/some.list", content=f"/.\n{lists}".encode(), mtime=9999)]


def test_times_are_at_most_that_of_the_newest_file_of_a_package() -> None:
    """Folders and links always have that time: not every store, and not every update of a package, sets them."""
    flat = write(
        [
            item("usr/", mtime=5000),
            item("opt/", mtime=5),
            item("usr/old", mtime=100),
            item("usr/new", mtime=300.7),
            item("usr/made", mtime=4000),
            symlink("usr/link", "x"),
            item("usr/future", mtime=2**40),
            *packaged("usr", "usr/old", "usr/new", "usr/link", "usr/missing"),
        ]
    )
    assert flat.layer.created == "1970-01-01T00:05:00Z"
    assert {name: info.mtime for name, info in flat.infos.items()} == {
        "usr": 300, "opt": 300, "usr/old": 100, "usr/new": 300, "usr/made": 300, "usr/link": 300, "usr/future": 300,
        "var/lib/dpkg/info/some.list": 300,
    }  # fmt: skip


def test_a_configuration_file_that_the_build_edited_does_not_count() -> None:
    """Otherwise the times would be those of the build, and no two builds would give the same bytes."""
    flat = write([item("usr/a", mtime=100), item("etc/bash.bashrc", mtime=4000), *packaged("usr/a", "etc/bash.bashrc")])
    assert flat.layer.created == "1970-01-01T00:01:40Z"


def test_without_packages_everything_is_from_1970() -> None:
    flat = write([item("a", mtime=100), item("var/lib/dpkg/info/x.md5sums", content=b"/a\n")])
    assert flat.layer.created == "1970-01-01T00:00:00Z"
    assert {info.mtime for info in flat.infos.values()} == {0}


# ---- facts about the layer


def test_the_layer_names_the_files_in_opt() -> None:
    names = ["opt/", "opt/venv/", "opt/venv/bin/", "opt/venv/bin/python3", "optional", "opt.txt", "usr/", "usr/opt"]
    flat = write([*map(item, names), symlink("opt/venv/lib64", "lib"), hardlink("opt/venv/x", "optional")])
    assert flat.layer.taken == ("opt/venv/bin/python3", "opt/venv/lib64", "opt/venv/x")


def test_the_layer_names_the_folders_that_are_not_0755_root() -> None:
    flat = write(
        [
            item("./", mode=0o700),
            item("tmp/", mode=0o1777),
            item("root/", mode=0o700),
            item("home/", uid=1000),
            item("srv/", gid=50),
            item("etc/"),
            item("etc/file", mode=0o600),
        ]
    )
    assert flat.layer.folders == ("home", "root", "srv", "tmp")


# ---- contents


def test_every_kind_of_file() -> None:
    flat = write(
        [
            item("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
            item("disk", type=tarfile.BLKTYPE, devmajor=8, devminor=1),
            item("fifo", type=tarfile.FIFOTYPE),
            item("old", type=tarfile.AREGTYPE, content=b"old"),
            item("./folder/", mode=0o700, uid=1000),
            item("./folder/sudo", mode=0o104755, uid=70000, gid=27, uname="root", gname="sudo"),
            symlink("link", "../a b"),
            item("n" * 150, content=b"long"),
            item("naïve-文字", content=b"not ASCII"),
            item("large", content=bytes(3_000_000)),
        ]
    )
    infos = flat.infos
    assert (infos["null"].type, infos["null"].devmajor, infos["null"].devminor) == (tarfile.CHRTYPE, 1, 3)
    assert (infos["disk"].type, infos["disk"].devmajor, infos["disk"].devminor) == (tarfile.BLKTYPE, 8, 1)
    assert infos["fifo"].type == tarfile.FIFOTYPE
    assert (infos["old"].type, flat.contents["old"]) == (tarfile.REGTYPE, b"old")
    assert (infos["folder"].type, infos["folder"].mode, infos["folder"].uid) == (tarfile.DIRTYPE, 0o700, 1000)
    sudo = infos["folder/sudo"]
    assert (sudo.mode, sudo.uid, sudo.gid, sudo.gname) == (0o4755, 70000, 27, "")
    assert len(infos) == 10
    assert infos["link"].linkname == "../a b"
    assert flat.contents["n" * 150] == b"long"
    assert flat.contents["naïve-文字"] == b"not ASCII"
    assert len(flat.contents["large"]) == 3_000_000


@pytest.mark.parametrize(
    "value", [*CAPABILITY.values(), "two\nlines", "é", b"\xff\x00\xfe".decode("utf-8", "surrogateescape")]
)
def test_only_extended_attributes_of_a_header_are_kept(value: str) -> None:
    headers = {"SCHILY.xattr.security.capability": value, "atime": "5.5", "LIBARCHIVE.x": "y", "comment": "z"}
    flat = write([item("ping", pax_headers=headers, mtime=1.5), item("plain")])
    assert {key: value for key, value in flat.infos["ping"].pax_headers.items() if key != "hdrcharset"} == {
        "SCHILY.xattr.security.capability": value
    }
    assert flat.infos["plain"].pax_headers == {}


# ---- the same bytes


def many() -> Sequence[tuple[tarfile.TarInfo, bytes]]:
    items = [item("d/"), item("d/e/"), *(item(f"d/e/{n}", content=b"%d" % n, mtime=n) for n in range(60))]
    items += [symlink("d/link", "e"), item("d/cap", pax_headers=CAPABILITY), *packaged("d/e/9", "d/e/30")]
    return [*items, hardlink("d/hard", "d/e/5"), hardlink("a", "d/e/6")]


def test_the_same_files_are_the_same_bytes() -> None:
    expected = write(many())
    for seed in range(3):
        plain = [entry for entry in many() if not entry[0].islnk()]
        random.Random(seed).shuffle(plain)
        assert write([*plain, *(entry for entry in many() if entry[0].islnk())]).blob == expected.blob


def test_the_bytes_do_not_depend_on_times_of_the_build() -> None:
    def at(time: float) -> Items:
        return [*many(), item("made/", mtime=time), item("made/log", mtime=time + 0.25)]

    assert write(at(10_000)).blob == write(at(20_000.5)).blob


@pytest.mark.parametrize("size", [0, 1, 20_000, 3 * 20_480, 100_000])
def test_the_bytes_do_not_depend_on_the_number_of_processors(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Each part of a file is compressed by itself."""
    monkeypatch.setattr(splice, "MEMBER", 20_480)
    monkeypatch.setattr(splice, "_IN_BACKGROUND", 1000)
    content = random.Random(size).randbytes(size)
    blobs = set()
    for processors in (None, 1, 2, 7):
        monkeypatch.setattr("os.cpu_count", lambda count=processors: count)
        flat = write([item("file", content=content)])
        assert flat.contents == {"file": content}
        blobs.add(flat.blob)
    assert len(blobs) == 1
