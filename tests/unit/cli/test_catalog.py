"""`builder catalog` on this machine alone."""

from __future__ import annotations

import json

import yaml

from builder.matrix.project import Project
from tests.unit.cli.conftest import CELL, Run


def test_the_catalog_is_the_only_output(run: Run, tiny: Project) -> None:
    result = run("catalog", "qz-*", "--here", "--format", "json")
    assert result.code == 0
    data = json.loads(result.out)
    assert [image["cell"] for image in data["images"]] == [f"{CELL}{end}" for end in ("", "-jupyter", "-board")]
    assert data["made"] == "2026-11-22"
    assert data["places"] == "on this machine"
    assert data["unlocked"] == ["qz-0.5-cu1210-py39-board"]
    assert [image["released"] for image in data["images"]] == ["unknown: the registry was not looked up"] * 3
    path = tiny.root / "out/catalog.json"
    written = run("catalog", "qz-*", "--here", "--format", "json", "--output", str(path))
    assert (written.code, written.out) == (0, "")
    assert path.read_text(encoding="utf-8") == result.out


def test_the_text_and_the_page(run: Run) -> None:
    text = run("catalog", CELL, "--here")
    assert text.out.startswith("# Images\n\n1 image on 2026-11-22.")
    page = run("catalog", CELL, "--here", "--format", "html")
    assert page.out.startswith("<!doctype html>")


def test_profiles_need_a_registry(run: Run, tiny: Project) -> None:
    result = run("catalog", "--here", "--format", "kubespawner")
    assert yaml.safe_load(result.out) == {"singleuser": {"profileList": []}}
    assert f"# {CELL}-jupyter is left out: unknown: the registry was not looked up\n" in result.out
    path = tiny.root / "matrix.yaml"
    path.write_text(path.read_text("utf-8").replace("registry: registry.example.test:5000", 'registry: ""'), "utf-8")
    result = run("catalog", "--here", "--format", "kubespawner")
    assert (result.code, result.out) == (2, "")
    assert "registry" in result.err
