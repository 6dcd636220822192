"""The files of a wheel that a team's repository uses."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path

import pytest

from builder.common.files import digests_of_tree
from builder.evidence.suite import RUNNER, Suite
from builder.matrix import reader
from builder.matrix.project import Project
from builder.plan import plan
from tests.paths import ROOT
from tools import shipped_wheel


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of a project, with a package that has an archive of the shipped files."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "files.tar").write_bytes(shipped_wheel.archive())
    shutil.copy(ROOT / "matrix.yaml", shipped)
    monkeypatch.setattr(reader, "_SHIPPED", shipped)
    return tmp_path / "project/.builder"


def test_unpacked_templates_have_the_digests_of_the_checkout(installed: Path) -> None:
    """Links and modes too: digests of images depend on them."""
    files = reader.shipped_files(installed)
    assert files.parent == installed
    every = digests_of_tree(ROOT, ROOT / "templates")
    of_host = ("templates/host/env.sh", "templates/host/README.md")
    public = {name: digest for name, digest in every.items() if "/host/" not in name or name in of_host}
    assert digests_of_tree(files, files / "templates") == public
    assert any(path.is_symlink() for path in files.rglob("*"))


def test_image_tests_have_everything_that_they_import(installed: Path) -> None:
    of_wheel, of_checkout = Suite.of(reader.shipped_files(installed)), Suite.of(ROOT)
    assert of_wheel == of_checkout
    assert RUNNER in of_wheel.files


def test_files_are_unpacked_once(installed: Path) -> None:
    files = reader.shipped_files(installed)
    (files / "templates/macros.j2").unlink()
    assert reader.shipped_files(installed) == files
    assert not (files / "templates/macros.j2").exists()
    assert [path.name for path in installed.iterdir()] == [files.name]


def test_the_archive_depends_on_the_files_alone() -> None:
    """A file with private settings of this machine in templates/host is not in it."""
    with tarfile.open(fileobj=io.BytesIO(shipped_wheel.archive())) as tar:
        members = tar.getmembers()
    assert {(member.mtime, member.uid, member.uname) for member in members} == {(0, 0, "")}
    assert {member.name for member in members if "/host/" in member.name} == {
        "templates/host/README.md", "templates/host/env.sh",
    }  # fmt: skip


def test_a_team_with_the_same_locks_gets_the_same_layers(installed: Path) -> None:
    """Their inputs name files by their paths in a checkout, wherever these are."""
    root = installed.parent
    root.mkdir()
    (root / "matrix.yaml").write_text("extends: gpu-images\nregistry: ''\nnamespace: org\n", encoding="utf-8")
    shutil.copytree(ROOT / "locks", root / "locks")
    (root / "locks/uv.txt").unlink()
    team, here = Project(root), Project(ROOT)
    theirs = {image.id: image for image in plan.make_plan(team, team.cells).images}
    ours = plan.make_plan(here, here.cells).images
    assert len(ours) > 50
    for image in ours:
        assert theirs[image.id].layers == image.layers
        assert theirs[image.id].files == image.files
