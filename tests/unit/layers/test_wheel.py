"""Wheels are installed as by an installer; invalid ones are refused by name, in one line."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import random
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pytest

from builder.layers import splice, wheel, wheel_zip
from builder.layers.splice import Entry, Zipped
from builder.layers.wheel import InstallScheme
from builder.layers.wheel_zip import WheelError
from builder.plan import layer_order

PLACE = wheel.environment("3.11")
SITE = "opt/venv/lib/python/site-packages"
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
    return {path: read(entry) for path, entry in entries(packed, place).items()}


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


def test_a_wheel_for_every_python_has_the_same_files_as_for_one() -> None:
    """Layers of CUDA's wheels are the same for all images; lib/python3.11 is a link to lib/python."""
    packed = pack({"nvidia/lib/x.so": b"so"}, points="[console_scripts]\nrun = tiny:run\n")
    assert installed(packed, wheel.environment("")) == installed(packed)


def test_only_the_executable_bit_of_a_file_is_kept() -> None:
    modes = {
        "a": 0o644, "b": 0o755, "c": 0o600, "d": 0o100, "e": 0o4755, "f": 0o001, "g": 0o666, "h": 0o777,
        f"{DATA}/scripts/s": 0o644, f"{DATA}/data/t": 0o744,
    }  # fmt: skip
    packed = pack(dict.fromkeys(modes, b"x"), modes=modes, points="[console_scripts]\nrun = tiny:run\n")
    result = {path.rpartition("/")[2]: entry.mode for path, entry in entries(packed).items()}
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
            assert entry.mode == (0o755 if entry.path == "opt" else 0o775)


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
    assert layer_order.LAYER_FORMAT == 6
    assert written.digest == "sha256:aa241cfd0e20813eb5ffc4b9c687e940f1c9d56948404edbfdebe93687c9e969"
    assert written.diff_id == "sha256:c38c7fe6c749b72e3e7461e0930ee0aefc6860bc1868b7b50d15ea2fc0f8fc3a"


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
