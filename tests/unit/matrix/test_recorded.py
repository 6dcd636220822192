"""`locks/gpu-images.txt` of a team's repository."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from builder import __version__
from builder.cli.context import Context
from builder.common.console import View
from builder.matrix.project import RECORD, Project
from builder.plan import plan
from builder.steps import ci, render
from tests.fakes.engine import MemoryConsole
from tests.paths import ROOT

MATRIX = """\
extends: gpu-images
registry: ""
namespace: org
frameworks: {pytorch: {versions: {"2.15": {cuda: ["13.2"], python: ["3.13"], arch: [amd64]}}}}
variants: [plain, jupyter]
"""
PLAIN, JUPYTER = "pt-2.15-cu132-py313", "pt-2.15-cu132-py313-jupyter"


@pytest.fixture
def team(tmp_path: Path) -> Project:
    root = tmp_path / "team"
    (root / "locks").mkdir(parents=True)
    (root / "matrix.yaml").write_text(MATRIX, encoding="utf-8")
    for lock in [ROOT / f"locks/{PLAIN}.json", *(ROOT / "locks").glob("os-trixie-*.json")]:
        shutil.copy(lock, root / "locks")
    return Project(root)


@pytest.fixture
def since(team: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Renders and "commits" the project; the function lists what changed since that commit."""
    render.render_images(team, team.cells, is_part=False)
    folder = tmp_path / "commit"
    shutil.copytree(team.root, folder, ignore=shutil.ignore_patterns(".builder"))
    monkeypatch.setattr("builder.common.git.export", lambda _, __, to: shutil.copytree(folder, to, dirs_exist_ok=True))

    def changed() -> list[str]:
        images = plan.make_plan(team, team.cells).images
        return [image.id for image in ci.changed_images(ci.plan_digests(team, "HEAD", View(MemoryConsole())), images)]

    return changed


def test_rendering_records_the_release_and_the_plan_of_each_image(team: Project) -> None:
    _, changed = render.render_images(team, team.cells, is_part=False)
    assert changed[-1] == "locks/gpu-images.txt"
    plans = {image.id: image.plan for image in plan.make_plan(team, team.cells).images}
    assert team.recorded() == {"gpu-images": __version__, **plans}
    assert render.render_images(team, team.cells, is_part=False)[1] == []


def test_a_part_keeps_the_plans_of_the_others_and_forgets_what_is_gone(team: Project) -> None:
    render.render_images(team, team.cells, is_part=False)
    path = team.root / RECORD
    text = path.read_text(encoding="utf-8")
    others = text.replace(f"gpu-images {__version__}", "gpu-images 9.0.0").replace(
        f"{PLAIN} sha256:", f"{PLAIN} sha256:f"
    )
    path.write_text(f"{others}pt-2.9-cu128-py311 sha256:0\n<<<<<<< HEAD\n", encoding="utf-8")
    render.render_images(team, [cell for cell in team.cells if cell.id == PLAIN], is_part=True)
    assert path.read_text(encoding="utf-8") == text


def test_a_project_with_templates_of_its_own_records_nothing(tiny: Project) -> None:
    assert tiny.record({}) == []
    assert not (tiny.root / RECORD).exists()


def test_what_another_release_of_the_builder_changes_has_changed_since_a_revision(
    since: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its templates plan both the revision and the working tree, so they alone show no difference."""
    assert since() == []
    monkeypatch.setattr(plan, "FORMAT", plan.FORMAT + 1)
    assert since() == [PLAIN, JUPYTER]


@pytest.mark.parametrize("release", ["0.0.1", __version__])
def test_another_release_is_named_once(
    team: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    monkeypatch.setattr("builder.matrix.project.__version__", release)
    render.render_images(team, team.cells, is_part=False)
    context = Context(root=team.root)
    assert context.project is context.project
    shown = capsys.readouterr().err
    assert shown.startswith("locks/gpu-images.txt: made with gpu-images 0.0.1, this is ") == (release == "0.0.1")
    assert shown.count("\n") == (release == "0.0.1")
