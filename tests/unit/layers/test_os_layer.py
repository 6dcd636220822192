"""The `os` layer: layers merged as by a runtime, and the same bytes for the same files."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from builder.layers import os_layer
from builder.layers.os_layer import OsLayer

STATUS = """\
Package: python3.1-minimal
Status: install ok installed
Version: 3.1.9-1

Package: python3.11-minimal
Status: install ok installed
Depends: libpython3.11-minimal (= 3.11.2-6+deb12u6)
Description: minimal subset
 Version: none
Version: 3.11.2-6+deb12u6
Homepage: none

Package: zlib1g
Version: 1:1.2.13
"""
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
    """The merged layer, and the files read back from it, by path."""

    def __init__(self, layer: OsLayer, blob: bytes) -> None:
        self.layer = layer
        self.blob = blob
        plain = gzip.decompress(blob)
        assert layer.digest == "sha256:" + hashlib.sha256(blob).hexdigest()
        assert layer.diff_id == "sha256:" + hashlib.sha256(plain).hexdigest()
        assert (layer.size, layer.unpacked) == (len(blob), len(plain))
        self.infos: dict[str, tarfile.TarInfo] = {}
        self.contents: dict[str, bytes] = {}
        with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
            for info in tar:
                assert info.name not in self.infos
                assert not info.islnk() or info.linkname in self.infos, "a hard link before its target"
                self.infos[info.name] = info
                file = tar.extractfile(info) if info.isreg() else None
                self.contents[info.name] = (
                    self.contents[info.linkname] if info.islnk() else file.read() if file else b""
                )

    @property
    def paths(self) -> set[str]:
        return set(self.infos)


Write = Callable[..., Flat]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Flattens layers, lowest first."""

    def run(*layers: Items) -> Flat:
        paths = []
        for number, layer in enumerate(layers):
            paths.append(tmp_path / f"{number}.tar")
            paths[-1].write_bytes(tar_of(layer))
        out = io.BytesIO()
        return Flat(os_layer.write(paths, out), out.getvalue())

    return run


# ---- one layer on another


def test_an_upper_layer_replaces_a_file(write: Write) -> None:
    below = [item("etc/"), item("etc/a", content=b"old", mode=0o600, uid=5), item("etc/b", content=b"stays")]
    flat = write(below, [item("etc/", mode=0o700), item("etc/a", content=b"newer", mode=0o755, gid=7)])
    assert flat.contents == {"etc": b"", "etc/a": b"newer", "etc/b": b"stays"}
    info = flat.infos["etc/a"]
    assert (info.mode, info.uid, info.gid, info.uname, info.gname) == (0o755, 0, 7, "", "")
    assert flat.infos["etc"].mode == 0o700


def test_names_with_a_leading_dot_or_slash_are_the_same(write: Write) -> None:
    below = [item("./"), item("./etc/"), item("./etc/a", content=b"old"), item("/usr/"), item("/usr/b")]
    flat = write(below, [item("etc/a", content=b"new"), item("./usr/.wh.b")])
    assert flat.paths == {"etc", "etc/a", "usr"}
    assert flat.contents["etc/a"] == b"new"


@pytest.mark.parametrize(
    ("whiteout", "left"),
    [
        ("a/.wh.b", {"a", "a/b.txt", "a/bc", "a/bc/x", "top"}),
        ("a/b/.wh.x", {"a", "a/b", "a/b/y", "a/b/y/z", "a/b.txt", "a/bc", "a/bc/x", "top"}),
        (".wh.a", {"top"}),
        (".wh.top", {"a", "a/b", "a/b/x", "a/b/y", "a/b/y/z", "a/b.txt", "a/bc", "a/bc/x"}),
        (".wh.missing", {"a", "a/b", "a/b/x", "a/b/y", "a/b/y/z", "a/b.txt", "a/bc", "a/bc/x", "top"}),
        (".wh..wh.plnk", {"a", "a/b", "a/b/x", "a/b/y", "a/b/y/z", "a/b.txt", "a/bc", "a/bc/x", "top"}),
        ("a/b/.wh..wh..opq", {"a", "a/b", "a/b.txt", "a/bc", "a/bc/x", "top"}),
        ("a/.wh..wh..opq", {"a", "top"}),
        (".wh..wh..opq", set()),
    ],
)
def test_whiteouts_and_opaque_folders(write: Write, whiteout: str, left: set[str]) -> None:
    names = ["a/", "a/b/", "a/b/x", "a/b/y/", "a/b/y/z", "a/b.txt", "a/bc/", "a/bc/x", "top"]
    assert write([item(name) for name in names], [item(whiteout)]).paths == left


