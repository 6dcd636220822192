"""Plans of git revisions of the checkout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from builder.common import git
from builder.common.errors import BuilderError
from builder.matrix.project import Project
from builder.plan import plan


@contextmanager
def checkout(project: Project, revision: str) -> Iterator[Project]:
    """The project as it is in a git revision, in a temporary folder. Raises UsageError without such a revision."""
    with project.scratch() as folder:
        git.export(project.root, revision, Path(folder))
        yield Project(Path(folder))


def digests(project: Project, revision: str, say: Callable[[str], None]) -> dict[str, str]:
    """Cell id -> digest of its plan in a git revision; empty for a revision that this program cannot plan.

    Raises UsageError if there is no such revision.
    """
    if not revision.strip("0"):  # what GitHub names for a new branch
        return {}
    with checkout(project, revision) as before:
        try:
            return {image.id: image.digest for image in plan.make(before, before.cells).images}
        except BuilderError as error:
            say(f"{revision} cannot be planned, so all images count as changed: {error}")
            return {}
