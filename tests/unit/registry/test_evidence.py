"""Evidence: passes, files that cannot be read, and whether evidence is still valid."""

from __future__ import annotations

import shutil
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
    [None, b"", b"{", b"[]", b"\xff\xfe", b'{"image_id": "x"}'],
    ids=["absent", "empty", "cut short", "a list", "not UTF-8", "incomplete"],
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
    assert evidence.why_invalid(partial(evidence.read, tmp_path), tests, "p", GOOD["suite"]) == reason
    assert evidence.why_outdated(tests, "p", GOOD["suite"]) == ("" if reason == "tests failed" else reason)
    assert evidence.why_invalid(partial(evidence.read, tmp_path), None, "p", GOOD["suite"]) == "not tested"


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
    reason = evidence.why_invalid(
        partial(evidence.read, tmp_path), evidence_with(reused={OTHER: ("thorough",)}), "p", GOOD["suite"]
    )
    assert reason == (f"it relies on tests of {name}, whose evidence is no longer valid" if name else "")


def test_the_gpu_status_has_the_reason() -> None:
    assert evidence_with(gpu_reason="no driver").gpu_status == "not run (no driver)"
    assert evidence_with(gpu="passed").gpu_status == "passed"


def test_gpu_has_three_states() -> None:
    with pytest.raises(ValidationError):
        evidence_with(gpu="skipped")


@pytest.mark.parametrize(
    "name",
    [
        "tests/images/test_base.py",
        "tests/images/conftest.py",
        "tests/images/notebooks/science.ipy",
        "tests/gpu/test_cuda.py",
    ],
)
def test_a_changed_file_of_the_suite_is_named(tmp_path: Path, name: str) -> None:
    before = evidence.suite(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("assert 1")
    first = evidence.suite(tmp_path)
    (tmp_path / name).write_text("assert 2")
    second = evidence.suite(tmp_path)
    for old, new in ((before, first), (first, second), (second, before)):
        assert evidence.changed(old, new) == [name]
    assert evidence.changed(second, second) == []


def test_other_files_are_no_part_of_the_suite(tmp_path: Path) -> None:
    """An editor's swap file and a changed mode made all evidence invalid."""
    test = tmp_path / "tests/images/test_base.py"
    test.parent.mkdir(parents=True)
    test.write_text("assert 1")
    before = evidence.suite(tmp_path)
    for name in (".test_base.py.swp", "test_base.py~", "4913"):
        (test.parent / name).write_text("x")
    test.chmod(0o755)
    assert evidence.suite(tmp_path) == before


def test_the_program_that_runs_the_tests_is_part_of_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = evidence.suite(tmp_path)
    assert sorted(before) == sorted(f"builder/{name}" for name in evidence.RUNNERS)
    program = tmp_path / "program"
    shutil.copytree(evidence.PROGRAM, program)
    (program / "build/image_tests.py").write_text("# edited")
    monkeypatch.setattr(evidence, "PROGRAM", program)
    assert evidence.changed(before, evidence.suite(tmp_path)) == ["builder/build/image_tests.py"]
