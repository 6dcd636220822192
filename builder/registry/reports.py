"""Evidence in a registry: attached to the image that it is about, usually signed, it is a report.

A report counts if its evidence does, and if a signer that `evidence` in matrix.yaml lists has signed it. An unsigned
one counts if this machine ran the tests itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from builder.common.errors import VerifyError
from builder.common.files import short_digest
from builder.layers.blobs import Descriptor
from builder.matrix.project import Project
from builder.registry import artifacts, signing
from builder.registry.client import Registry
from builder.registry.evidence import NOT_RUN, OWN, Coverage, Evidence, Report, Requirement, coverage_of, read_evidence
from builder.registry.failures import RejectedError
from builder.registry.signing import SIGNATURE_TYPE, Signer, Trust

TYPE = "application/vnd.gpu-images.evidence.v2+json"


def attach_evidence(
    project: Project, registry: Registry, image: Descriptor, results: Iterable[Evidence], signer: Signer | None
) -> None:
    """Attaches evidence to an image in a registry, unless it is attached; signed if there is a signer."""
    trust = Trust.of(project)

    def is_attached(content: bytes) -> bool:
        # A damaged report does not prevent a new one. Any signature counts if the matrix lists no signers.
        return any(
            documents.get(TYPE) == content
            and (
                not signer
                or (
                    SIGNATURE_TYPE in documents
                    and (not trust.signers or bool(signing.trusted_signer(trust, documents, TYPE)))
                )
            )
            for documents in artifacts.documents(registry, image.digest, TYPE)
        )

    with artifacts.attaching(registry, image) as attachments:
        for evidence in results:
            content = evidence.model_dump_json().encode()
            if is_attached(content):
                continue
            state = "failed" if not evidence.is_pass else NOT_RUN if evidence.is_emulated else "passed"
            # Shown by registries and oras, so that whoever pulls sees the state without pulling.
            notes = {
                "gpu-images.cell": evidence.cell,
                "gpu-images.tests": state,
                "gpu-images.gpu": evidence.gpu_state,
                artifacts.CREATED: evidence.finished,
            }
            attachments.add(TYPE, signing.signed(TYPE, content, signer), notes)


def registry_coverage(
    registry: Registry,
    requirement: Requirement,
    trust: Trust,
    *,
    state: Path | None = None,
    allow_unsigned: bool = False,
) -> Coverage:
    """What the reports that are attached to an image prove. Raises RegistryError, SigningError.

    `state` is where this machine's own evidence is, None without it. `allow_unsigned` accepts reports without a trusted
    signature.
    """
    own = read_evidence(state, requirement.image) if state else []
    reports: list[Report] = []
    refused: list[str] = []
    for artifact in artifacts.attached(registry, requirement.image, TYPE):
        try:
            documents = artifacts.read_artifact(registry, artifact, TYPE, requirement.image) or {}
            try:
                evidence = Evidence.model_validate_json(documents.get(TYPE, b""))
            except ValidationError as error:
                raise VerifyError("it cannot be read") from error
            if reason := requirement.why_not_met(evidence):
                raise VerifyError(reason)
            signer = signing.trusted_signer(trust, documents, TYPE) or (OWN if evidence in own else "")
            if not (signer or allow_unsigned):
                is_signed = SIGNATURE_TYPE in documents
                reason = "no signer listed under `evidence` in matrix.yaml signed it" if is_signed else "it is unsigned"
                raise VerifyError(f"{reason}, and this machine did not run these tests")
            reports.append(Report(evidence=evidence, signer=signer, artifact=artifact))
        except (VerifyError, RejectedError) as error:
            refused.append(f"report {short_digest(artifact)} does not count: {error}")
    return coverage_of(reports, refused)
