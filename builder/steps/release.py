"""Releases staged images: reads the reports of each from the registry, and publishes them if all are covered.

Only the checkout and the registry are needed. What is published is recorded beside the staged release, before the first
tag, as an artifact with the tag `released-<stamp>`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from builder.common import errors, git
from builder.common.console import View
from builder.common.errors import (
    BuilderError,
    ImageTestError,
    NoRegistryError,
    RefusedError,
    RegistryError,
    StaleError,
    VerifyError,
)
from builder.common.text import listed
from builder.evidence import reports, sbom_and_provenance
from builder.evidence.results import Coverage, Requirement
from builder.evidence.signing import Signer, Trust
from builder.evidence.suite import Suite, gpu_test
from builder.host import Host
from builder.layers.blobs import Descriptor, wheel_file
from builder.layers.known_layers import KnownLayers
from builder.layers.store import Store
from builder.matrix import support, tags
from builder.matrix.project import Project
from builder.matrix.schema import ARM64
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.registry import artifacts, transfer
from builder.registry.client import Repository
from builder.registry.parallel import CHECKS, look_up
from builder.release import expected, publish, scan, staging
from builder.release.publish import PublishableImage, Publisher, Released
from builder.release.scan import ImageScan, Scanner
from builder.release.staging import ReleasedImage, ReleaseRecord, StagedImage, StagedRelease, StagingArea

NOBODY = "nobody who is trusted"  # in place of a signer, beside others


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A staged image that may be released: its target, its SBOM, and the scan of that.

    `scan` is None if matrix.yaml has no scanner.
    """

    target: PublishableImage
    sbom: bytes
    scan: ImageScan | None

    @property
    def state(self) -> str:
        """The results of its GPU tests and of its scan."""
        return f"gpu: {self.target.coverage.gpu_status}" + (f", scan: {scan.PASSED}" if self.scan else "")


# The errors that `skip_incomplete` accepts: tests that are missing or failed, another plan, the scanner or the end of
# support, a check that failed.
NOT_READY = (ImageTestError, StaleError, RefusedError, VerifyError)


