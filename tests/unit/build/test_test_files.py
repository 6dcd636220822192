"""The test files of a team that extends the shipped ones, together below one root."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.build.context import RunContext, clean, with_test_files
from builder.common.console import View
from builder.evidence.suite import Suite
from builder.host import Host
from builder.matrix.project import Project
from tests.fakes.engine import FakeEngine, MemoryConsole
from tests.paths import ROOT

OWN = {
    "tests/images/test_mine.py": "def test_it():\n    pass\n",
    "tests/images/test_ssh.py": "def test_own_ssh():\n    pass\n",
}


@pytest.fixture
def run(tmp_path: Path, console: MemoryConsole) -> RunContext:
    text = "extends: gpu-images\nregistry: ''\nnamespace: org\ncomponents: {mine: {needs: [python]}}\n"
    (tmp_path / "matrix.yaml").write_text(text, encoding="utf-8")
    for name, content in OWN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    return RunContext(engine=FakeEngine(), project=Project(tmp_path), host=Host(), view=View(console))


def test_what_runs_is_what_the_results_depend_on(run: RunContext) -> None:
    """A release compares the suite of the project with that of the copy, which the tester reads."""
    copy = with_test_files(run).project
    suite = Suite.of(*run.project.folders)
    assert Suite.of(copy.root) == suite
    shipped = Suite.of(ROOT).files
    assert {name for name in suite.files if suite.files[name] != shipped.get(name)} == set(OWN)
    for name, content in OWN.items():
        assert (copy.root / name).read_text("utf-8") == content
    assert (copy.root / "pyproject.toml").read_bytes() == (ROOT / "pyproject.toml").read_bytes()


def test_results_and_logs_are_those_of_the_checkout(run: RunContext) -> None:
    """A message names a log relative to the root of the tests."""
    copy = with_test_files(run).project
    assert copy.state.resolve() == run.project.state.resolve()
    assert str((copy.logs / "a.log").relative_to(copy.root)) == ".builder/logs/a.log"


def test_clean_removes_containers_of_killed_tests(run: RunContext) -> None:
    """Their label is the root of the tests."""
    engine = FakeEngine()
    copy = with_test_files(run).project
    clean(engine, run.project, cache=False)
    assert engine.swept == [str(run.project.root), str(copy.root)]


def test_a_file_that_the_team_deleted_is_not_left(run: RunContext) -> None:
    with_test_files(run)
    (run.project.root / "tests/images/test_mine.py").unlink()
    copy = with_test_files(run).project
    assert not (copy.root / "tests/images/test_mine.py").exists()
    assert Suite.of(copy.root) == Suite.of(*run.project.folders)


def test_a_project_that_extends_nothing_is_not_copied(tiny: Project, console: MemoryConsole) -> None:
    run = RunContext(engine=FakeEngine(), project=tiny, host=Host(), view=View(console))
    assert with_test_files(run) is run
