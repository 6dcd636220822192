"""Wheels are installed as by an installer; invalid ones are refused by name, in one line."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import random
import re
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.layers import splice, wheel, wheel_zip
from builder.layers.splice import Entry, SpliceError, Zipped
from builder.layers.wheel import InstallScheme
from builder.layers.wheel_zip import WheelError
from builder.plan import layer_order

PLACE = wheel.environment("3.11")
SITE = "opt/venv/lib/python3.11/site-packages"
RECORDS = "opt/venv/user/lib/python/site-packages"
MODES = dict.fromkeys(["opt/venv/user", "opt/venv/user/lib", "opt/venv/user/lib/python"], 0o1775) | {RECORDS: 0o775}
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


def entries(packed: Wheel, place: InstallScheme = PLACE) -> dict[str, Entry]:
    """Path -> entry of an installed wheel; paths are unique."""
    files = list(wheel.install(*packed.open(), place))
    assert len({entry.path for entry in files}) == len(files)
    return {entry.path: entry for entry in files}


def installed(packed: Wheel, place: InstallScheme = PLACE) -> dict[str, bytes]:
    """The files, without the links of the second record."""
    return {path: read(entry) for path, entry in entries(packed, place).items() if not entry.link}


def record(packed: Wheel, place: InstallScheme = PLACE) -> dict[str, list[str]]:
    text = installed(packed, place)[f"{place.site}/{INFO}/RECORD"].decode()
    return {path: rest for path, *rest in csv.reader(io.StringIO(text))}


def refusal(*packed: Wheel, place: InstallScheme = PLACE) -> str:
    """The message of a refusal: one line that begins with the name of the (last) wheel."""
    with pytest.raises(WheelError) as raised:
        splice.write_layer(wheel.layer_entries([item.open() for item in packed], place), io.BytesIO())
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith((f"{packed[-1].name}: ", f"{packed[0].name} and {packed[-1].name} "))
    return message


# ---- what is installed


def test_a_plain_wheel_in_its_order_and_record_is_last() -> None:
    files = {"tiny/__init__.py": b"VALUE = 1\n", "tiny/data.bin": bytes(999), "alone.py": b"", "tiny/py.typed": b""}
    result = installed(pack(files))
    info = f"{SITE}/{INFO}"
    parts = ("METADATA", "WHEEL", "INSTALLER", "REQUESTED", "RECORD")
    assert list(result) == [*(f"{SITE}/{path}" for path in files), *(f"{info}/{part}" for part in parts)]
    assert all(result[f"{SITE}/{path}"] == content for path, content in files.items())
    assert result[f"{info}/INSTALLER"] == b"uv"
    assert result[f"{info}/REQUESTED"] == b""
    assert result[f"{info}/WHEEL"] == WHEEL


@pytest.mark.parametrize(("place", "site"), [(PLACE, SITE), (wheel.CUDA, "opt/nvidia")])
def test_a_second_record_links_to_the_first(place: InstallScheme, site: str) -> None:
    """For the files of the folder itself: an installer that replaces the package removes only these links."""
    packed = pack({"a.py": b""}, points="[console_scripts]\nrun = a:b\n", parts={"licenses/LICENSE": b""})
    links = {path: entry for path, entry in entries(packed, place).items() if entry.link}
    names = ("METADATA", "WHEEL", "RECORD", "INSTALLER", "REQUESTED", "entry_points.txt")
    assert {path: entry.link for path, entry in links.items()} == {
        f"{RECORDS}/{INFO}/{name}": f"/{site}/{INFO}/{name}" for name in names
    }


def test_each_scheme_has_its_folder() -> None:
    files = {
        f"{DATA}/purelib/pure/a.py": b"pure",
        f"{DATA}/platlib/plat/b.so": b"plat",
        f"{DATA}/headers/sub/c.h": b"header",
        f"{DATA}/scripts/run": b"script",
        f"{DATA}/data/share/man/man1/run.1": b"data",
    }
    result = installed(pack(files))
    expected = {
        f"{SITE}/pure/a.py": b"pure",
        f"{SITE}/plat/b.so": b"plat",
        "opt/venv/include/site/python3.11/tiny-pkg/sub/c.h": b"header",
        "opt/venv/bin/run": b"script",
        "opt/venv/share/man/man1/run.1": b"data",
    }
    assert expected.items() <= result.items()
    assert not [path for path in result if ".data" in path]
    rows = record(pack(files))
    assert rows["../../../share/man/man1/run.1"] == list(row("", b"data")[1:])
    assert rows["pure/a.py"] == list(row("", b"pure")[1:])
    assert "../../../include/site/python3.11/tiny-pkg/sub/c.h" in rows


def test_schemes_of_the_shared_libraries() -> None:
    files = {"nvidia/lib/x.so": b"so", f"{DATA}/data/share/x": b"x", f"{DATA}/headers/x.h": b"h"}
    points = "[console_scripts]\nrun = tiny:run\n"
    result = installed(pack(files, points=points), wheel.CUDA)
    assert set(result) >= {
        "opt/nvidia/nvidia/lib/x.so",
        "opt/nvidia/share/x",
        "opt/nvidia/include/tiny-pkg/x.h",
        "opt/nvidia/bin/run",
        f"opt/nvidia/{INFO}/RECORD",
    }
    assert result["opt/nvidia/bin/run"].startswith(b"#!/opt/venv/bin/python\n")
    assert {"share/x", "bin/run", "nvidia/lib/x.so"} <= set(record(pack(files, points=points), wheel.CUDA))


def test_only_the_executable_bit_of_a_file_is_kept() -> None:
    modes = {
        "a": 0o644, "b": 0o755, "c": 0o600, "d": 0o100, "e": 0o4755, "f": 0o001, "g": 0o666, "h": 0o777,
        f"{DATA}/scripts/s": 0o644, f"{DATA}/data/t": 0o744,
    }  # fmt: skip
    packed = pack(dict.fromkeys(modes, b"x"), modes=modes, points="[console_scripts]\nrun = tiny:run\n")
    result = {path.rpartition("/")[2]: entry.mode for path, entry in entries(packed).items() if not entry.link}
    assert {name for name, mode in result.items() if mode == 0o755} == {"b", "d", "e", "f", "h", "s", "t", "run"}
    assert set(result.values()) == {0o644, 0o755}


def test_folders_of_the_zip_are_left_out() -> None:
    out = io.BytesIO(pack({"tiny/a.py": b""}).content)
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr("tiny/", b"")
        archive.writestr("empty/", b"")
    assert not [path for path in entries(Wheel(name=NAME, content=out.getvalue())) if "empty" in path]


# ---- scripts


def test_entry_points() -> None:
    points = (
        "[console_scripts]\nrun = tiny.cli:main\nextra= tiny:go [fast,big]\nnested =tiny.a.b : Tool.run\n\n"
        "# a remark\n[gui_scripts]\nwin-dow.2 = tiny:window\n\n[other.group]\nthing = no/function at all\n"
    )
    packed = pack({}, points=points)
    result = entries(packed)
    assert {path for path in result if path.startswith("opt/venv/bin/")} == {
        f"opt/venv/bin/{name}" for name in ("run", "extra", "nested", "win-dow.2")
    }
    assert read(result["opt/venv/bin/run"]) == (
        b"#!/opt/venv/bin/python\n# -*- coding: utf-8 -*-\nimport sys\nfrom tiny.cli import main\n"
        b'if __name__ == "__main__":\n'
        b'    if sys.argv[0].endswith("-script.pyw"):\n        sys.argv[0] = sys.argv[0][:-11]\n'
        b'    elif sys.argv[0].endswith(".exe"):\n        sys.argv[0] = sys.argv[0][:-4]\n    sys.exit(main())\n'
    )
    nested = read(result["opt/venv/bin/nested"])
    assert b"from tiny.a.b import Tool\n" in nested
    assert nested.endswith(b"    sys.exit(Tool.run())\n")
    assert b"from tiny import go\n" in read(result["opt/venv/bin/extra"])
    for entry in result.values():
        if entry.path.startswith("opt/venv/bin/"):
            assert entry.mode == 0o755
            compile(read(entry), entry.path, "exec")
            name = entry.path.rpartition("/")[2]
            assert record(packed)[f"../../../bin/{name}"] == list(row("", read(entry))[1:])


def test_without_entry_points_there_are_no_scripts() -> None:
    for points in ("", "\n", "[console_scripts]\n", "[other]\na = b:c\n", "stray = a:b\n"):
        assert not [path for path in entries(pack({}, points=points)) if "/bin/" in path]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"#!python\nprint(1)\n", b"#!/opt/venv/bin/python\nprint(1)\n"),
        (b"#!pythonw\nprint(1)\n", b"#!/opt/venv/bin/python\nprint(1)\n"),
        (b"#!python3 -E\nprint(1)\n", b"#!/opt/venv/bin/python\nprint(1)\n"),
        (b"#!python\r\nprint(1)\r\n", b"#!/opt/venv/bin/python\nprint(1)\r\n"),
        (b"#!python", b"#!/opt/venv/bin/python\n"),
        (b"#!python\n\xff\0", b"#!/opt/venv/bin/python\n\xff\0"),
        (b"#!/usr/bin/python\n", b"#!/usr/bin/python\n"),
        (b"#! python\n", b"#! python\n"),
        (b"#!/bin/sh\n#!python\n", b"#!/bin/sh\n#!python\n"),
        (b"\x7fELF\0\1", b"\x7fELF\0\1"),
        (b"", b""),
    ],
)
def test_placeholders_for_python(before: bytes, after: bytes) -> None:
    packed = pack({f"{DATA}/scripts/run": before, f"{DATA}/data/bin/other": before, "module": before})
    result = installed(packed)
    assert result["opt/venv/bin/run"] == after
    assert result["opt/venv/bin/other"] == result[f"{SITE}/module"] == before
    assert record(packed)["../../../bin/run"] == list(row("", after)[1:])


def test_a_declared_script_overrides_a_shipped_one() -> None:
    """Scripts of setuptools for another system or installer; pip leaves them out too."""
    names = ["run", "run.exe", "run-script.py", "run.pya", "run.sh", "runner"]
    packed = pack(
        {f"{DATA}/scripts/{name}": b"#!python\nshipped\n" for name in names} | {f"{DATA}/data/bin/run": b"shipped"},
        points="[gui_scripts]\nrun = tiny:run\n",
    )
    result = installed(packed)
    assert {path.rpartition("/")[2] for path in result if "/bin/" in path} == {"run", "run.sh", "runner"}
    assert b"from tiny import run" in result["opt/venv/bin/run"]
    assert {path for path in record(packed) if "bin" in path} == {
        f"../../../bin/{n}" for n in ("run", "run.sh", "runner")
    }


def pip(name: str = "pip", *, script: str = "pip") -> Wheel:
    return pack(
        name=f"{name}-25.0-py3-none-any.whl",
        info=f"{name}-25.0.dist-info",
        points=f"[console_scripts]\n{script} = pip._internal.cli.main:main\n{script}3 = pip._internal.cli.main:main\n",
    )


def test_pip_has_a_script_for_its_python() -> None:
    result = installed(pip())
    assert {path for path in result if "/bin/" in path} == {f"opt/venv/bin/{n}" for n in ("pip", "pip3", "pip3.11")}
    assert result["opt/venv/bin/pip3.11"] == result["opt/venv/bin/pip"]
    assert "../../../bin/pip3.11,sha256=" in result[f"{SITE}/pip-25.0.dist-info/RECORD"].decode()


# ---- RECORD


def test_record_is_sorted_quoted_and_complete() -> None:
    files = {"z.py": b"z", 'a,b "c".txt': b"odd", "é/ü.txt": b"accents", "Z.py": b"Z", "a b": b"space", "a/x": b""}
    packed = pack(files)
    text = installed(packed)[f"{SITE}/{INFO}/RECORD"].decode()
    assert "\r" not in text
    rows = list(csv.reader(io.StringIO(text)))
    paths = [path for path, *_ in rows]
    assert paths == sorted(paths, key=str.encode)
    assert {f"{SITE}/{path}" for path in paths} == set(installed(packed))
    for path, content in files.items():
        assert list(row(path, content)) in rows
    assert [f"{INFO}/RECORD", "", ""] in rows
    assert list(row(f"{INFO}/INSTALLER", b"uv")) in rows
    assert list(row(f"{INFO}/REQUESTED", b"")) in rows


def test_a_signature_of_record_is_kept_with_and_without_its_row() -> None:
    """Shipped but not in RECORD, as in the specification; or listed but not shipped."""
    shipped = pack({f"{INFO}/x": b"x"}, parts={"RECORD.jws": b"signature"})
    assert installed(shipped)[f"{SITE}/{INFO}/RECORD.jws"] == b"signature"
    assert record(shipped)[f"{INFO}/RECORD.jws"] == ["", ""]
    missing = pack({}, parts={"RECORD": record_of({}, (f"{INFO}/RECORD.p7s", "", ""))})
    assert f"{SITE}/{INFO}/RECORD.p7s" not in installed(missing)
    assert record(missing)[f"{INFO}/RECORD.p7s"] == ["", ""]


def test_files_of_an_installer_in_a_wheel_are_replaced() -> None:
    packed = pack({}, parts={"INSTALLER": b"someone", "REQUESTED": b"by someone"}, modes={f"{INFO}/INSTALLER": 0o755})
    result = entries(packed)
    assert read(result[f"{SITE}/{INFO}/INSTALLER"]) == b"uv"
    assert read(result[f"{SITE}/{INFO}/REQUESTED"]) == b""
    assert result[f"{SITE}/{INFO}/INSTALLER"].mode == 0o644
    assert record(packed)[f"{INFO}/INSTALLER"] == list(row("", b"uv")[1:])


def test_invalid_rows_are_left_out() -> None:
    packed = pack({"a": b"a"}, parts={"RECORD": b"a\nb,c\n\na,sha256=x,1,more\n"})
    assert record(packed)["a"] == ["", ""]


# ---- refused: paths


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../outside", "a/../../outside", "a/./b", "./a", "a//b", "..", ".", f"{DATA}/scripts/../../x",
     f"{DATA}/data/../x"],
)  # fmt: skip
def test_paths_outside_the_target(path: str) -> None:
    assert repr(path) in refusal(pack({path: b"x"}))


@pytest.mark.parametrize("name", ["good.py\0hidden", "\0"])
def test_a_path_with_nul(name: str) -> None:
    """`zipfile` truncates the path there."""
    placeholder = name.replace("\0", "|")
    content = pack({placeholder: b"x"}).content.replace(placeholder.encode(), name.encode())
    assert f"invalid path {name.partition(chr(0))[0]!r}" in refusal(Wheel(name=NAME, content=content))


@pytest.mark.parametrize("path", ["a\nb", "a\r", "\ta", "a/\x1b[31mb", "a\x7f"])
def test_paths_with_control_characters(path: str) -> None:
    """They may end a line of RECORD, or change the text on a terminal."""
    assert repr(path) in refusal(pack({path: b"x"}))


@pytest.mark.parametrize("first", [b"", b"UT\0\0", b"UT\5\0\1time"])
def test_a_second_name_in_an_extra_field(first: bytes) -> None:
    """Some readers use it as the name of the file."""
    second = b"\x01" + zlib.crc32(b"good.py").to_bytes(4, "little") + b"evil.py"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        item = zipfile.ZipInfo("good.py")
        item.extra = first + b"\x75\x70" + len(second).to_bytes(2, "little") + second
        archive.writestr(item, b"x")
        for path in ("METADATA", "WHEEL", "RECORD"):
            archive.writestr(f"{INFO}/{path}", WHEEL if path == "WHEEL" else b"")
    assert "ambiguous path 'good.py'" in refusal(Wheel(name=NAME, content=out.getvalue()))


@pytest.mark.parametrize("path", ["a\\b.py", "..\\x", "C:\\x", "-rf", "a b", "~", "$(x)", "con", "a:b", "%41", "é"])
def test_other_paths_are_valid_on_linux(path: str) -> None:
    """As in pip: a backslash is not a separator."""
    assert installed(pack({path: b"x"}))[f"{SITE}/{path}"] == b"x"


@pytest.mark.parametrize("path", ["a.py", f"{INFO}/METADATA", f"{INFO}/RECORD"])
def test_one_path_twice_is_refused(path: str) -> None:
    out = io.BytesIO(pack({"a.py": b"1"}).content)
    with zipfile.ZipFile(out, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(path, b"2")
    assert f"duplicate path '{path}'" in refusal(Wheel(name=NAME, content=out.getvalue()))


@pytest.mark.parametrize(
    "files",
    [
        {"a/b": b"", f"{DATA}/purelib/a/b": b""},
        {f"{DATA}/platlib/a/b": b"", f"{DATA}/purelib/a/b": b""},
        {f"{DATA}/scripts/a": b"", f"{DATA}/data/bin/a": b""},
        {f"{DATA}/purelib/{INFO}/INSTALLER": b""},
        {f"{DATA}/data/lib/python3.11/site-packages/{INFO}/RECORD": b""},
    ],
)
def test_two_files_with_one_installed_path(files: dict[str, bytes]) -> None:
    assert "two files are installed as /opt/venv/" in refusal(pack(files))


@pytest.mark.parametrize(
    "files", [{"a": b"", "a/b": b""}, {"a/b": b"", "a": b""}, {"x/a/b/c": b"", f"{DATA}/purelib/x/a": b""}]
)
def test_a_path_that_is_file_and_folder(files: dict[str, bytes]) -> None:
    assert re.search(r"/a is a (file|folder), and a (file|folder)", refusal(pack(files)))


@pytest.mark.parametrize(
    "path",
    [
        "nvidia/x.so",
        "nvidia/__init__.py",
        "nvidia",
        f"{DATA}/purelib/nvidia/x.so",
        f"{DATA}/platlib/nvidia/x.so",
        f"{DATA}/data/lib/python3.11/site-packages/nvidia/x.so",
    ],
)
def test_paths_below_the_link_to_the_shared_libraries(path: str) -> None:
    error = refusal(pack({path: b"x"}))
    assert path in error
    assert "link to the shared libraries" in error


@pytest.mark.parametrize("path", [f"{DATA}/data/user", f"{DATA}/data/user/lib/python/site-packages/x.pth"])
def test_paths_in_the_folder_for_packages_of_users(path: str) -> None:
    assert "which is for packages of users" in refusal(pack({path: b"x"}))


# ---- refused: metadata


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (zipped({"a.py": b""}), "has 0 .dist-info folders"),
        (pack({"tiny_pkg-2.0.dist-info/METADATA": b""}), "has 2 .dist-info folders"),
        (pack({"other-1.0.dist-info/METADATA": b""}), "has 2 .dist-info folders"),
        (pack({}, info="other-1.0.dist-info"), "other-1.0.dist-info is of another project or version"),
        (pack({}, info="tiny_pkg.dist-info"), "another project"),
        (pack({}, info="tiny-pkg-1.0.dist-info"), "another project"),
        (pack({}, info="tiny_pkg-1.0.DIST-INFO"), "has 0 .dist-info folders"),
        (pack({}, parts={"WHEEL": b"Wheel-Version: 2.0\n"}), "unsupported Wheel-Version 2.0"),
        (pack({}, parts={"WHEEL": b"Wheel-Version: 10\n"}), "unsupported Wheel-Version 10"),
        (pack({}, parts={"WHEEL": b"Generator: x\n\nWheel-Version: 1.0\n"}), "unsupported Wheel-Version none"),
        (pack({}, parts={"WHEEL": b""}), "unsupported Wheel-Version none"),
        (pack({}, parts={"WHEEL": b"\xff\xfe"}), "utf-8"),
        (pack({}, without=["WHEEL"]), "unsupported Wheel-Version none"),
        (pack({}, without=["RECORD"]), "has no RECORD"),
        (pack({}, without=["RECORD"], parts={"record": b""}), "has no RECORD"),
        (pack({}, parts={"RECORD": b"\xff,,\n"}), "utf-8"),
        (pack({}, parts={"RECORD": b"a" * 200_000 + b",,\n"}), "field larger than"),
        (pack({}, parts={"entry_points.txt": b"\xff"}), "utf-8"),
        (pack({}, name="tiny_pkg-1.0.whl"), "invalid file name of a wheel"),
        (pack({}, name="tiny_pkg-one-py3-none-any.whl"), "invalid file name of a wheel"),
    ],
)
def test_invalid_metadata_is_refused(packed: Wheel, message: str) -> None:
    assert message in refusal(packed)


@pytest.mark.parametrize("info", ["Tiny_PKG-1.0.dist-info", "tiny.pkg-1.0.dist-info", "tiny_pkg-1.0+local.dist-info"])
def test_other_spellings_of_the_project(info: str) -> None:
    assert f"{SITE}/{info}/INSTALLER" in entries(pack({}, info=info))


def test_too_large_metadata_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "MAX_METADATA", 1000)
    for part in ("WHEEL", "RECORD", "entry_points.txt"):
        assert f"{part} is too large: 1001 bytes" in refusal(pack({}, parts={part: b"\n" * 1001}))
    entries(pack({}, parts={"entry_points.txt": b"\n" * 1000}))
    entries(pack({"large": bytes(1001), f"{DATA}/scripts/program": bytes(1001)}))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{DATA}/unknown/x", "unknown scheme 'unknown'"),
        (f"{DATA}/PURELIB/x", "unknown scheme 'PURELIB'"),
        (f"{DATA}/stdlib/x", "unknown scheme 'stdlib'"),
        (f"{DATA}/file", "is in no scheme"),
        (f"{DATA}/purelib", "is in no scheme"),
        (DATA, "is in no scheme"),
        ("other-1.0.data/purelib/x", "is in no scheme"),
        ("tiny_pkg.data/purelib/x", "is in no scheme"),
        (".data/purelib/x", "is in no scheme"),
    ],
)
def test_data_without_a_valid_scheme(path: str, message: str) -> None:
    error = refusal(pack({path: b"x"}))
    assert path in error
    assert message in error


@pytest.mark.parametrize(
    "name", ["a/b", "../../usr/bin/x", "..", ".", "", "'x'", '"x"', "a\\b", "a b", "a\tb", "a\x1bb", "a\0b", "\u202ex"]
)
def test_invalid_names_of_scripts(name: str) -> None:
    error = refusal(pack({}, points=f"[console_scripts]\n{name} = tiny:run\n"))
    assert "invalid name of a script" in error
    assert error.isprintable()


@pytest.mark.parametrize("name", ["x", "x-y_z.2", "2to3", "g++", "@x", "é", "..x"])
def test_valid_names_of_scripts(name: str) -> None:
    assert f"opt/venv/bin/{name}" in entries(pack({}, points=f"[console_scripts]\n{name} = tiny:run\n"))


@pytest.mark.parametrize(
    "value",
    [
        "tiny", "tiny:", ":run", "", "tiny:run()", "tiny:run;import os", "tiny:run import os", "tiny:a..b", "tiny:.a",
        "tiny..x:run", "1tiny:run", "tiny:1", "tiny:run\\nimport os", "tiny:run'", "tiny:{x}", "tiny:run # no",
        "tiny:run [extra", "tiny:a-b", "ti-ny:run",
    ],
)  # fmt: skip
def test_an_invalid_function_of_a_script_is_refused(value: str) -> None:
    assert "has an invalid function" in refusal(pack({}, points=f"[console_scripts]\nrun = {value}\n"))


def test_an_invalid_function_in_newer_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since 3.12, the standard library asserts the syntax of a value."""

    def attr(_: object) -> str:
        raise AssertionError

    monkeypatch.setattr(importlib.metadata.EntryPoint, "attr", property(attr))
    assert "has an invalid function: 'tiny:run'" in refusal(pack({}, points="[console_scripts]\nrun = tiny:run\n"))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