@pytest.mark.parametrize("first", [True, False], ids=["whiteout first", "whiteout last"])
@pytest.mark.parametrize("whiteout", ["a/.wh..wh..opq", ".wh.a", "a/.wh.new"])
def test_a_whiteout_does_not_hide_files_of_its_own_layer(write: Write, whiteout: str, first: bool) -> None:
    new = [item("a/"), item("a/new", content=b"new")]
    layer = [item(whiteout), *new] if first else [*new, item(whiteout)]
    flat = write([item("a/"), item("a/new", content=b"old"), item("a/old")], layer)
    assert flat.contents["a/new"] == b"new"
    assert flat.paths == ({"a", "a/new", "a/old"} if whiteout == "a/.wh.new" else {"a", "a/new"})


def test_a_removed_folder_can_be_added_again(write: Write) -> None:
    flat = write([item("a/"), item("a/x")], [item(".wh.a")], [item("a/"), item("a/y")])
    assert flat.paths == {"a", "a/y"}


@pytest.mark.parametrize("above", [item("a", content=b"file"), symlink("a", "b")])
def test_a_folder_becomes_something_else(write: Write, above: tuple[tarfile.TarInfo, bytes]) -> None:
    flat = write([item("a/"), item("a/x"), item("a/y/"), item("a/y/z"), item("ab")], [above])
    assert flat.paths == {"a", "ab"}
    assert flat.infos["a"].type == above[0].type


@pytest.mark.parametrize("below", [item("a", content=b"file"), symlink("a", "b")])
def test_something_else_becomes_a_folder(write: Write, below: tuple[tarfile.TarInfo, bytes]) -> None:
    flat = write([below], [item("a/", mode=0o700), item("a/x", content=b"x")])
    assert flat.infos["a"].isdir()
    assert flat.contents == {"a": b"", "a/x": b"x"}


def test_a_folder_in_two_layers_keeps_its_contents(write: Write) -> None:
    assert write([item("a/"), item("a/x")], [item("a/", mode=0o711)]).paths == {"a", "a/x"}


# ---- hard links

NAMES = [item("bin/"), item("bin/perl", content=b"perl", mode=0o755), hardlink("bin/perl5", "bin/perl", mode=0o755)]


def test_a_hard_link_stays_one(write: Write) -> None:
    flat = write([*NAMES, item("zzz")])
    assert flat.infos["bin/perl5"].islnk()
    assert flat.infos["bin/perl5"].linkname == "bin/perl"
    assert list(flat.infos)[-1] == "bin/perl5"


@pytest.mark.parametrize(
    "above",
    [
        [item("bin/perl", content=b"another")],
        [item("bin/.wh.perl")],
        [symlink("bin/perl", "perl5")],
        [item("bin/perl/"), item("bin/perl/x")],
        [hardlink("bin/perl", "bin/other"), item("bin/other")][::-1],
    ],
)
def test_a_hard_link_whose_target_was_replaced_is_a_file(write: Write, above: Items) -> None:
    flat = write(NAMES, above)
    assert flat.infos["bin/perl5"].isreg()
    assert flat.contents["bin/perl5"] == b"perl"
    assert flat.infos["bin/perl5"].mode == 0o755


def test_a_replaced_hard_link(write: Write) -> None:
    flat = write(NAMES, [item("bin/perl5", content=b"five")])
    assert flat.contents == {"bin": b"", "bin/perl": b"perl", "bin/perl5": b"five"}
    assert not any(info.islnk() for info in flat.infos.values())


@pytest.mark.parametrize("replaced", [False, True])
def test_a_hard_link_to_a_hard_link(write: Write, replaced: bool) -> None:
    """Sorted by name, it would precede its target."""
    layers: list[Items] = [[item("m", content=b"content"), hardlink("z", "m"), hardlink("a", "z")]]
    flat = write(*layers, *([[item("m", content=b"other")]] if replaced else []))
    assert flat.contents["a"] == flat.contents["z"] == b"content"
    assert [flat.infos[name].islnk() for name in "az"] == [not replaced] * 2


