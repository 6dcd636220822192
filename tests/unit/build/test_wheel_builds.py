"""Sources of packages: what of them is copied into a container, and what is refused. Builds are integration tests."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from builder.build import wheel_builds
from builder.build.wheel_builds import SourceBuilder, copy_source
from builder.common.console import View
from builder.common.errors import BuildError, StaleError
from builder.engine.client import Engine
from builder.host import Host
from builder.index.download import Fetcher
from builder.index.wheels import LockedWheel, Sdist
from builder.layers import garbage
from builder.layers.store import Store
from builder.lock import lockfile
from builder.lock.sources import WheelBuild
from builder.matrix.project import Project
from builder.matrix.schema import PackageSource
from tests.fakes import locks
from tests.fakes.engine import FakeEngine, MemoryConsole

CELL = "qz-0.5-cu129-py311"
Edit = Callable[[str, str], Project]


def item(name: str, *, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, target, size, 0o4755
    info.uname, info.uid = "somebody", 1234
    return info


def packed(*items: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for each in items:
            tar.addfile(each, io.BytesIO(b"x" * each.size))
    return buffer.getvalue()


def copied(content: bytes, strip: int = 1) -> dict[str, tarfile.TarInfo]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        copy_source("a.tar.gz", io.BytesIO(content), tar, strip=strip)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        return {member.name: member for member in tar}


def test_a_source_is_copied_without_its_folder_owners_and_times() -> None:
    members = copied(
        packed(item("a-1.0/setup.py", size=3), item("a-1.0/src/link", kind=tarfile.SYMTYPE, target="../setup.py"))
    )
    assert list(members) == ["mnt/build/source/setup.py", "mnt/build/source/src/link"]
    file = members["mnt/build/source/setup.py"]
    assert (file.size, file.mode, file.uid, file.uname, file.mtime) == (3, 0o755, 0, "", 946684800)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (item("a-1.0/../../etc/passwd"), "invalid path 'a-1.0/../../etc/passwd'"),
        (item("/etc/passwd"), "invalid path '/etc/passwd'"),
        (item("a-1.0/link", kind=tarfile.SYMTYPE, target="/etc/shadow"), "'a-1.0/link' is a link out of the source"),
        (item("a-1.0/link", kind=tarfile.SYMTYPE, target="../../x"), "'a-1.0/link' is a link out of the source"),
        (item("a-1.0/link", kind=tarfile.LNKTYPE, target="a-1.0/setup.py"), "neither a file nor a symbolic link"),
        (item("a-1.0/pipe", kind=tarfile.FIFOTYPE), "neither a file nor a symbolic link"),
        (item("a-1.0/device", kind=tarfile.CHRTYPE), "neither a file nor a symbolic link"),
    ],
)
def test_a_hostile_member_is_refused(member: tarfile.TarInfo, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        copied(packed(member))


@pytest.mark.parametrize("content", [b"not an archive", packed(item("a-1.0/x", size=5000))[:2000], b"\0" * 100])
def test_a_damaged_archive_is_refused(content: bytes) -> None:
    with pytest.raises(BuildError, match=r"^a\.tar\.gz: not a valid archive"):
        copied(content)


def test_a_source_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_builds, "MOST_BYTES", 1_000_000)
    bomb = gzip.compress(packed(item("a-1.0/zeros", size=5_000_000)))
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=out, mode="w") as tar,
        gzip.open(io.BytesIO(bomb)) as content,
        pytest.raises(BuildError, match="unpacks to more than"),
    ):
        copy_source("a.tar.gz", cast("BinaryIO", content), tar, strip=1)
    assert len(out.getvalue()) < 1_100_000


def test_a_sparse_file_is_refused_before_it_is_written() -> None:
    """An archive of 1,536 bytes became 3 GB."""
    sparse = item("a-1.0/zeros", kind=tarfile.GNUTYPE_SPARSE)
    header = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % 3_000_000_000  # the real size, in GNU's format
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar, pytest.raises(BuildError, match="is a sparse file"):
        copy_source("a.tar.gz", io.BytesIO(bytes(header) + b"\0" * 1024), tar, strip=1)
    assert len(out.getvalue()) < 20_000


class SdistFetcher(Fetcher):
    """Has the sdist `content` of the test."""

    content = b""

    def fetch(self, wheel: LockedWheel | Sdist) -> Path:
        if isinstance(wheel, LockedWheel) and wheel.source:
            return super().fetch(wheel)
        self.path(wheel).write_bytes(self.content)
        return self.path(wheel)


def build_of(
    project: Project, tmp_path: Path, files: dict[str, str], source: str = ""
) -> tuple[SourceBuilder, WheelBuild]:
    """A builder, and the build of an sdist with these files, or of another source."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"a-1.0/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    fetcher = type("OwnFetcher", (SdistFetcher,), {"content": buffer.getvalue()})
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    store = Store(tmp_path / "store")
    builder = SourceBuilder(project, Host(), View(MemoryConsole()), store, scratch, new_fetcher=fetcher)
    [cell] = project.select([CELL])
    lock = lockfile.read_lock(project.root, cell.group)
    assert lock
    source = source or f"a-1.0.tar.gz#sha256={'0' * 64}"
    return builder, WheelBuild(name="a", source=source, index="", recipe=PackageSource(), cell=cell, lock=lock)


