"""Bytecode depends only on its source and on Python: not on the time, the order, other modules or the hash seed."""

from __future__ import annotations

import asyncio
import email
import importlib.util
import json
import logging
import marshal
import os
import py_compile
import random
import shutil
import subprocess
import sys
import unittest
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest

from tests.paths import ROOT

PROGRAM = ROOT / "templates/steps/compile.py"
PACKAGES = (asyncio, email, json, logging, unittest)
TIMEOUT_S = 120
# Two functions with the same set of names; see `with_own_sets` in the program.
SETS = """\
def one(x):
    return x in {"odd_name_1", "odd_name_2"}


def two(x):
    return x in {"odd_name_1", "odd_name_2"} and 5.5
"""
OWN = {
    "sets.py": SETS.encode(),
    "a_names.py": b"odd_name_1 = odd_name_2 = 1\n",
    "z_names.py": b"odd_name_2 = odd_name_1 = 1\n",
    "many_sets.py": b"def f(x):\n"
    + b"".join(b"    x in {%d, 'text %d', b'%d', None}\n" % (n, n, n) for n in range(200)),
    "empty.py": b"",
    "windows.py": b"\xef\xbb\xbfx = 1\r\ny = '''two\r\nlines'''\r\n",
    "latin.py": b"# -*- coding: latin-1 -*-\nx = '\xe9'\n",
    "folder with space/naïve.py": b"x = 1.5, -0.0, 1j, ..., 'a' * 3\n",
    "docs.py": b"'Documented.'\nclass A:\n    'Too.'\n    def f(self, a: int = 5) -> str:\n        return f'{a!r}'\n",
}
BROKEN = {
    "template.py": b"{% if x %}\nx = {{ y }}\n{% endif %}\n",
    "python2.py": b"print 'hello'\n",
    "nul.py": b"x = 1\0\n",
    "utf16.py": "x = 1\n".encode("utf-16"),
    "no_coding.py": b"x = '\xe9'\n",
    "deep.py": b"x = " + b"(" * 5000 + b")" * 5000 + b"\n",
    "long.py": b"x = " + b"-" * 200_000 + b"1\n",
}


