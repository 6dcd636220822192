"""Wheels are installed as by an installer; invalid ones are refused by name, in one line."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pytest

from builder.common.errors import BuilderWarning
from builder.layers import splice, wheel
from builder.layers.splice import Entry, SpliceError, Zipped
from builder.layers.wheel import SITE, OverlapError, WheelError
from builder.plan import layer_order

PYTHON = "3.11"
NAME = "tiny_pkg-1.0-py3-none-any.whl"
INFO = "tiny_pkg-1.0.dist-info"
DATA = "tiny_pkg-1.0.data"
WHEEL = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """File name and content."""

    name: str
    content: bytes

    def open(self) -> tuple[str, BinaryIO]:
        return self.name, io.BytesIO(self.content)


def read(entry: Entry) -> bytes:
    return splice.read_zipped(entry.content) if isinstance(entry.content, Zipped) else entry.content or b""


def row(path: str, content: bytes) -> tuple[str, str, str]:
    hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return path, f"sha256={hashed}", str(len(content))


def record_of(files: Mapping[str, bytes], *more: tuple[str, str, str], info: str = INFO) -> bytes:
    text = io.StringIO()
    rows = [row(path, content) for path, content in files.items() if path != f"{info}/RECORD"]
    csv.writer(text, lineterminator="\n").writerows([*rows, *more, (f"{info}/RECORD", "", "")])
    return text.getvalue().encode()


def pack(
    files: Mapping[str, bytes] = {},
    *,
    name: str = NAME,
    info: str = INFO,
    points: str = "",
    modes: Mapping[str, int] = {},
    without: Sequence[str] = (),
    method: int = zipfile.ZIP_DEFLATED,
    parts: Mapping[str, bytes] = {},
) -> Wheel:
    """A wheel of `files`. `parts` replace files of .dist-info; `points` is its entry_points.txt."""
    project, _, version = info.removesuffix(".dist-info").partition("-")
    metadata = f"Metadata-Version: 2.1\nName: {project.replace('_', '-')}\nVersion: {version}\n"
    members = dict(files) | {f"{info}/METADATA": metadata.encode()}
    members[f"{info}/WHEEL"] = WHEEL
    if points:
        members[f"{info}/entry_points.txt"] = points.encode()
    members[f"{info}/RECORD"] = record_of(members, info=info)
    members |= {f"{info}/{part}": content for part, content in parts.items()}
    for part in without:
        del members[f"{info}/{part}"]
    return zipped(members, name=name, modes=modes, method=method)


def zipped(
    members: Mapping[str, bytes],
    *,
    name: str = NAME,
    modes: Mapping[str, int] = {},
    method: int = zipfile.ZIP_DEFLATED,
) -> Wheel:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path, content in members.items():
            item = zipfile.ZipInfo(path)
            item.external_attr = (0o100000 | modes.get(path, 0o644)) << 16
            archive.writestr(item, content, method)
    return Wheel(name=name, content=out.getvalue())


def entries(packed: Wheel, python: str = PYTHON) -> dict[str, Entry]:
    """Path -> entry of an installed wheel; paths are unique."""
    files = list(wheel.install(*packed.open(), python))
    assert len({entry.path for entry in files}) == len(files)
    return {entry.path: entry for entry in files}


def installed(packed: Wheel, python: str = PYTHON) -> dict[str, bytes]:
    return {path: read(entry) for path, entry in entries(packed, python).items()}


def record(packed: Wheel, python: str = PYTHON) -> dict[str, list[str]]:
    text = installed(packed, python)[f"{SITE}/{INFO}/RECORD"].decode()
    return {path: rest for path, *rest in csv.reader(io.StringIO(text))}


def layer(*packed: Wheel, may_overlap: bool = False) -> list[Entry]:
    return wheel.layer_entries([item.open() for item in packed], PYTHON, may_overlap=may_overlap)


def other(files: Mapping[str, bytes], **more: Any) -> Wheel:
    return pack(files, name="other-2.0-py3-none-any.whl", info="other-2.0.dist-info", **more)


# ---- what is installed


def test_files_are_installed_by_their_schemes() -> None:
    """A local test compares random wheels with uv."""
    scripts, programs = f"{DATA}/scripts", "opt/venv/bin"
    files = {
        "tiny/__init__.py": b"VALUE = 1\n",
        "tiny/run": b"#!python\n",
        f"{DATA}/purelib/pure.py": b"pure",
        f"{DATA}/platlib/plat.so": b"plat",
        f"{DATA}/headers/sub/c.h": b"header",
        f"{DATA}/data/share/a, b.txt": b"data",
        f"{DATA}/data/bin/as-it-is": b"#!python\n",
        f"{DATA}/data/bin/go": b"overridden",
        f"{scripts}/shell.sh": b"#!/bin/sh\n",
        f"{scripts}/sub folder/run": b"#!python\n",  # uv refuses it
        f"{scripts}/go.sh": b"#!python3 -E\r\nprint(1)\r\n",
        # Scripts of setuptools for another system or installer; pip leaves them out too.
        **dict.fromkeys((f"{scripts}/go{end}" for end in ("", ".exe", "-script.py", ".pya")), b"overridden"),
    }
    modes = {
        f"{INFO}/INSTALLER": 0o755,
        "tiny/run": 0o100,
        f"{DATA}/platlib/plat.so": 0o4755,
        f"{DATA}/purelib/pure.py": 0o666,
    }
    points = "[console_scripts]\ngo = tiny.cli : Tool.run [fast]\n# a remark\n[other.group]\nthing = no/function\n"
    replaced = {"INSTALLER": b"someone", "REQUESTED": b"by someone"}
    packed = pack(files, modes=modes, points=points, parts=replaced)
    result = entries(packed)
    script = read(result.pop(f"{programs}/go"))
    compile(script, "go", "exec")
    assert script.startswith(
        b"#!/opt/venv/bin/python\n# -*- coding: utf-8 -*-\nimport sys\nfrom tiny.cli import Tool\n"
    )
    assert script.endswith(b"    sys.exit(Tool.run())\n")
    *_, last = result.items()
    assert last == (f"{SITE}/{INFO}/RECORD", result.pop(f"{SITE}/{INFO}/RECORD"))
    installed_files = {
        f"{SITE}/tiny/__init__.py": (0o644, b"VALUE = 1\n"),
        f"{SITE}/tiny/run": (0o755, b"#!python\n"),
        f"{SITE}/pure.py": (0o644, b"pure"),
        f"{SITE}/plat.so": (0o755, b"plat"),
        "opt/venv/include/site/python3.11/tiny-pkg/sub/c.h": (0o644, b"header"),
        "opt/venv/share/a, b.txt": (0o644, b"data"),
        f"{programs}/as-it-is": (0o644, b"#!python\n"),
        f"{programs}/shell.sh": (0o755, b"#!/bin/sh\n"),
        f"{programs}/sub folder/run": (0o755, b"#!/opt/venv/bin/python\n"),
        f"{programs}/go.sh": (0o755, b"#!/opt/venv/bin/python\nprint(1)\r\n"),
        f"{SITE}/{INFO}/INSTALLER": (0o644, b"uv"),
        f"{SITE}/{INFO}/REQUESTED": (0o644, b""),
    }
    shipped = {f"{SITE}/{INFO}/{part}" for part in ("METADATA", "WHEEL", "entry_points.txt")}
    assert {path: (entry.mode, read(entry)) for path, entry in result.items() if path not in shipped} == installed_files
    contents = {path: content for path, (_, content) in installed_files.items()} | {f"{programs}/go": script}
    rows = record(packed)
    for path, content in contents.items():
        relative = path.removeprefix(f"{SITE}/").replace("opt/venv/", "../../../")
        assert rows.pop(relative) == list(row("", content)[1:])
    assert set(rows) == {path.removeprefix(f"{SITE}/") for path in shipped} | {f"{INFO}/RECORD"}


def test_a_wheel_for_every_python_has_the_same_files_as_for_one() -> None:
    """Layers of CUDA's wheels are the same for all images; lib/python3.11 is a link to lib/python."""
    packed = pack({"nvidia/lib/x.so": b"so"}, points="[console_scripts]\nrun = tiny:run\n")
    assert installed(packed, "") == installed(packed)


