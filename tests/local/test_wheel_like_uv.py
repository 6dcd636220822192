"""A layer of unusual but valid wheels has the files that uv installs into a virtual environment.

The differences that are meant, and no others, are undone or left out in `normal`.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from builder.layers import splice, wheel
from tests.unit.layers import test_wheel

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = "lib/python/site-packages"
TIMEOUT_S = 120
PLACEHOLDERS = [b"#!python\nprint(1)\n", b"#!pythonw\nx = 1\n", b"#!python3 -E\r\nx = 1\r\n", b"#!python"]
OTHER_SCRIPTS = [b"#!/bin/sh\necho\n", b"\x7fELF\0\1\2", b"", b"print(1)\n", b"\n#!python\n"]


@dataclass(frozen=True, kw_only=True)
class Project:
    """The contents of a wheel. `entry_points` by group; `signed` and `installed` are optional files of wheels."""

    name: str
    version: str = "1.0"
    files: Mapping[str, bytes]
    modes: Mapping[str, int]
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    in_record: bool = True
    signed: bool = False
    installed: bool = False
    method: int = zipfile.ZIP_DEFLATED

    @property
    def info(self) -> str:
        return f"{self.name}-{self.version}.dist-info"

    def wheel(self) -> test_wheel.Wheel:
        points = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
            for group, points in self.entry_points.items()
        )
        parts = {"RECORD.jws": b"{}"} if self.signed else {}
        parts |= {"INSTALLER": b"someone\n", "REQUESTED": b"by someone\n"} if self.installed else {}
        if not self.in_record:
            parts["RECORD"] = test_wheel.record_of({}, info=self.info)
        return test_wheel.pack(
            self.files, name=f"{self.name}-{self.version}-py3-none-any.whl", info=self.info, points=points,
            modes=self.modes, method=self.method, parts=parts,
        )  # fmt: skip


# uv refuses unprintable characters.
_CHARACTERS = st.characters(blacklist_categories=["C", "Zl", "Zp"], blacklist_characters="/\ufffd")
_PARTS = st.one_of(
    st.sampled_from(["a", "B", "pkg", "with space", "dot.ted", ".hidden", "né", "文字", "🐍", "a,b", 'q"q', "it's", "#",
                     "%20", "back\\slash", "-x", "$(x)", "a:b", "x" * 60, "__init__", "test", "e\u0301", "\xe9"]),
    st.text(_CHARACTERS, min_size=1, max_size=12),
)  # fmt: skip
_ENDS = st.sampled_from(
    [".py", ".so", ".txt", ".PY", ".pth", ".json", "-"]
)  # no folder ends so, or a file could be one too
_FOLDERS = st.lists(_PARTS.map(lambda part: part + "_"), max_size=6)
_CONTENTS = st.one_of(st.just(b""), st.binary(max_size=300), st.sampled_from([b"x = 1\n", b"#!python\n", bytes(70000)]))
_MODES = st.sampled_from([0o644, 0o755, 0o600, 0o700, 0o100, 0o666, 0o777, 0o4755, 0o611])
_SCRIPTS = st.sampled_from(PLACEHOLDERS + OTHER_SCRIPTS)
_POINTS = st.sampled_from(["m:f", "m.n:C.run", "m:f [extra]", "m:f [a,b]", "_x.y1:z_"])


@st.composite
def projects(draw: st.DrawFn, number: int) -> Project:
    """A random project. All its paths have the number, so that several projects fit into one environment."""
    name = draw(st.sampled_from(["p{}", "p{}_under_score", "p{}x0"])).format(number)
    version = draw(st.sampled_from(["1.0", "2.1.post3", "0.1a1", "3+local.1", "1!2"]))
    data = f"{name}-{version}.data"
    roots = [
        f"w{number}_", f"namespace_/w{number}_", f"{data}/purelib/u{number}_", f"{data}/platlib/l{number}_",
        f"{data}/headers/", f"{data}/data/share/w{number}_", f"{data}/data/w{number}_", f"{data}/data/bin/d{number}_",
        f"{data}/data/lib/python{PYTHON}/site-packages/s{number}_",
    ]  # fmt: skip
    files: dict[str, bytes] = {}
    for root in draw(st.lists(st.sampled_from(roots), max_size=8)):
        path = "/".join([*draw(_FOLDERS), draw(_PARTS) + draw(_ENDS)])
        files[root + path] = draw(_CONTENTS)
    for script in draw(st.lists(st.sampled_from(["run", "run.sh", "odd name", "né", "a.b-c"]), max_size=3)):
        files[f"{data}/scripts/{number}-{script}"] = draw(_SCRIPTS)
    points: dict[str, dict[str, str]] = {}
    for group in draw(st.sets(st.sampled_from(["console_scripts", "gui_scripts", "other.group"]))):
        names = draw(st.dictionaries(st.sampled_from(["go", "g-o.2", "go_", "né"]), _POINTS, min_size=1))
        points[group] = {f"{group[0]}{number}{script}": value for script, value in names.items()}
        for script in points[group] if group != "other.group" else ():
            for end in draw(st.sets(st.sampled_from(["", ".exe", "-script.py", ".pya", ".sh"]), max_size=2)):
                files[f"{data}/scripts/{script}{end}"] = draw(_SCRIPTS)
    flags = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    return Project(
        name=name,
        version=version,
        files=files,
        modes={path: draw(_MODES) for path in files},
        entry_points=points,
        in_record=flags[0],
        signed=flags[1],
        installed=flags[2],
        method=draw(st.sampled_from([zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])),
    )


@dataclass(frozen=True)
class Node:
    """A file or folder; `content` is None for a folder."""

    mode: int
    content: bytes | None


Tree = dict[str, Node]


def tree(root: Path, without: Mapping[str, object] = {}) -> Tree:
    """The files and folders below `root`, by relative path."""
    installed: Tree = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            relative = str(path.relative_to(root))
            if relative not in without and not path.is_symlink():
                installed[relative] = Node(path.stat().st_mode & 0o7777, None if path.is_dir() else path.read_bytes())
    return installed


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment without packages."""
    root = tmp_path_factory.mktemp("venv")
    (root / "lib/python").mkdir(parents=True)
    (root / f"lib/python{PYTHON}").symlink_to("python")  # as in images
    command = [sys.executable, "-m", "venv", "--without-pip", str(root)]
    subprocess.run(command, timeout=TIMEOUT_S, check=True, umask=0o022)
    return root


