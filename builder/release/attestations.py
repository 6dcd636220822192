"""Checks the signature, test results and provenance of a released image, without its checkout.

Only documents that a trusted signer signed count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import AliasPath, BaseModel, Field

from builder.common.errors import ImageTestError, VerifyError
from builder.common.files import short_digest
from builder.common.reference import ImageRef
from builder.common.text import listed, printable
from builder.evidence import reports, sbom_and_provenance, signing
from builder.evidence.results import Requirement
from builder.evidence.signing import Trust
from builder.layers import oci
from builder.layers.oci import LayerWheels
from builder.matrix import tags
from builder.matrix.tags import ADDED_LABEL, PARENT_LABEL, PLAN_LABEL
from builder.release.image_sources import RegistrySource

SHOWN = 5  # wheels that are missing
NO_STATEMENT = "no statement of a trusted signer"


State = Literal["signed", "as planned", "same", "different"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result for one part of an image; `detail` is the reason.

    `signed` by a trusted signer, `as planned` by this checkout, `same` as what it was compared with; `different` is
    a failure.
    """

    part: str
    digest: str
    state: State
    detail: str = ""


class _Dependency(BaseModel, frozen=True):
    sha256: str = Field("", validation_alias=AliasPath("digest", "sha256"))


class _Provenance(BaseModel, frozen=True):
    """The plan of an image, and its packages; the first of them is the parent of an image that `builder add` made."""

    plan: str = Field("", validation_alias=AliasPath("buildDefinition", "internalParameters", "plan"))
    dependencies: tuple[_Dependency, ...] = Field(
        (), validation_alias=AliasPath("buildDefinition", "resolvedDependencies")
    )
    revision: str = Field("", validation_alias=AliasPath("buildDefinition", "externalParameters", "revision"))


@dataclass(frozen=True, kw_only=True)
class Attestations:
    """Signatures and statements of trusted signers about an image; `reference` is the name that the user gave."""

    source: RegistrySource
    reference: ImageRef
    trust: Trust

    def signatures(self) -> Iterator[Finding]:
        """The signatures of the index that names the image, if there is one, and of the image as its cell.

        Each must be for the tag of the reference.
        """
        name = self.reference.repository.rpartition("/")[2]
        if self.source.index:
            yield self._signature("signature of the index", self.source.index, {"image": name})
        yield self._signature("signature", self._digest, {"cell": self.source.cell, "image": name})

    def _signature(self, part: str, digest: str, annotations: Mapping[str, str]) -> Finding:
        # Signatures are for a tag or a digest; a reference without either means `latest`.
        tag = self.reference.tag if self.reference.digest else self.reference.target
        signer, signatures = signing.signer_of_manifest(self.source.repository, digest, annotations, self.trust)
        if not signer:
            as_cell = f"as cell {annotations['cell'][:100]!a} of" if "cell" in annotations else "as"
            detail = f"no trusted signer signed it {as_cell} {annotations['image']}"
        elif not any(_is_for(signature, tag) for signature in signatures):
            signed = sorted(
                {tag for signature in signatures for tag in (signature.get("tag"), signature.get("release")) if tag}
            )
            detail = f"signed for {', '.join(signed) or 'no tag'}, not for {tag}"
        else:
            return Finding(part=part, digest=digest, state="signed", detail=f"by {signer}")
        return Finding(part=part, digest=digest, state="different", detail=detail)

    @property
    def _digest(self) -> str:
        return self.source.image.manifest.digest

    def _statements(self, kind: str) -> list[bytes]:
        return signing.statements_of_image(self.source.repository, self._digest, kind, self.trust)

    def _finding(self, name: str, detail: str, state: Literal["signed", "different"] = "different") -> Finding:
        return Finding(part=name, digest=self._digest, state=state, detail=detail)

    def test_results(self) -> Finding:
        cell, plan = self.source.cell, self.source.image.labels.get(PLAN_LABEL, "")
        requirement = Requirement(image=self._digest, cell=cell, plan=plan)
        predicates = self._statements(reports.TEST_RESULT)
        if not predicates and ADDED_LABEL in self.source.image.labels:  # its tests are optional
            return self._finding("test results", "not tested: `builder add --test` would do it", "signed")
        if not predicates:
            return self._finding("test results", NO_STATEMENT)
        coverage = reports.stated_coverage(predicates, requirement)
        try:
            coverage.require_pass(cell)
        except ImageTestError as error:
            return self._finding("test results", str(error).removeprefix(f"{cell}: "))
        return self._finding("test results", f"{len(coverage.passed)} passed, gpu: {coverage.gpu_status}", "signed")

    def provenance(self, contents: Iterable[LayerWheels | None]) -> Finding:
        """Compares the provenance with the parent or the plan of the image, and with the wheels of its own layers."""
        stated, reason = self._provenance
        if stated is None:
            return self._finding("provenance", reason)
        locked = {dependency.sha256 for dependency in stated.dependencies}
        wheels = {sha256: file for content in contents if content for file, sha256 in content.wheels}
        if missing := [printable(file[:100]) for sha256, file in wheels.items() if sha256 not in locked]:
            return self._finding("provenance", f"it does not name {listed(missing, SHOWN)}")
        if self._parent:
            return self._finding("provenance", f"parent {short_digest(self._parent)}", "signed")
        return self._finding("provenance", f"commit {self.revision}" if self.revision else "no commit", "signed")

    @property
    def revision(self) -> str:
        """The commit that the provenance names; empty if it names none."""
        stated, _ = self._provenance
        return stated.revision[:60] if stated else ""

    @property
    def _parent(self) -> str:
        labels = self.source.image.labels
        return labels.get(PARENT_LABEL, "") if ADDED_LABEL in labels else ""

    @cached_property
    def _provenance(self) -> tuple[_Provenance | None, str]:
        """A signed provenance of the plan or the parent in the labels, or the reason that there is none."""
        reason, plan = NO_STATEMENT, self.source.image.labels.get(PLAN_LABEL)
        for content in self._statements(sbom_and_provenance.PROVENANCE):  # a later release may attach a corrected one
            try:
                stated = oci.parse_document(_Provenance, content, "provenance", hint="")
            except VerifyError as error:
                reason = str(error)
                continue
            parent = f"sha256:{stated.dependencies[0].sha256}" if stated.dependencies else ""
            if (self._parent == parent) if self._parent else (stated.plan == plan):
                return stated, ""
            reason = f"it is about another {'parent' if self._parent else 'plan'}"
        return None, reason


def _is_for(signature: Mapping[str, str], tag: str) -> bool:
    """True if a signature is for a tag; also for no tag, if the image is named by its digest."""
    if tags.is_stamp(tag.rpartition("-")[2]):
        return signature.get("release") == tag
    return not tag or tags.is_tag_of(tag, signature.get("tag", ""))