def test_folders_of_the_zip_are_left_out() -> None:
    out = io.BytesIO(pack({"tiny/a.py": b""}).content)
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr("tiny/", b"")
        archive.writestr("empty/", b"")
    assert not [path for path in entries(Wheel(name=NAME, content=out.getvalue())) if "empty" in path]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"#!pythonw\nprint(1)\n", b"#!/opt/venv/bin/python\nprint(1)\n"),
        (b"#!python", b"#!/opt/venv/bin/python\n"),
        (b"#!python\n\xff\0", b"#!/opt/venv/bin/python\n\xff\0"),
        (b"#! python\n", b"#! python\n"),
        (b"#!/bin/sh\n#!python\n", b"#!/bin/sh\n#!python\n"),
        (b"", b""),
    ],
)
def test_placeholders_for_python(before: bytes, after: bytes) -> None:
    assert installed(pack({f"{DATA}/scripts/run": before}))["opt/venv/bin/run"] == after


@pytest.mark.parametrize("points", ["", "\n", "[console_scripts]\n", "[other]\na = b:c\n", "stray = a:b\n"])
def test_without_entry_points_there_are_no_scripts(points: str) -> None:
    assert not [path for path in entries(pack({}, points=points)) if "/bin/" in path]


def test_pip_has_a_script_for_its_python() -> None:
    points = "[console_scripts]\npip = pip._internal.cli.main:main\npip3 = pip._internal.cli.main:other\n"
    result = installed(pack(name="pip-25.0-py3-none-any.whl", info="pip-25.0.dist-info", points=points))
    assert {path for path in result if "/bin/" in path} == {f"opt/venv/bin/{n}" for n in ("pip", "pip3", "pip3.11")}
    assert result["opt/venv/bin/pip3.11"] == result["opt/venv/bin/pip"]
    assert "../../../bin/pip3.11,sha256=" in result[f"{SITE}/pip-25.0.dist-info/RECORD"].decode()


