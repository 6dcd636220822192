"""A team's matrix.yaml that extends the shipped one, and which files of a project are the team's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builder.common import strict_yaml
from builder.common.errors import MatrixError
from builder.matrix import reader
from builder.matrix.project import Project
from builder.matrix.schema import Matrix
from tests.paths import ROOT

OWN = """\
extends: gpu-images
registry: ghcr.io
namespace: my-org
frameworks: {pytorch: {versions: ["2.9"]}}
variants: [plain, jupyter]
"""
SHIPPED = Project(ROOT).matrix


def load(text: str) -> Matrix:
    return reader.read_matrix(strict_yaml.parse_yaml(text.encode(), "matrix.yaml"))


def refusal(text: str) -> str:
    with pytest.raises(MatrixError) as caught:
        load(text)
    return str(caught.value)


def team(folder: Path, text: str = OWN) -> Project:
    (folder / "matrix.yaml").write_text(text, encoding="utf-8")
    return Project(folder)


def test_what_a_team_does_not_write_is_as_shipped() -> None:
    matrix = load(OWN)
    assert (matrix.registry, matrix.namespace) == ("ghcr.io", "my-org")
    assert (matrix.debian, matrix.python, matrix.cuda) == (SHIPPED.debian, SHIPPED.python, SHIPPED.cuda)
    assert matrix.components == SHIPPED.components
    versions = matrix.frameworks["pytorch"].versions
    assert versions == {"2.9": SHIPPED.frameworks["pytorch"].versions["2.9"]}
    assert (list(matrix.frameworks), list(matrix.variants)) == (["pytorch"], ["plain", "jupyter"])
    assert (matrix.exclude, matrix.budgets, matrix.sets) == (SHIPPED.exclude, [], {})


def test_without_a_choice_there_are_all_frameworks_and_variants() -> None:
    matrix = load("extends: gpu-images\nregistry: ''\nnamespace: my-org\n")
    assert (matrix.frameworks, matrix.variants) == (SHIPPED.frameworks, SHIPPED.variants)


def test_mappings_merge_and_other_values_replace() -> None:
    matrix = load(
        OWN.replace(
            '{pytorch: {versions: ["2.9"]}}', '{pytorch: {image: torch, versions: {"2.9": {python: ["3.13"]}}}, jax: }'
        )
        + "components:\n  jupyter: {packages: [jupyterlab], env: {A: b}}\n  vision: {packages: [timm]}\n"
    )
    pytorch, shipped = matrix.frameworks["pytorch"], SHIPPED.frameworks["pytorch"]
    assert pytorch.model_copy(update={"image": shipped.image, "versions": shipped.versions}) == shipped
    assert pytorch.versions["2.9"] == shipped.versions["2.9"].model_copy(update={"python": ["3.13"]})
    assert matrix.frameworks["jax"] == SHIPPED.frameworks["jax"]
    jupyter = SHIPPED.components["jupyter"].model_copy(update={"packages": ["jupyterlab"], "env": {"A": "b"}})
    assert matrix.components["jupyter"] == jupyter
    assert matrix.components.keys() == {*SHIPPED.components, "vision"}


@pytest.mark.parametrize(("line", "is_arm64"), [("2.9", False), ("2.15", True)])
def test_shipped_exclusions_stay_until_the_team_writes_its_own(tmp_path: Path, line: str, is_arm64: bool) -> None:
    """One that matches no cell of the team is no fault. Without them, 2.9 has cells that cannot be built."""
    text = OWN.replace("2.9", line)
    shipped = {cell.id for cell in Project(ROOT).cells}
    assert {cell.id for cell in team(tmp_path, text).cells} <= shipped
    none = team(tmp_path, text + "exclude: []\n")
    if is_arm64:
        assert {cell.id for cell in none.cells} - shipped
    else:
        with pytest.raises(MatrixError):  # uv has no build of its Python for arm64
            _ = none.cells
    with pytest.raises(MatrixError, match=r"matrix\.yaml:6:19: 'tf-\*' matches no cell"):
        _ = team(tmp_path, text + 'exclude: [{cells: "tf-*", reason: we have none of these}]\n').cells


def test_variants_of_ones_own_stand_beside_shipped_ones() -> None:
    matrix = load(OWN.replace("[plain, jupyter]", "{plain: , jupyter: , mine: [tools, ssh]}"))
    assert matrix.variants == {
        "plain": [], "jupyter": SHIPPED.variants["jupyter"], "mine": ["tools", "ssh"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpu-images", "gpu-image", "matrix.yaml:1:10: extends: input should be 'gpu-images', found 'gpu-image'"),
        ('["2.9"]', '["2.8"]', "matrix.yaml:4:35: frameworks.pytorch.versions.2.8: gpu-images has no '2.8'"),
        ('["2.9"]', "[2.9]", "matrix.yaml:4:35: 2.9 is not text"),
        ('{versions: ["2.9"]}}', ", jux: }", "matrix.yaml:4:25: frameworks.jux: gpu-images has no 'jux'; did you mean"),
        ("pytorch:", "pytorhc:", "matrix.yaml:4:14: frameworks.pytorhc: gpu-images has no 'pytorhc'; did you mean"),
        ('pytorch: {versions: ["2.9"]}', "own: {image: x}", "matrix.yaml:4:19: frameworks.own.short: missing"),
        ("jupyter]", "jupiter]", "matrix.yaml:5:19: variants.jupiter: gpu-images has no 'jupiter'; did you mean"),
        ("variants: [plain, jupyter]", "variants: {jupyter: }", "matrix.yaml:5:11: variants: 'plain' is missing"),
        ("variants:", "variant:", "matrix.yaml:5:1: variant: unknown key"),
        ("variants:", "components: {ssh: {port: 0}}\nvariants:", "matrix.yaml:5:26: components.ssh.port: input should"),
        ("variants:", "python: [a]\nvariants:", "matrix.yaml:5:9: python: input should be a valid dictionary"),
    ],
)  # fmt: skip
def test_faults_are_named_with_the_place_in_the_file_of_the_team(old: str, new: str, message: str) -> None:
    assert OWN.count(old) == 1
    assert refusal(OWN.replace(old, new)).startswith(message)


def test_a_fault_in_a_shipped_value_names_the_shipped_file() -> None:
    """The team's component needs the shipped one, whose needs then are circular."""
    lines = (ROOT / "matrix.yaml").read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.startswith("  lfs: "))
    error = refusal(OWN + "components: {tools: {needs: [lfs]}}\n")
    assert error.startswith(
        ("matrix.yaml:6:", f"builder/shipped/matrix.yaml:{line}:8: components.lfs: circular needs: lfs")
    )


