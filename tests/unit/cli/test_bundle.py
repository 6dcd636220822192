"""`builder bundle` and `builder images --from`: which options belong together, and what is refused."""

from __future__ import annotations

from pathlib import Path

from builder.matrix.project import Project
from tests.unit.cli.conftest import CELL, Run


def test_an_untested_image_is_not_bundled(run: Run, locked: Project, tmp_path: Path) -> None:
    """Whoever copies it to a registry would give it the tags of a release."""
    assert run("render").code == 0
    result = run("--store", str(tmp_path / "store"), "bundle", CELL, "-o", str(tmp_path / "images.tar"))
    assert result.code == 8
    assert f"{CELL}: not built" in result.err
    assert f"-> builder images {CELL}" in result.err
    assert not (tmp_path / "images.tar").exists()


def test_the_store_has_no_registry_to_choose(run: Run, locked: Project) -> None:
    result = run("bundle", CELL, "-o", "images.tar", "--to", "registry.example.test")
    assert result.code == 2
    assert "--to needs --released" in result.err


def test_a_bundle_is_no_source_for_a_dockerfile(run: Run, locked: Project, tmp_path: Path) -> None:
    file = tmp_path / "images.tar"
    result = run("build", CELL, "--from", str(file))
    assert result.code == 2
    assert "does not exist" in result.err
    file.touch()
    result = run("build", CELL, "--from", str(file), "--method", "dockerfile")
    assert result.code == 2
    assert "--from needs --method assemble" in result.err
