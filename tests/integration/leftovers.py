"""Removes images that a killed test run left in the engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from builder.engine.client import RUN_LABEL

NAMESPACE = re.compile(r"builder-test-([0-9]+)-[0-9a-f]+/", re.ASCII)
CELL = "io.github.gpu-images.cell"


def namespace(word: str) -> str:
    """The namespace for images of a checkout, with the id of this process."""
    return f"builder-test-{os.getpid()}-{word}"


def sweep() -> list[str]:
    """Removes images of test runs that have ended, and returns them; does nothing without an engine."""
    if not shutil.which("docker") or _docker("version", "--format", "{{.Server.Version}}") is None:
        return []
    names = (_docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}") or "").split()
    processes = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}
    removed = dead(names, processes)
    systems = _docker("image", "ls", "--filter", "dangling=true", "--filter", f"label={RUN_LABEL}", "-q", "--no-trunc")
    removed += [image for image in (systems or "").split() if dead([_label(image, RUN_LABEL)], processes)]
    if not any(NAMESPACE.match(name) for name in set(names) - set(removed)):  # else they may be of a run that goes on
        listed = _docker("image", "ls", "--filter", "dangling=true", "--filter", f"label={CELL}", "-q", "--no-trunc")
        removed += [image for image in (listed or "").split() if _is_tiny(image)]
    if removed:
        _docker("image", "rm", "-f", *removed)
    return removed


def dead(names: Iterable[str], processes: set[int]) -> list[str]:
    """The names whose process has ended."""
    matches = ((name, NAMESPACE.match(name)) for name in names)
    return [name for name, match in matches if match and int(match[1]) not in processes]


def _is_tiny(image: str) -> bool:
    """Whether an image belongs to a checkout of the tests, by its framework."""
    return _label(image, CELL).startswith("ty-")


def _label(image: str, name: str) -> str:
    return _docker("image", "inspect", "--format", f'{{{{index .Config.Labels "{name}"}}}}', image) or ""


def _docker(*arguments: str) -> str | None:
    result = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120, check=False)
    return result.stdout if result.returncode == 0 else None