@pytest.mark.parametrize(
    ("files", "requirements"),
    [
        ({"setup.py": ""}, ["setuptools", "wheel"]),
        ({"pyproject.toml": "[project]\nname = 'a'\n"}, ["setuptools", "wheel"]),
        ({"pyproject.toml": '[build-system]\nrequires = ["flit>=3", "cython ; python_version<\'4\'"]'},
         ["flit>=3", 'cython; python_version < "4"']),
    ],
)  # fmt: skip
def test_the_requirements_of_a_build(
    tiny: Project, tmp_path: Path, files: dict[str, str], requirements: list[str]
) -> None:
    builder, build = build_of(tiny, tmp_path, files)
    assert builder.requirements(build) == requirements
    assert list((tmp_path / "store/downloads").iterdir()) == [], "the sdist is not kept"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[build-system", "no valid"),
        ("[build-system]\nrequires = 3", "no valid"),
        ("[build-system]\nrequires = 'abc'", "no valid"),
        ("a = " + "[" * 5000, "no valid"),
        ("[build-system]\nbackend = 'x'", "no valid"),
        ("build-system = 3", "no valid"),
        ('[build-system]\nrequires = ["--index-url=https://x.example.test"]', "no valid"),
        ('[build-system]\nrequires = ["x @ https://x.example.test/x.whl"]', "needs x from an address"),
    ],
)
def test_hostile_requirements_of_a_build_are_refused(tiny: Project, tmp_path: Path, text: str, message: str) -> None:
    builder, build = build_of(tiny, tmp_path, {"pyproject.toml": text})
    with pytest.raises(BuildError, match=message):
        builder.requirements(build)


@pytest.mark.parametrize("target", ["pyproject.toml", "nothing"])
def test_a_link_for_the_requirements_of_a_build_is_refused(tiny: Project, tmp_path: Path, target: str) -> None:
    """It was an internal error."""
    builder, build = build_of(tiny, tmp_path, {})
    content = gzip.compress(packed(item("a-1.0/pyproject.toml", kind=tarfile.SYMTYPE, target=target)))
    builder._new_fetcher = type("OwnFetcher", (SdistFetcher,), {"content": content})
    with pytest.raises(BuildError, match=r"no valid \[build-system\]"):
        builder.requirements(build)


