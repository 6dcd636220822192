"""Runs the command that creates a repository."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

TIMEOUT_S = 120


@cache  # once for each repository in a run
def run(command: tuple[str, ...]) -> str:
    """Runs a command without a shell; returns why it failed, empty if it did not."""
    program = Path(command[0]).name
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{program} timed out after {TIMEOUT_S} s"
    except OSError as error:
        return f"{program} cannot run: {(error.strerror or type(error).__name__).lower()}"
    if not result.returncode:
        return ""
    first = next((line for line in result.stderr.splitlines() if line.strip()), "no message")
    return f"{program}: exit status {result.returncode}: {first}"
