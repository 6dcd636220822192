"""What is pinned in this repository: whether each pin has a date, and which ones are old.

Without a network: a pin that is older than it should be may still be the newest release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path

from builder.common import validation
from builder.matrix.pins import Pins
from builder.matrix.project import Project

COSIGN, LOCK = "sigstore/cosign", "locks/builder.txt"
_NAMED = "builder/matrix/pins.yaml"
_USES = re.compile(r"^\s*-?\s*uses:\s*([\w./-]+)@([0-9a-f]{40})\s+#\s*(\S+)", re.MULTILINE | re.ASCII)
_COSIGN = re.compile(r"^\s*cosign-release:\s*[\"']?(v[0-9.]+)", re.MULTILINE | re.ASCII)


def read_pinned(root: Path) -> dict[str, set[str]]:
    """The versions of each pinned thing in a checkout, by name; one if all places agree."""
    pinned: dict[str, set[str]] = {}
    for path in sorted((root / ".github/workflows").glob("*.y*ml")):
        text = path.read_text(encoding="utf-8")
        for name, _, version in _USES.findall(text):
            pinned.setdefault(name, set()).add(version)
        for version in _COSIGN.findall(text):
            pinned.setdefault(COSIGN, set()).add(version)
    for debian in Project(root).matrix.debian.values():
        name, _, digest = debian.image.partition("@")
        pinned.setdefault(name, set()).add(digest)
    uv = (root / "locks/uv.txt").read_text(encoding="utf-8").split()[0]
    pinned["uv"] = {uv.removeprefix("uv==")}
    pinned[LOCK] = {""}  # the versions of many packages
    return pinned


def faults(pinned: Mapping[str, set[str]], listed: Pins) -> list[str]:
    """Pins without an entry, entries without a pin, and versions that differ. These change only with the repository."""
    lines = [f"{name} is pinned, but has no entry" for name in pinned if name not in listed.pins]
    lines += [f"{name} has an entry, but is not pinned" for name in listed.pins if name not in pinned]
    for name, versions in pinned.items():
        if (pin := listed.pins.get(name)) and versions != {pin.version}:
            lines.append(f"{name} is pinned as {', '.join(sorted(versions))}, its entry has {pin.version}")
    return [f"{_NAMED}: {line}" for line in sorted(lines)]


def reminders(listed: Pins, today: date) -> list[str]:
    """Pins that are older than they should be, and those with known vulnerabilities."""
    lines = []
    for name, pin in listed.pins.items():
        what = name if not pin.version or pin.version.startswith("sha256:") else f"{name} {pin.version}"
        if today > pin.released + timedelta(days=pin.days):
            lines.append(
                f"{what} dates from {pin.released}, more than {pin.days} days ago: look for a newer one, then set "
                f"version and date in {_NAMED}"
            )
        program = name.rpartition("/")[2]
        if pin.version and (known := listed.vulnerabilities(program, pin.version.removeprefix("v"))):
            safe = " or ".join(listed.safe_releases(program))
            lines.append(
                f"{what} has known vulnerabilities: {', '.join(each.id for each in known)}: use {safe} or newer"
            )
    return lines


def check(root: Path, today: date) -> tuple[list[str], list[str]]:
    """The faults and the reminders of a checkout."""
    listed = validation.read_model(root / _NAMED, Pins)
    return faults(read_pinned(root), listed), reminders(listed, today)
