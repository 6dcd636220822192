"""`builder scan`: the table, the findings, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from builder.matrix.project import Project
from builder.registry.scan import Finding, Result
from builder.registry.scan_results import Scanned, Scanner
from tests.unit.cli.conftest import CELL, Run

DIGEST = "sha256:" + "a" * 64
HIGH = Finding(id="CVE-1", package="libtls", version="1.1", severity="high")
LOW = Finding(id="CVE-2", package="libtls", version="1.1", severity="low", excepted="not reachable")


@pytest.fixture
def scanned(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> list[Scanned]:
    """What the scans of released images give."""
    path = tiny.root / "matrix.yaml"
    exceptions = [{"id": name, "reason": "not reachable", "until": "2999-01-31"} for name in ("CVE-2", "CVE-3")]
    settings = json.dumps({"command": ["scanner", "{sbom}"], "exceptions": exceptions})
    path.write_text(f"scan: {settings}\n{path.read_text('utf-8')}", encoding="utf-8")
    rows: list[Scanned] = []

    def scan(*_: object) -> Iterator[Scanned]:
        return iter(rows)

    monkeypatch.setattr(Scanner, "scan", scan)
    return rows


def result(*findings: Finding) -> Result:
    return Result(image=DIGEST, scanner="s 1", time="2026-11-23T00:00:00Z", findings=findings)


def test_refused_and_failed_scans_fail_the_command(run: Run, scanned: list[Scanned]) -> None:
    scanned += [
        Scanned(cell=CELL, digest=DIGEST, result=result(HIGH, LOW), refused=(HIGH,)),
        Scanned(cell="other", digest=DIGEST, failure="scanner: exit status 1"),
    ]
    shown = run("scan")
    assert shown.code == 16
    rows = [line.split() for line in shown.out.splitlines()]
    assert [CELL, "0", "1", "0", "0", "0", "1", "refused"] in rows
    assert ["other", *"------", "scan", "failed"] in rows
    assert f"{CELL}: CVE-1 in libtls 1.1 (high)" in shown.out
    assert "other: scanner: exit status 1" in shown.out
    assert "2 of 2 images refused or not scanned" in shown.err
    assert "note: unused exception for CVE-3" in shown.err
    assert "CVE-2 matches" not in shown.err


def test_images_without_refused_findings(run: Run, scanned: list[Scanned]) -> None:
    scanned.append(Scanned(cell=CELL, digest=DIGEST, result=result(LOW)))
    shown = run("scan", "--format", "json")
    assert shown.code == 0
    [row] = json.loads(shown.out)
    assert (row["cell"], row["digest"], row["state"], row["counts"]["excepted"]) == (
        CELL,
        DIGEST,
        "clean, 1 excepted",
        1,
    )


def test_a_scan_of_nothing_is_no_pass(run: Run, scanned: list[Scanned]) -> None:
    assert scanned == []
    shown = run("scan")
    assert shown.code == 2
    assert "none of these images is released" in shown.err


def test_without_a_scanner(run: Run) -> None:
    shown = run("scan")
    assert shown.code == 2
    assert "`scan` is not set in matrix.yaml" in shown.err
    assert '  command: [grype, "sbom:{sbom}", --output, cyclonedx-json]' in shown.err
