"""Wheels as an installer would install them; what no installer should is refused, by name and in one line."""

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

from builder import splice, wheel
from builder.splice import Entry, SpliceError, Zipped
from builder.wheel import Place, WheelError

PLACE = wheel.environment("3.11")
SITE = "opt/venv/lib/python3.11/site-packages"
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
    return splice.read(entry.content) if isinstance(entry.content, Zipped) else entry.content or b""


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
    """A wheel of `files`. `parts` are files of .dist-info, in place of good ones; `points` is its entry_points.txt."""
    members = dict(files) | {f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-pkg\nVersion: 1.0\n"}
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


def entries(made: Wheel, place: Place = PLACE) -> dict[str, Entry]:
    """Path -> entry of an installed wheel, which has no path twice."""
    found = list(wheel.install(*made.open(), place))
    assert len({entry.path for entry in found}) == len(found)
    return {entry.path: entry for entry in found}


def installed(made: Wheel, place: Place = PLACE) -> dict[str, bytes]:
    return {path: read(entry) for path, entry in entries(made, place).items()}


def record(made: Wheel, place: Place = PLACE) -> dict[str, list[str]]:
    text = installed(made, place)[f"{place.site}/{INFO}/RECORD"].decode()
    return {path: rest for path, *rest in csv.reader(io.StringIO(text))}


def refusal(*made: Wheel, place: Place = PLACE) -> str:
    """The one line that a refusal says; it begins with the name of the (last) wheel."""
    with pytest.raises(WheelError) as raised:
        splice.write(wheel.layer_entries([one.open() for one in made], place), io.BytesIO())
    told = str(raised.value)
    assert "\n" not in told
    assert told.startswith((f"{made[-1].name}: ", f"{made[0].name} and {made[-1].name} "))
    return told


# ---- what is installed


def test_a_plain_wheel() -> None:
    files = {"tiny/__init__.py": b"VALUE = 1\n", "tiny/data.bin": bytes(999), "alone.py": b"", "tiny/py.typed": b""}
    found = installed(pack(files))
    info = f"{SITE}/{INFO}"
    assert set(found) == {f"{SITE}/{path}" for path in files} | {
        f"{info}/{part}" for part in ("METADATA", "WHEEL", "RECORD", "INSTALLER", "REQUESTED")
    }
    assert all(found[f"{SITE}/{path}"] == content for path, content in files.items())
    assert found[f"{info}/INSTALLER"] == b"uv"
    assert found[f"{info}/REQUESTED"] == b""
    assert found[f"{info}/WHEEL"] == WHEEL


def test_the_order_is_the_wheels_and_record_comes_last() -> None:
    paths = [entry.path.removeprefix(f"{SITE}/") for entry in entries(pack({"z.py": b"", "a.py": b""})).values()]
    parts = ("METADATA", "WHEEL", "INSTALLER", "REQUESTED", "RECORD")
    assert paths == ["z.py", "a.py", *(f"{INFO}/{part}" for part in parts)]


def test_schemes() -> None:
    files = {
        f"{DATA}/purelib/pure/a.py": b"pure",
        f"{DATA}/platlib/plat/b.so": b"plat",
        f"{DATA}/headers/sub/c.h": b"header",
        f"{DATA}/scripts/run": b"script",
        f"{DATA}/data/share/man/man1/run.1": b"data",
    }
    found = installed(pack(files))
    expected = {
        f"{SITE}/pure/a.py": b"pure",
        f"{SITE}/plat/b.so": b"plat",
        "opt/venv/include/site/python3.11/tiny-pkg/sub/c.h": b"header",
        "opt/venv/bin/run": b"script",
        "opt/venv/share/man/man1/run.1": b"data",
    }
    assert expected.items() <= found.items()
    assert not [path for path in found if ".data" in path]
    listed = record(pack(files))
    assert listed["../../../share/man/man1/run.1"] == list(row("", b"data")[1:])
    assert listed["pure/a.py"] == list(row("", b"pure")[1:])
    assert "../../../include/site/python3.11/tiny-pkg/sub/c.h" in listed


def test_schemes_of_the_shared_libraries() -> None:
    files = {"nvidia/lib/x.so": b"so", f"{DATA}/data/share/x": b"x", f"{DATA}/headers/x.h": b"h"}
    points = "[console_scripts]\nrun = tiny:run\n"
    found = installed(pack(files, points=points), wheel.CUDA)
    assert set(found) >= {
        "opt/nvidia/nvidia/lib/x.so",
        "opt/nvidia/share/x",
        "opt/nvidia/include/tiny-pkg/x.h",
        "opt/nvidia/bin/run",
        f"opt/nvidia/{INFO}/RECORD",
    }
    assert found["opt/nvidia/bin/run"].startswith(b"#!/opt/venv/bin/python\n")
    assert {"share/x", "bin/run", "nvidia/lib/x.so"} <= set(record(pack(files, points=points), wheel.CUDA))


def test_modes() -> None:
    modes = {
        "a": 0o644, "b": 0o755, "c": 0o600, "d": 0o100, "e": 0o4755, "f": 0o001, "g": 0o666, "h": 0o777,
        f"{DATA}/scripts/s": 0o644, f"{DATA}/data/t": 0o744,
    }  # fmt: skip
    made = pack(dict.fromkeys(modes, b"x"), modes=modes, points="[console_scripts]\nrun = tiny:run\n")
    found = {path.rpartition("/")[2]: entry.mode for path, entry in entries(made).items()}
    assert {name for name, mode in found.items() if mode == 0o755} == {"b", "d", "e", "f", "h", "s", "t", "run"}
    assert set(found.values()) == {0o644, 0o755}


def test_a_record_that_is_executable_stays_so() -> None:
    found = entries(pack({}, modes={f"{INFO}/RECORD": 0o755}))
    assert found[f"{SITE}/{INFO}/RECORD"].mode == 0o755


def test_folders_of_the_zip_are_left_out() -> None:
    out = io.BytesIO(pack({"tiny/a.py": b""}).content)
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr("tiny/", b"")
        archive.writestr("empty/", b"")
    assert not [path for path in entries(Wheel(name=NAME, content=out.getvalue())) if "empty" in path]


def test_stored_entries() -> None:
    assert installed(pack({"a": b"x"}, method=zipfile.ZIP_STORED)) == installed(pack({"a": b"x"}))


# ---- scripts


def test_entry_points() -> None:
    points = (
        "[console_scripts]\nrun = tiny.cli:main\nextra= tiny:go [fast,big]\nnested =tiny.a.b : Tool.run\n\n"
        "# a remark\n[gui_scripts]\nwin-dow.2 = tiny:window\n\n[other.group]\nthing = no/function at all\n"
    )
    made = pack({}, points=points)
    found = entries(made)
    assert {path for path in found if path.startswith("opt/venv/bin/")} == {
        f"opt/venv/bin/{name}" for name in ("run", "extra", "nested", "win-dow.2")
    }
    assert read(found["opt/venv/bin/run"]) == (
        b"#!/opt/venv/bin/python\n# -*- coding: utf-8 -*-\nimport sys\nfrom tiny.cli import main\n"
        b'if __name__ == "__main__":\n'
        b'    if sys.argv[0].endswith("-script.pyw"):\n        sys.argv[0] = sys.argv[0][:-11]\n'
        b'    elif sys.argv[0].endswith(".exe"):\n        sys.argv[0] = sys.argv[0][:-4]\n    sys.exit(main())\n'
    )
    nested = read(found["opt/venv/bin/nested"])
    assert b"from tiny.a.b import Tool\n" in nested
    assert nested.endswith(b"    sys.exit(Tool.run())\n")
    assert b"from tiny import go\n" in read(found["opt/venv/bin/extra"])
    for entry in found.values():
        if entry.path.startswith("opt/venv/bin/"):
            assert entry.mode == 0o755
            compile(read(entry), entry.path, "exec")
            name = entry.path.rpartition("/")[2]
            assert record(made)[f"../../../bin/{name}"] == list(row("", read(entry))[1:])


def test_no_entry_points_no_scripts() -> None:
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
    made = pack({f"{DATA}/scripts/run": before, f"{DATA}/data/bin/other": before, "module": before})
    found = installed(made)
    assert found["opt/venv/bin/run"] == after
    assert found["opt/venv/bin/other"] == found[f"{SITE}/module"] == before
    assert record(made)["../../../bin/run"] == list(row("", after)[1:])


def test_a_declared_script_counts_more_than_a_shipped_one() -> None:
    """What setuptools made for another system or installer; pip leaves it out too."""
    names = ["run", "run.exe", "run-script.py", "run.pya", "run.sh", "runner"]
    made = pack(
        {f"{DATA}/scripts/{name}": b"#!python\nshipped\n" for name in names} | {f"{DATA}/data/bin/run": b"shipped"},
        points="[gui_scripts]\nrun = tiny:run\n",
    )
    found = installed(made)
    assert {path.rpartition("/")[2] for path in found if "/bin/" in path} == {"run", "run.sh", "runner"}
    assert b"from tiny import run" in found["opt/venv/bin/run"]
    assert {path for path in record(made) if "bin" in path} == {
        f"../../../bin/{n}" for n in ("run", "run.sh", "runner")
    }


def pip(name: str = "pip", *, script: str = "pip") -> Wheel:
    return pack(
        name=f"{name}-25.0-py3-none-any.whl",
        info=f"{name}-25.0.dist-info",
        points=f"[console_scripts]\n{script} = pip._internal.cli.main:main\n{script}3 = pip._internal.cli.main:main\n",
    )


def test_pip_has_a_script_for_its_python() -> None:
    found = installed(pip())
    assert {path for path in found if "/bin/" in path} == {f"opt/venv/bin/{n}" for n in ("pip", "pip3", "pip3.11")}
    assert found["opt/venv/bin/pip3.11"] == found["opt/venv/bin/pip"]
    assert "../../../bin/pip3.11,sha256=" in found[f"{SITE}/pip-25.0.dist-info/RECORD"].decode()


def test_nothing_else_has() -> None:
    for made, place in ((pip("notpip"), PLACE), (pip(script="pipe"), PLACE), (pip(), wheel.CUDA)):
        assert not [path for path in installed(made, place) if path.endswith("3.11")]


# ---- RECORD


def test_record_is_sorted_quoted_and_complete() -> None:
    files = {"z.py": b"z", 'a,b "c".txt': b"odd", "é/ü.txt": b"accents", "Z.py": b"Z", "a b": b"space", "a/x": b""}
    made = pack(files)
    text = installed(made)[f"{SITE}/{INFO}/RECORD"].decode()
    assert "\r" not in text
    rows = list(csv.reader(io.StringIO(text)))
    paths = [path for path, *_ in rows]
    assert paths == sorted(paths, key=str.encode)
    assert {f"{SITE}/{path}" for path in paths} == set(entries(made))
    for path, content in files.items():
        assert list(row(path, content)) in rows
    assert [f"{INFO}/RECORD", "", ""] in rows
    assert list(row(f"{INFO}/INSTALLER", b"uv")) in rows
    assert list(row(f"{INFO}/REQUESTED", b"")) in rows


def test_a_signature_of_record_stays_with_its_row_and_without() -> None:
    """Shipped, and not in RECORD, as the specification has it; or listed, and not shipped."""
    shipped = pack({f"{INFO}/x": b"x"}, parts={"RECORD.jws": b"signature"})
    assert installed(shipped)[f"{SITE}/{INFO}/RECORD.jws"] == b"signature"
    assert record(shipped)[f"{INFO}/RECORD.jws"] == ["", ""]
    listed = pack({}, parts={"RECORD": record_of({}, (f"{INFO}/RECORD.p7s", "", ""))})
    assert f"{SITE}/{INFO}/RECORD.p7s" not in installed(listed)
    assert record(listed)[f"{INFO}/RECORD.p7s"] == ["", ""]


def test_what_an_installer_left_in_a_wheel_is_replaced() -> None:
    made = pack({}, parts={"INSTALLER": b"someone", "REQUESTED": b"by someone"}, modes={f"{INFO}/INSTALLER": 0o755})
    found = entries(made)
    assert read(found[f"{SITE}/{INFO}/INSTALLER"]) == b"uv"
    assert read(found[f"{SITE}/{INFO}/REQUESTED"]) == b""
    assert found[f"{SITE}/{INFO}/INSTALLER"].mode == 0o644
    assert record(made)[f"{INFO}/INSTALLER"] == list(row("", b"uv")[1:])


def test_rows_that_make_no_sense_are_left_out() -> None:
    made = pack({"a": b"a"}, parts={"RECORD": b"a\nb,c\n\na,sha256=x,1,more\n"})
    assert record(made)["a"] == ["", ""]


# ---- refused: paths


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../outside", "a/../../outside", "a/./b", "./a", "a//b", "..", ".", f"{DATA}/scripts/../../x",
     f"{DATA}/data/../x"],
)  # fmt: skip
def test_paths_that_lead_elsewhere(path: str) -> None:
    assert repr(path) in refusal(pack({path: b"x"}))


