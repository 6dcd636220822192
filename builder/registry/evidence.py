"""Test results of one image, stored by its id, and whether they are still valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, StringConstraints, ValidationError

from builder.common import atomic
from builder.common.units import listed
from builder.layers import oci
from builder.layers.oci import Image, Printable
from builder.plan.plan import PlannedImage
from builder.registry.suite import GPU_TESTS, IMAGE_TESTS, Suite


class Evidence(BaseModel, extra="forbid", frozen=True):
    """`suite` is the digest of every file of the tests, and of the program that ran them, by path.

    `gpu` is never `passed` without a GPU; `gpu_reason` says why GPU tests were not run. `not_applicable` are tests
    with nothing to check on that GPU: they count neither as passed nor as failed. `reused` are thorough tests that
    another image passed, by its id, and were not run again. `seconds` are durations by test, `figures` what GPU tests
    measured. `machine` is where the tests ran: engine, kernel, and GPUs and driver if there were any. `finished` is
    RFC 3339. Texts are printable: they reach the terminals of other machines.
    """

    image_id: Printable
    cell: Printable
    plan: Printable
    suite: dict[Printable, Printable]
    passed: tuple[Printable, ...]
    failed: tuple[Printable, ...]
    gpu: Literal["passed", "failed", "not run"]
    gpu_reason: Printable = ""
    not_applicable: tuple[Printable, ...] = ()
    reused: dict[Printable, tuple[Printable, ...]] = {}
    seconds: dict[Printable, float] = {}
    figures: tuple[dict[Printable, Any], ...] = ()
    machine: dict[Printable, Printable] = {}
    finished: Annotated[str, StringConstraints(pattern=f"^$|{oci.TIME}")] = ""

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


def why_incomplete(evidence: Evidence, components: Sequence[str], suite: Suite) -> str:
    """Why a pass does not cover the tests of an image with these components, or has others; empty if it covers them.

    How often a test with parameters runs cannot be read from its file: one result is enough.
    """
    image_tests, gpu_tests = (suite.of_image(components, folder) for folder in (IMAGE_TESTS, GPU_TESTS))
    passed, not_applicable, reused = (
        {name.partition("[")[0] for name in names}
        for names in (evidence.passed, evidence.not_applicable, chain.from_iterable(evidence.reused.values()))
    )
    if unknown := (passed - image_tests - gpu_tests) | (not_applicable - gpu_tests) | (reused - image_tests):
        return f"it has results of tests that this image does not have: {listed(sorted(unknown), 1)}"
    is_on_gpu = bool(gpu_tests & (passed | not_applicable))
    missing = image_tests - passed - reused
    if is_on_gpu or evidence.gpu == "passed":
        missing |= gpu_tests - passed - not_applicable
    if missing:
        return f"it lacks results of tests: {listed(sorted(missing), 1)}"
    if is_on_gpu != (evidence.gpu == "passed") or (is_on_gpu and not gpu_tests & passed):
        return f"its GPU test results do not match `gpu: {evidence.gpu}`"
    return ""


def why_invalid(
    lookup: Callable[[str], Evidence | None], evidence: Evidence | None, image: PlannedImage, suite: Suite
) -> str:
    """Why evidence does not prove that a planned image passes the current test suite; empty if it does.

    `lookup` is that of `why_failed`.
    """
    reason = why_outdated(evidence, image.digest, suite.files)
    if reason or evidence is None:
        return reason
    return why_failed(lookup, evidence, suite.files) or why_incomplete(evidence, image.components, suite)


def why_failed(lookup: Callable[[str], Evidence | None], evidence: Evidence, suite: Mapping[str, str]) -> str:
    """Why evidence does not prove that all tests that it names passed; empty if it does.

    `lookup` returns the evidence of the images that passed reused tests: without it, those tests did not pass.
    """
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


def check_stored(state: Path, stored: Image, image: PlannedImage, suite: Suite) -> tuple[Evidence | None, str]:
    """The evidence of a stored image, and why the image does not count as tested (empty if it does)."""
    ids = (stored.config.digest, stored.manifest.digest)  # either may be its id in an engine
    evidence = next(filter(None, (read(state, image_id) for image_id in ids)), None)
    return evidence, why_invalid(partial(read, state), evidence, image, suite)


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Files of a test suite that were edited, added or removed."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
