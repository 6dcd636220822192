"""A checkout: how it is found, and its lock, which one builder at a time holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from builder.common.errors import BusyError, MatrixError, UsageError
from builder.matrix.project import Project


def test_found_from_a_folder_below(tiny: Project) -> None:
    assert Project.find(tiny.root / "templates" / "base").root == tiny.root
    assert tiny.logs.relative_to(tiny.root) == Path(".builder/logs")


def test_not_found(tmp_path: Path) -> None:
    (tmp_path / "matrix.yaml").mkdir()
    with pytest.raises(UsageError, match=r"^no matrix.yaml in ") as caught:
        Project.find(tmp_path)
    assert "--root" in caught.value.hint


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "new")


def hold(project: Project, command: str = "second") -> None:
    with project.locked(command):
        pass


def test_a_second_builder_is_refused_with_the_name_of_the_first(project: Project) -> None:
    """Each time: a refusal does not overwrite the name."""
    with project.locked("builder images"):
        for _ in range(2):
            with pytest.raises(BusyError) as caught:
                hold(project)
            assert f"`builder images` (pid {os.getpid()}, since " in str(caught.value)


def test_the_lock_is_free_after_the_end_and_after_a_failure(project: Project) -> None:
    hold(project, "first")
    with pytest.raises(RuntimeError), project.locked("second"):
        raise RuntimeError
    hold(project, "third")


@pytest.mark.parametrize("content", ["", '{"pid": 1', "[]", "1", '{"pid": 1}', "é"])
def test_a_holder_that_has_not_written_its_name(project: Project, content: str) -> None:
    with project.locked("first"):
        (project.state / "lock").write_text(content, encoding="latin-1")
        with pytest.raises(BusyError, match="a process that has just started"):
            hold(project)


def test_temporary_files_of_killed_runs_are_removed(project: Project) -> None:
    """Only those: other hidden files stay."""
    for folder in ("locks", "images/group", ".builder/evidence", ".builder/tmp/x"):
        (project.root / folder).mkdir(parents=True)
        for name in (".a.json.1.tmp", ".gitignore", "b.json"):
            (project.root / folder / name).touch()
    hold(project)
    files = sorted(path.name for path in project.root.rglob("*") if path.is_file())
    assert files == [".gitignore"] * 3 + ["b.json"] * 3 + ["lock"]


FOLDER_INDEX = ("variants:\n", "indexes: {own: wheels/}\nvariants:\n")


def test_an_index_is_a_folder_of_the_checkout(edit: Callable[[str, str], Project]) -> None:
    project = edit(*FOLDER_INDEX)
    with pytest.raises(MatrixError, match=r"^matrix.yaml:\d+:\d+: indexes.own: the checkout has no folder wheels$"):
        _ = project.matrix
    (project.root / "wheels").mkdir()
    assert Project(project.root).matrix.folder_of("own") == "wheels"


@pytest.mark.parametrize("link", ["wheels", "wheels/own-1.0-py3-none-any.whl"])
def test_an_index_outside_of_the_checkout_is_refused(
    edit: Callable[[str, str], Project], tmp_path: Path, link: str
) -> None:
    project = edit(*FOLDER_INDEX)
    (tmp_path / "elsewhere").mkdir()
    (project.root / link).parent.mkdir(exist_ok=True)
    (project.root / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MatrixError, match=r"indexes.own: wheels or a wheel in it is a link$"):
        _ = project.matrix
