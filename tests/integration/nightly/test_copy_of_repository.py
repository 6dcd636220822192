"""A copy of this repository, with a matrix.yaml of the team's own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from builder.matrix.project import Project
from tests.integration import clones
from tests.integration.clones import run

SERVICE = {
    "run": "#!/bin/sh\nexec sleep infinity\n",
    "check": "#!/bin/sh\nexit 0\n",
}
# Tests of the tool have data of their own, and take minutes; these read that of the repository.
OF_THE_REPOSITORY = (
    "test_repository.py", "test_examples.py", "test_workflows.py", "templates", "lock/test_checks.py",
    "lock/test_locality.py", "matrix/test_facts.py", "evidence/test_suite.py",
)  # fmt: skip


def test_a_copy_with_pytorch_alone_and_a_component_of_its_own_passes_the_checks(tmp_path: Path) -> None:
    """builder named one entry to edit at a time, and tests expected the frameworks and services of this repository."""
    clone = clones.make(tmp_path / "clone")
    path = clone / "matrix.yaml"
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^  tensorflow:\n.*?(?=^\S)", "", text, count=1, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^  (tensorflow|jax): \{.*\n", "", text, flags=re.MULTILINE)
    text = text.replace("  plain: []\n", "  plain: []\n  hello: [hello]\n")
    text = text.replace("\ncomponents:\n", "\ncomponents:\n  hello: {needs: [python], command: [services]}\n")
    path.write_text(text, encoding="utf-8")
    service = clone / "templates/hello/files/etc/services.d/hello"
    service.mkdir(parents=True)
    for name, program in SERVICE.items():
        (service / name).write_text(program, encoding="utf-8")
        (service / name).chmod(0o755)
    test = "def test_the_service_is_there(host):\n    assert host.file('/etc/services.d/hello/run').exists\n"
    (clone / "tests/images/test_hello.py").write_text(test.replace("'", '"'), encoding="utf-8")

    # The entries that the message names, and no others, are deleted.
    done = subprocess.run([".venv/bin/builder", "plan"], cwd=clone, capture_output=True, text=True, check=False)
    pattern = r"^  matrix\.yaml:(\d+):\d+: '([^']*)'(?: in '([^']*)')? matches no cell"
    entries = re.findall(pattern, done.stderr, re.MULTILINE)
    assert done.stderr.startswith(f"matrix: {len(entries)} entries match no cell\n"), done.stderr
    lines = text.splitlines(keepends=True)
    for number, name, alternatives in entries:
        line = lines[int(number) - 1]
        if alternatives:  # such as {pt-2.15,jax-0.12}, of which one alone matches
            line = line.replace(alternatives, alternatives.replace(f",{name}", "").replace(f"{name},", ""))
        line = line.replace(f', "{name}"', "").replace(f'"{name}"', "").replace("[, ", "[")
        lines[int(number) - 1] = "" if "cells: ," in line or line.rstrip().endswith("[]") else line
    path.write_text("".join(lines), encoding="utf-8")

    run([".venv/bin/builder", "lock"], clone)
    run([".venv/bin/builder", "render"], clone)
    run(["git", "add", "-A"], clone)
    run(["make", "lint"], clone)
    tests = [f"tests/unit/{name}" for name in OF_THE_REPOSITORY]
    run([".venv/bin/pytest", "-q", "-n", "2", *tests], clone)
    for name in Project(clone).matrix.sets:
        run([".venv/bin/builder", "plan", name], clone)