@pytest.mark.parametrize("name", ["good.py\0hidden", "\0"])
def test_a_path_with_nul(name: str) -> None:
    """`zipfile` cuts it off there."""
    placeholder = name.replace("\0", "|")
    content = pack({placeholder: b"x"}).content.replace(placeholder.encode(), name.encode())
    assert f"holds the path {name.partition(chr(0))[0]!r}" in refusal(Wheel(name=NAME, content=content))


@pytest.mark.parametrize("path", ["a\nb", "a\r", "\ta", "a/\x1b[31mb", "a\x7f"])
def test_paths_with_control_characters(path: str) -> None:
    """Which end the line in one RECORD and not in another, or change what a terminal shows."""
    assert repr(path) in refusal(pack({path: b"x"}))


def test_a_second_name_in_an_extra_field() -> None:
    """Some readers take it for the name of the file."""
    second = b"\x01" + zlib.crc32(b"good.py").to_bytes(4, "little") + b"evil.py"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        item = zipfile.ZipInfo("good.py")
        item.extra = b"\x75\x70" + len(second).to_bytes(2, "little") + second
        archive.writestr(item, b"x")
        for path in ("METADATA", "WHEEL", "RECORD"):
            archive.writestr(f"{INFO}/{path}", WHEEL if path == "WHEEL" else b"")
    assert "'good.py', which not everyone reads alike" in refusal(Wheel(name=NAME, content=out.getvalue()))