@pytest.mark.parametrize("section", ["console_scripts", "other"])
def test_a_value_of_several_lines(end: str, section: str) -> None:
    """No line of a wheel may become a line of a script. The standard library splits lines at many characters."""
    assert "entry_points.txt" in refusal(pack({}, points=f"[{section}]\nrun = x:y{end}import os\n"))
    assert "function" in refusal(pack({}, points=f"[console_scripts]\nrun = x:y{end}a = import os\n"))


# ---- refused: zip files


def test_an_encrypted_entry_is_refused() -> None:
    content = bytearray(pack({"a.py": b"x"}).content)
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    assert "'a.py' is encrypted" in refusal(Wheel(name=NAME, content=bytes(content)))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["bzip2", "lzma"])
def test_another_compression_is_refused(method: int) -> None:
    assert "has a compression method that wheels do not use" in refusal(pack({"a.py": b"x"}, method=method))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"a-module.py", b"b-module.py", "'a-module.py' differs from its local header: 'b-module.py'"),
        (b"PK\x03\x04", b"PK\x03\x05", "has no local header"),
    ],
)
def test_a_local_header_that_differs(old: bytes, new: bytes, message: str) -> None:
    """Every reader must read `a-module.py` as the same file."""
    packed = pack({"a-module.py": b"x"})
    assert message in refusal(Wheel(name=NAME, content=packed.content.replace(old, new, 1)))