def test_record_is_sorted_and_quoted() -> None:
    files = {"z.py": b"z", 'a,b "c".txt': b"odd", "é/ü.txt": b"accents", "Z.py": b"Z", "a b": b"space", "a/x": b""}
    text = installed(pack(files))[f"{SITE}/{INFO}/RECORD"].decode()
    assert "\r" not in text
    rows = list(csv.reader(io.StringIO(text)))
    assert [path for path, *_ in rows] == sorted((path for path, *_ in rows), key=str.encode)
    assert all(list(row(path, content)) in rows for path, content in files.items())


def test_a_signature_of_record_is_kept_with_and_without_its_row() -> None:
    """Shipped but not in RECORD, as in the specification; or listed but not shipped."""
    shipped = pack({f"{INFO}/x": b"x"}, parts={"RECORD.jws": b"signature"})
    assert installed(shipped)[f"{SITE}/{INFO}/RECORD.jws"] == b"signature"
    assert record(shipped)[f"{INFO}/RECORD.jws"] == ["", ""]
    missing = pack({}, parts={"RECORD": record_of({}, (f"{INFO}/RECORD.p7s", "", ""))})
    assert f"{SITE}/{INFO}/RECORD.p7s" not in installed(missing)
    assert record(missing)[f"{INFO}/RECORD.p7s"] == ["", ""]