@pytest.mark.parametrize("path", ["a\\b.py", "..\\x", "C:\\x", "-rf", "a b", "~", "$(x)", "con", "a:b", "%41", "é"])
def test_other_paths_are_names_as_good_as_any_on_linux(path: str) -> None:
    """As pip has it: a backslash separates nothing here."""
    assert installed(pack({path: b"x"}))[f"{SITE}/{path}"] == b"x"


def test_upper_and_lower_case_are_different_files() -> None:
    assert installed(pack({"A.py": b"A", "a.py": b"a"}))[f"{SITE}/A.py"] == b"A"


@pytest.mark.parametrize("path", ["a.py", f"{INFO}/METADATA", f"{INFO}/RECORD"])
def test_one_path_twice(path: str) -> None:
    out = io.BytesIO(pack({"a.py": b"1"}).content)
    with zipfile.ZipFile(out, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(path, b"2")
    assert f"holds '{path}' twice" in refusal(Wheel(name=NAME, content=out.getvalue()))


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
def test_two_files_that_come_to_one_path(files: dict[str, bytes]) -> None:
    assert "two of its files come to /opt/venv/" in refusal(pack(files))


@pytest.mark.parametrize(
    "files", [{"a": b"", "a/b": b""}, {"a/b": b"", "a": b""}, {"x/a/b/c": b"", f"{DATA}/purelib/x/a": b""}]
)
def test_a_file_that_is_a_folder_too(files: dict[str, bytes]) -> None:
    assert re.search(r"/a as a (file|folder), which is a (file|folder)", refusal(pack(files)))


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
def test_nothing_lies_under_the_link_to_the_shared_libraries(path: str) -> None:
    told = refusal(pack({path: b"x"}))
    assert path in told
    assert "link to the shared libraries" in told


@pytest.mark.parametrize("path", ["nvidia_smi/x.so", "nvidia.py", "a/nvidia/x.so", f"{DATA}/data/nvidia/x"])
def test_other_names_with_nvidia_are_fine(path: str) -> None:
    assert len(entries(pack({path: b"x"}))) == 6


# ---- refused: metadata


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (zipped({"a.py": b""}), "has 0 .dist-info folders"),
        (pack({"tiny_pkg-2.0.dist-info/METADATA": b""}), "has 2 .dist-info folders"),
        (pack({"other-1.0.dist-info/METADATA": b""}), "has 2 .dist-info folders"),
        (pack({}, info="other-1.0.dist-info"), "holds other-1.0.dist-info, which is another project's"),
        (pack({}, info="tiny_pkg.dist-info"), "another project's"),
        (pack({}, info="tiny-pkg-1.0.dist-info"), "another project's"),
        (pack({}, info="tiny_pkg-1.0.DIST-INFO"), "has 0 .dist-info folders"),
        (pack({}, parts={"WHEEL": b"Wheel-Version: 2.0\n"}), "wheel version 2.0"),
        (pack({}, parts={"WHEEL": b"Wheel-Version: 10\n"}), "wheel version 10"),
        (pack({}, parts={"WHEEL": b"Generator: x\n\nWheel-Version: 1.0\n"}), "wheel version none"),
        (pack({}, parts={"WHEEL": b""}), "wheel version none"),
        (pack({}, parts={"WHEEL": b"\xff\xfe"}), "utf-8"),
        (pack({}, without=["WHEEL"]), "wheel version none"),
        (pack({}, without=["RECORD"]), "has no RECORD"),
        (pack({}, without=["RECORD"], parts={"record": b""}), "has no RECORD"),
        (pack({}, parts={"RECORD": b"\xff,,\n"}), "utf-8"),
        (pack({}, parts={"RECORD": b"a" * 200_000 + b",,\n"}), "field larger than"),
        (pack({}, parts={"entry_points.txt": b"\xff"}), "utf-8"),
        (pack({}, name="tiny_pkg-1.0.whl"), "no name of a wheel"),
        (pack({}, name="tiny_pkg-one-py3-none-any.whl"), "no name of a wheel"),
    ],
)
def test_metadata_that_is_not_right(made: Wheel, words: str) -> None:
    assert words in refusal(made)