def installed_by_uv(root: Path, wheels: Sequence[Path]) -> Tree:
    """The files that uv installs; they are removed again."""
    before = tree(root)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHON"))}
    options = ["--no-deps", "--no-index", "--no-cache", "--offline", "--link-mode=copy", "--quiet", "--no-config"]
    uv = str(Path(sys.executable).parent / "uv")
    command = [uv, "pip", "install", "--python", str(root / "bin/python"), *options, *map(str, wheels)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, umask=0o022, env=environ
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return tree(root, before)
    finally:
        for path in sorted(tree(root, before), reverse=True):
            target = root / path
            target.rmdir() if target.is_dir() else target.unlink()


def spliced(root: Path, wheels: Sequence[test_wheel.Wheel]) -> Tree:
    """The files in a layer of the wheels."""
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheel, "PYTHON", str(root / "bin/python"))
        blob, top = Path(scratch) / "layer.tar.gz", Path(scratch) / "root"
        with blob.open("wb") as out:
            splice.write_layer(wheel.layer_entries([packed.open() for packed in wheels], PYTHON), out)
        with tarfile.open(blob) as tar:
            tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)  # Python 3.11.2 has no `filter=`
            tar.extractall(top)
        nodes = tree(top / wheel.ENVIRONMENT, without=tree(root))
        assert {node.mode for node in nodes.values() if node.content is None} == {0o775}
        # No installer makes folders that group 0 can write.
        return {path: node if node.content is not None else replace(node, mode=0o755) for path, node in nodes.items()}


def normal(installed: Tree, projects: Sequence[Project]) -> dict[str, Any]:
    """The tree without intended differences."""
    shown: dict[str, Any] = dict(installed)
    shown.pop(".lock", None)  # uv's own
    for project in projects:
        info = f"{SITE}/{project.info}"
        shown[f"{info}/INSTALLER"] = installed[f"{info}/INSTALLER"].mode
        # Where it was installed from: uv is given a file here.
        origins = [f"{project.info}/{part}" for part in ("direct_url.json", "uv_cache.json")]
        for path in origins:
            shown.pop(f"{SITE}/{path}", None)
        # Order and quotes. uv keeps rows of scripts that it did not install, and has no row for what the wheel's own
        # RECORD has none for.
        data = f"{project.name}-{project.version}.data"
        rows = {path for path in recorded(installed, project) if not path.startswith((data, *origins))}
        shown[f"{info}/RECORD"] = (
            installed[f"{info}/RECORD"].mode,
            rows if project.in_record and not project.signed else None,
        )
    return shown


def recorded(installed: Tree, project: Project) -> dict[str, list[str]]:
    content = installed[f"{SITE}/{project.info}/RECORD"].content or b""
    return {path: rest for path, *rest in csv.reader(io.StringIO(content.decode(), newline=""))}


@settings(
    max_examples=11,  # each takes an installation by uv
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # no search for a smaller example
)
@given(st.tuples(*(projects(number) for number in range(12))))
def test_random_wheels(environment: Path, batch: tuple[Project, ...]) -> None:
    packed = [project.wheel() for project in batch]
    from_layer = spliced(environment, packed)
    with tempfile.TemporaryDirectory() as scratch:
        paths = [Path(scratch) / built.name for built in packed]
        for path, built in zip(paths, packed, strict=True):
            path.write_bytes(built.content)
        from_uv = installed_by_uv(environment, paths)
    assert normal(from_uv, batch) == normal(from_layer, batch)
    # RECORD has a row for every file, and every hash and size is right.
    for project in batch:
        for name, (hashed, size) in recorded(from_layer, project).items():
            content = from_layer[os.path.normpath(f"{SITE}/{name}")].content
            assert content is not None
            assert not hashed or (name, hashed, size) == test_wheel.row(name, content)