def test_a_local_header_of_another_compression() -> None:
    content = bytearray(pack({"a-module.py": b"x"}).content)
    content[8] = zipfile.ZIP_STORED
    assert "'a-module.py' differs from its local header" in refusal(Wheel(name=NAME, content=bytes(content)))


def test_overlapping_entries_are_refused() -> None:
    """As in a zip bomb of many files that share their data."""
    inner = pack({"inner.py": b"x" * 99}, method=zipfile.ZIP_STORED).content
    inner = inner[: inner.index(b"PK\x03\x04", 4)]
    packed = pack({"a.py": inner, "b.py": b""}, method=zipfile.ZIP_STORED).content
    at = packed.rindex(b"PK\x01\x02", 0, packed.index(b"b.py", packed.index(b"PK\x01\x02")))
    moved = (30 + len("a.py")).to_bytes(4, "little")
    hostile = packed[: at + 42] + moved + packed[at + 46 :]
    assert "'b.py' overlaps the previous entry" in refusal(Wheel(name=NAME, content=hostile))


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\x05\x06" + bytes(18), b"PK\x03\x04" * 99])
def test_files_that_are_not_wheels(content: bytes) -> None:
    refusal(Wheel(name=NAME, content=content))


@pytest.mark.parametrize("part", ["RECORD", "WHEEL"])
def test_damaged_metadata_is_named_with_its_wheel(part: str) -> None:
    content = bytearray(pack({}, method=zipfile.ZIP_STORED).content)
    content[content.index(f"{INFO}/{part}".encode()) + len(f"{INFO}/{part}") + 3] ^= 1
    error = refusal(Wheel(name=NAME, content=bytes(content)))
    assert error == f"{NAME}: {INFO}/{part}: content does not match the CRC-32 and size of its entry"