def wheel_of(name: str, version: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(zipfile.ZipInfo(f"{name}-{version}.dist-info/METADATA"), text)
    return buffer.getvalue()


def result_of(file: str, content: bytes) -> bytes:
    """The tar that a container returns."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo(file)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class ResultEngine(FakeEngine):
    """Its containers print `line`, which may be several, and end with `status` or return `result`."""

    def __init__(self, result: bytes, status: int = 0, line: str = "") -> None:
        super().__init__()
        self.result, self.status, self.line = result, status, line
        self.given: dict[str, Any] = {}
        self.runs = 0

    def run_to_file(self, image: str, **settings: Any) -> int:
        self.given = settings
        self.runs += 1
        for line in self.line.splitlines(keepends=True):
            settings["on_line"](line)
        settings["out"].write(self.result)
        return self.status


class BuilderInImage(SourceBuilder):
    """Has an image to build in."""

    def _image(self, build: WheelBuild) -> str:
        return "the image"


def built(
    project: Project,
    tmp_path: Path,
    engine: ResultEngine,
    locked: LockedWheel | None = None,
    wheels: Sequence[LockedWheel] = (),
    console: MemoryConsole | None = None,
    recipe: PackageSource | None = None,
) -> LockedWheel:
    ready, build = build_of(project, tmp_path, {"setup.py": ""})
    (project.root / "templates").mkdir(exist_ok=True)
    builder = BuilderInImage(
        project, Host(), View(console or MemoryConsole()), ready._store, tmp_path / "scratch",
        connect=lambda: cast("Engine", engine), new_fetcher=ready._new_fetcher,
    )  # fmt: skip
    return builder.build(replace(build, locked=locked, recipe=recipe or build.recipe), wheels).wheel


GOOD = result_of("a-1.0-py3-none-any.whl", wheel_of("a", "1.0"))


def test_a_built_wheel_is_named_in_the_store(tiny: Project, tmp_path: Path) -> None:
    engine = ResultEngine(GOOD)
    wheel = built(tiny, tmp_path, engine)
    assert (wheel.name, wheel.version, wheel.source) == ("a", "1.0", f"a-1.0.tar.gz#sha256={'0' * 64}")
    store = Store(tmp_path / "store")
    assert store.path(f"sha256:{wheel.sha256}").read_bytes() == wheel_of("a", "1.0")
    assert list(store.images()) == [f"wheels/{CELL}/a"]
    assert garbage.find_garbage(store).blobs == {}
    settings = engine.given
    assert (settings["network_mode"], settings["cap_drop"]) == ("none", ["ALL"])
    assert settings["healthcheck"] == {"test": ["NONE"]}, "that of the image would be work, and no build idle"
    assert settings["environment"]["SOURCE_DATE_EPOCH"] == "946684800"


def test_a_wheel_of_an_earlier_run_is_taken_if_it_had_the_same_inputs(tiny: Project, tmp_path: Path) -> None:
    """A package failed after another one had been built for hours, and the next run built that again."""
    engine = ResultEngine(GOOD)
    wheel = built(tiny, tmp_path, engine)
    assert built(tiny, tmp_path, engine) == wheel
    assert engine.runs == 1
    built(tiny, tmp_path, engine, recipe=PackageSource(env={"JOBS": "1"}))
    built(tiny, tmp_path, engine, wheel)
    assert engine.runs == 3, "for another recipe, and to compare with the locked wheel"
    Store(tmp_path / "store").path(f"sha256:{wheel.sha256}").write_bytes(b"damaged")
    assert built(tiny, tmp_path, engine) == wheel
    assert engine.runs == 4


def test_a_build_shows_where_its_log_is_and_how_far_it_is(tiny: Project, tmp_path: Path) -> None:
    text = "  running build_ext\n  [1/2] nvcc -c a.cu\n  ptxas info: used 8 registers\n  [ 99%] Linking\n  end\n"
    console = MemoryConsole()
    built(tiny, tmp_path, ResultEngine(GOOD, line=text), console=console)
    first, *notes, last = console.text.splitlines()
    assert first == f"a: building, log: .builder/logs/source-{CELL}-a.log"
    assert (tiny.root / f".builder/logs/source-{CELL}-a.log").read_text() == text
    assert notes == ["a: running build_ext"], "one line a minute without a terminal"
    assert re.fullmatch(r"a: done in [0-9.]+ s: a-1\.0-py3-none-any\.whl, [0-9]+ B", last)


def test_the_progress_of_ninja_and_cmake_stays_in_sight(
    tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel_builds, "NOTE_S", 0)
    lines = ["running build_ext", f"[1/2] nvcc -c {'a' * 2000}.cu", "ptxas info: 8 registers", "[ 99%] Linking", "end"]
    console = MemoryConsole()
    built(tiny, tmp_path, ResultEngine(GOOD, line="".join(f"  {line}\n" for line in lines)), console=console)
    notes = [line.removeprefix("a: ") for line in console.text.splitlines()[1:-1]]
    assert notes == ["running build_ext", f"[1/2] nvcc -c {'a' * 86}", "[ 99%] Linking"]


def test_a_build_gets_the_wheels_from_source_that_it_needs_from_the_store(tiny: Project, tmp_path: Path) -> None:
    """The builder looked for them on the index."""
    content = wheel_of("inner", "1.0")
    with Store(tmp_path / "store").used():
        digest = Store(tmp_path / "store").put(content, "application/octet-stream").digest
    source = f"inner-1.0.tar.gz#sha256={'0' * 64}"
    entry = locks.entry("inner", "1.0", len(content))
    engine = ResultEngine(GOOD)
    built(tiny, tmp_path, engine, wheels=[replace(entry, sha256=digest.removeprefix("sha256:"), source=source)])
    with tarfile.open(tmp_path / "scratch/inputs.tar") as tar:
        file = tar.extractfile(f"mnt/build/wheels/{entry.file}")
        assert file
        assert file.read() == content


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (b"not a tar", "no usable wheel"),
        (result_of("a-1.0.zip", wheel_of("a", "1.0")), "Invalid wheel filename"),
        (result_of("../a-1.0-py3-none-any.whl", wheel_of("a", "1.0")), "no usable wheel"),
        (result_of("a-1.0-py3-none-any.whl", b"not a zip"), "not a zip"),
        (result_of("b-1.0-py3-none-any.whl", wheel_of("b", "1.0")), "is b 1.0, not a"),
        (result_of("a-2.0-py3-none-any.whl", wheel_of("a", "1.0")), "is a 1.0, not a"),
        (result_of("a-1.0-cp39-cp39-linux_x86_64.whl", wheel_of("a", "1.0")), "not for Python 3.11"),
    ],
)
def test_a_build_that_returns_something_else_is_refused(
    tiny: Project, tmp_path: Path, result: bytes, message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        built(tiny, tmp_path, ResultEngine(result))
    assert Store(tmp_path / "store").images() == {}


def test_another_wheel_than_the_locked_one_is_refused_and_gets_no_name(tiny: Project, tmp_path: Path) -> None:
    locked = locks.entry("a", "1.0", 1)
    with pytest.raises(BuildError, match="gives another wheel than the locked one") as caught:
        built(tiny, tmp_path, ResultEngine(GOOD), locked)
    assert locked.sha256 in str(caught.value)
    assert f"builder lock --upgrade-package a {CELL} " in caught.value.hint
    assert Store(tmp_path / "store").images() == {}


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("urlopen error [Errno -3] Temporary failure in name resolution\n", "has no network"),
        ("x.c:1: error\n", "log"),
        ("  nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n", "memory ran out. Let fewer run"),
        ("  g++: fatal error: Killed signal terminated program cc1plus\n", "sources.a.env of matrix.yaml"),
        ("  Killed\n", "memory ran out"),
        ("  ModuleNotFoundError: No module named 'psutil'\n", "needs the module psutil. List"),
    ],
)
def test_a_build_that_fails_shows_its_last_lines(tiny: Project, tmp_path: Path, line: str, hint: str) -> None:
    with pytest.raises(BuildError) as caught:
        built(tiny, tmp_path, ResultEngine(b"", 1, line))
    assert line.strip() in str(caught.value)
    assert hint in caught.value.hint


def test_the_notes_of_pip_do_not_hide_the_reason(tiny: Project, tmp_path: Path) -> None:
    """The message had these notes alone."""
    notes = ["  error: subprocess-exited-with-error", "  note: This error originates from a subprocess", *[""] * 15]
    text = "\n".join(["  a.cu(3): error: expected a ';'", *notes])
    with pytest.raises(BuildError) as caught:
        built(tiny, tmp_path, ResultEngine(b"", 1, text))
    assert str(caught.value).splitlines()[-1] == "  |   a.cu(3): error: expected a ';'"


@pytest.mark.parametrize(
    "error",
    [
        "/torch/ATen.h:9:2: error: #error C++20 or later compatible compiler is required to use ATen.",
        "a.cpp:1:10: fatal error: cusparse.h: No such file or directory",
        '/tmp/build/source/a.cu(7): error: identifier "x" is undefined',
        "nvcc fatal   : Unsupported gpu architecture 'compute_70'",
    ],
)
def test_the_first_error_of_a_compiler_is_in_the_message(tiny: Project, tmp_path: Path, error: str) -> None:
    """flash-attn 2.8 is C++17, and PyTorch 2.15 needs C++20: a traceback of torch hid that."""
    text = "".join(
        f"  {line}\n" for line in ["[1/2] c++ -Werror: a", error, "b.h:1:1: error: later", *["traceback"] * 20]
    )
    with pytest.raises(BuildError) as caught:
        built(tiny, tmp_path, ResultEngine(b"", 1, text))
    assert str(caught.value).splitlines()[1:4] == [f"  | {error}", "  | ...", "  |   traceback"]


def test_a_build_that_is_killed_names_the_limit(tiny: Project, tmp_path: Path) -> None:
    console = MemoryConsole()
    with pytest.raises(
        BuildError, match=r"\(status 137: it was killed, after [0-9]+ hours or because memory ran out\)"
    ):
        built(tiny, tmp_path, ResultEngine(b"", 137, "[1/2] nvcc\n"), console=console)
    assert "a: failed in " in console.text


def test_a_folder_that_changes_during_a_build_is_refused(edit: Edit, tiny: Project, tmp_path: Path) -> None:
    (tiny.root / "packages/a").mkdir(parents=True)
    (tiny.root / "packages/a/setup.py").write_text("first")
    project = edit("variants:\n", "sources: {a: {folder: packages/a}}\nvariants:\n")
    builder, build = build_of(project, tmp_path, {}, project.matrix.origin("a"))
    assert builder.requirements(build) == ["setuptools", "wheel"]
    (tiny.root / "packages/a/setup.py").write_text("second")
    (tmp_path / "other").mkdir()
    other, _ = build_of(project, tmp_path / "other", {})
    with pytest.raises(StaleError, match="packages/a changed while a was built"):
        other.requirements(build)
