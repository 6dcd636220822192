"""The plan of cells, in a checkout whose images/ is up to date."""

from __future__ import annotations

from collections.abc import Sequence

from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.plan import budget, plan, render
from builder.plan.plan import Plan


def make(project: Project, chosen: Sequence[Cell]) -> Plan:
    """The plan of the chosen cells. Raises an error unless images/ is up to date and the plan is within the budgets."""
    complete = plan.make_locked(project, project.cells)
    render.check(project.root, render.render(project.root, project.matrix, complete))
    ids = {cell.id for cell in chosen}
    images = tuple(image for image in complete.images if image.id in ids)
    budget.check_plan(project.matrix, images)
    return Plan(images=images)
