"""This working tree as a clone with an environment of its own, as people have it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from tests.paths import ROOT

TIMEOUT_S = 300


def make(target: Path) -> Path:
    """Clones the working tree, with what is not committed."""
    files = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name, follow_symlinks=False)
    run(["git", "init", "-q"], target)
    run(["git", "add", "-A"], target)
    run(["git", "-c", "user.name=t", "-c", "user.email=t@example.test", "commit", "-qm", "as it is"], target)
    run(["make", ".venv/.ready"], target)
    return target


def reset(clone: Path) -> None:
    """Undoes what a test changed."""
    run(["git", "checkout", "-q", "."], clone)
    run(["git", "clean", "-qfd"], clone)


def run(command: list[str], cwd: Path) -> str:
    """What it prints. A make that is run here must take nothing from a make that runs the tests, such as CELLS."""
    of_make = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "CELLS", "FILES", "STAMP"}
    outside = {name: value for name, value in os.environ.items() if name not in of_make}
    done = subprocess.run(
        command, cwd=cwd, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
        capture_output=True, env={**outside, "COLUMNS": "200", "GPU_IMAGES_STORE": f"{cwd}/.builder/store",
            "COSIGN_PASSWORD": ""},
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
