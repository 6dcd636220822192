"""Runs the examples of the images and parses their output."""

from __future__ import annotations

import re

from testinfra.host import Host


def run(host: Host, command: str) -> str:
    """The output of a command that must succeed."""
    result = host.run(command)
    assert result.rc == 0, result.stdout + result.stderr[-3000:]
    return str(result.stdout)


def epochs(text: str) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by epoch, from the output of an example."""
    lines = re.findall(r"^epoch (\d+): loss ([\d.]+) accuracy ([\d.]+)$", text, re.MULTILINE)
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in lines}


def weights(text: str) -> list[str]:
    """The digests of the final weights, from the output of an example."""
    return re.findall(r"^weights (\w+)$", text, re.MULTILINE)
