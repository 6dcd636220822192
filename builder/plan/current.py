"""The plan of cells whose files in images/ are up to date."""

from __future__ import annotations

from collections.abc import Sequence

from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.plan import budget, plan, render
from builder.plan.plan import Plan


def make(project: Project, chosen: Sequence[Cell]) -> Plan:
    """The plan of the chosen cells.

    Raises an error unless their files in images/ are up to date and they are within the budgets. The locks and files of
    other cells do not matter.
    """
    planned = plan.make_locked(project, chosen)
    render.check(project.root, render.render(project.root, project.matrix, planned), [cell.id for cell in chosen])
    budget.check_plan(project.matrix, planned.images)
    return planned
