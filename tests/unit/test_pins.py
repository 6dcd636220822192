"""Dates of what is pinned. Whether a pin is old is tested with a given day: no test fails because time passes."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path

import pytest

from builder.common import validation
from builder.common.errors import FileError
from builder.matrix.pins import Pins, Vulnerability, load_pins
from tests import pins
from tests.paths import ROOT

DIGEST = "sha256:" + "a" * 64
TEXT = f"""\
pins:
  actions/checkout: {{version: v5.0.0, date: 2026-01-01, days: 10}}
  sigstore/cosign: {{version: v2.5.0, date: 2026-01-02, days: 10}}
  debian:trixie-slim: {{version: "{DIGEST}", date: 2026-01-03, days: 10}}
  locks/builder.txt: {{date: 2026-01-04, days: 10}}
vulnerable:
  cosign:
    - {{id: CVE-1, fixed: [2.6.2, 3.0.4], risk: r, source: s}}
    - {{id: CVE-2, fixed: [2.6.5, 3.1.3], risk: r, source: s}}
"""
PINNED = {
    "actions/checkout": {"v5.0.0"}, "sigstore/cosign": {"v2.5.0"}, "debian:trixie-slim": {DIGEST},
    "locks/builder.txt": {""},
}  # fmt: skip


@pytest.fixture
def listed(tmp_path: Path) -> Pins:
    return read(tmp_path, TEXT)


def read(folder: Path, text: str) -> Pins:
    path = folder / "pins.yaml"
    path.write_text(text)
    return validation.read_model(path, Pins)


def test_every_pin_of_this_repository_has_an_entry() -> None:
    assert pins.check(ROOT, date(2000, 1, 1))[0] == []
    assert set(pins.read_pinned(ROOT)) >= {"actions/checkout", "sigstore/cosign", "debian:trixie-slim", "uv"}


def test_entries_and_pins_that_do_not_match_are_faults(listed: Pins) -> None:
    assert pins.faults(PINNED, listed) == []
    changed = {**PINNED, "actions/cache": {"v4"}, "actions/checkout": {"v5.0.0", "v6.0.0"}}
    del changed["debian:trixie-slim"]
    assert pins.faults(changed, listed) == [
        "builder/matrix/pins.yaml: actions/cache is pinned, but has no entry",
        "builder/matrix/pins.yaml: actions/checkout is pinned as v5.0.0, v6.0.0, its entry has v5.0.0",
        "builder/matrix/pins.yaml: debian:trixie-slim has an entry, but is not pinned",
    ]


def test_an_old_pin_is_reported_the_day_after(listed: Pins) -> None:
    def old(day: int) -> list[str]:
        lines = pins.reminders(listed, date(2026, 1, day))
        return [line.split()[0] for line in lines if "days ago" in line]

    assert old(11) == []
    assert old(12) == ["actions/checkout"]
    assert old(15) == ["actions/checkout", "sigstore/cosign", "debian:trixie-slim", "locks/builder.txt"]
    assert "actions/checkout v5.0.0 dates from 2026-01-01, more than 10 days ago" in pins.reminders(listed, date.max)[0]


def test_a_pin_with_a_known_vulnerability_is_reported_on_any_day(listed: Pins) -> None:
    assert pins.reminders(listed, date.min) == [
        "sigstore/cosign v2.5.0 has known vulnerabilities: CVE-1, CVE-2: use 2.6.5 or 3.1.3 or newer"
    ]


@pytest.mark.parametrize(
    ("version", "affected"),
    [("1.13.0", True), ("2.6.1", True), ("2.6.2", False), ("2.10.0", False), ("3.0.3", True), ("3.0.4", False),
     ("4.0.0", False)],
)  # fmt: skip
def test_which_releases_a_vulnerability_affects(version: str, affected: bool) -> None:
    vulnerability = Vulnerability(id="CVE-1", fixed=("3.0.4", "2.6.2"), risk="r", source="s")
    assert vulnerability.affects(version) is affected


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("date: 2026-01-01", "date: soon", "date"),
        ("days: 10", "days: 0", "days"),
        ("version: v5.0.0", "version: latest", "version"),
        ("fixed: [2.6.2, 3.0.4]", "fixed: []", "fixed"),
        ("risk: r", "risks: r", "risk"),
    ],
)
def test_an_invalid_entry_is_named(tmp_path: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(FileError, match=rf"pins\.yaml:[0-9]+:[0-9]+: .*{message}"):
        read(tmp_path, TEXT.replace(before, after, 1))


def test_renovate_finds_each_entry_with_a_release() -> None:
    """Python writes named groups as `(?P<`. Renovate replaces the text that a pattern matches by the template."""
    text = (ROOT / "builder/matrix/pins.yaml").read_text()
    managers = json.loads((ROOT / ".github/renovate.json").read_text())["customManagers"]
    matched: dict[str, str] = {}
    for manager in managers:
        if not any("pins" in pattern for pattern in manager["managerFilePatterns"]):
            continue
        for pattern in manager["matchStrings"]:
            for match in re.finditer(pattern.replace("(?<", "(?P<"), text):
                groups = match.groupdict()
                name = manager.get("depNameTemplate") or groups["depName"]
                tag = f":{groups['currentValue']}" if "currentDigest" in groups else ""
                matched[name + tag] = groups.get("currentDigest") or groups["currentValue"]
                if template := manager.get("autoReplaceStringTemplate"):
                    new = re.sub(r"\{\{\{replace 'T\.\*' '' releaseTimestamp\}\}\}", "2026-12-24", template)
                    new = new.replace("{{{depName}}}", name).replace("{{{newValue}}}", "9.9.9")
                    assert re.fullmatch(pattern.replace("(?<", "(?P<"), new), "the next update finds it again"
                    assert "{{" not in new
    assert matched == {name: pin.version for name, pin in load_pins().pins.items() if pin.version}
