"""Releases staged images: reads the reports of each from the registry, and publishes them if all are covered.

Only the checkout and the registry are needed. What is published is recorded beside the staged release, before the first
tag, as an artifact with the tag `released-<stamp>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import Path

from builder.common import errors, git
from builder.common.console import View
from builder.common.errors import ImageTestError, RegistryError, VerifyError
from builder.index.host import Host
from builder.layers.blobs import Descriptor
from builder.layers.known_layers import KnownLayers
from builder.layers.store import Store
from builder.lock import os_lock
from builder.lock.os_lock import OsLock
from builder.matrix import tags
from builder.matrix.project import Project
from builder.matrix.tags import BASE_LABEL
from builder.plan.plan import PlannedImage
from builder.registry import artifacts, expected, publish, pull, scan, scan_results, staging, statements
from builder.registry.client import Registry
from builder.registry.publish import Published, Publisher, Target
from builder.registry.reports import Reader, Readings
from builder.registry.scan import Result
from builder.registry.signing import Signer
from builder.registry.staging import Place, Release, Released, ReleasedImage, StagedImage


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A staged image that may be released: its target, the reports that count, its SBOM, and the scan of that.

    `scan` is None if nothing scans it, or if its scan failed, which `--allow-vulnerable` accepts.
    """

    target: Target
    readings: Readings
    signer: str
    sbom: bytes
    scan: Result | None


