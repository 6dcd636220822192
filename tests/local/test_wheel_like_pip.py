"""A layer of unusual but valid wheels has the files that pip and uv install into a virtual environment.

The differences that are meant, and no others, are undone or left out in `normal`.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from builder.layers import splice, wheel

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = "lib/python/site-packages"
TIMEOUT_S = 120
PLACEHOLDERS = [b"#!python\nprint(1)\n", b"#!pythonw\nx = 1\n", b"#!python3 -E\r\nx = 1\r\n", b"#!python"]
OTHER_SCRIPTS = [b"#!/bin/sh\necho\n", b"\x7fELF\0\1\2", b"", b"print(1)\n", b"\n#!python\n"]


@dataclass(frozen=True, kw_only=True)
class File:
    content: bytes
    mode: int = 0o644
    is_stored: bool = False


@dataclass(frozen=True, kw_only=True)
class Project:
    """The contents of a wheel. `entry_points` by group; `signed` and `installed` are optional files of wheels."""

    name: str
    version: str = "1.0"
    files: Mapping[str, File]
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    in_record: bool = True
    signed: bool = False
    installed: bool = False

    @property
    def info(self) -> str:
        return f"{self.name}-{self.version}.dist-info"

    @property
    def data(self) -> str:
        return f"{self.name}-{self.version}.data"

    @property
    def file(self) -> str:
        return f"{self.name}-{self.version}-py3-none-any.whl"

    def wheel(self) -> bytes:
        members = dict(self.files)
        own = {
            "METADATA": f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n",
            "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        if self.entry_points:
            own["entry_points.txt"] = "".join(
                f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
                for group, points in self.entry_points.items()
            )
        if self.installed:
            own |= {"INSTALLER": "someone\n", "REQUESTED": "by someone\n"}
        members |= {f"{self.info}/{part}": File(content=text.encode()) for part, text in own.items()}
        rows = [row(path, member.content) for path, member in members.items() if self.in_record or self.info in path]
        if self.signed:
            members[f"{self.info}/RECORD.jws"] = File(content=b"{}")
        text = io.StringIO()
        csv.writer(text).writerows([*rows, (f"{self.info}/RECORD", "", "")])
        members[f"{self.info}/RECORD"] = File(content=text.getvalue().encode())
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for path, member in members.items():
                item = zipfile.ZipInfo(path)
                item.external_attr = (stat.S_IFREG | member.mode) << 16
                archive.writestr(item, member.content, zipfile.ZIP_STORED if member.is_stored else zipfile.ZIP_DEFLATED)
        return out.getvalue()


def row(path: str, content: bytes) -> tuple[str, str, str]:
    hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return path, f"sha256={hashed}", str(len(content))


# ---- random projects

# uv refuses unprintable characters, and line separators break pip's RECORD.
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
_FILES = st.builds(File, content=_CONTENTS, mode=_MODES, is_stored=st.booleans())
_SCRIPTS = st.builds(File, content=st.sampled_from(PLACEHOLDERS + OTHER_SCRIPTS), mode=_MODES, is_stored=st.booleans())
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
    files: dict[str, File] = {}
    for root in draw(st.lists(st.sampled_from(roots), max_size=8)):
        path = "/".join([*draw(_FOLDERS), draw(_PARTS) + draw(_ENDS)])
        files[root + path] = draw(_FILES)
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
        entry_points=points,
        in_record=flags[0],
        signed=flags[1],
        installed=flags[2],
    )


BATCHES = st.tuples(*(projects(number) for number in range(12)))


# ---- installation


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


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment; `clean` has its files without any package."""

    root: Path
    clean: Tree = field(repr=False)

    @property
    def python(self) -> str:
        return str(self.root / "bin/python")

    def installed(self, *command: str) -> Tree:
        """The files that this command installs; they are removed again."""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, umask=0o022, env=_environ()
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return tree(self.root, self.clean)
        finally:
            for path in sorted(tree(self.root, self.clean), reverse=True):
                target = self.root / path
                target.rmdir() if target.is_dir() else target.unlink()

    def pip(self, wheels: Sequence[Path]) -> Tree:
        options = ["--no-deps", "--no-compile", "--no-index", "--no-cache-dir", "--no-warn-script-location", "--quiet"]
        arguments = ["-m", "pip", "--disable-pip-version-check", "install", *options, *map(str, wheels)]
        return self.installed(self.python, "-B", *arguments)

    def uv(self, wheels: Sequence[Path]) -> Tree:
        options = ["--no-deps", "--no-index", "--no-cache", "--offline", "--link-mode=copy", "--quiet", "--no-config"]
        uv = str(Path(sys.executable).parent / "uv")
        return self.installed(uv, "pip", "install", "--python", self.python, *options, *map(str, wheels))


