"""Which files are part of the test suite."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from builder.registry import evidence
from builder.registry.suite import IMAGE_TESTS, PACKAGE, Suite
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
        assert evidence.changed_files(old, new) == [name]
    assert evidence.changed_files(second, second) == []


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


@pytest.mark.parametrize("name", ["build/image_tests.py", "build/programs.py", "registry/evidence.py"])
def test_the_program_that_runs_the_tests_is_part_of_the_suite(tmp_path: Path, name: str) -> None:
    package = tmp_path / "builder"
    shutil.copytree(PACKAGE, package)
    before = Suite.of(tmp_path, package).files
    (package / name).write_text("# edited")
    assert f"builder/{name}" in evidence.changed_files(before, Suite.of(tmp_path, package).files)


def test_what_the_tests_import_is_part_of_the_suite(tmp_path: Path) -> None:
    """The leak check of test_base.py depends on index/host.py and common/text.py, which no evidence named."""
    assert {"builder/index/host.py", "builder/common/text.py"} <= Suite.of(ROOT).files.keys()
    for name, content in {
        "tests/images/test_base.py": "def test():\n    from tests.helpers import other, thing\n",
        "tests/helpers/__init__.py": "",
        "tests/helpers/thing.py": "import builder.common.git\n",
        "tests/helpers/unused.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    names = Suite.of(tmp_path).files.keys()
    assert {"tests/helpers/__init__.py", "tests/helpers/thing.py", "builder/common/git.py"} <= names
    assert "tests/helpers/unused.py" not in names


def test_imported_tests_are_tests_of_the_module() -> None:
    """Those of dist_check.py are tests of each framework."""
    tests = Suite.of(ROOT).of_image(["pytorch"], IMAGE_TESTS)
    assert "tests/images/test_pytorch.py::test_dist_check_of_two_processes" in tests
    assert "tests/images/test_pytorch.py::library" not in tests


def test_what_computes_the_plan_is_no_part_of_the_suite() -> None:
    """Its digest is in the evidence: a change that leaves the plan as it is does not require all tests again."""
    names = Suite.of(ROOT).files
    assert not [name for name in names if name.startswith(("builder/plan/", "builder/matrix/", "builder/lock/"))]


def test_what_talks_to_registries_is_no_part_of_the_suite() -> None:
    """An edit of the registry client required all tests of all images again."""
    names = Suite.of(ROOT).files
    assert "builder/registry/evidence.py" in names
    registry = {name for name in names if name.startswith("builder/registry/")}
    assert registry <= {f"builder/registry/{name}.py" for name in ("__init__", "evidence", "suite")}


def test_a_test_with_a_thorough_parameter_is_beside_a_thorough_test() -> None:
    """One result of a test with parameters is enough, so a run without the thorough ones must lack another test."""
    suite = Suite.of(ROOT)
    for path, tests in suite.tests.items():
        if "marks=pytest.mark.thorough" in (ROOT / path).read_text(encoding="utf-8"):
            assert any("thorough" in marks for marks in tests.values()), path


def test_the_tests_under_emulation_are_those_marked_for_it() -> None:
    suite = Suite.of(ROOT)
    names = suite.of_image(["base", "python", "pytorch"], IMAGE_TESTS, is_emulated=True)
    assert {"tests/images/test_pytorch.py::test_version_and_cuda_are_those_of_the_cell"} < names
    assert names < suite.of_image(["base", "python", "pytorch"], IMAGE_TESTS)
    assert "tests/images/test_pytorch.py::test_dist_check_of_two_processes" not in names


@pytest.mark.parametrize("content", [b"def (", b"a = '\0'", b"\xff\xfe"], ids=["syntax", "null byte", "not UTF-8"])
def test_a_file_that_cannot_be_parsed_imports_nothing(tmp_path: Path, content: bytes) -> None:
    test = tmp_path / "tests/images/test_base.py"
    test.parent.mkdir(parents=True)
    test.write_bytes(content)
    assert "tests/images/test_base.py" in Suite.of(tmp_path).files