@dataclass(kw_only=True)
class Releaser:
    """Checks and releases the images of one staged release. `planned` are the images of this checkout by cell.

    `today` is compared with the ends of support. `registry` overrides the setting in matrix.yaml. `signer` signs the
    images; None leaves them unsigned. `skip_incomplete` leaves out images that may not be released; `check` puts their
    errors into `left_out`. For hints, `again` is the command that releases them, and `test` the one that tests them.
    """

    project: Project
    place: StagingArea
    release: StagedRelease
    planned: Mapping[str, PlannedImage]
    today: date
    registry: str = ""
    signer: Signer | None = None
    allow_unsigned: bool = False
    allow_untested_gpu: bool = False
    allow_not_run: bool = False
    allow_missing_arch: bool = False
    roll_back: bool = False
    skip_incomplete: bool = False
    again: str = "builder release"
    test: str = "builder test --staged newest"

    def __post_init__(self) -> None:
        self.left_out: tuple[BuilderError, ...] = ()
        self._candidates: dict[str, Candidate] = {}  # that are published, by cell
        self._trust, self._suite = Trust.of(self.project), Suite.of(self.project.root)
        self.signer = self.signer and self.signer.with_trust(self.project)
        self._known = KnownLayers(self.project.root)
        settings = self.project.matrix.scan
        self._scanner = Scanner(self.project, settings) if settings else None

    def check(self, view: View) -> list[Candidate]:
        """The images of a release, several at a time.

        Raises one error for all that may not be released, unless some may and the others are left out, and for a list
        of images that is not trusted (see `StagingArea.require_signed`).
        """

        def check_image(staged: StagedImage) -> Candidate | BuilderError:
            view.begin(staged.cell, "checking")
            try:
                candidate = self._check(staged, view)
            except NoRegistryError:
                raise
            except BuilderError as error:
                view.end(staged.cell, "failed")
                return error
            view.end(staged.cell, "done", candidate.state)
            return candidate

        to_check, candidates, left_out = self.release.images, list[Candidate](), list[BuilderError]()
        with view.live():
            while to_check:
                results = [result for _, result in look_up(check_image, to_check, CHECKS)]
                candidates += [result for result in results if isinstance(result, Candidate)]
                left_out += [result for result in results if isinstance(result, BuilderError)]
                to_check = ()
                if not self.allow_missing_arch:
                    present = {candidate.target.cell for candidate in candidates}
                    alone = [each for each in candidates if not present.issuperset(each.target.cells.values())]
                    candidates = [each for each in candidates if each not in alone]
                    left_out += [self._missing_arch(each.target, present) for each in alone]
                if left_out and candidates and self.skip_incomplete:
                    # Others may have to pass the thorough tests in place of an image that is left out.
                    before, ids = self.planned, {candidate.target.cell for candidate in candidates}
                    cells = [cell for cell in self.project.cells if cell.id in ids]
                    self.planned = {image.id: image for image in plan.make_locked_plan(self.project, cells).images}
                    changed = {cell for cell in ids if self.planned[cell].thorough != before[cell].thorough}
                    to_check = tuple(image for image in self.release.images if image.cell in changed)
                    candidates = [candidate for candidate in candidates if candidate.target.cell not in changed]
        self.left_out = tuple(left_out)
        # A registry or Sigstore that does not answer says nothing about an image.
        failures = [error for error in left_out if self.skip_incomplete and not isinstance(error, NOT_READY)]
        left_out = [error for error in left_out if error not in failures]
        if not self.skip_incomplete:
            cells = [self.planned[staged.cell].cell for staged in self.release.images if staged.cell in self.planned]
            failures += support.refusals(self.project.matrix, cells, self.today)
        if not self.allow_unsigned:
            try:
                self.place.require_signed(self.project, self.release, self.again)
            except VerifyError as error:
                failures.append(error)
        if failures or (left_out and not (self.skip_incomplete and candidates)):
            raise errors.join([*failures, *left_out], "images cannot be released")
        return candidates

    def _check(self, staged: StagedImage, view: View) -> Candidate:
        planned = self.planned.get(staged.cell)
        if planned is None or planned.digest != staged.plan:
            raise self.release.stale(staged.cell)
        if self.skip_incomplete and (refusals := support.refusals(self.project.matrix, [planned.cell], self.today)):
            raise errors.join(refusals, f"ends of support are over for {staged.cell}")
        image = staging.image_of(self.place, staged)
        repository = self.place.open(staged.repository)
        expected_image = expected.of_plan(self.project.root, self._known, planned)
        # The report that is required below covers layers that are not known.
        config = repository.read_blob(image.config.digest)
        expected.check_image(expected_image, image, config, is_trusted=True)
        requirement = Requirement.of(planned, image.manifest.digest, self._suite)
        coverage = reports.registry_coverage(
            repository, requirement, self._trust, state=self.project.state, allow_unsigned=self.allow_unsigned
        )
        try:
            coverage.require_pass(staged.cell)
        except ImageTestError as error:
            raise ImageTestError(str(error), hint="" if coverage.image_tests else self._how_to_cover()) from error
        if coverage.is_emulated:
            if not self.allow_not_run:
                raise ImageTestError(
                    f"{staged.cell}: {coverage.tests_status}",
                    hint=f"On an {planned.cell.arch} machine: {self.test}   To release it as it is: {self.again} "
                    "--allow-not-run",
                )
        elif not (planned.cell.is_cpu or coverage.gpu == "passed" or self.allow_untested_gpu):
            test = gpu_test(planned.cell.framework)
            is_there = (self.project.root / test).is_file()
            machine = f"an {ARM64} machine" if planned.cell.arch == ARM64 else "a machine"
            how = f"On {machine} with a GPU: {self.test} --gpu require"
            how = how if is_there else f"Write {test}, then test again."
            raise ImageTestError(
                f"{staged.cell}: GPU tests have not passed (gpu: {coverage.gpu_status})",
                hint=f"{how}   To release it untested: {self.again} --allow-untested-gpu",
            )
        target = PublishableImage(
            cell=staged.cell,
            arch=planned.cell.arch,
            cells=publish.cells_by_arch(self.project, planned),
            stored=image,
            coverage=coverage,
            references=publish.references(planned, self.registry),
        )
        sbom = sbom_and_provenance.sbom(planned, target.references[0].name, image)
        image_scan: ImageScan | None = None
        if self._scanner:
            view.begin(staged.cell, "scanning")
            image_scan = self._scanner.scan_sbom(staged.cell, target.digest, sbom)
        return Candidate(target=target, sbom=sbom, scan=image_scan)

    def _missing_arch(self, target: PublishableImage, present: Collection[str]) -> ImageTestError:
        """The error for an image that would be released without those for the other architectures of its tags."""
        missing = [cell for cell in target.cells.values() if cell not in present]
        stage = f"builder stage{self.place.option}"
        return ImageTestError(
            f"{target.cell}: {listed(missing, 1)} would not be released with it, and has the same tags",
            hint=f"On a machine of that architecture: builder images {missing[0]} && {stage} --images-only {missing[0]}"
            f"   Then list them together: {stage} {' '.join(target.cells.values())}   To release it alone: "
            f"{self.again} --allow-missing-arch ({publish.WITHOUT_ARCH})",
        )

    def _how_to_cover(self) -> str:
        """A hint for an image without test results that count."""
        key = " --sign KEY" if self.project.matrix.evidence and not self.signer else ""
        allow = "" if self.allow_unsigned else f"   To accept unsigned results: {self.again} --allow-unsigned"
        return f"Run the tests: {self.test}{key}{allow}"

    def publish(self, host: Host, view: View, store: Store, candidates: Sequence[Candidate]) -> Released:
        """Publishes images that were checked, and records it. The error that ended it is in the result."""
        self._candidates = {each.target.cell: each for each in candidates}
        if not self.roll_back:
            self._check_newest(candidates)
        targets = [self._with_source(store, candidate.target) for candidate in candidates]
        publisher = Publisher(
            host=host,
            view=view,
            store=store,
            stamps=tags.stamps(self.release.stamp),  # the later ones if another release has taken the tags with it
            roll_back=self.roll_back,
            allow_missing_arch=self.allow_missing_arch,
            documents=self,
        )
        return publisher.publish(targets)

    def record(self) -> None:
        """Records what the release publishes, see `publish.ReleaseDocuments`."""
        groups = publish.by_tags(each.target for each in self._candidates.values())
        tagged = {target.cell: publish.tagged_manifest(targets).digest for targets in groups for target in targets}
        images = [
            ReleasedImage(
                cell=candidate.target.cell,
                digest=candidate.target.digest,
                tagged=tagged[candidate.target.cell],
                references=tuple(map(str, candidate.target.references)),
                gpu=candidate.target.coverage.gpu_status,
                signer=_signers(candidate.target.coverage),
                scan=scan.PASSED if candidate.scan else scan.UNSCANNED,
            )
            for candidate in self._candidates.values()
        ]
        cells = {cell for candidate in self._candidates.values() for cell in candidate.target.cells.values()}
        skipped = {
            "unsigned": self.allow_unsigned,
            "untested-gpu": self.allow_untested_gpu,
            "not-run": self.allow_not_run,
            "missing-arch": self.allow_missing_arch and not cells <= self._candidates.keys(),
        }
        stamp, revision = self.release.stamp, self.release.revision
        before = self.place.released(stamp)
        # Images that an earlier run published and this one leaves out: their tags are set.
        images += [image for image in before.images if image.cell not in self._candidates] if before else []
        now = (name for name, is_set in skipped.items() if is_set)
        allowed = dict.fromkeys((*(before.allowed if before else ()), *now))
        self.place.record(ReleaseRecord(stamp=stamp, revision=revision, images=tuple(images), allowed=tuple(allowed)))

    def attach(self, repository: Repository, image: PublishableImage, stamped: str) -> None:
        """Attaches the reports that count, the SBOM and the scan; then, signed, the statements; then the signature."""
        candidate, planned, signer = self._candidates[image.cell], self.planned[image.cell], self.signer
        source = self.place.open(staging.name_of(image.references[0]))
        with artifacts.attaching(repository, image.stored.manifest.descriptor) as attachments:
            if source.name != repository.name:
                for report in image.coverage.reports:
                    attachments.copy(source, report.artifact)
                mounted = [image.source] if image.source else []
                for wheel in (wheel for wheel in planned.wheels if wheel.source):
                    file = wheel_file(wheel)
                    if source.has_blob(file.digest):  # else it was staged without it
                        attachments.add_file(
                            file, None, {artifacts.TITLE: wheel.file}, fetch=image.fetch, mount_from=mounted
                        )
            attachments.add(sbom_and_provenance.SBOM_TYPE, {sbom_and_provenance.SBOM_TYPE: candidate.sbom})
            if candidate.scan:
                candidate.scan.add_to(attachments)
        if signer is None:
            return
        # The commit of the checkout, whose plan was compared with the image: the document in staging is not signed.
        provenance = sbom_and_provenance.provenance(
            planned, source=self.project.matrix.source, revision=git.state(self.project.root)
        )
        documents = {sbom_and_provenance.SBOM: candidate.sbom, sbom_and_provenance.PROVENANCE: provenance}
        if test_result := reports.test_result(image.coverage):
            documents[reports.TEST_RESULT] = test_result
        if candidate.scan:
            documents[scan.SCAN] = candidate.scan.predicate
        signer.attest(repository, image.digest, documents, sbom_and_provenance.agree)
        # Sign last: once an image has a statement of cosign 3, cosign 3 ignores the signatures of cosign 2.
        self._sign(repository, image.digest, image.cell, image, stamped)

    def sign_index(self, repository: Repository, digest: str, images: Sequence[PublishableImage], stamped: str) -> None:
        """Signs it as the cell without an architecture: `cosign verify` of a tag does not depend on whether it names
        an index.
        """
        cell = self.planned[images[0].cell].cell
        self._sign(repository, digest, f"{cell.axes}{cell.suffix}", images[0], stamped)

    def _sign(self, repository: Repository, digest: str, cell: str, image: PublishableImage, stamped: str) -> None:
        if self.signer:
            full = image.references[0]
            annotations = {"cell": cell, "image": staging.name_of(full), "tag": full.tag}
            self.signer.sign_manifest(repository, digest, annotations | ({"release": stamped} if stamped else {}))

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

    def _with_source(self, store: Store, target: PublishableImage) -> PublishableImage:
        """The target, with where its blobs come from: mounted from staging, or else downloaded from there."""
        name = staging.name_of(target.references[0])
        staged, registry = self.place.repository(name), self.place.open(name)

        def fetch(blob: Descriptor) -> Path:
            transfer.fetch_blobs(registry, store, [blob])
            return store.path(blob.digest)

        is_same = staged.registry == target.references[0].registry
        return replace(target, source=staged.repository if is_same else "", fetch=fetch)


def _signers(coverage: Coverage) -> str:
    """Who signed the results that a release relies on; empty if nobody who is trusted signed any of them."""
    names = coverage.signers
    return ", ".join(name or NOBODY for name in names) if any(names) else ""
