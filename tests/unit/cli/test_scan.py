"""`builder scan`: what it prints, and the exit code."""

from __future__ import annotations

import json

import pytest

from builder.common.errors import RefusedError
from builder.matrix.project import Project
from builder.registry import scan
from builder.registry.scan import ReleasedScan, ScanRecord
from tests.unit.cli.conftest import CELL, Run

DIGEST = "sha256:" + "a" * 64


def released_scan(cell: str, exit_status: int) -> ReleasedScan:
    record = ScanRecord(
        image=DIGEST, command=("scanner",), exit_status=exit_status, time="2026-11-23T00:00:00Z", output=DIGEST
    )
    error = RefusedError(f"{cell}: refused by scanner (exit status 2)\n  | CVE-1") if exit_status else None
    return ReleasedScan(cell=cell, digest=DIGEST, record=record, error=error)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[ReleasedScan]:
    """What the scans of released images give."""
    scans: list[ReleasedScan] = []
    monkeypatch.setattr(scan, "scan_released", lambda *_, **__: scans)
    return scans


def test_refused_images_fail_the_command(run: Run, scans: list[ReleasedScan]) -> None:
    scans += [released_scan(CELL, 0), released_scan("second", 2), released_scan("third", 2)]
    shown = run("scan")
    assert shown.code == 16
    assert (
        "2 of 3 images were refused or not scanned\nsecond: refused by scanner (exit status 2)\n  | CVE-1" in shown.err
    )
    assert "third: refused" in shown.err


def test_the_result_for_scripts_is_printed_before_the_command_fails(run: Run, scans: list[ReleasedScan]) -> None:
    scans.append(released_scan(CELL, 2))
    shown = run("scan", "--format", "json")
    assert shown.code == 16
    [row] = json.loads(shown.out)
    assert (row["cell"], row["digest"], row["record"]["exit_status"]) == (CELL, DIGEST, 2)
    assert row["error"].startswith(f"{CELL}: refused by scanner")


def test_images_that_pass_are_counted(run: Run, scans: list[ReleasedScan]) -> None:
    scans.append(released_scan(CELL, 0))
    shown = run("scan")
    assert shown.code == 0
    assert "1 image scanned, none refused" in shown.err


def test_a_scan_without_a_scanner_is_refused(tiny: Project, run: Run) -> None:
    assert tiny.matrix.scan is None
    shown = run("scan")
    assert shown.code == 2
    assert "`scan` is not set in matrix.yaml" in shown.err
    assert '  command: [grype, "sbom:{sbom}", --fail-on, high]' in shown.err
