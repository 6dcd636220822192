"""Test results of images: evidence of one run, reports that count, and the coverage by all of them together.

Evidence names one image, by the digest of its manifest, and one run on one machine: of the image tests, or of the GPU
tests. The machine that ran the tests keeps the evidence in `.builder/evidence`. `builder.evidence.reports` attaches
evidence to the image in a registry. No machine copies the results of another one.

Evidence counts if it is for exactly this image, this plan and the test files of this checkout. A pass must have results
of all tests that the image must pass. The newest image tests must be a pass, and so must the newest GPU tests on every
kind of GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, StringConstraints, ValidationError

from builder.common.errors import ImageTestError
from builder.common.files import digest_of_bytes, short_digest, write_atomically
from builder.common.text import counted, listed
from builder.evidence.suite import GPU_TESTS, IMAGE_TESTS, Suite
from builder.layers import oci
from builder.layers.oci import Printable
from builder.plan.plan import PlannedImage

OWN = "own results, unsigned"  # in place of a signer
Kind = Literal["image", "gpu"]
GpuState = Literal["passed", "failed", "not run"]


class Evidence(BaseModel, extra="forbid", frozen=True):
    """The results of one run of the image tests or of the GPU tests.

    `image` is the digest of the image's manifest (of one built from a Dockerfile, its id in the engine). `suite` has
    the digest of every file of the tests, and of the program that ran them, by path. `reasons` are the first lines of
    failures. `not_applicable` are GPU tests with nothing to check on that GPU: they count neither as passed nor as
    failed. `no_gpu` is the reason that the machine that ran the image tests did not run the GPU tests, empty if it did.
    `seconds` are durations by test, `figures` the measurements of GPU tests. `machine` describes the machine of the
    tests: engine, kernel, and GPUs and driver for GPU tests. `finished` is RFC 3339. Texts are printable: they reach
    the terminals of other machines.
    """

    image: Printable
    cell: Printable
    plan: Printable
    suite: dict[Printable, Printable]
    kind: Kind
    passed: tuple[Printable, ...]
    failed: tuple[Printable, ...]
    reasons: dict[Printable, Printable] = {}
    not_applicable: tuple[Printable, ...] = ()
    no_gpu: Printable = ""
    seconds: dict[Printable, float] = {}
    figures: tuple[dict[Printable, Any], ...] = ()
    machine: dict[Printable, Printable] = {}
    finished: Annotated[str, StringConstraints(pattern=f"^$|{oci.TIME}")] = ""

    @property
    def is_pass(self) -> bool:
        return bool(self.passed) and not self.failed

    @property
    def gpu(self) -> str:
        """The GPUs that the tests ran on; empty for image tests."""
        return self.machine.get("gpu", "") if self.kind == "gpu" else ""

    @property
    def gpu_state(self) -> str:
        """The state of the GPU tests on the machine of this run, with the reason if they were not run."""
        if self.kind == "gpu":
            return "passed" if self.is_pass else "failed"
        return f"not run ({self.no_gpu})" if self.no_gpu else "not run"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Evidence that counts. `signer` is a trusted signer, OWN for unsigned results of this machine, or empty for
    evidence without a trusted signature. `artifact` is its digest in a registry, empty for local evidence.
    """

    evidence: Evidence
    signer: str
    artifact: str = ""


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """The image, plan and test files of evidence that counts for an image, and the tests that a pass must have.

    Without a suite, evidence may name any test files, and a pass any tests. `components` and `thorough` are those of
    the planned image, whose tests the suite has.
    """

    image: str
    cell: str
    plan: str
    suite: Suite | None = None
    components: tuple[str, ...] = ()
    thorough: frozenset[str] = frozenset()

    @classmethod
    def of(cls, planned: PlannedImage, image: str, suite: Suite) -> Requirement:
        """The requirement for the image with this digest, which was built as planned."""
        return cls(
            image=image, cell=planned.id, plan=planned.plan, suite=suite,
            components=planned.components, thorough=planned.thorough,
        )  # fmt: skip

    def why_not_met(self, evidence: Evidence) -> str:
        """The reason that evidence does not count, or an empty string."""
        if evidence.image != self.image:
            return "it is about another image"
        if evidence.cell != self.cell:
            return f"it is about the cell {evidence.cell[:100]!a}"
        if evidence.plan != self.plan:
            return "it is about another plan"
        if self.suite is None:
            return ""
        if files := changed_files(evidence.suite, self.suite.files):
            return f"test suite changed since it was tested: {listed(files, 1)}"
        if not evidence.is_pass:
            return ""  # a failure counts even if it is not complete
        # How often a test with parameters runs cannot be read from its file: one result is enough.
        passed, not_applicable = (
            {name.partition("[")[0] for name in names} for names in (evidence.passed, evidence.not_applicable)
        )
        folder = IMAGE_TESTS if evidence.kind == "image" else GPU_TESTS
        present = self.suite.of_image(self.components, folder)
        if unknown := (passed - present) | (not_applicable - (present if folder == GPU_TESTS else set())):
            return f"it has results of tests that this image does not have: {listed(sorted(unknown), 1)}"
        needed = self.suite.of_image(self.components, folder, thorough=self.thorough)
        if missing := needed - passed - not_applicable:
            is_thorough = missing.isdisjoint(self.suite.of_image(self.components, folder, thorough=()))
            whose = " that another image of its command ran" if is_thorough else ""
            return f"it lacks results of tests{whose}: {listed(sorted(missing), 1)}"
        return ""