@dataclass(frozen=True)
class Venv:
    root: Path

    @property
    def python(self) -> str:
        return str(self.root / "bin/python")

    @property
    def site(self) -> Path:
        return next(self.root.glob("lib/python3*/site-packages"))

    def write(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            (self.site / name).parent.mkdir(parents=True, exist_ok=True)
            (self.site / name).write_bytes(content)

    def run(self, *command: str, seed: str = "0") -> str:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        result = subprocess.run(
            [self.python, "-B", "-W", "ignore", *command],
            env={**environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout

    def compiled(self) -> dict[str, bytes]:
        """The compiled files by path below site-packages."""
        return {str(path.relative_to(self.site)): path.read_bytes() for path in self.site.rglob("*.pyc")}

    def clean(self) -> None:
        for path in [*self.site.rglob("__pycache__")]:
            shutil.rmtree(path)


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], timeout=TIMEOUT_S, check=True
    )
    new = Venv(tmp_path / "venv")
    new.write(OWN)
    return new


@pytest.fixture
def full(venv: Venv) -> Venv:
    """An environment with a few hundred modules."""
    for package in PACKAGES:
        folder = Path(str(package.__file__)).parent
        shutil.copytree(folder, venv.site / folder.name, ignore=shutil.ignore_patterns("__pycache__", "test", "tests"))
    for path in sorted(Path(str(os.__file__)).parent.glob("*.py")):
        shutil.copy(path, venv.site / f"copy_of_{path.name}")
    return venv


def test_the_same_bytes_in_another_process(full: Venv, tmp_path: Path) -> None:
    full.run(str(PROGRAM), str(tmp_path / "one.zip"))
    expected = full.compiled()
    assert len(expected) > 250
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        top = str(full.site).lstrip("/")
        assert {item.filename: archive.read(item) for item in archive.infolist()} == {
            f"{top}/{name}": content for name, content in expected.items()
        }
        for item in archive.infolist():
            assert (item.date_time, item.compress_type) == ((1980, 1, 1, 0, 0, 0), zipfile.ZIP_DEFLATED)
    for seed in ("0", "1", "4294967295"):
        full.clean()
        full.run(str(PROGRAM), str(tmp_path / "two.zip"), seed=seed)
        assert full.compiled() == expected
        assert (tmp_path / "two.zip").read_bytes() == (tmp_path / "one.zip").read_bytes()


def test_the_same_bytes_in_another_order(full: Venv) -> None:
    """In one process, whose state changes with each module."""
    full.run(str(PROGRAM))
    expected = full.compiled()
    for order in ("reverse=True", "key=len", "key=hash"):
        full.clean()
        code = (
            "import glob, runpy, sys\n"
            "odd_name_1 = odd_name_2 = 0  # from Python 3.12 on, names of modules that were compiled live on\n"
            "compile_one = runpy.run_path(sys.argv[1])['compile_one']\n"
            f"for path in sorted(glob.glob(sys.argv[2] + '/**/*.py', recursive=True), {order}):\n"
            "    compile_one(path)\n"
        )
        full.run("-c", code, str(PROGRAM), str(full.site), seed="7")
        assert full.compiled() == expected


def test_the_same_bytes_beside_other_modules(full: Venv) -> None:
    """Each layer is compiled separately, beside the modules of other layers."""
    full.run(str(PROGRAM))
    expected = full.compiled()
    for share in (2, 10, 100):
        for name in random.Random(share).sample(sorted(expected), len(expected) // share):
            (full.site / name).unlink()
        full.run(str(PROGRAM))
        assert full.compiled() == expected


def test_all_files_are_hash_based_and_unchecked(venv: Venv) -> None:
    venv.run(str(PROGRAM))
    compiled_files = venv.compiled()
    sources = {str(path.relative_to(venv.site)): path for path in venv.site.rglob("*.py")}
    assert set(compiled_files) == {
        str(Path(importlib.util.cache_from_source(str(path))).relative_to(venv.site)) for path in sources.values()
    }
    for path in sources.values():
        compiled = Path(importlib.util.cache_from_source(str(path))).read_bytes()
        assert compiled[:4] == importlib.util.MAGIC_NUMBER
        assert int.from_bytes(compiled[4:8], "little") == 0b01  # a hash, which is not checked
        assert compiled[8:16] == importlib.util.source_hash(path.read_bytes())
        code = marshal.loads(compiled[16:])
        assert isinstance(code, CodeType)
        assert code.co_filename == str(path)
    (venv.site / "a_names.py").write_text("raise SystemExit(1)\n", encoding="utf-8")
    assert venv.run("-c", "import a_names; print(a_names.odd_name_1)") == "1\n", "it read the source"


def test_the_tests_of_packages_are_not_compiled(venv: Venv) -> None:
    venv.write({"one/tests/test_it.py": b"", "one/test/__init__.py": b"", "one/testing.py": b"", "tests.py": b""})
    venv.run(str(PROGRAM))
    names = {name.rpartition("/")[2].partition(".")[0] for name in venv.compiled()}
    assert not {"test_it", "__init__"} & names
    assert {"testing", "tests"} <= names


def test_only_sets_differ_from_other_bytecode(venv: Venv, tmp_path: Path) -> None:
    venv.run(str(PROGRAM))
    for name in sorted({*OWN} - {"sets.py", "many_sets.py"}):
        path = str(venv.site / name)
        py_compile.compile(
            path, str(tmp_path / "x.pyc"), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
        assert Path(importlib.util.cache_from_source(path)).read_bytes() == (tmp_path / "x.pyc").read_bytes(), name
    code = "import sets; print([(sets.one(x), sets.two(x)) for x in ('odd_name_1', 'odd_name_2', 'x')])"
    assert venv.run("-c", code) == "[(True, 5.5), (True, 5.5), (False, False)]\n"


def test_invalid_files_are_skipped(venv: Venv, tmp_path: Path) -> None:
    venv.write(BROKEN)
    output = venv.run(str(PROGRAM), str(tmp_path / "bytecode.zip"))
    assert output == f"compiled {len(OWN)} of {len(OWN) + len(BROKEN)} modules\n"
    stems = {Path(name).name.partition(".")[0] for name in venv.compiled()}
    assert stems == {Path(name).stem for name in OWN}
    with zipfile.ZipFile(tmp_path / "bytecode.zip") as archive:
        assert len(archive.namelist()) == len(OWN)


def test_compiled_modules_are_unchanged(venv: Venv, tmp_path: Path) -> None:
    """They may be in a lower layer. Files behind the link to the CUDA libraries do not belong to any Python."""
    venv.run(str(PROGRAM))
    places = {path: path.stat() for path in venv.site.rglob("*.pyc")}
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/module.py").write_bytes(b"x = 1\n")
    (venv.site / "nvidia").symlink_to(tmp_path / "shared")
    venv.write({"new/module.py": b"x = 1\n"})
    assert venv.run(str(PROGRAM), str(tmp_path / "bytecode.zip")) == "compiled 1 of 1 modules\n"
    for path, before in places.items():
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not (tmp_path / "shared/__pycache__").exists()
    with zipfile.ZipFile(tmp_path / "bytecode.zip") as archive:
        assert len(archive.namelist()) == 1
