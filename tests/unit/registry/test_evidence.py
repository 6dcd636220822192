"""Evidence: passes, files that cannot be read, and whether evidence is still valid."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from builder.registry import evidence
from builder.registry.evidence import Evidence

ID = "sha256:" + "a" * 64
GOOD: dict[str, Any] = {
    "image_id": ID,
    "cell": "c",
    "plan": "p",
    "suite": {"tests/images/conftest.py": "s"},
    "passed": ("t",),
    "failed": (),
    "gpu": "not run",
}


def evidence_with(**changes: Any) -> Evidence:
    return Evidence(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "is_pass"),
    [
        ({}, True),
        ({"gpu": "passed"}, True),
        ({"gpu": "failed"}, False),
        ({"failed": ("x",)}, False),
        ({"passed": ()}, False),
        ({"passed": (), "gpu": "passed"}, False),
        ({"passed": (), "not_applicable": ("t",)}, False),
    ],
)
def test_a_pass(changes: dict[str, Any], is_pass: bool) -> None:
    assert evidence_with(**changes).is_pass is is_pass


def test_write_and_read(tmp_path: Path) -> None:
    written = evidence_with(failed=("x",))
    evidence.write(tmp_path, written)
    assert evidence.read(tmp_path, ID) == written
    assert evidence.path(tmp_path, ID).name == f"sha256-{'a' * 64}.json"


@pytest.mark.parametrize(
    "blob",
    [
        None,
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"image_id": "x"}',
        evidence_with(finished="2026-11-22T10:00:00Z").model_dump_json().replace("2026-11-22T10:00:00Z", "x").encode(),
    ],
    ids=["absent", "empty", "cut short", "a list", "not UTF-8", "incomplete", "another time"],
)
def test_a_file_that_cannot_be_read_is_no_evidence(tmp_path: Path, blob: bytes | None) -> None:
    path = evidence.path(tmp_path, ID)
    path.parent.mkdir(parents=True)
    if blob is not None:
        path.write_bytes(blob)
    assert evidence.read(tmp_path, ID) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"plan": "other"}, "not tested"),
        ({"suite": {"a": "1", "b": "2"}}, "test suite changed since it was tested: a and 2 more"),
        ({"failed": ("x",)}, "tests failed"),
    ],
    ids=str,
)
def test_valid_evidence_is_a_pass_of_this_plan_and_suite(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    tests = evidence_with(**changes)
    outdated = evidence.why_outdated(tests, "p", GOOD["suite"])
    assert (outdated or evidence.why_failed(partial(evidence.read, tmp_path), tests, GOOD["suite"])) == reason
    assert outdated == ("" if reason == "tests failed" else reason)
    assert evidence.why_outdated(None, "p", GOOD["suite"]) == "not tested"


OTHER = "sha256:" + "b" * 64


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, ""),
        (None, OTHER),
        ({"suite": {"tests/images/conftest.py": "edited"}}, "c"),
        ({"failed": ("x",)}, "c"),
        ({"passed": ("t", "u")}, "c"),
    ],
    ids=["valid", "none", "test suite changed", "failed", "another test"],
)
def test_evidence_is_valid_only_with_that_of_the_image_whose_results_it_reuses(
    tmp_path: Path, changes: dict[str, Any] | None, name: str
) -> None:
    if changes is not None:
        evidence.write(tmp_path, evidence_with(**{"image_id": OTHER, "passed": ("t", "thorough"), **changes}))
    reason = evidence.why_failed(
        partial(evidence.read, tmp_path), evidence_with(reused={OTHER: ("thorough",)}), GOOD["suite"]
    )
    assert reason == (f"it relies on tests of {name}, whose evidence is no longer valid" if name else "")


def test_the_gpu_status_has_the_reason() -> None:
    assert evidence_with(gpu_reason="no driver").gpu_status == "not run (no driver)"
    assert evidence_with(gpu="passed").gpu_status == "passed"


def test_gpu_has_three_states() -> None:
    with pytest.raises(ValidationError):
        evidence_with(gpu="skipped")