GOOD = pack(
    {"tiny/a.py": b"x" * 50, f"{DATA}/scripts/run": b"#!python\n", "é": b"x"}, points="[console_scripts]\na = b:c\n"
)
DIRECTORY = GOOD.content.index(b"PK\x01\x02")


@given(
    st.lists(
        st.tuples(
            st.integers(0, len(GOOD.content) - 1) | st.integers(DIRECTORY, len(GOOD.content) - 1), st.integers(0, 255)
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, len(GOOD.content)) | st.just(len(GOOD.content)),
    st.booleans(),
)
def test_any_damage_raises_our_errors(changes: list[tuple[int, int]], end: int, in_memory: bool) -> None:
    content = bytearray(GOOD.content)
    for at, value in changes:
        content[at] = value
    del content[end:]
    with io.BytesIO() if in_memory else tempfile.TemporaryFile() as file:
        file.write(content)
        try:
            splice.write_layer(wheel.layer_entries([(NAME, cast("BinaryIO", file))], PLACE), io.BytesIO())
        except (WheelError, SpliceError) as error:
            assert str(error).startswith(f"{NAME}: ")  # noqa: PT017  it need not be raised


def hash_of(name: str, content: bytes) -> str:
    """A hash as in RECORD."""
    encoded = base64.urlsafe_b64encode(hashlib.new(name, content).digest()).decode().rstrip("=")
    return f"{name}={encoded}"


def with_hash(value: str, method: int = zipfile.ZIP_DEFLATED) -> Wheel:
    """A wheel whose RECORD has this hash for tiny/a.py, whose content is `a = 1`."""
    rows = f"tiny/a.py,{value},5\n{INFO}/METADATA,,\n{INFO}/WHEEL,,\n{INFO}/RECORD,,\n"
    return pack({"tiny/a.py": b"a = 1"}, method=method, parts={"RECORD": rows.encode()})


def write(packed: Wheel, diff_id: str = "") -> bytes:
    out = io.BytesIO()
    splice.write_layer(wheel.layer_entries([packed.open()], PLACE), out, diff_id=diff_id)
    return out.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED], ids=["deflated", "stored"])
