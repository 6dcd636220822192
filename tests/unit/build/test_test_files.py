"""The test files of a team that extends the shipped ones, together below one root."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.build.image_tests import project_of_tests
from builder.engine.run import Run
from builder.evidence.suite import Suite
from builder.matrix.project import Project
from tests.fakes.engine import MemoryConsole
from tests.fakes.run import new_run
from tests.paths import ROOT

OWN = {
    "tests/images/test_mine.py": "def test_it():\n    pass\n",
    "tests/images/test_ssh.py": "def test_own_ssh():\n    pass\n",
}


@pytest.fixture
def run(tmp_path: Path, console: MemoryConsole) -> Run:
    text = "extends: gpu-images\nregistry: ''\nnamespace: org\ncomponents: {mine: {needs: [python]}}\n"
    (tmp_path / "matrix.yaml").write_text(text, encoding="utf-8")
    for name, content in OWN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    return new_run(Project(tmp_path), console=console)


def test_what_runs_is_what_the_results_depend_on(run: Run) -> None:
    """A release compares the suite of the project with that of the copy, which the tester reads."""
    copy = project_of_tests(run)
    suite = Suite.of(*run.project.folders)
    assert Suite.of(copy.root) == suite
    shipped = Suite.of(ROOT).files
    assert {name for name in suite.files if suite.files[name] != shipped.get(name)} == set(OWN)
    for name, content in OWN.items():
        assert (copy.root / name).read_text("utf-8") == content
    assert (copy.root / "pyproject.toml").read_bytes() == (ROOT / "pyproject.toml").read_bytes()


def test_results_and_logs_are_those_of_the_checkout(run: Run) -> None:
    """A message names a log relative to the root of the tests."""
    copy = project_of_tests(run)
    assert copy.state.resolve() == run.project.state.resolve()
    assert str((copy.logs / "a.log").relative_to(copy.root)) == ".builder/logs/a.log"


def test_a_file_that_the_team_deleted_is_not_left(run: Run) -> None:
    project_of_tests(run)
    (run.project.root / "tests/images/test_mine.py").unlink()
    copy = project_of_tests(run)
    assert not (copy.root / "tests/images/test_mine.py").exists()
    assert Suite.of(copy.root) == Suite.of(*run.project.folders)


def test_a_project_that_extends_nothing_is_not_copied(tiny: Project, console: MemoryConsole) -> None:
    run = new_run(tiny, console=console)
    assert project_of_tests(run) is tiny
