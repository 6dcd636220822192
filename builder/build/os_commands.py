"""Reads the commands of a Dockerfile's stage, so that they can be run without BuildKit.

Source: Dockerfile reference, "RUN --mount". Only what needs no BuildKit is read: RUN in shell form, and mounts of
folders of the build context and of caches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_FLAG = re.compile(r"--mount=(\S+)\s+")


@dataclass(frozen=True, kw_only=True)
class Command:
    """The text of a RUN instruction, for a shell; `mounts` are paths in the root folder -> folders of the context."""

    text: str
    mounts: Mapping[str, str]


def commands(dockerfile: str, stage: str) -> tuple[Command, ...] | None:
    """The commands of a stage that begins with the base image, in order; None if BuildKit is needed to run them."""
    instructions = _instructions(dockerfile, stage)
    parsed = [_command(instruction) for instruction in instructions]
    return tuple(command for command in parsed if command) if instructions and all(parsed) else None


def _instructions(dockerfile: str, stage: str) -> list[str]:
    """The instructions of a stage, each on one line."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n", "", "\n".join(lines) + "\n")
    match = re.search(rf"^FROM \$\{{BASE\}} AS {re.escape(stage)}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    return [line.strip() for line in match[1].splitlines() if line.strip()] if match else []


def _command(instruction: str) -> Command | None:
    keyword, _, rest = instruction.partition(" ")
    rest, mounts = rest.strip(), {}
    if keyword != "RUN":
        return None
    while flag := _FLAG.match(rest):
        fields = dict(field.partition("=")[::2] for field in flag[1].split(","))
        rest = rest[flag.end() :]
        if fields.get("type") == "bind" and set(fields) == {"type", "source", "target"}:
            mounts[fields["target"]] = fields["source"]
        elif fields.get("type") != "cache":
            return None
    return None if rest.startswith(("--", "[", "<<")) else Command(text=rest, mounts=mounts)