@pytest.mark.parametrize("version", ["1.0", "1.9", "1"])
def test_wheel_versions_that_are_known(version: str) -> None:
    assert entries(pack({}, parts={"WHEEL": f"Wheel-Version: {version}\n".encode()}))


@pytest.mark.parametrize("info", ["Tiny_PKG-1.0.dist-info", "tiny.pkg-1.0.dist-info", "tiny_pkg-1.0+local.dist-info"])
def test_other_spellings_of_the_project(info: str) -> None:
    assert f"{SITE}/{info}/INSTALLER" in entries(pack({}, info=info))


def test_metadata_that_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "MAX_METADATA", 1000)
    for part in ("WHEEL", "RECORD", "entry_points.txt"):
        assert f"its {part} has 1001 bytes" in refusal(pack({}, parts={part: b"\n" * 1001}))
    entries(pack({"large": bytes(1001), f"{DATA}/scripts/program": bytes(1001)}))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{DATA}/unknown/x", "no scheme 'unknown'"),
        (f"{DATA}/PURELIB/x", "no scheme 'PURELIB'"),
        (f"{DATA}/stdlib/x", "no scheme 'stdlib'"),
        (f"{DATA}/file", "belongs to no scheme"),
        (f"{DATA}/purelib", "belongs to no scheme"),
        (DATA, "belongs to no scheme"),
        ("other-1.0.data/purelib/x", "belongs to no scheme"),
        ("tiny_pkg.data/purelib/x", "belongs to no scheme"),
        (".data/purelib/x", "belongs to no scheme"),
    ],
)
def test_data_that_belongs_nowhere(path: str, words: str) -> None:
    told = refusal(pack({path: b"x"}))
    assert path in told
    assert words in told


