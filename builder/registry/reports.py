"""Test results in a registry, attached to the image that they are about, and whether they cover it.

A report counts if it is about exactly this image, this plan and the test files of this checkout, and if somebody whom
`evidence` in matrix.yaml names has signed it. An unsigned one counts if this machine ran the tests itself. A pass must
have results of all of the image's tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from builder.common import digest
from builder.common.errors import ImageTestError, VerifyError
from builder.layers.oci import Image
from builder.matrix.project import Project
from builder.registry import artifacts, evidence, signing
from builder.registry.client import Registry
from builder.registry.evidence import Evidence
from builder.registry.failures import RejectedError
from builder.registry.signing import SIGNATURE_TYPE, Signer, Trust
from builder.registry.suite import Suite

TYPE = "application/vnd.gpu-images.evidence.v1+json"
OWN = "own results, unsigned"  # in place of a signer


class Report(BaseModel, extra="forbid", frozen=True):
    """Test results of the image whose manifest has the digest `image`.

    `reused` is the evidence of other images whose results count for this one.
    """

    format: Literal[1] = 1
    image: str
    evidence: Evidence
    reused: tuple[Evidence, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A report in a registry, by the digest of its artifact.

    `signer` is a trusted signer, OWN for unsigned results of this machine, or empty for nobody who is trusted.
    """

    artifact: str
    report: Report
    signer: str

    @property
    def evidence(self) -> Evidence:
        return self.report.evidence

    @property
    def gpu(self) -> str:
        """The GPUs that the tests ran on; empty without one."""
        return self.evidence.machine.get("gpu", "")


@dataclass(frozen=True, kw_only=True)
class Readings:
    """The reports of an image that count, the oldest first, and why the others do not."""

    counted: tuple[Reading, ...] = ()
    refused: tuple[str, ...] = ()


def write(project: Project, registry: Registry, image: Image, report: Report, signer: Signer | None) -> None:
    """Attaches a report to an image in a registry, unless it is attached; signed if there is a signer."""
    content = report.model_dump_json().encode()
    # A damaged report does not prevent a new one.
    for documents in artifacts.documents(registry, image.manifest.digest, TYPE):
        if documents.get(TYPE) == content and (not signer or _is_signed(project, documents)):
            return
    proof = report.evidence
    notes = {
        "gpu-images.cell": proof.cell,
        "gpu-images.tests": "passed" if proof.is_pass else "failed",
        "gpu-images.gpu": proof.gpu_status,
        artifacts.CREATED: proof.finished,
    }
    artifacts.attach(registry, image.manifest, TYPE, signing.signed(TYPE, content, signer), notes)


def _is_signed(project: Project, documents: Mapping[str, bytes]) -> bool:
    """Whether a report has a signature that counts; any signature, if the matrix names nobody."""
    if not project.matrix.evidence:
        return SIGNATURE_TYPE in documents
    return bool(signing.trusted_signer(Trust.of(project), documents, TYPE))