def test_invalid_rows_are_left_out() -> None:
    packed = pack({"a": b"a"}, parts={"RECORD": b"a\nb,c\n\na,sha256=x,1,more\n"})
    assert record(packed)["a"] == ["", ""]


@pytest.mark.parametrize("version", ["1", "1.0.0", "v1.0", "1.0+cu128"])
def test_another_spelling_of_the_version_is_the_same_version(version: str) -> None:
    """uv and pip install tiny_pkg-1.0-py3-none-any.whl with tiny_pkg-1.0.0.dist-info."""
    packed = pack({"x.py": b""}, info=f"tiny_pkg-{version}.dist-info")
    assert f"{SITE}/x.py" in installed(packed)


# ---- what is refused


def edited(packed: Wheel, old: bytes, new: bytes, count: int = -1) -> Wheel:
    assert old in packed.content
    return Wheel(name=packed.name, content=packed.content.replace(old, new, count))


def with_extra(first: bytes) -> Wheel:
    """Its file has a second name in an extra field, which some readers use as the name of the file."""
    second = b"\x01" + zlib.crc32(b"good.py").to_bytes(4, "little") + b"evil.py"
    out = io.BytesIO(pack().content)
    with zipfile.ZipFile(out, "a") as archive:
        item = zipfile.ZipInfo("good.py")
        item.extra = first + b"\x75\x70" + len(second).to_bytes(2, "little") + second
        archive.writestr(item, b"x")
    return Wheel(name=NAME, content=out.getvalue())


def with_duplicate(path: str) -> Wheel:
    out = io.BytesIO(pack({"a.py": b"1"}).content)
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(out, "a") as archive:
        archive.writestr(path, b"2")
    return Wheel(name=NAME, content=out.getvalue())


def with_entry(start: int, value: bytes) -> Wheel:
    """Bytes of the first entry of the zip's directory are replaced. Source: APPNOTE.TXT, 4.3.12."""
    content = bytearray(pack({"a.py": b"1"}).content)
    at = content.index(b"PK\x01\x02") + start
    content[at : at + len(value)] = value
    return Wheel(name=NAME, content=bytes(content))


def hostile() -> Iterator[tuple[str, Wheel]]:
    for path in (
        "/etc/passwd", "../outside", "a/../../outside", "a/./b", "./a", "a//b", "..", ".",
        f"{DATA}/scripts/../../x", f"{DATA}/data/../x",
        "a\nb", "a\r", "\ta", "a/\x1b[31mb", "a\x7f",  # they may end a line of RECORD, or change text on a terminal
        f"{DATA}/x", f"{DATA}/unknown/x", "other-1.0.data/purelib/x", "second-1.0.dist-info/METADATA",
    ):  # fmt: skip
        yield f"path {path!r}", pack({path: b"x"})
    # `zipfile` truncates the path at NUL.
    yield "NUL in a path", edited(pack({"good.py|hidden": b"x"}), b"good.py|", b"good.py\0")
    yield "only NUL", edited(pack({"|": b"x"}), b"|", b"\0")
    for first in (b"", b"UT\0\0", b"UT\5\0\1time"):
        yield f"second name after {first!r}", with_extra(first)
    for path in ("a.py", f"{INFO}/METADATA", f"{INFO}/RECORD"):
        yield f"{path} twice", with_duplicate(path)
    for files in (
        {"a/b": b"", f"{DATA}/purelib/a/b": b""},
        {f"{DATA}/platlib/a/b": b"", f"{DATA}/purelib/a/b": b""},
        {f"{DATA}/scripts/a": b"", f"{DATA}/data/bin/a": b""},
        {f"{DATA}/purelib/{INFO}/INSTALLER": b""},
        {f"{DATA}/data/lib/python3.11/site-packages/{INFO}/RECORD": b""},
        {"a": b"", "a/b": b""},
        {"a/b": b"", "a": b""},
        {"x/a/b/c": b"", f"{DATA}/purelib/x/a": b""},
    ):
        yield f"{[*files]} in one place", pack(files)
    yield "encrypted", with_entry(8, b"\x01\0")
    yield "another compression", with_entry(10, b"\x0c\0")
    yield "overlapping entries", with_entry(20, b"\xff\0\0\0")
    yield "no local header", edited(pack({"a.py": b"1"}), b"PK\x03\x04", b"PK\x03\x05", 1)
    yield "another local name", edited(pack({"a.py": b"1"}), b"a.py", b"b.py", 1)
    yield "no zip", Wheel(name=NAME, content=b"no zip")
    for name in ("tiny_pkg-1.1-py3-none-any.whl", "tiny_pkg-1.0.post1-py3-none-any.whl", "tiny_pkg.whl"):
        yield f"named {name}", pack(name=name)
    for metadata in ("Name: other\nVersion: 1.0\n", "Name: tiny-pkg\nVersion: 9.9.9\n", "Name: tiny-pkg\n"):
        yield repr(metadata), pack(parts={"METADATA": metadata.encode()})
    for part, text in (("WHEEL", b"Wheel-Version: 2.0\n"), ("WHEEL", b""), ("RECORD", b"\xff"), ("METADATA", b"\xff")):
        yield f"{part} {text!r}", pack(parts={part: text})
    for part in ("RECORD", "WHEEL"):
        yield f"no {part}", pack(without=[part])
    for point in ("../up = a:b", "sub/run = a:b", "'q' = a:b", "run = a", "run = a:", "run = a:b-c", "run"):
        yield f"entry point {point}", pack(points=f"[console_scripts]\n{point}\n")