@dataclass(kw_only=True)
class Releaser:
    """Checks and releases the images of one staged release. `planned` are the images of this checkout by cell.

    `registry` overrides the setting in matrix.yaml. `signer` signs the images; None leaves them unsigned.
    """

    project: Project
    place: Place
    release: Release
    planned: Mapping[str, PlannedImage]
    registry: str = ""
    signer: Signer | None = None
    allow_unsigned: bool = False
    allow_untested_gpu: bool = False
    allow_vulnerable: bool = False
    roll_back: bool = False

    def __post_init__(self) -> None:
        self._reader = Reader.of(self.project, allow_unsigned=self.allow_unsigned)
        self._known = KnownLayers(self.project.root)

    def check(self) -> list[Candidate]:
        """The images of a release. Raises one error for all that may not be released."""
        return errors.collect(self._check, self.release.images, "images cannot be released")

    def _check(self, staged: StagedImage) -> Candidate:
        planned = self.planned.get(staged.cell)
        if planned is None or planned.digest != staged.plan:
            raise self.release.stale(staged.cell)
        image, manifest = staging.image_of(self.place, staged)
        registry = self.place.open(staged.repository)
        expected_image = expected.of_known(self.project.root, self._known, planned, image.labels.get(BASE_LABEL, ""))
        # The report that is required below vouches for layers that are not known.
        config = registry.read_blob(image.config.digest)
        expected.check(expected_image, image, manifest.content, config, is_vouched=True)
        readings = self._reader.read(registry, image, planned.id, planned.digest)
        proof = self._reader.proof(readings, staged.cell)
        if not (planned.cell.is_cpu or proof.evidence.gpu == "passed" or self.allow_untested_gpu):
            raise ImageTestError(
                f"{staged.cell}: GPU tests have not passed (gpu: {proof.evidence.gpu_status})",
                hint=f"On a machine with a GPU: builder test --staged {self.release.stamp} --gpu require   "
                f"To release it untested: builder release {self.release.stamp} --allow-untested-gpu",
            )
        target = Target(
            cell=staged.cell,
            stored=image,
            manifest=manifest,
            evidence=proof.evidence,
            references=publish.references(planned, self.registry),
        )
        sbom = statements.sbom(planned, target.references[0].name, image, self._system(planned))
        result = self._scan(target, sbom)
        return Candidate(target=target, readings=readings, signer=proof.signer, sbom=sbom, scan=result)

    def _scan(self, target: Target, sbom: bytes) -> Result | None:
        """The result of a scan; None if there is no scanner. Raises RefusedError, VerifyError, unless allowed."""
        if (settings := self.project.matrix.scan) is None:
            return None
        try:
            result = scan.scan(settings, target.digest, sbom)
        except VerifyError as error:
            if self.allow_vulnerable:
                return None
            raise VerifyError(f"{target.cell}: {scan.FAILED}: {error}", hint=error.hint) from error
        if not self.allow_vulnerable:
            scan.check(target.cell, result, settings)
        return result

    def _system(self, planned: PlannedImage) -> OsLock:
        system = os_lock.read(self.project.root, planned.system)
        assert system is not None, "the plan has it"
        return system

    def publish(self, host: Host, view: View, store: Store, candidates: Sequence[Candidate]) -> Published:
        """Publishes images that were checked, and records it. The error that ended it is in the result."""
        by_cell = {candidate.target.cell: candidate for candidate in candidates}

        def attach(registry: Registry, target: Target, stamped: str) -> None:
            self._attach(registry, by_cell[target.cell])
            self._sign(registry, by_cell[target.cell], stamped)

        if not self.roll_back:
            self._check_newest(candidates)
        targets = [self._with_source(store, candidate.target) for candidate in candidates]
        return Publisher(
            host=host,
            view=view,
            store=store,
            stamps=_stamps(self.release.stamp),
            roll_back=self.roll_back,
            record=lambda: self._record(candidates),
            attach=attach,
        ).publish(targets)

    def _attach(self, registry: Registry, candidate: Candidate) -> None:
        """Attaches the reports that count, the SBOM and the scan."""
        target = candidate.target
        source = self.place.open(staging.name_of(target.references[0]))
        with artifacts.attaching(registry, target.stored.manifest) as attachments:
            if source.name != registry.name:
                for reading in candidate.readings.counted:
                    attachments.copy(source, reading.artifact)
            attachments.add(statements.SBOM_TYPE, {statements.SBOM_TYPE: candidate.sbom})
            if candidate.scan:
                scan_results.add(attachments, candidate.scan, self.signer)

    def _sign(self, registry: Registry, candidate: Candidate, stamped: str) -> None:
        """Attaches the signed statements (SBOM, provenance), then signs the image, if there is a signer.

        `stamped` is the stamped tag that the image gets now, empty if it has one.
        """
        if (signer := self.signer) is None:
            return
        target = candidate.target
        # The checkout, whose plan was compared with the image: the document in staging is not signed.
        source, revision = self.project.matrix.source, git.state(self.project.root)
        planned = self.planned[target.cell]
        provenance = statements.provenance(
            planned, target.stored, self._system(planned), source=source, revision=revision
        )
        documents = {statements.SBOM: candidate.sbom, statements.PROVENANCE: provenance}
        signer.attest(registry, target.digest, documents, statements.agree)
        # Sign last: once an image has a statement of cosign 3, cosign 3 ignores the signatures of cosign 2.
        full = target.references[0]
        annotations = {"cell": target.cell, "image": staging.name_of(full), "tag": full.tag}
        signer.sign_image(registry, target.digest, annotations | ({"release": stamped} if stamped else {}))

    def _check_newest(self, candidates: Sequence[Candidate]) -> None:
        """Raises RegistryError if a newer release published other images of these cells."""
        digests = {candidate.target.cell: candidate.target.digest for candidate in candidates}
        for stamp in self.place.released_stamps():
            if tags.stamp_order(stamp) <= tags.stamp_order(self.release.stamp):
                return
            newer = self.place.released(stamp)
            images = newer.images if newer else ()
            if cells := [image.cell for image in images if digests.get(image.cell, image.digest) != image.digest]:
                raise RegistryError(
                    f"nothing was published: release {stamp} is newer and has other images of {', '.join(cells)}",
                    hint="Stage the images again, or use --roll-back to move the tags back.",
                )

    def _with_source(self, store: Store, target: Target) -> Target:
        """The target, with where its blobs come from: mounted from staging, or else downloaded from there."""
        name = staging.name_of(target.references[0])
        staged, registry = self.place.repository(name), self.place.open(name)

        def fetch(blob: Descriptor) -> Path:
            pull.fetch(registry, store, [blob])
            return store.path(blob.digest)

        is_same = staged.registry == target.references[0].registry
        return replace(target, source=staged.repository if is_same else "", fetch=fetch)

    def _record(self, candidates: Sequence[Candidate]) -> None:
        without = scan.FAILED if self.project.matrix.scan else scan.UNSCANNED
        images = [
            ReleasedImage(
                cell=candidate.target.cell,
                digest=candidate.target.digest,
                references=tuple(map(str, candidate.target.references)),
                gpu=candidate.target.evidence.gpu_status,
                signer=candidate.signer,
                scan=candidate.scan.summary if candidate.scan else without,
            )
            for candidate in candidates
        ]
        skipped = {
            "unsigned": self.allow_unsigned,
            "untested-gpu": self.allow_untested_gpu,
            "vulnerable": self.allow_vulnerable,
        }
        stamp, revision = self.release.stamp, self.release.revision
        before = self.place.released(stamp)
        now = (name for name, is_set in skipped.items() if is_set)
        allowed = dict.fromkeys((*(before.allowed if before else ()), *now))
        self.place.record(Released(stamp=stamp, revision=revision, images=tuple(images), allowed=tuple(allowed)))


def _stamps(stamp: str) -> Iterator[str]:
    """This stamp and the later ones of its day, in case another release has the tags of this one."""
    day = stamp.partition(".")[0]
    return dropwhile(lambda other: other != stamp, tags.stamps(day))