def test_files_of_a_team_and_shipped_files(tmp_path: Path) -> None:
    """A component's folder is used as a whole, and the scripts that make images are always the shipped ones."""
    for name in ("templates/jupyter/files/etc/own", "tests/images/test_jupyter.py", "locks/a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    project = team(tmp_path)
    own = ("templates/jupyter/files", "templates/jupyter/prefetch.txt", "tests/images/test_jupyter.py", "locks/a.json")
    assert [project.path(name) for name in own] == [tmp_path / name for name in own]
    shipped = ("templates/steps/os.sh", "templates/Dockerfile.j2", "templates/ssh/files", "tests/images/test_ssh.py")
    assert [project.path(name) for name in shipped] == [ROOT / name for name in shipped]
    assert project.path("templates/ssh").is_dir()


def test_a_matrix_that_extends_nothing_has_only_its_own_files(tiny: Project) -> None:
    assert tiny.folders == (tiny.root,)
    assert tiny.path("tests/images/test_base.py") == tiny.root / "tests/images/test_base.py"


def test_a_folder_of_templates_that_is_no_component_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "templates/jupiter").mkdir(parents=True)
    with pytest.raises(MatrixError, match=re.escape("templates/jupiter: no component 'jupiter'; did you mean")):
        _ = team(tmp_path).matrix