def test_a_file_with_another_sha256_than_in_record_refuses_the_wheel(method: int) -> None:
    with pytest.raises(SpliceError, match=rf"^{NAME}: tiny/a\.py: .* does not match the SHA-256 in RECORD$"):
        write(with_hash(hash_of("sha256", b"a = 2"), method))
    assert write(with_hash(hash_of("sha256", b"a = 1"), method))


@pytest.mark.parametrize(
    "value",
    [
        "",
        hash_of("sha512", b"a = 2"),
        hash_of("md5", b"a = 2"),
        "sha256=",
        "sha256=AA",
        f"sha256={'0' * 64}",
        "sha256=\u00e9",
        "sha256",
        "=",
    ],
)
def test_other_hashes_in_record_are_not_compared(value: str) -> None:
    """Installers do not compare them either. In a layer whose digest is known, such a file is hashed nevertheless."""
    packed = with_hash(value)
    [entry] = [entry for path, entry in entries(packed).items() if path == f"{SITE}/tiny/a.py"]
    assert entry.sha256 == ""
    assert write(packed) == write(packed, diff_id="sha256:" + "5" * 64)


def test_hashes_of_record_are_those_of_the_entries() -> None:
    """A script whose first line is replaced has another hash than in the wheel."""
    packed = pack({"tiny/a.py": b"a = 1", "tiny/empty.py": b"", f"{DATA}/scripts/run": b"#!python\n"})
    for path, entry in entries(packed).items():
        if entry.sha256:
            assert entry.sha256 == hashlib.sha256(read(entry)).hexdigest(), path
    hashed = {path.removeprefix(f"{SITE}/") for path, entry in entries(packed).items() if entry.sha256}
    assert hashed == {"tiny/a.py", "tiny/empty.py", f"{INFO}/METADATA", f"{INFO}/WHEEL"}


