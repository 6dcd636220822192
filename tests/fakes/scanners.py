"""A scanner in matrix.yaml: a Python program."""

from __future__ import annotations

import json
import sys

from builder.matrix.project import Project


def with_scanner(project: Project, code: str, *, parallel: int = 1) -> Project:
    """The checkout with a scanner that runs `code`; its first argument is `sbom:` and the path of the SBOM."""
    path = project.root / "matrix.yaml"
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("scan: ")]
    (project.root / "scanner.py").write_text(code, encoding="utf-8")
    settings = {"command": [sys.executable, "scanner.py", "sbom:{sbom}"], "parallel": parallel}
    path.write_text("\n".join([f"scan: {json.dumps(settings)}", *lines, ""]), encoding="utf-8")
    return Project(project.root)