def test_data_below_another_folder_is_a_folder_as_any() -> None:
    assert f"{SITE}/a/{DATA}/purelib/x" in entries(pack({f"a/{DATA}/purelib/x": b""}))


@pytest.mark.parametrize(
    "name", ["a/b", "../../usr/bin/x", "..", ".", "", "'x'", '"x"', "a\\b", "a b", "a\tb", "a\x1bb", "a\0b", "\u202ex"]
)
def test_names_that_no_script_has(name: str) -> None:
    told = refusal(pack({}, points=f"[console_scripts]\n{name} = tiny:run\n"))
    assert "declares a script named" in told
    assert told.isprintable()


@pytest.mark.parametrize("name", ["x", "x-y_z.2", "2to3", "g++", "@x", "é", "..x"])
def test_names_that_a_script_may_have(name: str) -> None:
    assert f"opt/venv/bin/{name}" in entries(pack({}, points=f"[console_scripts]\n{name} = tiny:run\n"))


@pytest.mark.parametrize(
    "value",
    [
        "tiny", "tiny:", ":run", "", "tiny:run()", "tiny:run;import os", "tiny:run import os", "tiny:a..b", "tiny:.a",
        "tiny..x:run", "1tiny:run", "tiny:1", "tiny:run\\nimport os", "tiny:run'", "tiny:{x}", "tiny:run # no",
        "tiny:run [extra", "tiny:a-b", "ti-ny:run",
    ],
)  # fmt: skip
def test_values_that_name_no_function(value: str) -> None:
    assert "names no function" in refusal(pack({}, points=f"[console_scripts]\nrun = {value}\n"))


