"""The plan of the checkout, whose images/ must be up to date, and of its git revisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from builder.common import git
from builder.common.errors import BuilderError
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


def digests(project: Project, revision: str, say: Callable[[str], None]) -> dict[str, str]:
    """Cell id -> digest of its plan in a git revision; empty for a revision that this program cannot plan.

    Raises UsageError if there is no such revision.
    """
    if not revision.strip("0"):  # what GitHub names for a new branch
        return {}
    with project.scratch() as folder:
        git.export(project.root, revision, Path(folder))
        try:
            before = Project(Path(folder))
            return {image.id: image.digest for image in plan.make(before, before.cells).images}
        except BuilderError as error:
            say(f"{revision} cannot be planned, so all images count as changed: {error}")
            return {}
