"""Releases staged images: reads the reports of each from the registry, and publishes them if all are covered.

Only the checkout and the registry are needed. The published images are recorded beside the staged release, before
the first tag, in an artifact with the tag `released-<stamp>`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import Literal, get_args

from builder.common import errors, git
from builder.common.console import View
from builder.common.errors import (
    BuilderError,
    ImageTestError,
    NoRegistryError,
    RegistryError,
    VerifyError,
)
from builder.common.text import listed
from builder.evidence import reports, sbom_and_provenance
from builder.evidence.results import OWN, Requirement
from builder.evidence.signing import Signer, Trust
from builder.evidence.suite import Suite, gpu_test
from builder.host import Host
from builder.layers.known_layers import KnownLayers
from builder.layers.store import Store
from builder.matrix import support, tags
from builder.matrix.project import Project
from builder.matrix.schema import ARM64
from builder.plan.plan import PlannedImage
from builder.registry import artifacts, transfer
from builder.registry.client import Repository
from builder.registry.parallel import CHECKS, look_up, pipeline
from builder.release import expected, publish, scan, staging
from builder.release.publish import PublishableImage, PushedImage, Released, TagGroup
from builder.release.scan import Scanner
from builder.release.staging import ReleasedImage, ReleaseRecord, StagedImage, StagedRelease, StagingArea

NOBODY = "nobody who is trusted"  # in place of a signer, beside others
SHOWN = 10  # cells in a message

Exemption = Literal["unsigned", "untested-gpu", "missing-arch"]  # from a check; releases record them
EXEMPTIONS: tuple[Exemption, ...] = get_args(Exemption)


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    """How to release: `today` is compared with the ends of support, `registry` overrides that of matrix.yaml.

    Without `signer`, nothing is signed. `allowed` are checks to skip; `roll_back` lets tags move to older images.
    `check_only` publishes nothing. For hints, `again` is the command that releases the images, and `test` the one that
    tests them.
    """

    today: date
    registry: str = ""
    signer: Signer | None = None
    allowed: Collection[Exemption] = ()
    roll_back: bool = False
    check_only: bool = False
    again: str = "builder release"
    test: str = "builder test --staged newest"


def release(
    project: Project,
    host: Host,
    store: Store,
    view: View,
    area: StagingArea,
    staged: StagedRelease,
    planned: Mapping[str, PlannedImage],
    options: ReleaseOptions,
) -> Released:
    """Publishes the images of a staged release, and sets their tags; the error that ended it is in the result.

    `planned` are the images of this checkout by cell.
    """
    allowed, signer = options.allowed, options.signer and options.signer.with_trust(project)

    # Check all images before anything changes: an image that may not be released holds back all of them.
    images = check_images(project, view, area, staged, planned, options)
    if signer is None:
        view.say("this release is unsigned: users cannot check who made its images. To sign it: --sign KEY")
    own = [image.cell for image in images if OWN in image.coverage.signers]
    if own and project.matrix.evidence:  # without `evidence`, results need no signature
        view.say(f"the release will record `{OWN}` for {listed(own, SHOWN)}: only this machine ran their tests")
    for line in support.not_built(project.matrix, [image.planned.cell for image in images], are_built=True):
        view.say(line)
    result = Released(images=images)
    if options.check_only:
        return result
    if not options.roll_back:
        _require_newest(area, staged, images)

    with store.used(), result.until_error(view):
        # Read all tags first. So if the registry does not respond, or a tag would move back, nothing is changed.
        groups = publish.group_by_tags(images, host)
        publish.check_tags(groups, view, roll_back=options.roll_back, allow_missing_arch="missing-arch" in allowed)
        stamp = publish.free_stamp(groups, tags.stamps(staged.stamp))  # a later one if another release has its tags
        group_of = {image.cell: group for group in groups for image in group.images}

        # Record what will be published before the first tag is set. If this run is interrupted, the record still names
        # the release that set the tags, and no older release moves them back.
        area.record(_new_record(area.released(staged.stamp), staged, images, group_of, allowed))

        # Images go up by digest, one after another; the attachments of one go up while the next one is pushed.
        names = {image.references[0].repository for image in images}

        def push_image(image: PublishableImage) -> PushedImage:
            # Staging has all blobs. The registry mounts them from there, or else from the repository of another image.
            # One that can do neither gets them by way of this machine.
            own, sources = image.references[0].repository, dict.fromkeys([*_mounts(area, image), *sorted(names)])
            mounts = [name for name in sources if name != own]
            fetch = partial(transfer.fetch_blob, _staged_in(area, image), store)
            return publish.push_image(group_of[image.cell].repository, store, view, image, mounts, fetch)

        def finish_image(pushed: PushedImage, stop: threading.Event) -> None:
            image, began = pushed.image, time.monotonic()
            repository = pushed.repository.stoppable(stop)
            view.begin(image.cell, "attaching test results and statements")
            _attach_documents(repository, area, image)
            if signer:
                signer.attest(repository, image.digest, _statements(project, image), sbom_and_provenance.agree)
                # Sign last: once an image has a statement of cosign 3, cosign 3 ignores the signatures of cosign 2.
                annotations = _annotations(image.cell, group_of[image.cell], stamp)
                signer.sign_manifest(repository, image.digest, annotations)
            view.end(image.cell, "done", "test results and statements attached")
            result.pushed[image.cell] = replace(pushed, seconds=pushed.seconds + time.monotonic() - began)

        with view.live():
            pipeline(push_image, finish_image, images, lambda image: view.end(image.cell, "failed"))

        # Images for several architectures get one tag, which names an index of them. It is signed as the cell without
        # an architecture: `cosign verify` of a tag does not depend on whether it names an index.
        for group in groups:
            if group.is_index:
                manifest, cell = group.manifest, group.images[0].planned.cell
                group.repository.put_manifest(manifest.digest, manifest.content, manifest.media_type)
                if signer:
                    annotations = _annotations(f"{cell.axes}{cell.suffix}", group, stamp)
                    signer.sign_manifest(group.repository, manifest.digest, annotations)

        # No tag before all images are complete in the registry: none names an image of half a release.
        publish.set_tags(groups, stamp, result.tags)
    return result


def check_images(
    project: Project,
    view: View,
    area: StagingArea,
    staged: StagedRelease,
    planned: Mapping[str, PlannedImage],
    options: ReleaseOptions,
) -> list[PublishableImage]:
    """The images of a staged release, with their SBOMs and scans.

    Raises one error for all that may not be released, and for a list of images that is not trusted (see
    `StagingArea.require_signed`).
    """
    allowed, again, test = options.allowed, options.again, options.test
    known, suite, trust = KnownLayers(project.root), Suite.of(*project.folders), Trust.of(project)
    scanner = Scanner(project, project.matrix.scan) if project.matrix.scan else None
    plans, failures = planned, dict[str, BuilderError]()

    def require_tests(image: PublishableImage) -> None:
        """Raises ImageTestError unless the image has passed the tests that a release needs."""
        cell, coverage = image.planned.cell, image.coverage
        try:
            coverage.require_pass(cell.id)
        except ImageTestError as error:
            key = " --sign KEY" if project.matrix.evidence and options.signer is None else ""
            accept = "" if "unsigned" in allowed else f"   To accept unsigned results: {again} --allow-unsigned"
            hint = "" if coverage.image_tests else f"Run the tests: {test}{key}{accept}"
            raise ImageTestError(str(error), hint=hint) from error
        if not (cell.is_cpu or coverage.gpu == "passed" or "untested-gpu" in allowed):
            file = gpu_test(cell.framework)
            machine = f"an {ARM64} machine" if cell.arch == ARM64 else "a machine"
            how = f"On {machine} with a GPU: {test} --gpu require"
            how = how if project.path(file).is_file() else f"Write {file}, then test again."
            raise ImageTestError(
                f"{cell.id}: GPU tests have not passed (gpu: {coverage.gpu_status})",
                hint=f"{how}   To release it untested: {again} --allow-untested-gpu",
            )

    def check_image(entry: StagedImage) -> PublishableImage:
        """Compares the image with the plan of this checkout, reads its reports, and scans it."""
        # Anyone who can write to staging may have changed the list: only images of this checkout's plan count.
        planned = plans.get(entry.cell)
        if planned is None or planned.plan != entry.plan:
            raise staged.stale(entry.cell)
        stored = staging.image_of(area, entry)
        repository = area.open(entry.repository)
        # Its labels, configuration and known layers must be those of the plan, or its tags would not be true. Layers
        # that are not known are covered by the report that is required below.
        config = repository.read_blob(stored.config.digest)
        expected_image = expected.of_plan(project, known, planned)
        expected.check_image(expected_image, stored, config, is_trusted=True)
        coverage = reports.registry_coverage(
            repository, Requirement.of(planned, stored.manifest.digest, suite), trust,
            state=project.state, allow_unsigned="unsigned" in allowed,
        )  # fmt: skip
        image = PublishableImage.of(project, planned, stored, coverage, options.registry)
        require_tests(image)
        # A scan in the registry is no evidence: anyone who can write there may have attached it.
        image = replace(image, sbom=sbom_and_provenance.sbom(planned, image.references[0].name, stored))
        if scanner:
            view.begin(entry.cell, "scanning")
            image = replace(image, scan=scanner.scan_sbom(entry.cell, image.digest, image.sbom))
        return image

    def checked_image(entry: StagedImage) -> PublishableImage | None:
        """The image, or None for one that may not be released, whose error is in `failures`."""
        view.begin(entry.cell, "checking")
        try:
            image = check_image(entry)
        except NoRegistryError:
            raise
        except BuilderError as error:
            failures[entry.cell] = error
            view.end(entry.cell, "failed")
            return None
        state = f"gpu: {image.coverage.gpu_status}" + (f", scan: {scan.PASSED}" if image.scan else "")
        view.end(entry.cell, "done", state)
        return image

    with view.live():
        checked = look_up(checked_image, staged.images, CHECKS)
    images = [image for _, image in checked if image]
    refused = [failures[entry.cell] for entry in staged.images if entry.cell in failures]
    # An image goes with those for the other architectures of its tags, or not at all.
    present = {image.cell for image in images}
    if "missing-arch" not in allowed:
        alone = [image for image in images if not present.issuperset(image.cells.values())]
        refused += [_missing_arch(area, image, present, again) for image in alone]
    cells = [plans[each.cell].cell for each in staged.images if each.cell in plans]
    refused += support.refusals(project.matrix, cells, options.today)
    if "unsigned" not in allowed:
        try:
            area.require_signed(project, staged, again)
        except VerifyError as error:
            refused.append(error)
    if refused:
        raise errors.join(refused, "images cannot be released")
    return images


def _missing_arch(area: StagingArea, image: PublishableImage, present: Collection[str], again: str) -> ImageTestError:
    """The error for an image that would be released without those for the other architectures of its tags."""
    missing = [cell for cell in image.cells.values() if cell not in present]
    stage = f"builder stage{area.option}"
    return ImageTestError(
        f"{image.cell}: {listed(missing, 1)} would not be released with it, and has the same tags",
        hint=f"On a machine of that architecture: builder images {missing[0]} && {stage} --images-only {missing[0]}"
        f"   Then list them together: {stage} {' '.join(image.cells.values())}   To release it alone: "
        f"{again} --allow-missing-arch ({publish.WITHOUT_ARCH})",
    )


def _require_newest(area: StagingArea, staged: StagedRelease, images: Sequence[PublishableImage]) -> None:
    """Raises RegistryError if a newer release published other images of these cells."""
    digests = {image.cell: image.digest for image in images}
    for stamp in area.released_stamps():
        if tags.stamp_order(stamp) <= tags.stamp_order(staged.stamp):
            return
        newer = area.released(stamp)
        released = newer.images if newer else ()
        if cells := [image.cell for image in released if digests.get(image.cell, image.digest) != image.digest]:
            raise RegistryError(
                f"nothing was published: release {stamp} is newer and has other images of {', '.join(cells)}",
                hint="Stage the images again, or use --roll-back to move the tags back.",
            )


def _new_record(
    before: ReleaseRecord | None,
    staged: StagedRelease,
    images: Sequence[PublishableImage],
    group_of: Mapping[str, TagGroup],
    allowed: Collection[Exemption],
) -> ReleaseRecord:
    """The record of the release, which continues the record of its earlier runs, `before`."""
    released = []
    for image in images:
        signers = image.coverage.signers
        released.append(
            ReleasedImage(
                cell=image.cell,
                digest=image.digest,
                tagged=group_of[image.cell].manifest.digest,
                references=tuple(map(str, image.references)),
                gpu=image.coverage.gpu_status,
                signer=", ".join(name or NOBODY for name in signers) if any(signers) else "",
                scan=scan.PASSED if image.scan else scan.UNSCANNED,
            )
        )
    is_complete = {cell for image in images for cell in image.cells.values()} <= group_of.keys()
    used = [name for name in EXEMPTIONS if name in allowed and not (name == "missing-arch" and is_complete)]
    return ReleaseRecord(
        stamp=staged.stamp,
        revision=staged.revision,
        # Images that an earlier run published and this one leaves out: their tags are set.
        images=(*released, *(image for image in (before.images if before else ()) if image.cell not in group_of)),
        allowed=tuple(dict.fromkeys((*(before.allowed if before else ()), *used))),
    )


def _staged_in(area: StagingArea, image: PublishableImage) -> Repository:
    """The repository in staging that has the image."""
    return area.open(staging.name_of(image.references[0]))


def _mounts(area: StagingArea, image: PublishableImage) -> list[str]:
    """The name of the repository in staging, if the registry of the release can mount blobs from it."""
    staged = area.repository(staging.name_of(image.references[0]))
    return [staged.repository] if staged.registry == image.references[0].registry else []


def _attach_documents(repository: Repository, area: StagingArea, image: PublishableImage) -> None:
    """Attaches the reports that count, the SBOM and the scan."""
    source = _staged_in(area, image)
    with artifacts.attaching(repository, image.stored.manifest.descriptor) as attachments:
        for report in image.coverage.reports:
            attachments.copy(source, report.artifact)
        attachments.add(sbom_and_provenance.SBOM_TYPE, {sbom_and_provenance.SBOM_TYPE: image.sbom})
        if image.scan:
            image.scan.add_to(attachments)


def _statements(project: Project, image: PublishableImage) -> dict[str, bytes]:
    """The predicates to sign for an image, by kind."""
    # The commit of the checkout, whose plan was compared with the image: the document in staging is not signed.
    provenance = sbom_and_provenance.provenance(
        image.planned, source=project.matrix.source, revision=git.state(project.root)
    )
    statements = {sbom_and_provenance.SBOM: image.sbom, sbom_and_provenance.PROVENANCE: provenance}
    if test_result := reports.test_result(image.coverage):
        statements[reports.TEST_RESULT] = test_result
    if image.scan:
        statements[scan.SCAN] = image.scan.predicate
    return statements


def _annotations(cell: str, group: TagGroup, stamp: str) -> dict[str, str]:
    """The annotations of a signature: the cell, the full tag, and the stamped tag if the image gets it now."""
    full, stamped = group.images[0].references[0], group.stamped(stamp)
    annotations = {"cell": cell, "image": staging.name_of(full), "tag": full.tag}
    return annotations | ({"release": stamped} if stamped else {})
