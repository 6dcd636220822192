"""Test results of one image, stored by its id, and whether they are still valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from builder.common import atomic, digest
from builder.common.units import listed
from builder.layers.oci import Image

IMAGE_TESTS, GPU_TESTS = "tests/images", "tests/gpu"
PROGRAM = Path(__file__).parents[1]
# The modules that decide whether an image passes: they run the tests, assign GPUs and start containers.
RUNNERS = (
    "common/debian.py",
    "engine/client.py",
    "compat/gpus.py",
    "compat/gpu_support.py",
    "layers/installed.py",
    "build/reused_tests.py",
    "build/image_tests.py",
    "build/outcomes.py",
    "build/programs.py",
)


class Evidence(BaseModel, extra="forbid", frozen=True):
    """`suite` is the digest of every file of the tests, and of the program that ran them, by path.

    `gpu` is never `passed` without a GPU; `gpu_reason` says why GPU tests were not run. `not_applicable` are tests
    with nothing to check on that GPU: they count neither as passed nor as failed. `reused` are thorough tests that
    another image passed, by its id, and were not run again. `seconds` are durations by test, `figures` what GPU tests
    measured. `machine` is where the tests ran: engine, kernel, and GPUs and driver if there were any. `finished` is
    RFC 3339.
    """

    image_id: str
    cell: str
    plan: str
    suite: dict[str, str]
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    gpu: Literal["passed", "failed", "not run"]
    gpu_reason: str = ""
    not_applicable: tuple[str, ...] = ()
    reused: dict[str, tuple[str, ...]] = {}
    seconds: dict[str, float] = {}
    figures: tuple[dict[str, Any], ...] = ()
    machine: dict[str, str] = {}
    finished: str = ""

    @property
    def slowest(self) -> list[tuple[str, float]]:
        """The three tests that took longest, by name without their file, with their seconds."""
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])[:3]
        return [(name.rpartition("::")[2], seconds) for name, seconds in longest]

    @property
    def reused_count(self) -> int:
        return sum(map(len, self.reused.values()))

    @property
    def is_pass(self) -> bool:
        return bool(self.passed) and not self.failed and self.gpu != "failed"

    @property
    def gpu_status(self) -> str:
        """The state of the GPU tests, with the reason if they were not run."""
        return f"{self.gpu} ({self.gpu_reason})" if self.gpu_reason else self.gpu


def why_outdated(evidence: Evidence | None, plan: str, suite: Mapping[str, str]) -> str:
    """Why evidence is not about a plan's image and the current test suite; empty if it is."""
    if evidence is None or evidence.plan != plan:
        return "not tested"
    if files := changed(evidence.suite, suite):
        return f"test suite changed since it was tested: {listed(files, 1)}"
    return ""


def why_invalid(
    lookup: Callable[[str], Evidence | None], evidence: Evidence | None, plan: str, suite: Mapping[str, str]
) -> str:
    """Why evidence does not prove that a plan's image passes the current test suite; empty if it does.

    `lookup` returns the evidence of the images that passed reused tests: without it, those tests did not pass.
    """
    reason = why_outdated(evidence, plan, suite)
    if reason or evidence is None:
        return reason
    if not evidence.is_pass:
        return "tests failed"
    for image_id, tests in evidence.reused.items():
        other = lookup(image_id)
        if other is None or changed(other.suite, suite) or not (other.is_pass and set(tests) <= set(other.passed)):
            return f"it relies on tests of {other.cell if other else image_id}, whose evidence is no longer valid"
    return ""


def path(state: Path, image_id: str) -> Path:
    return state / "evidence" / f"{image_id.replace(':', '-')}.json"


def write(state: Path, evidence: Evidence) -> None:
    atomic.write_text(path(state, evidence.image_id), evidence.model_dump_json(indent=1) + "\n")


def read(state: Path, image_id: str) -> Evidence | None:
    """None if there is none or it cannot be read: the tests are then run again."""
    try:
        return Evidence.model_validate_json(path(state, image_id).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


def check_stored(state: Path, stored: Image, plan: str, suite: Mapping[str, str]) -> tuple[Evidence | None, str]:
    """The evidence of a stored image, and why the image does not count as tested (empty if it does)."""
    ids = (stored.config.digest, stored.manifest.digest)  # either may be its id in an engine
    evidence = next(filter(None, (read(state, image_id) for image_id in ids)), None)
    return evidence, why_invalid(partial(read, state), evidence, plan, suite)


def suite(root: Path) -> dict[str, str]:
    """Digest by path of every Python file and notebook of the image tests, and of the modules that run them.

    Other files (an editor's swap file) and file modes change no test.
    """
    paths = [
        path
        for folder in (IMAGE_TESTS, GPU_TESTS)
        for path in digest.tree(root / folder)
        if path.suffix in (".py", ".ipy")
    ]
    files = {path.relative_to(root).as_posix(): path for path in paths}
    files |= {f"builder/{name}": PROGRAM / name for name in RUNNERS}
    return {name: digest.of_bytes(path.read_bytes()) for name, path in sorted(files.items())}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Files of a test suite that were edited, added or removed."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