# ---- several wheels in one layer


def other(files: Mapping[str, bytes], **more: Any) -> Wheel:
    return pack(files, name="other-2.0-py3-none-any.whl", info="other-2.0.dist-info", **more)


def layer(*packed: Wheel) -> list[Entry]:
    return wheel.layer_entries([item.open() for item in packed], PLACE)


def test_every_folder_occurs_once_and_before_its_contents() -> None:
    result = layer(pack({"ns/a/x.py": b"a", "top.py": b""}), other({"ns/b/x.py": b"b", "ns/a/y.py": b""}))
    paths = [entry.path for entry in result]
    assert len(set(paths)) == len(paths)
    for number, entry in enumerate(result):
        assert (number and "/" in entry.path) or entry.path == "opt"
        assert entry.path == "opt" or entry.path.rpartition("/")[0] in paths[:number]
        if entry.content is None and not entry.link:
            assert entry.mode == MODES.get(entry.path, 0o775 if entry.path.startswith(f"{RECORDS}/") else 0o755)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_large_files_of_two_wheels_are_compared_in_chunks(monkeypatch: pytest.MonkeyPatch, method: int) -> None:
    """Shared libraries have gigabytes."""

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            reads.append(len(data))
            return data

    monkeypatch.setattr(splice, "CHUNK", 1000)
    reads: list[int] = []
    large = random.Random(1).randbytes(100_000)
    packed = [pack({"ns/x.so": large}, method=method), other({"ns/x.so": large}, method=method)]
    result = wheel.layer_entries([(item.name, Watched(item.content)) for item in packed], PLACE)
    assert [entry.path for entry in result].count(f"{SITE}/ns/x.so") == 1
    assert sum(reads) > 2 * len(large)
    assert max(reads) < 10_000