@pytest.mark.parametrize("packed", [pytest.param(packed, id=name) for name, packed in hostile()])
def test_an_invalid_wheel_is_refused_by_name_in_one_line(packed: Wheel) -> None:
    with pytest.raises(WheelError) as raised:
        layer(packed)
    assert str(raised.value).startswith(f"{packed.name}: ")
    assert str(raised.value).isprintable()


def test_a_file_must_match_its_row_in_record() -> None:
    packed = pack({"a": b"a"}, parts={"RECORD": record_of({"a": b"b"})})
    with pytest.raises(SpliceError):
        splice.write_layer(layer(packed), io.BytesIO())


def test_a_wheel_that_pip_and_uv_install_in_spite_of_its_record() -> None:
    info = "pynvvideocodec-2.0.4.dist-info"
    wrong = {"RECORD": record_of({"a": b"b"}, info=info)}
    packed = pack({"a": b"a"}, name=wheel.WRONG_RECORDS[0], info=info, parts=wrong)
    splice.write_layer(layer(packed), io.BytesIO())


def test_a_wheel_that_unpacks_to_a_thousand_times_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts all its files together."""
    packed = pack({"a": bytes(700_000), "b": bytes(700_000)})
    with zipfile.ZipFile(packed.open()[1]) as archive:
        total = sum(item.file_size for item in archive.infolist())
    monkeypatch.setattr(wheel, "MAX_UNPACKED", total)
    assert layer(packed)
    monkeypatch.setattr(wheel, "MAX_UNPACKED", total - 1)
    with pytest.raises(WheelError):
        layer(packed)


# ---- several wheels in one layer


def test_every_folder_occurs_once_and_before_its_contents() -> None:
    result = layer(pack({"ns/a/x.py": b"a", "top.py": b""}), other({"ns/b/x.py": b"b", "ns/a/y.py": b""}))
    paths = [entry.path for entry in result]
    assert len(set(paths)) == len(paths)
    for number, entry in enumerate(result):
        assert (number and "/" in entry.path) or entry.path == "opt"
        assert entry.path == "opt" or entry.path.rpartition("/")[0] in paths[:number]
        if entry.content is None and not entry.link:
            assert entry.mode == (0o755 if entry.path == "opt" else 0o775)


RUN = "[console_scripts]\nrun = a:b\n"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pack({"ns/x.py": b"same"}), other({"ns/x.py": b"not the same"})),
        (pack({"ns/x.py": b"same"}), other({"ns/x.py": b"Same"})),
        (pack({"ns/x.py": b"same"}, method=zipfile.ZIP_STORED), other({"ns/x.py": b""})),
        (pack({"x": b""}), other({"x": b""}, modes={"x": 0o755})),
        (pack({"x": b"1"}), other({"x": b"1"}, parts={"RECORD": record_of({})})),  # only CRC-32 might collide
        (pack({f"{DATA}/scripts/run": b"shipped"}), other({}, points=RUN)),
        (pack({"ns/x": b""}), other({"ns": b""})),
        (pack({"ns": b""}), other({"ns/x": b""})),
        (pack({"ns": b""}), other({"ns/x/y": b""})),
    ],
    ids=["content", "letter", "empty", "mode", "no SHA-256", "script", "file", "folder", "deep folder"],
)
def test_two_wheels_that_conflict(first: Wheel, second: Wheel) -> None:
    with pytest.raises(OverlapError):
        layer(first, second)


def test_two_wheels_may_have_the_same_script_and_the_same_file() -> None:
    wheels = [make({"ns/x.so": b"same"}, points=RUN, method=method) for make, method in ((pack, 0), (other, 8))]
    paths = [entry.path for entry in layer(*wheels)]
    assert [paths.count(path) for path in ("opt/venv/bin/run", f"{SITE}/ns/x.so")] == [1, 1]


def test_the_last_of_several_wheels_has_the_file() -> None:
    """As after an installation, each RECORD has the row of its own wheel: to uninstall either removes the file."""
    third = pack({"x": b"3"}, name="third-3.0-py3-none-any.whl", info="third-3.0.dist-info")
    with pytest.warns(BuilderWarning) as warned:
        result = layer(pack({"x": b"1", "t": b""}), other({"x": b"2", "t": b""}), third, may_overlap=True)
    paths = [entry.path for entry in result]
    assert len(set(paths)) == len(paths)
    contents = {entry.path: read(entry) for entry in result if entry.content is not None}
    assert contents[f"{SITE}/x"] == b"3"
    assert row("x", b"1")[1].encode() in contents[f"{SITE}/{INFO}/RECORD"]
    assert row("x", b"2")[1].encode() in contents[f"{SITE}/other-2.0.dist-info/RECORD"]
    assert len(warned) == 2
    splice.write_layer(result, io.BytesIO())


def test_a_layer_of_a_wheel_is_these_bytes() -> None:
    """A change here needs a new `layer_order.LAYER_FORMAT`: layers of older builders could not be found or rebuilt.

    A new version of libdeflate (`deflate` in locks/builder.txt) changes them, too.
    """
    files = {
        "tiny/__init__.py": b"VALUE = 1\n",
        "tiny/empty.py": b"",
        f"{DATA}/scripts/shipped": b"#!python\nprint(1)\n",
        f"{DATA}/data/share/tiny.txt": b"shared\n",
        f"{DATA}/headers/tiny.h": b"#define TINY\n",
    }
    packed = pack(
        files,
        points="[console_scripts]\nrun = tiny:run\n[gui_scripts]\nwindow = tiny.gui:App.run\n",
        method=zipfile.ZIP_STORED,
    )
    written = splice.write_layer(wheel.layer_entries([packed.open()], PYTHON), io.BytesIO())
    assert layer_order.LAYER_FORMAT == 6
    assert written.digest == "sha256:aa241cfd0e20813eb5ffc4b9c687e940f1c9d56948404edbfdebe93687c9e969"
    assert written.diff_id == "sha256:c38c7fe6c749b72e3e7461e0930ee0aefc6860bc1868b7b50d15ea2fc0f8fc3a"
