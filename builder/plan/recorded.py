"""`locks/gpu-images.txt` of a team's repository: the release of gpu-images that rendered it, and the plan of each cell.

The shipped templates are not in that repository, so a git revision alone does not say what was planned then.
"""

from __future__ import annotations

import re
from pathlib import Path

from builder import __version__
from builder.common.files import write_atomically
from builder.matrix.project import Project

PATH = "locks/gpu-images.txt"
_LINE = re.compile(r"^(\S+) (\S+)$", re.MULTILINE)


def read_recorded(root: Path) -> dict[str, str]:
    """The digests of plans by cell, and the release of gpu-images; empty without the file. Ignores damaged lines."""
    path = root / PATH
    return dict(_LINE.findall(path.read_text(encoding="utf-8", errors="replace"))) if path.is_file() else {}


def record_plans(project: Project, plans: dict[str, str]) -> list[str]:
    """Records the plans of cells, if matrix.yaml extends the shipped one; returns the path if the file changed."""
    if not project.matrix.extends:
        return []
    before = read_recorded(project.root)
    known = before | plans
    after = {"gpu-images": __version__} | {cell.id: known[cell.id] for cell in project.cells if cell.id in known}
    if after != before:
        write_atomically(project.root / PATH, "".join(f"{name} {value}\n" for name, value in after.items()))
    return [PATH] if after != before else []