@pytest.mark.parametrize("replaced", [False, True])
def test_a_hard_link_to_a_symbolic_link_or_device(write: Write, replaced: bool) -> None:
    device = item("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)
    below = [symlink("link", "/to"), hardlink("link2", "link"), device, hardlink("null2", "null")]
    flat = write(below, [item("link"), item("null")] if replaced else [])
    if replaced:
        assert (flat.infos["link2"].type, flat.infos["link2"].linkname) == (tarfile.SYMTYPE, "/to")
        assert flat.infos["null2"].type == tarfile.CHRTYPE
        assert (flat.infos["null2"].devmajor, flat.infos["null2"].devminor) == (1, 3)
    else:
        assert flat.infos["link2"].linkname == "link"
        assert flat.infos["null2"].linkname == "null"


@pytest.mark.parametrize(("name", "to"), [("./b", "./a"), ("./b", "a"), ("./b", "/a"), ("b", "./a")])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_hard_link_by_another_spelling(write: Write, name: str, to: str, replaced: bool) -> None:
    first = item("./a" if name.startswith(".") else "a", content=b"a")
    flat = write([first, hardlink(name, to)], [item("a")] if replaced else [])
    assert flat.contents["b"] == b"a"
    assert flat.infos["b"].islnk() != replaced


# ---- times


def packaged(*paths: str) -> Items:
    lists = "".join(f"/{path}\n" for path in paths)
    return [item("var/lib/dpkg/info/some.list", content=f"/.\n{lists}".encode(), mtime=9999)]


def test_times_are_at_most_that_of_the_newest_file_of_a_package(write: Write) -> None:
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


def test_a_package_of_a_layer_above_counts_too(write: Write) -> None:
    below = [item("a", mtime=100), *packaged("a")]
    above = [item("b", mtime=200), item("var/lib/dpkg/info/b.list", content=b"/b\n", mtime=1)]
    assert write(below, above).layer.created == "1970-01-01T00:03:20Z"
    assert write(below, above, [item(".wh.b")]).layer.created == "1970-01-01T00:01:40Z"


def test_a_configuration_file_that_the_build_edited_does_not_count(write: Write) -> None:
    """Otherwise the times would be those of the build, and no two builds would give the same bytes."""
    flat = write([item("usr/a", mtime=100), item("etc/bash.bashrc", mtime=4000), *packaged("usr/a", "etc/bash.bashrc")])
    assert flat.layer.created == "1970-01-01T00:01:40Z"


def test_without_packages_everything_is_from_1970(write: Write) -> None:
    flat = write([item("a", mtime=100), item("var/lib/dpkg/info/x.md5sums", content=b"/a\n")])
    assert flat.layer.created == "1970-01-01T00:00:00Z"
    assert {info.mtime for info in flat.infos.values()} == {0}


# ---- facts about the layer


def test_paths_in_opt(write: Write) -> None:
    names = ["opt/", "opt/venv/", "opt/venv/bin/", "opt/venv/bin/python3", "optional", "opt.txt", "usr/", "usr/opt"]
    flat = write([*map(item, names), symlink("opt/venv/lib64", "lib"), hardlink("opt/venv/x", "optional")])
    assert flat.layer.taken == ("opt/venv/bin/python3", "opt/venv/lib64", "opt/venv/x")


def test_folders_that_are_not_0755_root(write: Write) -> None:
    flat = write(
        [
            item("./", mode=0o700),
            item("tmp/", mode=0o1777),
            item("root/", mode=0o700),
            item("home/", uid=1000),
            item("srv/", gid=50),
            item("etc/"),
            item("etc/file", mode=0o600),
            item("var/"),
        ],
        [item("var/", mode=0o775), item("srv/")],
    )
    assert flat.layer.folders == ("home", "root", "tmp", "var")


# ---- contents


def test_every_kind_of_file(write: Write) -> None:
    flat = write(
        [
            item("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
            item("disk", type=tarfile.BLKTYPE, devmajor=8, devminor=1),
            item("fifo", type=tarfile.FIFOTYPE),
            item("old", type=tarfile.AREGTYPE, content=b"old"),
            item("sudo", mode=0o104755, uid=0, gid=27, uname="root", gname="sudo"),
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
    assert (infos["sudo"].mode, infos["sudo"].gid, infos["sudo"].gname) == (0o4755, 27, "")
    assert infos["link"].linkname == "../a b"
    assert flat.contents["n" * 150] == b"long"
    assert flat.contents["naïve-文字"] == b"not ASCII"
    assert len(flat.contents["large"]) == 3_000_000


@pytest.mark.parametrize(
    "value", [*CAPABILITY.values(), "two\nlines", "é", b"\xff\x00\xfe".decode("utf-8", "surrogateescape")]
)
def test_only_extended_attributes_of_a_header_are_kept(write: Write, value: str) -> None:
    headers = {"SCHILY.xattr.security.capability": value, "atime": "5.5", "LIBARCHIVE.x": "y", "comment": "z"}
    flat = write([item("ping", pax_headers=headers, mtime=1.5), item("plain")])
    assert {key: value for key, value in flat.infos["ping"].pax_headers.items() if key != "hdrcharset"} == {
        "SCHILY.xattr.security.capability": value
    }
    assert flat.infos["plain"].pax_headers == {}


def test_extended_attributes_of_a_hard_link(write: Write) -> None:
    below = [item("a", content=b"a", pax_headers=CAPABILITY), hardlink("b", "a")]
    assert write(below, [item(".wh.a")]).infos["b"].pax_headers == CAPABILITY


# ---- the same bytes


def many() -> Sequence[tuple[tarfile.TarInfo, bytes]]:
    items = [item("d/"), item("d/e/"), *(item(f"d/e/{n}", content=b"%d" % n, mtime=n) for n in range(60))]
    items += [symlink("d/link", "e"), item("d/cap", pax_headers=CAPABILITY), *packaged("d/e/9", "d/e/30")]
    return [*items, hardlink("d/hard", "d/e/5"), hardlink("a", "d/e/6")]


def test_the_same_files_are_the_same_bytes(write: Write) -> None:
    expected = write(many())
    assert write(many()).blob == expected.blob
    for seed in range(3):
        plain = [entry for entry in many() if not entry[0].islnk()]
        random.Random(seed).shuffle(plain)
        assert write([*plain, *(entry for entry in many() if entry[0].islnk())]).blob == expected.blob


def test_the_bytes_do_not_depend_on_the_layer_of_a_file(write: Write) -> None:
    files = [entry for entry in many() if not entry[0].islnk()]
    halves = write(files[::2], files[1::2])
    again = write([item("removed"), *files[1::2]], [item(".wh.removed"), item("./"), *files[::2]])
    assert halves.blob == again.blob == write(files).blob


def test_the_bytes_do_not_depend_on_times_of_the_build(write: Write) -> None:
    def at(time: float) -> Items:
        return [*many(), item("made/", mtime=time), item("made/log", mtime=time + 0.25)]

    assert write(at(10_000)).blob == write(at(20_000.5)).blob


@pytest.mark.parametrize("size", [0, 1, 20_000, 3 * 20_480, 100_000])
def test_the_bytes_do_not_depend_on_the_number_of_processors(
    write: Write, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Each part of the tar is compressed by itself."""
    monkeypatch.setattr(os_layer, "MEMBER", 20_480)
    content = random.Random(size).randbytes(size)
    blobs = set()
    for processors in (None, 1, 2, 7):
        monkeypatch.setattr("os.cpu_count", lambda processors=processors: processors)
        flat = write([item("file", content=content)])
        assert flat.contents == {"file": content}
        blobs.add(flat.blob)
    assert len(blobs) == 1


# ---- docker save


def saved(tmp_path: Path, layers: Mapping[str, bytes], *links: tuple[tarfile.TarInfo, bytes]) -> Path:
    """An archive whose manifest lists these layers and links, in this order."""
    path = tmp_path / "saved.tar"
    names = [*layers, *(info.name for info, _ in links)]
    manifest = json.dumps([{"Config": "blobs/sha256/c", "RepoTags": None, "Layers": names}]).encode()
    contents = [item(name, content=content) for name, content in layers.items()]
    path.write_bytes(
        tar_of([item("index.json", content=b"{}"), *contents, *links, item("manifest.json", content=manifest)])
    )
    return path


def test_layers_of_an_archive_plain_and_compressed(tmp_path: Path) -> None:
    first, second = tar_of([item("a", content=b"1" * 5000)]), tar_of([item("b")])
    archive = saved(
        tmp_path, {"blobs/sha256/b": first, "blobs/sha256/a": gzip.compress(second), "old/layer.tar": b"\0" * 1024}
    )
    (tmp_path / "scratch").mkdir()
    paths = os_layer.saved_layers(archive, tmp_path / "scratch")
    assert [path.read_bytes() for path in paths] == [first, second, bytes(1024)]
    assert {path.parent for path in paths} == {tmp_path / "scratch"}
    flat = Flat(os_layer.write(paths, out := io.BytesIO()), out.getvalue())
    assert flat.paths == {"a", "b"}


def test_a_layer_that_is_a_link_to_an_equal_one(tmp_path: Path) -> None:
    """As saved by older engines."""
    layer = tar_of([item("a")])
    archive = saved(tmp_path, {"one/layer.tar": layer}, symlink("two/layer.tar", "../one/layer.tar"))
    assert [path.read_bytes() for path in os_layer.saved_layers(archive, tmp_path)] == [layer, layer]
