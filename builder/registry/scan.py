"""Scans images for vulnerabilities: runs the scanner of matrix.yaml on their SBOM, and attaches what it printed.

The scanner alone decides, by its exit status: 0 accepts the image. A release runs it, and never reads a scan from a
registry: those are for people, and for `builder status`.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from pydantic import AliasPath, BaseModel, Field, StrictInt, StringConstraints

from builder.common.console import View
from builder.common.errors import BuilderError, NoRegistryError, RefusedError, SigningError, UsageError, VerifyError
from builder.common.files import digest_of_bytes
from builder.common.text import Redactor, duration, one_line, printable
from builder.index.host import Host
from builder.layers import oci
from builder.layers.blobs import Descriptor
from builder.layers.oci import Digest
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import SBOM
from builder.plan.plan import PlannedImage
from builder.registry import artifacts, publish, sbom_and_provenance, signing
from builder.registry.artifacts import Attachments
from builder.registry.client import Registry
from builder.registry.failures import RejectedError
from builder.registry.parallel import CHECKS, look_up
from builder.registry.signing import Signer, Trust

TYPE, OUTPUT_TYPE = "application/vnd.gpu-images.scan.v2+json", "text/plain"
UNSCANNED = "unscanned"
TIMEOUT_S = 600
SHOWN_LINES = 15


class ScanRecord(BaseModel, extra="forbid", frozen=True):
    """One run of the scanner on an SBOM; `output` is the digest of what it printed to standard output."""

    image: Digest
    command: tuple[str, ...]
    exit_status: StrictInt
    time: Annotated[str, StringConstraints(pattern=oci.TIME)]
    output: Digest

    @property
    def state(self) -> str:
        return "passed" if self.exit_status == 0 else "failed"


@dataclass(frozen=True, kw_only=True)
class ImageScan:
    """The scan of an image: its record, what the scanner printed, and the error unless it accepted the image."""

    record: ScanRecord
    output: bytes
    refusal: RefusedError | None

    def add_to(self, attachments: Attachments, signer: Signer | None) -> None:
        """Adds the record, signed if there is a signer, and the output. Raises RegistryError, SigningError."""
        documents = signing.signed(TYPE, self.record.model_dump_json().encode(), signer)
        if self.output:  # not every registry stores an empty blob
            documents[OUTPUT_TYPE] = self.output
        attachments.add(TYPE, documents, {artifacts.CREATED: self.record.time})


@dataclass(frozen=True, kw_only=True)
class ReleasedScan:
    """The scan of a released image: `record` is None without a result, `error` if the scanner accepted the image."""

    cell: str
    digest: str
    record: ScanRecord | None = None
    error: BuilderError | None = None


class Scanner:
    """Runs the scanner of matrix.yaml in the checkout, where it finds its own settings. Thread-safe."""

    def __init__(self, project: Project, timeout_s: float = TIMEOUT_S) -> None:
        """Raises UsageError without a scanner."""
        if project.matrix.scan is None:
            raise UsageError(
                "`scan` is not set in matrix.yaml: no image is scanned for vulnerabilities",
                hint="Replace `scan: null` in matrix.yaml with e.g.:\n"
                'scan:\n  command: [grype, "sbom:{sbom}", --fail-on, high]',
            )
        self._project, self._timeout_s = project, timeout_s
        self._settings = project.matrix.scan
        self._slots = threading.BoundedSemaphore(self._settings.parallel)

    def scan_sbom(self, cell: str, image: str, sbom: bytes) -> ImageScan:
        """Scans the SBOM of the image with this digest. Raises VerifyError if the scanner gives no result."""
        program, log = self._settings.command[0], self._project.logs / f"{cell}.scan.log"
        status: int | None = None
        with self._slots, TemporaryDirectory() as folder:
            path, output, messages = (Path(folder) / name for name in ("sbom.json", "output", "messages"))
            path.write_bytes(sbom)
            # Files, as a child of the scanner could keep pipes open after a timeout.
            with output.open("wb") as out, messages.open("wb") as err:
                try:
                    status = subprocess.run(
                        [word.replace(SBOM, str(path)) for word in self._settings.command],
                        cwd=self._project.root, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                        timeout=self._timeout_s, check=False,
                    ).returncode  # fmt: skip
                except subprocess.TimeoutExpired:
                    pass  # what it printed until then is shown below
                except OSError as error:
                    raise VerifyError(
                        f"{cell}: {program}: {(error.strerror or str(error)).lower()}",
                        hint="Install the scanner, or correct `scan.command` in matrix.yaml.",
                    ) from error
            printed = output.read_bytes()
            text = Redactor()(printable(b"\n".join([printed, messages.read_bytes()]).decode(errors="replace")))
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text, encoding="utf-8")
        last = [f"  | {one_line(line)}" for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
        if status is None or status < 0:
            reason = f"no result within {duration(self._timeout_s)}" if status is None else f"ended by signal {-status}"
            raise VerifyError("\n".join([f"{cell}: {program}: {reason}", *last]), hint=f"Full output: {log}")
        record = ScanRecord(
            image=image,
            command=tuple(self._settings.command),
            exit_status=status,
            time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            output=digest_of_bytes(printed),
        )
        refusal: RefusedError | None = None
        if status:
            refusal = RefusedError(
                "\n".join([f"{cell}: refused by {program} (exit status {status})", *last]),
                hint=f"Update the packages, or edit the scanner's own list of exceptions. Full output: {log}",
            )
        return ImageScan(record=record, output=printed, refusal=refusal)

    def scan_tag(
        self, cell: Cell, registry: Registry, tag: str, view: View, signer: Signer | None = None
    ) -> ReleasedScan | None:
        """Scans the image of a cell that a tag names, and attaches the scan; None if there is no such tag.

        Raises NoRegistryError. Other errors are in the result.
        """
        manifest = registry.image_manifest(tag, cell.arch)
        if manifest is None:
            return None
        view.begin(cell.id, "scanning")
        try:
            scan = self.scan_sbom(cell.id, manifest.digest, self._sbom(cell.id, registry, manifest.digest))
            image = Descriptor(media_type=manifest.media_type, digest=manifest.digest, size=len(manifest.content))
            with artifacts.attaching(registry, image) as attachments:
                scan.add_to(attachments, signer)
        except NoRegistryError:
            raise
        except BuilderError as error:
            view.end(cell.id, "failed", "not scanned")
            return ReleasedScan(cell=cell.id, digest=manifest.digest, error=error)
        view.end(cell.id, "failed" if scan.refusal else "done", "refused" if scan.refusal else "")
        return ReleasedScan(cell=cell.id, digest=manifest.digest, record=scan.record, error=scan.refusal)

    def _sbom(self, cell: str, registry: Registry, image: str) -> bytes:
        """The SBOM of an image: signed, if matrix.yaml lists trusted signers. Raises VerifyError, SigningError."""
        trust = Trust.of(self._project)
        if trust.signers:
            # The last one first: an earlier release may have attached one without source packages.
            sboms = signing.statements_of_image(registry, image, sbom_and_provenance.SBOM, trust)[::-1]
        else:
            attached = artifacts.documents(registry, image, sbom_and_provenance.SBOM_TYPE)
            sboms = [documents.get(sbom_and_provenance.SBOM_TYPE, b"") for documents in attached]
        for content in sboms:
            with suppress(VerifyError):
                if oci.parse_document(_SbomSubject, content, "SBOM", hint="").subject == image:
                    return content
        kind = "signed by a trusted signer " if trust.signers else ""
        raise VerifyError(f"{cell}: no SBOM {kind}is attached to this image: `builder release` attaches one")


class _SbomSubject(BaseModel):
    subject: str = Field(validation_alias=AliasPath("metadata", "component", "bom-ref"))


def scan_released(
    project: Project, host: Host, images: Sequence[PlannedImage], view: View, *, registry: str, signer: Signer | None
) -> list[ReleasedScan]:
    """Scans the images that full tags name, several at a time. `registry` overrides the one of matrix.yaml.

    Raises UsageError without a scanner, a registry or a released image, and NoRegistryError.
    """
    scanner = Scanner(project)
    publish.require_registry(project, registry)

    def scan_image(planned: PlannedImage) -> ReleasedScan | None:
        full = publish.references(planned, registry)[0]
        return scanner.scan_tag(planned.cell, Registry(full, host=host, write=True), full.tag, view, signer)

    with view.live():
        scans = [scan for _, scan in look_up(scan_image, images, CHECKS) if scan]
    if not scans:
        raise UsageError("none of these images is released", hint="builder status shows which are.")
    return scans


def newest_scan(project: Project, registry: Registry, image: str) -> str:
    """Whether the newest scan of an image passed, its day, and whether no trusted signer signed it.

    `unscanned` without one. Leaves out those that are invalid or about another image. Raises RegistryError.
    """
    try:
        listed = artifacts.attached(registry, image, TYPE)
    except (VerifyError, RejectedError):
        return "invalid list"
    scans: list[tuple[str, str, dict[str, bytes]]] = []
    for artifact in listed:
        with suppress(VerifyError, RejectedError):
            documents = artifacts.read_artifact(registry, artifact, TYPE, image, without=OUTPUT_TYPE) or {}
            record = oci.parse_document(ScanRecord, documents.get(TYPE, b""), f"scan {artifact}", hint="")
            if record.image == image:
                scans.append((record.time, record.state, documents))
    if not scans:
        return UNSCANNED
    # By the signed time: the list of attachments is not signed.
    time, state, documents = max(scans, key=itemgetter(0))
    try:
        note = "" if signing.trusted_signer(Trust.of(project), documents, TYPE) else ", unsigned"
    except SigningError:
        note = ", signature not checked"
    return f"{state} {time[:10]}{note}"
