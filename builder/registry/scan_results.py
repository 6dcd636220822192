"""Results of scans in a registry, attached to the image that they are about, and scans of released images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from builder.common.errors import RegistryError, SigningError, VerifyError
from builder.index.host import Host
from builder.layers import oci
from builder.layers.blobs import Descriptor
from builder.matrix.project import Project
from builder.plan.plan import PlannedImage
from builder.registry import artifacts, publish, scan, signing, statements
from builder.registry.artifacts import Attachments
from builder.registry.client import Registry
from builder.registry.failures import RejectedError
from builder.registry.scan import Finding, Result
from builder.registry.signing import Signer, Trust

TYPE = "application/vnd.gpu-images.scan.v1+json"


def add(attachments: Attachments, result: Result, signer: Signer | None) -> None:
    """Adds a result to the attachments of an image; signed if there is a signer. Raises RegistryError, SigningError."""
    documents = signing.signed(TYPE, result.model_dump_json().encode(), signer)
    attachments.add(TYPE, documents, {"gpu-images.scan": result.summary, artifacts.CREATED: result.time})


def state(project: Project, registry: Registry, digest: str) -> str:
    """The newest result for an image, its day, and whether a trusted signer did not sign it; `unscanned` without one.

    Raises RegistryError.
    """
    try:
        listed = artifacts.attached(registry, digest, TYPE)
    except VerifyError:
        return f"{scan.UNSCANNED}, invalid list"
    results: list[tuple[str, str]] = []  # the time and the text of each; the list of attachments is not signed
    for artifact in listed:
        with suppress(VerifyError, RejectedError):
            documents = artifacts.read(registry, artifact, TYPE, digest) or {}
            result = oci.parse(Result, documents.get(TYPE, b""), f"scan {artifact}", hint="")
            if result.image == digest:
                text = f"{result.summary} {result.time[:10]}{_without_signature(project, documents)}"
                results.append((result.time, text))
    if results:
        return max(results)[1]
    return f"{scan.UNSCANNED}, {len(listed)} invalid" if listed else scan.UNSCANNED


def _without_signature(project: Project, documents: Mapping[str, bytes]) -> str:
    try:
        return "" if signing.trusted_signer(Trust.of(project), documents, TYPE) else ", unsigned"
    except SigningError:
        return ", signature not checked"


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """A scan of a released image: its result and the findings that refuse it, or why there is no result."""

    cell: str
    digest: str
    result: Result | None = None
    refused: tuple[Finding, ...] = ()
    failure: str = ""

    @property
    def state(self) -> str:
        if self.result is None:
            return scan.FAILED
        return "refused" if self.refused else self.result.summary

    def as_data(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "cell": self.cell,
            "digest": self.digest,
            "state": self.state,
            "failure": self.failure,
            "counts": self.result.counts if self.result else {},
            "result": self.result.model_dump() if self.result else None,
        }


class Scanner:
    """Scans the images that full tags name, and attaches the results. `registry` overrides the one of matrix.yaml."""

    def __init__(self, project: Project, host: Host, registry: str, signer: Signer | None) -> None:
        """Raises UsageError without a scanner or a registry."""
        self.settings = scan.settings_of(project)
        publish.require_registry(project, registry)
        self._project, self._host, self._registry, self._signer = project, host, registry, signer

    def scan(self, images: tuple[PlannedImage, ...]) -> Iterator[Scanned]:
        """A scan of each image that is released. Raises RegistryError, SigningError."""
        for planned in images:
            full = publish.references(planned, self._registry)[0]
            registry = Registry(full, host=self._host, write=True)
            manifest = registry.manifest(full.tag)
            if manifest is None:
                continue
            digest = manifest.digest
            try:
                result = scan.scan(self.settings, digest, self._sbom(registry, digest))
                image = Descriptor(media_type=manifest.media_type, digest=digest, size=len(manifest.content))
                with artifacts.attaching(registry, image) as attachments:
                    add(attachments, result, self._signer)
            except (VerifyError, RegistryError, SigningError) as error:
                yield Scanned(cell=planned.id, digest=digest, failure=str(error))
                continue
            yield Scanned(cell=planned.id, digest=digest, result=result, refused=result.refused(self.settings.refuse))

    def _sbom(self, registry: Registry, digest: str) -> bytes:
        """The SBOM of an image: signed, if matrix.yaml lists trusted signers. Raises VerifyError, SigningError."""
        trust = Trust.of(self._project)
        sboms: Iterable[bytes]
        if trust.signers:
            # The last one first: an earlier release may have attached one without source packages.
            sboms = reversed(signing.statements_of_image(registry, digest, statements.SBOM, trust))
        else:
            attached = artifacts.documents(registry, digest, statements.SBOM_TYPE)
            sboms = (documents.get(statements.SBOM_TYPE, b"") for documents in attached)
        for content in sboms:
            with suppress(VerifyError):
                if scan.subject(content) == digest:
                    return content
        kind = "signed by a trusted signer " if trust.signers else ""
        raise VerifyError(f"no SBOM {kind}is attached to this image: `builder release` attaches one")