def test_a_value_that_newer_pythons_take_for_a_fault_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since 3.12 the standard library asserts that a value has the right form."""

    def attr(_: object) -> str:
        raise AssertionError

    monkeypatch.setattr(importlib.metadata.EntryPoint, "attr", property(attr))
    assert "names no function: 'tiny:run'" in refusal(pack({}, points="[console_scripts]\nrun = tiny:run\n"))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
@pytest.mark.parametrize("section", ["console_scripts", "other"])
def test_a_value_that_goes_on_in_another_line(end: str, section: str) -> None:
    """No line of a wheel may become a line of a script. The standard library knows many ends of lines."""
    assert "entry_points.txt" in refusal(pack({}, points=f"[{section}]\nrun = x:y{end}import os\n"))
    assert "function" in refusal(pack({}, points=f"[console_scripts]\nrun = x:y{end}a = import os\n"))


# ---- refused: zip files


def test_an_encrypted_entry() -> None:
    content = bytearray(pack({"a.py": b"x"}).content)
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    assert "'a.py' is encrypted" in refusal(Wheel(name=NAME, content=bytes(content)))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["bzip2", "lzma"])
def test_other_compressions(method: int) -> None:
    assert "compressed in a way that wheels are not" in refusal(pack({"a.py": b"x"}, method=method))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"a-module.py", b"b-module.py", "'a-module.py' is another file by its own header: 'b-module.py'"),
        (b"PK\x03\x04", b"PK\x03\x05", "has no header where it should be"),
    ],
)
def test_a_local_header_that_disagrees(old: bytes, new: bytes, words: str) -> None:
    """What one reader takes for `a-module.py` must be that to every other reader."""
    made = pack({"a-module.py": b"x"})
    assert words in refusal(Wheel(name=NAME, content=made.content.replace(old, new, 1)))


def test_a_local_header_of_another_compression() -> None:
    content = bytearray(pack({"a-module.py": b"x"}).content)
    content[8] = zipfile.ZIP_STORED
    assert "'a-module.py' is another file" in refusal(Wheel(name=NAME, content=bytes(content)))


def test_entries_that_lie_in_each_other() -> None:
    """As in a bomb of many files that share their data."""
    inner = pack({"inner.py": b"x" * 99}, method=zipfile.ZIP_STORED).content
    inner = inner[: inner.index(b"PK\x03\x04", 4)]
    made = pack({"a.py": inner, "b.py": b""}, method=zipfile.ZIP_STORED).content
    at = made.rindex(b"PK\x01\x02", 0, made.index(b"b.py", made.index(b"PK\x01\x02")))
    moved = (30 + len("a.py")).to_bytes(4, "little")
    hostile = made[: at + 42] + moved + made[at + 46 :]
    assert "'b.py' begins before the entry in front of it ends" in refusal(Wheel(name=NAME, content=hostile))


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\x05\x06" + bytes(18), b"PK\x03\x04" * 99])
def test_what_is_no_wheel_at_all(content: bytes) -> None:
    refusal(Wheel(name=NAME, content=content))


def test_a_damaged_file_is_named_with_its_wheel() -> None:
    made = pack({"tiny/a.py": b"x" * 99}, method=zipfile.ZIP_STORED)
    damaged = Wheel(name=NAME, content=made.content.replace(b"x" * 99, b"x" * 98 + b"y", 1))
    with pytest.raises(SpliceError, match=rf"^{re.escape(NAME)}: tiny/a\.py: "):
        splice.write(wheel.layer_entries([damaged.open()], PLACE), io.BytesIO())


@pytest.mark.parametrize("part", ["RECORD", "WHEEL"])
def test_damaged_metadata_is_named_with_its_wheel(part: str) -> None:
    content = bytearray(pack({}, method=zipfile.ZIP_STORED).content)
    content[content.index(f"{INFO}/{part}".encode()) + len(f"{INFO}/{part}") + 3] ^= 1
    told = refusal(Wheel(name=NAME, content=bytes(content)))
    assert told == f"{NAME}: {INFO}/{part}: holds other bytes than its entry says"


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
def test_whatever_is_damaged_it_is_one_of_our_errors(changes: list[tuple[int, int]], end: int, in_memory: bool) -> None:
    content = bytearray(GOOD.content)
    for at, value in changes:
        content[at] = value
    del content[end:]
    with io.BytesIO() if in_memory else tempfile.TemporaryFile() as file:
        file.write(content)
        try:
            splice.write(wheel.layer_entries([(NAME, cast("BinaryIO", file))], PLACE), io.BytesIO())
        except (WheelError, SpliceError) as error:
            assert str(error).startswith(f"{NAME}: ")  # noqa: PT017  it need not be raised


# ---- several wheels in one layer


def other(files: Mapping[str, bytes], **more: Any) -> Wheel:
    return pack(files, name="other-2.0-py3-none-any.whl", info="other-2.0.dist-info", **more)


def layer(*made: Wheel) -> list[Entry]:
    return list(wheel.layer_entries([one.open() for one in made], PLACE))


def test_every_folder_comes_once_and_before_what_is_in_it() -> None:
    found = layer(pack({"ns/a/x.py": b"a", "top.py": b""}), other({"ns/b/x.py": b"b", "ns/a/y.py": b""}))
    paths = [entry.path for entry in found]
    assert len(set(paths)) == len(paths)
    for number, entry in enumerate(found):
        assert (number and "/" in entry.path) or entry.path == "opt"
        assert entry.path == "opt" or entry.path.rpartition("/")[0] in paths[:number]
        if entry.content is None:
            assert (entry.mode, entry.link) == (0o755, "")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_one_file_of_two_wheels_if_it_is_the_same(method: int) -> None:
    found = layer(pack({"ns/__init__.py": b"same"}), other({"ns/__init__.py": b"same"}, method=method))
    assert [entry.path for entry in found].count(f"{SITE}/ns/__init__.py") == 1


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_large_files_of_two_wheels_are_not_read_whole(monkeypatch: pytest.MonkeyPatch, method: int) -> None:
    """Shared libraries have gigabytes."""

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            found = super().read(size)
            reads.append(len(found))
            return found

    monkeypatch.setattr(splice, "CHUNK", 1000)
    reads: list[int] = []
    large = random.Random(1).randbytes(100_000)
    packed = [pack({"ns/x.so": large}, method=method), other({"ns/x.so": large}, method=method)]
    found = list(wheel.layer_entries([(one.name, Watched(one.content)) for one in packed], PLACE))
    assert [entry.path for entry in found].count(f"{SITE}/ns/x.so") == 1
    assert sum(reads) > 2 * len(large)
    assert max(reads) < 10_000


@pytest.mark.parametrize("content", [b"not the same", b"Same", b""])
def test_different_files_of_two_wheels(content: bytes) -> None:
    told = refusal(pack({"ns/x.py": b"same"}), other({"ns/x.py": content}))
    assert told == f"{NAME} and other-2.0-py3-none-any.whl both have /{SITE}/ns/x.py, with different bytes"


def test_one_file_with_two_modes() -> None:
    told = refusal(pack({"x": b""}), other({"x": b""}, modes={"x": 0o755}))
    assert told == f"{NAME} and other-2.0-py3-none-any.whl both have /{SITE}/x, with different modes"


@pytest.mark.parametrize("points", [("", "[console_scripts]\nrun = b:c\n"), ("[console_scripts]\nrun = a:b\n",) * 2])
def test_scripts_of_two_wheels_with_one_name(points: tuple[str, str]) -> None:
    one = pack({} if points[0] else {f"{DATA}/scripts/run": b"shipped"}, points=points[0])
    two = other({}, points=points[1])
    if points[0]:
        assert len([entry for entry in layer(one, two) if entry.path == "opt/venv/bin/run"]) == 1
    else:
        assert "/opt/venv/bin/run, with different bytes" in refusal(one, two)


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        ("ns/x", "ns", f"has /{SITE}/ns as a file, which is a folder"),
        ("ns", "ns/x", f"has /{SITE}/ns as a folder, which is a file in {NAME}"),
        ("ns", "ns/x/y", f"has /{SITE}/ns as a folder, which is a file in {NAME}"),
    ],
)
def test_a_file_in_one_wheel_and_a_folder_in_another(one: str, two: str, words: str) -> None:
    assert words in refusal(pack({one: b""}), other({two: b""}))


def test_a_damaged_file_of_two_wheels_is_named() -> None:
    content = random.Random(1).randbytes(99)
    damaged = other({"x": content}, method=zipfile.ZIP_STORED).content.replace(content, bytes(99), 1)
    assert ": x: " in refusal(pack({"x": content}), Wheel(name="other-2.0-py3-none-any.whl", content=damaged))


def test_a_layer_of_a_wheel_is_these_bytes() -> None:
    """A change here needs a new `splice.FORMAT`: layers of older builders could not be found or made again."""
    files = {
        "tiny/__init__.py": b"VALUE = 1\n",
        "tiny/empty.py": b"",
        f"{DATA}/scripts/shipped": b"#!python\nprint(1)\n",
        f"{DATA}/data/share/tiny.txt": b"shared\n",
        f"{DATA}/headers/tiny.h": b"#define TINY\n",
    }
    made = pack(
        files,
        points="[console_scripts]\nrun = tiny:run\n[gui_scripts]\nwindow = tiny.gui:App.run\n",
        method=zipfile.ZIP_STORED,
    )
    written = splice.write(wheel.layer_entries([made.open()], PLACE), io.BytesIO())
    assert splice.FORMAT == 1
    assert written.digest == "sha256:15aa4780e196f04ff5436f254052bc9a7749de5f98c59e2d661540342271d257"
    assert written.diff_id == "sha256:bff77c0d49b1158385aba83e4ad72000dfdf42088cb17f419b79d02a29f1d832"