def _environ() -> dict[str, str]:
    """The environment of this process, without settings of pip, uv and Python."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHON"))}
    return variables | {"PIP_CONFIG_FILE": os.devnull}


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    root = tmp_path_factory.mktemp("venv")
    (root / "lib/python").mkdir(parents=True)
    (root / f"lib/python{PYTHON}").symlink_to("python")  # as in images
    subprocess.run([sys.executable, "-m", "venv", str(root)], timeout=TIMEOUT_S, check=True, umask=0o022)
    return Environment(root=root, clean=tree(root))


def spliced(wheels: Sequence[Path], python: str) -> Tree:
    """The files in a layer of the wheels."""
    target = replace(wheel.environment(PYTHON), python=python)
    with tempfile.TemporaryDirectory() as scratch:
        blob, root = Path(scratch) / "layer.tar.gz", Path(scratch) / "root"
        with blob.open("wb") as out:
            opened = [(path.name, io.BytesIO(path.read_bytes())) for path in wheels]
            splice.write_layer(wheel.layer_entries(opened, target), out)
        with tarfile.open(blob) as tar:
            tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)  # Python 3.11.2 has no `filter=`
            tar.extractall(root)
        nodes = tree(root / target.prefix)
        assert {node.mode for node in nodes.values() if node.content is None} == {0o775}
        # No installer makes folders that group 0 can write.
        return {path: node if node.content is not None else replace(node, mode=0o755) for path, node in nodes.items()}


# ---- comparison


def normal(installed: Tree, environment: Environment, projects: Sequence[Project]) -> dict[str, Any]:
    """The tree without intended differences."""
    shown: dict[str, Any] = {path: node for path, node in installed.items() if path not in environment.clean}
    shown.pop(".lock", None)  # uv's own
    for project in projects:
        info = f"{SITE}/{project.info}"
        # Who installed it.
        shown[f"{info}/INSTALLER"] = installed[f"{info}/INSTALLER"].mode
        # Where it was installed from: pip and uv are given a file here.
        origins = [f"{project.info}/{part}" for part in ("direct_url.json", "uv_cache.json")]
        for path in origins:
            shown.pop(f"{SITE}/{path}", None)
        # Order, quotes, and hashes, which pip leaves out. pip and uv keep rows of scripts that they did not install;
        # uv has no row for what the wheel's own RECORD has none for.
        rows = {path for path in recorded(installed, project) if not path.startswith((project.data, *origins))}
        shown[f"{info}/RECORD"] = (
            installed[f"{info}/RECORD"].mode,
            rows if project.in_record and not project.signed else None,
        )
        # Generated scripts say the same in other words.
        for group in ("console_scripts", "gui_scripts"):
            for script in project.entry_points.get(group, ()):
                text = (installed[f"bin/{script}"].content or b"").decode().splitlines()
                code_lines = [line.strip() for line in text if line.startswith(("#!", "from ")) or "sys.exit" in line]
                shown[f"bin/{script}"] = (installed[f"bin/{script}"].mode, code_lines)
    return shown


def recorded(installed: Tree, project: Project) -> dict[str, list[str]]:
    content = installed[f"{SITE}/{project.info}/RECORD"].content or b""
    return {path: rest for path, *rest in csv.reader(io.StringIO(content.decode(), newline=""))}


def shipped_scripts(projects: Sequence[Project]) -> Iterator[str]:
    for project in projects:
        start = f"{project.data}/scripts/"
        yield from (f"bin/{path.removeprefix(start)}" for path in project.files if path.startswith(start))


def check(environment: Environment, projects: Sequence[Project], *, with_uv: bool = True) -> Tree:
    """The installed files; fails if layer, pip and uv differ."""
    with tempfile.TemporaryDirectory() as scratch:
        wheels = [Path(scratch) / project.file for project in projects]
        for project, path in zip(projects, wheels, strict=True):
            path.write_bytes(project.wheel())
        from_layer = spliced(wheels, environment.python)
        pip = environment.pip(wheels)
        uv = environment.uv(wheels) if with_uv else from_layer
    for script in shipped_scripts(projects):
        if script in pip:  # pip leaves one without executable bits as it is; uv and we do not
            pip[script] = replace(pip[script], mode=0o755)
    expected = normal(from_layer, environment, projects)
    assert normal(pip, environment, projects) == expected
    assert normal(uv, environment, projects) == expected
    for project in projects:
        check_record(from_layer, project, pip)
    return from_layer


def check_record(installed: Tree, project: Project, pip: Tree) -> None:
    """RECORD has a row for every file, and every hash and size is right."""
    rows = recorded(installed, project)
    from_pip = {path for path in recorded(pip, project) if not path.startswith(project.data)}
    assert set(rows) == from_pip - {f"{project.info}/direct_url.json"}
    for path, (hashed, size) in rows.items():
        node = installed[os.path.normpath(f"{SITE}/{path}")]
        if hashed:
            assert node.content is not None
            assert (path, hashed, size) == row(path, node.content)


@settings(
    max_examples=11,  # each takes an installation by pip and one by uv
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # no search for a smaller example
)
@given(BATCHES)
def test_random_wheels(environment: Environment, batch: tuple[Project, ...]) -> None:
    check(environment, batch)


def test_all_kinds_of_files_together(environment: Environment) -> None:
    """In two wheels that share a namespace and one of its files."""
    shared = {"space/__init__.py": File(content=b"# shared\n"), "space/empty.py": File(content=b"", is_stored=True)}
    data = "one_two-1.0.data"
    first = Project(
        name="one_two",
        files=shared
        | {
            "space/one/module.py": File(content=b"x = 1\n", mode=0o755),
            f"{data}/purelib/pure.py": File(content=b"pure"),
            f"{data}/platlib/plat.so": File(content=bytes(70000), is_stored=True),
            f"{data}/headers/deep/one.h": File(content=b"header"),
            f"{data}/data/share/a, b.txt": File(content=b"data", mode=0o600),
            f"{data}/scripts/placeholder": File(content=b"#!python\nprint(1)\n", mode=0o755),
            f"{data}/scripts/window": File(content=b"#!pythonw\nprint(1)\n", mode=0o755),
            f"{data}/scripts/no-mode": File(content=b"#!/bin/sh\n"),
            f"{data}/scripts/go-script.py": File(content=b"#!python\n"),
        },
        entry_points={"console_scripts": {"go": "m.n:C.run"}, "gui_scripts": {"show": "m:f [extra]"}},
    )
    second = Project(name="two", files=shared | {"space/two.py": File(content=b"y = 2\n")}, signed=True, installed=True)
    installed = check(environment, [first, second])
    assert {
        f"{SITE}/space/__init__.py", f"{SITE}/space/one/module.py", f"{SITE}/space/two.py", f"{SITE}/pure.py",
        f"{SITE}/plat.so", f"include/site/python{PYTHON}/one-two/deep/one.h", "share/a, b.txt", "bin/placeholder",
        "bin/window", "bin/no-mode", "bin/go", "bin/show", f"{SITE}/two-1.0.dist-info/RECORD.jws",
    } <= set(installed)  # fmt: skip
    assert "bin/go-script.py" not in installed
    assert installed["bin/window"].content == f"#!{environment.python}\nprint(1)\n".encode()


def test_scripts_in_folders(environment: Environment) -> None:
    """uv refuses them."""
    files = {"one-1.0.data/scripts/sub folder/run": File(content=b"#!python3 -E\r\nx = 1\r\n", mode=0o755)}
    installed = check(environment, [Project(name="one", files=files)], with_uv=False)
    assert installed["bin/sub folder/run"].content == f"#!{environment.python}\nx = 1\r\n".encode()
