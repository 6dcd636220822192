"""Test results of one image, kept by its id: what may be tagged, and what was never run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from builder import atomic, digest

SUITES = ("tests/images", "tests/gpu")


class Evidence(BaseModel):
    """`suite` is the digest of the tests that ran; `gpu` is never a pass where no GPU was.

    `gpu_reason` says why GPU tests were not run, `not_applicable` which of them had nothing to check on that GPU: they
    count neither as passed nor as failed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    image_id: str
    cell: str
    plan: str
    suite: str
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    gpu: Literal["passed", "failed", "not run"]
    gpu_reason: str = ""
    not_applicable: tuple[str, ...] = ()

    @property
    def is_pass(self) -> bool:
        return bool(self.passed) and not self.failed and self.gpu != "failed"

    @property
    def gpu_told(self) -> str:
        """The state of the GPU tests with what a person would ask next."""
        return f"{self.gpu} ({self.gpu_reason})" if self.gpu_reason else self.gpu


def path(state: Path, image_id: str) -> Path:
    return state / "evidence" / f"{image_id.replace(':', '-')}.json"


def write(state: Path, evidence: Evidence) -> None:
    atomic.write_text(path(state, evidence.image_id), evidence.model_dump_json(indent=1) + "\n")


def read(state: Path, image_id: str) -> Evidence | None:
    """None if there is none, or none that can be read: the tests are then run again."""
    try:
        return Evidence.model_validate_json(path(state, image_id).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


def figures_path(state: Path, image_id: str) -> Path:
    """What the GPU tests measured, beside the evidence."""
    return state / "evidence" / f"{image_id.replace(':', '-')}.gpu.json"


def write_figures(state: Path, image_id: str, figures: Sequence[dict[str, Any]]) -> None:
    """The JSON of every GPU check; without any, what an earlier run measured is forgotten."""
    if figures:
        atomic.write_text(figures_path(state, image_id), json.dumps(list(figures), indent=1) + "\n")
    else:
        figures_path(state, image_id).unlink(missing_ok=True)


def read_figures(state: Path, image_id: str) -> list[dict[str, Any]]:
    """Empty if there are none, or none that can be read."""
    try:
        return list(json.loads(figures_path(state, image_id).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []


def suite_digest(root: Path) -> str:
    """Digest of every file of the image tests: other tests, other evidence."""
    return digest.of_data([digest.of_tree(root, root / suite) for suite in SUITES])
