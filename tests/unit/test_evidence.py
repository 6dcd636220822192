"""Evidence: what counts as a pass, and what happens to a file that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from builder import evidence
from builder.evidence import Evidence

ID = "sha256:" + "a" * 64
GOOD = {"image_id": ID, "cell": "c", "plan": "p", "suite": "s", "passed": ("t",), "failed": (), "gpu": "not run"}


def made(**changes: Any) -> Evidence:
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
    ],
)
def test_what_is_a_pass(changes: dict[str, Any], is_pass: bool) -> None:
    assert made(**changes).is_pass is is_pass


def test_write_and_read(tmp_path: Path) -> None:
    one = made(failed=("x",))
    evidence.write(tmp_path, one)
    assert evidence.read(tmp_path, ID) == one
    assert evidence.path(tmp_path, ID).name == f"sha256-{'a' * 64}.json"


@pytest.mark.parametrize(
    "blob",
    [None, b"", b"{", b"[]", b"\xff\xfe", b'{"image_id": "x"}'],
    ids=["absent", "empty", "cut short", "a list", "not UTF-8", "incomplete"],
)
def test_what_cannot_be_read_is_no_evidence(tmp_path: Path, blob: bytes | None) -> None:
    path = evidence.path(tmp_path, ID)
    path.parent.mkdir(parents=True)
    if blob is not None:
        path.write_bytes(blob)
    assert evidence.read(tmp_path, ID) is None


def test_evidence_says_why_a_gpu_was_not_there() -> None:
    assert made(gpu_reason="no driver").gpu_told == "not run (no driver)"
    assert made(gpu="passed").gpu_told == "passed"


def test_a_test_with_nothing_to_check_is_no_pass() -> None:
    assert not made(passed=(), not_applicable=("t",)).is_pass


def test_figures_lie_beside_the_evidence_until_there_are_none(tmp_path: Path) -> None:
    evidence.write_figures(tmp_path, ID, [])
    assert not list(tmp_path.rglob("*.json"))
    evidence.write_figures(tmp_path, ID, [{"driver": "570.1"}])
    path = evidence.figures_path(tmp_path, ID)
    assert path.parent == evidence.path(tmp_path, ID).parent
    assert json.loads(path.read_text()) == [{"driver": "570.1"}]
    evidence.write_figures(tmp_path, ID, [])
    assert not path.exists()


def test_gpu_has_three_states() -> None:
    with pytest.raises(ValidationError):
        made(gpu="skipped")


@pytest.mark.parametrize("name", ["tests/images/test_base.py", "tests/images/conftest.py", "tests/gpu/test_cuda.py"])
def test_other_tests_other_suite(tmp_path: Path, name: str) -> None:
    before = evidence.suite_digest(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("assert 1")
    first = evidence.suite_digest(tmp_path)
    (tmp_path / name).write_text("assert 2")
    assert len({before, first, evidence.suite_digest(tmp_path)}) == 3
