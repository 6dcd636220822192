"""Reports: evidence that is attached to an image in a registry, and usually signed.

A report counts if its evidence counts, and if a signer that `evidence` in matrix.yaml lists has signed the report. An
unsigned report counts if this machine ran the tests. A release attaches the evidence that counted to the image as one
signed statement, for readers without a checkout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ValidationError

from builder.common.errors import VerifyError
from builder.common.files import short_digest
from builder.evidence import signing
from builder.evidence.results import OWN, Coverage, Evidence, Proof, Requirement, coverage_of, read_evidence
from builder.evidence.signing import Signer, Trust
from builder.layers import oci
from builder.layers.oci import Descriptor
from builder.matrix.tags import CELL_LABEL, LABEL
from builder.registry import artifacts
from builder.registry.client import Repository
from builder.registry.failures import RejectedError

TYPE = "application/vnd.gpu-images.evidence.v2+json"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"  # a kind of predicate


def attach_evidence(
    repository: Repository, image: Descriptor, results: Iterable[Evidence], signer: Signer | None
) -> None:
    """Attaches evidence to an image in a registry, unless it is attached; signed if there is a signer."""
    with artifacts.attaching(repository, image) as attachments:
        for evidence in results:
            state = "passed" if evidence.is_pass else "failed"
            # Registries and oras show them, so that users see the state before they pull the image.
            notes = {
                CELL_LABEL: evidence.cell,
                f"{LABEL}.tests": state,
                f"{LABEL}.gpu": evidence.gpu_state,
                artifacts.CREATED: evidence.finished,
            }
            report = attachments.add(TYPE, {TYPE: evidence.model_dump_json().encode()}, notes)
            if signer:
                # A manifest of its own: on the image itself, signers at the same time lose statements of each other,
                # and cosign 3 hides those of cosign 2.
                signer.sign_manifest(repository, report.descriptor)


def registry_coverage(
    repository: Repository,
    requirement: Requirement,
    trust: Trust,
    state: Path,
    *,
    allow_unsigned: bool = False,
) -> Coverage:
    """The coverage by the reports that are attached to an image. Raises RegistryError, SigningError.

    `state` is the folder with this machine's own evidence. `allow_unsigned` accepts reports that nobody trusted signed.
    """
    own = read_evidence(state, requirement.image)
    reports: list[Proof] = []
    refused: list[str] = []
    for artifact in artifacts.attached(repository, requirement.image, TYPE):
        try:
            documents = artifacts.read_artifact(repository, artifact, TYPE, requirement.image) or {}
            try:
                evidence = Evidence.model_validate_json(documents.get(TYPE, b""))
            except ValidationError as error:
                raise VerifyError("it cannot be read") from error
            if reason := requirement.why_not_met(evidence):
                raise VerifyError(reason)
            is_signed = signing.has_signature(repository, artifact)  # without one, neither cosign nor a key is needed
            signer = signing.signer_of_manifest(repository, artifact, {}, trust)[0] if is_signed else ""
            signer = signer or (OWN if evidence in own else "")
            if not (signer or allow_unsigned):
                reason = "no signer listed under `evidence` in matrix.yaml signed it" if is_signed else "it is unsigned"
                raise VerifyError(f"{reason}, and this machine did not run these tests")
            reports.append(Proof(evidence=evidence, signer=signer, artifact=artifact))
        except (VerifyError, RejectedError) as error:
            refused.append(f"report {short_digest(artifact)} does not count: {error}")
    return coverage_of(reports, refused)


class _TestResult(BaseModel, frozen=True):
    evidence: tuple[Evidence, ...]


def test_result(coverage: Coverage) -> bytes:
    """A predicate with the results of an image that a trusted signer signed or this machine ran; empty without any.

    Source: in-toto attestation framework, "Test Result", version 0.1.
    """
    signed = coverage_of(report for report in coverage.reports if report.signer)
    if not signed.reports:
        return b""
    files = {name: digest for result in signed.newest for name, digest in result.suite.items()}
    predicate = {
        "result": "FAILED" if signed.failure else "PASSED",
        "configuration": [
            {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}} for name, digest in files.items()
        ],
        "passedTests": signed.passed,
        "failedTests": signed.failed,
        "evidence": [report.evidence.model_dump(mode="json") for report in signed.reports],
    }
    return json.dumps(predicate).encode()


def stated_coverage(predicates: Iterable[bytes], requirement: Requirement) -> Coverage:
    """The coverage by signed predicates of the kind TEST_RESULT."""
    reports: list[Proof] = []
    refused: list[str] = []
    for predicate in predicates:
        try:
            results = oci.parse_document(_TestResult, predicate, "statement", hint="").evidence
        except VerifyError as error:
            refused.append(str(error))
            continue
        for evidence in results:
            if reason := requirement.why_not_met(evidence):
                refused.append(reason)
            else:
                reports.append(Proof(evidence=evidence, signer=""))
    return coverage_of(reports, refused)
