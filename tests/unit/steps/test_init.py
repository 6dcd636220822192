"""`builder init`: a repository of a team's own."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from click.testing import CliRunner, Result

from builder import __version__
from builder.cli import cli
from builder.common.errors import BuilderError
from builder.matrix.project import Project
from builder.steps.init import package_of, write_repository
from tests.paths import ROOT


def init(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["init", *arguments], catch_exceptions=False, standalone_mode=False)


def cells(folder: Path) -> list[str]:
    return [cell.id for cell in Project(folder).cells]


def test_the_defaults_are_two_images_of_one_framework(tmp_path: Path) -> None:
    result = init(str(tmp_path / "new"))
    project = Project(tmp_path / "new")
    matrix = project.matrix
    assert (matrix.registry, matrix.namespace, list(matrix.frameworks)) == ("", "org", ["pytorch"])
    plain, jupyter = cells(project.root)
    assert jupyter == f"{plain}-jupyter"
    lines = (project.root / "matrix.yaml").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 10
    wheel = f"./wheels/gpu_images-{__version__}-py3-none-any.whl[images]"
    assert (project.root / "requirements.txt").read_text("utf-8") == f"{wheel}\n"
    assert f"make and CI install {wheel}\n" in result.stderr
    assert (
        f"run `uv build --wheel --no-create-gitignore --out-dir {project.root}/wheels` in the checkout of gpu-images"
        in result.stderr
    )
    assert "file:" not in "".join(path.read_text("utf-8") for path in project.root.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("source", "requirement"),
    [
        (
            {"dir_info": {"editable": True}, "url": "file:///here"},
            f"./wheels/gpu_images-{__version__}-py3-none-any.whl[images]",
        ),
        ({"archive_info": {}, "url": "file:///a%20b/gpu.whl"}, "./wheels/gpu.whl[images]"),
        ({"archive_info": {}, "url": "https://e.test/gpu.whl"}, "gpu-images[images] @ https://e.test/gpu.whl"),
        (
            {"vcs_info": {"vcs": "git", "commit_id": "0123"}, "url": "https://e.test/gpu"},
            "gpu-images[images] @ git+https://e.test/gpu@0123",
        ),
        ({}, f"gpu-images[images]=={__version__}"),
    ],
    ids=["a checkout", "a wheel", "an address", "a commit", "an index"],
)
def test_what_ci_installs(source: dict[str, Any], requirement: str) -> None:
    assert package_of(source)[0] == requirement


def test_the_wheel_that_it_was_installed_from_is_copied(tmp_path: Path) -> None:
    wheel = tmp_path / "gpu images.whl"
    source = {"archive_info": {}, "url": wheel.as_uri()}
    options: dict[str, Any] = {"registry": "", "namespace": "org", "ci": "github", "frameworks": ["pytorch: "]}
    with pytest.raises(FileNotFoundError, match=r"gpu images\.whl"):
        write_repository(tmp_path / "new", source=source, **options)
    assert not (tmp_path / "new").exists()
    wheel.write_bytes(b"wheel")
    assert "wheels/gpu images.whl" in write_repository(tmp_path / "new", source=source, **options)
    assert (tmp_path / "new/wheels/gpu images.whl").read_bytes() == b"wheel"


def test_options_choose_the_images(tmp_path: Path) -> None:
    frameworks = ["--framework", "jax", "--framework", "tensorflow"]
    options = ["--registry", "ghcr.io", "--namespace", "a/b", *frameworks, "--cpu"]
    init(str(tmp_path), *options)
    matrix = Project(tmp_path).matrix
    assert (matrix.registry, matrix.namespace) == ("ghcr.io", "a/b")
    names = [re.sub(r"-[0-9.]+-cpu-py[0-9]+", "", cell) for cell in cells(tmp_path)]
    assert sorted(names) == ["jax", "jax-jupyter", "tf", "tf-jupyter"]
    assert {cell.cuda for cell in Project(tmp_path).cells} == {"cpu"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--framework", "pytorhc"], "no framework 'pytorhc'; did you mean 'pytorch'?"),
        (["--framework", "pytorch", "--cpu"], "pytorch has no images for the CPU on amd64"),
        (["--namespace", "a: b\nvariants: []"], "matrix.yaml:4:12: namespace: "),
        (["--registry", "https://ghcr.io"], "matrix.yaml:3:11: registry: "),
    ],
)
def test_what_no_repository_can_have_is_refused_before_a_file_is_written(
    tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(BuilderError) as caught:
        init(str(tmp_path), *options)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("mine")
    (tmp_path / "README.md").symlink_to("elsewhere")
    with pytest.raises(BuilderError, match=r"already has Makefile, README\.md: nothing is overwritten"):
        init(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile", "README.md"]


def test_the_workflow_calls_a_copy_with_inputs_that_it_has(tmp_path: Path) -> None:
    """With the release that it is from; GitHub finds a workflow of the same repository by its path."""
    init(str(tmp_path))
    job = yaml.safe_load((tmp_path / ".github/workflows/images.yml").read_text(encoding="utf-8"))["jobs"]["images"]
    head, _, text = (tmp_path / job["uses"]).read_text(encoding="utf-8").partition("\n")
    assert f" of gpu-images {__version__}." in head
    assert text == (ROOT / ".github/workflows/images.yml").read_text(encoding="utf-8")
    known = yaml.safe_load(text)[True]["workflow_call"]["inputs"]  # YAML 1.1 reads `on` as true
    assert set(job["with"]) == {"publish", "allow_untested_gpu", "team"}
    assert {name: known[name]["default"] for name in job["with"]} == job["with"]
    assert not (tmp_path / ".gitlab-ci.yml").exists()


def test_gitlab_gets_a_valid_file(tmp_path: Path) -> None:
    result = init(str(tmp_path), "--ci", "gitlab")
    text = (tmp_path / ".gitlab-ci.yml").read_text(encoding="utf-8")
    schemas = resources.files("check_jsonschema.builtin_schemas.vendor")
    jsonschema.validate(yaml.safe_load(text), json.loads((schemas / "gitlab-ci.json").read_text(encoding="utf-8")))
    assert not (tmp_path / ".github").exists()
    assert "workflow" not in result.stderr
