"""Size budgets: which one applies, and the messages for an image, a layer, and all images at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from builder.common.errors import BuildError, MatrixError
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.plan import budget, plan
from tests.fakes.engine import place

Budgeted = Callable[..., Project]
CELL = "em-1.10-cu1210-py311"
MB = 1_000_000


@pytest.fixture
def budgeted(tiny: Project) -> Budgeted:
    """The tiny project with these budgets, each as (cells, image, layer), from line 2 on."""

    def make(*entries: tuple[str, str, str]) -> Project:
        path = tiny.root / "matrix.yaml"
        head = "".join(f'  - {{cells: "{cells}", image: {image}, layer: {layer}}}\n' for cells, image, layer in entries)
        path.write_text("budgets:\n" + head + path.read_text())
        return Project(tiny.root)

    return make


def cell(project: Project, cell_id: str = CELL) -> Cell:
    return project.select([cell_id])[0]


def test_the_limits_are_inclusive(budgeted: Budgeted) -> None:
    project = budgeted(("*", "3MB", "2MB"))
    assert budget.budget_faults(project.matrix, cell(project), [("a", 2 * MB), ("b", MB)]) == []
    assert len(budget.budget_faults(project.matrix, cell(project), [("a", 2 * MB), ("b", MB + 1)])) == 1
    assert len(budget.budget_faults(project.matrix, cell(project), [("a", 2 * MB + 1)])) == 1


def test_the_first_budget_that_matches_applies(budgeted: Budgeted) -> None:
    """Even if a later one allows less."""
    project = budgeted(("*-jupyter", "1MB", "1MB"), ("em-*", "9MB", "9MB"), ("*", "1MB", "1MB"))
    layers = [("x", 5 * MB)]
    assert budget.budget_faults(project.matrix, cell(project), layers) == []
    (image, layer) = budget.budget_faults(project.matrix, cell(project, f"{CELL}-jupyter"), layers)
    assert "(matrix.yaml:2:" in image
    assert "(matrix.yaml:2:" in layer
    assert "(matrix.yaml:4:" in budget.budget_faults(project.matrix, cell(project, "qz-0.5-cu129-py311"), layers)[0]


def test_a_cell_that_no_budget_matches_may_have_any_size(tiny: Project, budgeted: Budgeted) -> None:
    """A line that was added as the README shows was locked, and then refused."""
    for project in (tiny, budgeted(("qz-*", "1MB", "1MB"))):
        assert budget.budget_faults(project.matrix, cell(project), [("huge", 10**15)]) == []


def test_a_pattern_with_too_many_alternatives(budgeted: Budgeted) -> None:
    project = budgeted(("{a,b}" * 9, "1MB", "1MB"))
    with pytest.raises(MatrixError) as caught:
        assert project.cells
    assert place(caught.value).startswith("matrix.yaml:2:")


def test_all_images_of_a_plan_are_reported_at_once(budgeted: Budgeted) -> None:
    """Layers without wheels are not counted: their size is not known yet."""
    project = budgeted(("qz-*", "1GB", "1GB"), ("*", "2MB", "1MB"))
    images = plan.make_plan(project, project.cells).images
    with pytest.raises(BuildError) as caught:
        budget.check_plan(project.matrix, images)
    lines = str(caught.value).splitlines()
    assert lines[0] == "over the size budget"
    assert {line.split(":")[0].strip() for line in lines[1:]} == {CELL, f"{CELL}-jupyter", f"{CELL}-board"}
    assert all(": the image is 2.0 MB" in line or ": the layer cuda is 2.0 MB" in line for line in lines[1:])
    assert len(lines) == 7
    budget.check_plan(project.matrix, [image for image in images if image.id.startswith("qz-")])


def test_a_built_image_is_checked_by_compressed_size(budgeted: Budgeted) -> None:
    """With the operating system."""
    project = budgeted(("*", "3MB", "2MB"))

    budget.check_built(project.matrix, cell(project), [("cuda", 2 * MB, 0), ("os", MB, 0)])
    with pytest.raises(BuildError, match=r"the layer os is 2\.5 MB, 500 kB more than the 2\.0 MB allowed"):
        budget.check_built(project.matrix, cell(project), [("os", 2 * MB + 500_000, 0)])


@pytest.mark.parametrize(("allowed", "limit"), [("", 18 * MB), ("20MB", 20 * MB)])
def test_the_unpacked_image_has_a_budget(tiny: Project, allowed: str, limit: int) -> None:
    """By default six times the compressed one: 2 MB of wheels that unpack to 2 GB must not be built."""
    text = "budgets:\n  - {cells: '*', image: 3MB, layer: 2MB" + (f", unpacked: {allowed}" if allowed else "") + "}\n"
    path = tiny.root / "matrix.yaml"
    path.write_text(path.read_text() + text)
    project = Project(tiny.root)

    budget.check_built(project.matrix, cell(project), [("a", 1000, limit - MB), ("b", 1000, MB)])
    with pytest.raises(
        BuildError, match=r"the unpacked image is .* more than the .* allowed \(matrix\.yaml:.*largest layers: a "
    ):
        budget.check_built(project.matrix, cell(project), [("a", 1000, limit - MB), ("b", 1000, MB + 1)])