@pytest.mark.parametrize("content", [b"not the same", b"Same", b""])
def test_different_files_of_two_wheels(content: bytes) -> None:
    error = refusal(pack({"ns/x.py": b"same"}), other({"ns/x.py": content}))
    assert error == f"{NAME} and other-2.0-py3-none-any.whl have different files for /{SITE}/ns/x.py"


def test_the_later_of_two_wheels_has_the_file() -> None:
    """As after an installation, each RECORD has the row of its own wheel: to uninstall either removes the file."""
    files = {"ns/x.py": b"first", "tests/t.py": b"same"}
    packed = [pack(files), other({**files, "ns/x.py": b"later"})]
    warnings: list[str] = []
    result = wheel.layer_entries([item.open() for item in packed], PLACE, warnings.append)
    paths = [entry.path for entry in result]
    assert len(set(paths)) == len(paths)
    contents = {entry.path: read(entry) for entry in result if entry.content is not None}
    assert contents[f"{SITE}/ns/x.py"] == b"later"
    assert b"ns/x.py,sha256=" in contents[f"{SITE}/{INFO}/RECORD"]
    assert row("ns/x.py", b"first")[1].encode() in contents[f"{SITE}/{INFO}/RECORD"]
    assert row("ns/x.py", b"later")[1].encode() in contents[f"{SITE}/other-2.0.dist-info/RECORD"]
    both = f"{NAME} and other-2.0-py3-none-any.whl"
    assert warnings == [f"{both} have different files for /{SITE}/ns/x.py; the later wheel's are used"]
    splice.write_layer(result, io.BytesIO())


