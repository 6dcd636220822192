"""Which files are part of the test suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builder.evidence import results
from builder.evidence.suite import IMAGE_TESTS, Suite
from tests.paths import ROOT


@pytest.mark.parametrize(
    "name",
    [
        "tests/images/test_base.py",
        "tests/images/conftest.py",
        "tests/images/notebooks/science.ipy",
        "tests/gpu/test_cuda.py",
    ],
)
def test_a_changed_file_of_the_suite_is_named(tmp_path: Path, name: str) -> None:
    before = Suite.of(tmp_path).files
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("assert 1")
    first = Suite.of(tmp_path).files
    (tmp_path / name).write_text("assert 2")
    second = Suite.of(tmp_path).files
    for old, new in ((before, first), (first, second), (second, before)):
        assert results.changed_files(old, new) == [name]
    assert results.changed_files(second, second) == []


def test_other_files_are_no_part_of_the_suite(tmp_path: Path) -> None:
    """An editor's swap file and a changed mode made all evidence invalid."""
    test = tmp_path / "tests/images/test_base.py"
    test.parent.mkdir(parents=True)
    test.write_text("assert 1")
    before = Suite.of(tmp_path).files
    for name in (".test_base.py.swp", "test_base.py~", "4913"):
        (test.parent / name).write_text("x")
    test.chmod(0o755)
    assert Suite.of(tmp_path).files == before


def test_the_module_that_runs_the_tests_is_part_of_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.evidence.suite.PACKAGE", tmp_path / "builder")
    runner = tmp_path / "builder/build/pytest_run.py"
    runner.parent.mkdir(parents=True)
    suites = []
    for content in ("first", "second"):
        runner.write_text(content)
        suites.append(Suite.of(tmp_path).files)
    assert results.changed_files(*suites) == ["builder/build/pytest_run.py"]


def test_what_the_tests_import_is_part_of_the_suite(tmp_path: Path) -> None:
    for name, content in {
        "tests/images/test_base.py": "def test():\n    from tests.helpers import other, thing\n",
        "tests/helpers/__init__.py": "",
        "tests/helpers/thing.py": "import tests.deep\n",
        "tests/deep.py": "",
        "tests/helpers/unused.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    names = Suite.of(tmp_path).files.keys()
    assert {"tests/helpers/__init__.py", "tests/helpers/thing.py", "tests/deep.py"} <= names
    assert "tests/helpers/unused.py" not in names


def test_the_suite_uses_nothing_of_builder() -> None:
    """Results depended on 31 modules, so an edit of the console required all tests of all images again."""
    for name in Suite.of(ROOT).files:
        if name.startswith("tests/") and name.endswith(".py"):
            text = (ROOT / name).read_text(encoding="utf-8")
            assert re.findall(r"^\s*(?:from|import) builder\b", text, re.MULTILINE) == [], name


def test_imported_tests_are_tests_of_the_module() -> None:
    """Those of dist_check.py are tests of each framework."""
    tests = Suite.of(ROOT).of_image(["pytorch"], IMAGE_TESTS)
    assert "tests/images/test_pytorch.py::test_dist_check_of_two_processes" in tests
    assert "tests/images/test_pytorch.py::library" not in tests


def test_a_test_with_a_thorough_parameter_is_beside_a_thorough_test() -> None:
    """One result of a test with parameters is enough, so a run without the thorough ones must lack another test."""
    suite = Suite.of(ROOT)
    for path, tests in suite.tests.items():
        if "marks=pytest.mark.thorough" in (ROOT / path).read_text(encoding="utf-8"):
            assert any("thorough" in marks for marks in tests.values()), path


@pytest.mark.parametrize("content", [b"def (", b"a = '\0'", b"\xff\xfe"], ids=["syntax", "null byte", "not UTF-8"])
def test_a_file_that_cannot_be_parsed_imports_nothing(tmp_path: Path, content: bytes) -> None:
    test = tmp_path / "tests/images/test_base.py"
    test.parent.mkdir(parents=True)
    test.write_bytes(content)
    assert "tests/images/test_base.py" in Suite.of(tmp_path).files