@dataclass(frozen=True)
class Coverage:
    """The combined result of an image's reports that count, oldest first; `refused` are reasons that others do not."""

    reports: tuple[Proof, ...] = ()
    refused: tuple[str, ...] = ()

    @cached_property
    def newest(self) -> list[Evidence]:
        """The newest evidence of the image tests, then of the GPU tests on each kind of GPU."""
        # Reports are sorted by time: a later one replaces an earlier one with the same key.
        by_kind = {(report.evidence.kind, report.evidence.gpu): report.evidence for report in self.reports}
        return sorted(by_kind.values(), key=lambda evidence: (evidence.kind == "gpu", evidence.finished))

    @property
    def image_tests(self) -> Evidence | None:
        return next((evidence for evidence in self.newest if evidence.kind == "image"), None)

    @property
    def failure(self) -> str:
        """The reason that the image does not count as tested, or an empty string.

        GPU tests may be missing, but not have failed.
        """
        for evidence in self.newest:
            if not evidence.is_pass:
                return f"tests failed{f' on {evidence.gpu}' if evidence.gpu else ''}"
        if self.image_tests is None:
            return self.refused[-1] if self.refused else "not tested"
        return ""

    def require_pass(self, cell: str) -> None:
        """Raises ImageTestError unless the image counts as tested."""
        if not self.reports:
            raise ImageTestError("\n  ".join([f"{cell}: no valid test results", *self.refused]))
        if self.failure:
            raise ImageTestError(f"{cell}: {self.failure}")

    @property
    def gpu(self) -> GpuState:
        """The state of the GPU tests: `passed` only if they passed on each kind of GPU that ran them."""
        passes = [evidence.is_pass for evidence in self.newest if evidence.kind == "gpu"]
        return "not run" if not passes else "passed" if all(passes) else "failed"

    @property
    def gpu_status(self) -> str:
        """The state of the GPU tests, with the reason if they were not run."""
        return self.image_tests.gpu_state if self.gpu == "not run" and self.image_tests else self.gpu

    @property
    def passed(self) -> list[str]:
        return sorted({name for evidence in self.newest for name in evidence.passed})

    @property
    def failed(self) -> list[str]:
        return sorted({name for evidence in self.newest for name in evidence.failed})

    @property
    def summary(self) -> str:
        """The number of tests that passed, and the state of the GPU tests."""
        return f"{counted(len(self.passed), 'test')} passed, gpu: {self.gpu_status}"

    @property
    def signers(self) -> list[str]:
        """The signers of the results that this coverage relies on.

        OWN for unsigned results of this machine, empty for results without a trusted signature.
        """
        names: list[str] = []
        for newest in self.newest:
            passes = [
                report.signer
                for report in self.reports
                if (report.evidence.kind, report.evidence.gpu) == (newest.kind, newest.gpu) and report.evidence.is_pass
            ]
            # A signature on an older pass of the same tests is better than none.
            names.append(
                next((name for name in reversed(passes) if name not in ("", OWN)), passes[-1] if passes else "")
            )
        return list(dict.fromkeys(names))


def coverage_of(reports: Iterable[Proof], refused: Sequence[str] = ()) -> Coverage:
    """The coverage by reports that count; `refused` are the reasons that others do not count."""
    return Coverage(tuple(sorted(reports, key=lambda report: report.evidence.finished)), tuple(refused))


def evidence_path(state: Path, evidence: Evidence) -> Path:
    """The file with this machine's results of these tests: for GPU tests, one for each kind of GPU."""
    gpu = f"-{short_digest(digest_of_bytes(evidence.gpu.encode()))}" if evidence.gpu else ""
    return state / "evidence" / f"{evidence.image.replace(':', '-')}.{evidence.kind}{gpu}.json"


def write_evidence(state: Path, evidence: Evidence) -> None:
    """Replaces the evidence of an earlier run of the same tests, on the same kind of GPU."""
    write_atomically(evidence_path(state, evidence), evidence.model_dump_json(indent=1) + "\n")


def read_evidence(state: Path, image: str) -> list[Evidence]:
    """This machine's evidence of an image. Leaves out files that cannot be read, so their tests are run again."""
    found: list[Evidence] = []
    for path in sorted((state / "evidence").glob(f"{image.replace(':', '-')}.*.json"), reverse=True):
        with suppress(OSError, UnicodeDecodeError, ValidationError):
            found.append(Evidence.model_validate_json(path.read_text(encoding="utf-8")))
    return found


def local_coverage(state: Path, requirement: Requirement) -> Coverage:
    """The coverage of an image by this machine's own results."""
    own: list[Proof] = []
    refused: list[str] = []
    for evidence in read_evidence(state, requirement.image):
        if reason := requirement.why_not_met(evidence):
            refused.append(reason)
        else:
            own.append(Proof(evidence=evidence, signer=OWN))
    return coverage_of(own, refused)


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Files of a test suite that were edited, added or removed."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