def test_the_last_of_three_wheels_has_the_file() -> None:
    third = pack({"x": b"3"}, name="third-3.0-py3-none-any.whl", info="third-3.0.dist-info")
    packed = [pack({"x": b"1"}), other({"x": b"2"}), third]
    warnings: list[str] = []
    result = wheel.layer_entries([item.open() for item in packed], PLACE, warnings.append)
    assert [read(entry) for entry in result if entry.path == f"{SITE}/x"] == [b"3"]
    assert len(warnings) == 2


def test_one_file_with_two_modes() -> None:
    error = refusal(pack({"x": b""}), other({"x": b""}, modes={"x": 0o755}))
    assert error == f"{NAME} and other-2.0-py3-none-any.whl have different files for /{SITE}/x"


@pytest.mark.parametrize("points", [("", "[console_scripts]\nrun = b:c\n"), ("[console_scripts]\nrun = a:b\n",) * 2])
def test_scripts_of_two_wheels_with_one_name(points: tuple[str, str]) -> None:
    first = pack({} if points[0] else {f"{DATA}/scripts/run": b"shipped"}, points=points[0])
    second = other({}, points=points[1])
    if points[0]:
        assert len([entry for entry in layer(first, second) if entry.path == "opt/venv/bin/run"]) == 1
    else:
        assert "have different files for /opt/venv/bin/run" in refusal(first, second)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("ns/x", "ns", f"/{SITE}/ns is a file, and a folder in {NAME}"),
        ("ns", "ns/x", f"/{SITE}/ns is a folder, and a file in {NAME}"),
        ("ns", "ns/x/y", f"/{SITE}/ns is a folder, and a file in {NAME}"),
    ],
)
def test_a_file_in_one_wheel_and_a_folder_in_another(first: str, second: str, message: str) -> None:
    assert message in refusal(pack({first: b""}), other({second: b""}))


def test_a_damaged_file_of_two_wheels_is_named() -> None:
    content = random.Random(1).randbytes(99)
    damaged = other({"x": content}, method=zipfile.ZIP_STORED).content.replace(content, bytes(99), 1)
    assert ": x: " in refusal(pack({"x": content}), Wheel(name="other-2.0-py3-none-any.whl", content=damaged))


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
    written = splice.write_layer(wheel.layer_entries([packed.open()], PLACE), io.BytesIO())
    assert layer_order.LAYER_FORMAT == 5
    assert written.digest == "sha256:6470fc20ebe688079ffc4497739f7acc9f69036ed3fb3441679d3e996a31126c"
    assert written.diff_id == "sha256:b5ac7f69a2b1a1330aa2d546a7265f4d049d3b22dfc5e5004c4a97ccafc6a955"


@pytest.mark.parametrize("name", ["tiny_pkg-1.1-py3-none-any.whl", "tiny_pkg-1.0.post1-py3-none-any.whl"])
def test_a_wheel_with_another_version_in_its_file_name(name: str) -> None:
    assert "of another project or version" in refusal(pack(name=name))


@pytest.mark.parametrize(
    "metadata", ["Name: other\nVersion: 1.0\n", "Name: tiny-pkg\nVersion: 9.9.9\n", "Name: tiny-pkg\n"]
)
def test_a_wheel_with_metadata_of_another_one(metadata: str) -> None:
    assert "METADATA is of another project or version" in refusal(pack(parts={"METADATA": metadata.encode()}))


@pytest.mark.parametrize("version", ["1", "1.0.0", "v1.0", "1.0+cu128"])
def test_another_spelling_of_the_version_is_the_same_version(version: str) -> None:
    """uv and pip install tiny_pkg-1.0-py3-none-any.whl with tiny_pkg-1.0.0.dist-info."""
    packed = pack({"x.py": b""}, info=f"tiny_pkg-{version}.dist-info")
    assert f"{SITE}/x.py" in installed(packed)


def test_a_wheel_that_unpacks_to_a_thousand_times_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_zip, "MAX_UNPACKED", 1_000_000)
    assert entries(pack({"tiny/data": bytes(900_000)}))
    error = refusal(pack({"tiny/data": bytes(2_000_000)}))
    assert re.search(r"bytes unpack to 200\d{4}, more than 50 times as many", error)


def test_the_size_limit_is_for_all_files_of_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack({"a": bytes(700), "b": bytes(700)})
    with zipfile.ZipFile(packed.open()[1]) as archive:
        total = sum(item.file_size for item in archive.infolist())
    monkeypatch.setattr(wheel_zip, "MAX_GROWTH", 0)
    monkeypatch.setattr(wheel_zip, "MAX_UNPACKED", total)
    assert entries(packed)
    monkeypatch.setattr(wheel_zip, "MAX_UNPACKED", total - 1)
    assert f"bytes unpack to {total}, more than" in refusal(packed)