def of_evidence(state: Path, image: Image, proof: Evidence) -> Report:
    """The report of an image, from the evidence on this machine."""
    others = (evidence.read(state, image_id) for image_id in proof.reused)
    return Report(image=image.manifest.digest, evidence=proof, reused=tuple(filter(None, others)))


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads the reports of images in a registry.

    `suite` is that of the checkout; without one, the test files that a report names count. `state` is where this
    machine's own evidence is, None without it. `allow_unsigned` accepts reports without a trusted signature.
    """

    trust: Trust
    suite: Suite | None = None
    state: Path | None = None
    allow_unsigned: bool = False

    @classmethod
    def of(cls, project: Project, *, allow_unsigned: bool = False) -> Reader:
        """The reader for the images of a checkout."""
        return cls(
            trust=Trust.of(project),
            suite=Suite.of(project.root),
            state=project.state,
            allow_unsigned=allow_unsigned,
        )

    def read(self, registry: Registry, image: Image, cell: str, plan: str, components: Sequence[str] = ()) -> Readings:
        """All reports that are attached to an image. Raises RegistryError, SigningError.

        `components` are those of the planned image, whose tests `suite` has.
        """
        counted, refused = [], []
        for artifact in artifacts.attached(registry, image.manifest.digest, TYPE):
            try:
                counted.append(self._read(registry, artifact, image, cell, plan, components))
            except (VerifyError, RejectedError) as error:
                refused.append(f"report {digest.short(artifact)} does not count: {error}")
        counted.sort(key=lambda reading: reading.evidence.finished)
        return Readings(counted=tuple(counted), refused=tuple(refused))

    def _read(
        self, registry: Registry, artifact: str, image: Image, cell: str, plan: str, components: Sequence[str]
    ) -> Reading:
        """A report. Raises VerifyError for one that does not count."""
        documents = artifacts.read(registry, artifact, TYPE, image.manifest.digest) or {}
        try:
            report = Report.model_validate_json(documents.get(TYPE, b""))
        except ValidationError as error:
            raise VerifyError("it cannot be read") from error
        self._check_subject(report, image, cell, plan, components)
        signer = signing.trusted_signer(self.trust, documents, TYPE)
        signer = signer or (OWN if self._is_own(image, report) else "")
        if not (signer or self.allow_unsigned):
            is_signed = SIGNATURE_TYPE in documents
            reason = "no signer listed under `evidence` in matrix.yaml signed it" if is_signed else "it is unsigned"
            raise VerifyError(f"{reason}, and this machine did not run these tests")
        return Reading(artifact=artifact, report=report, signer=signer)

    def _is_own(self, image: Image, report: Report) -> bool:
        if self.state is None:
            return False
        own = evidence.read(self.state, report.evidence.image_id)
        return own is not None and of_evidence(self.state, image, own) == report

    def _check_subject(self, report: Report, image: Image, cell: str, plan: str, components: Sequence[str]) -> None:
        """Raises VerifyError for a report that is not about this image and the tests of this checkout."""
        proof = report.evidence
        if report.image != image.manifest.digest or proof.image_id not in (image.manifest.digest, image.config.digest):
            raise VerifyError("it is about another image")
        if proof.cell != cell:
            raise VerifyError(f"it is about the cell {proof.cell[:100]!a}")
        if proof.plan != plan:
            raise VerifyError("it is about another plan")
        if not all(digest.is_digest(other.image_id) for other in report.reused):
            raise VerifyError("it reuses results of an image without a digest")
        if reason := evidence.why_outdated(proof, plan, self._suite(report)):
            raise VerifyError(reason)
        if self.suite and proof.is_pass and (reason := evidence.why_incomplete(proof, components, self.suite)):
            raise VerifyError(reason)

    def proof(self, readings: Readings, cell: str) -> Reading:
        """The report to rely on: a passing one, with GPU tests if there is one.

        Raises ImageTestError if no report counts, or if the newest one from some kind of GPU is not a pass.
        """
        newest = {reading.gpu: reading for reading in readings.counted}
        if not newest:
            raise ImageTestError("\n  ".join([f"{cell}: no valid test results", *readings.refused]))
        for gpu, reading in newest.items():
            if reason := self.why_failed(reading.report):
                raise ImageTestError(f"{cell}: {reason}{f' on {gpu}' if gpu else ''}")
        return max(newest.values(), key=lambda reading: (reading.evidence.gpu == "passed", reading.evidence.finished))

    def why_failed(self, report: Report) -> str:
        """Why a report that counts does not prove that all tests passed; empty if it does."""
        others = {other.image_id: other for other in report.reused}
        return evidence.why_failed(others.get, report.evidence, self._suite(report))

    def _suite(self, report: Report) -> Mapping[str, str]:
        return report.evidence.suite if self.suite is None else self.suite.files
