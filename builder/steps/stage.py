"""Pushes the tested images of the store to staging, with their reports."""

from __future__ import annotations

import threading

from builder.build.layer_lookup import LayerLookup
from builder.build.outcomes import Outcome, Report
from builder.common import errors, git
from builder.common.errors import DamagedError, ImageTestError
from builder.common.text import size
from builder.engine.run import Run
from builder.evidence import reports, results
from builder.evidence.results import Coverage, Requirement
from builder.evidence.signing import Signer
from builder.evidence.suite import Suite
from builder.layers import stored_images
from builder.matrix.schema import ARM64
from builder.plan.plan import Plan, PlannedImage
from builder.registry.transfer import Sent, pipeline
from builder.release import staging
from builder.release.staging import Candidate, StagedImage, StagingArea, plan_tag, repository_name


def stage(
    run: Run,
    area: StagingArea,
    plan: Plan,
    *,
    signer: Signer | None = None,
    lookup: LayerLookup | None = None,
    images_only: bool = False,
) -> Report:
    """Pushes the images of a plan that passed their tests by digest, and attaches their reports, signed by `signer`.

    Then lists them as a release of today and of this commit, unless `images_only` is set. Also attaches this
    machine's results to images that another machine staged. With a `lookup`, images that are neither in the store nor
    staged are staged too, without test results. The caller holds the store.

    Raises one error for all images that are neither in the store nor in staging, before anything is sent, and one for
    all failures.
    """
    if not plan.images:  # built-in sets may be empty; an empty release would be the newest one
        return Report()
    revision = git.state(run.project.root)  # now: the plan was made from these files
    signer = signer and signer.with_trust(run.project)
    suite = Suite.of(*run.project.folders)
    images = errors.collect(
        lambda planned: find_candidate(run, area, suite, planned, lookup), plan.images, "images cannot be staged"
    )

    listed = [StagedImage.of(image.planned, image.digest) for image in images]

    # One image after another; the attachments of one go up while the next one is pushed.
    def push_image(image: Candidate) -> Sent | None:
        if image.is_staged:
            return None
        # Blobs may be mounted from other repositories of the same registry.
        own = area.repository(repository_name(image.planned))
        others = [area.repository(part.repository) for part in listed]
        if lookup and not image.coverage.reports:
            others += lookup.references()
        names = dict.fromkeys(other.repository for other in others if other.registry == own.registry)
        mounts = [name for name in names if name != own.repository]
        repository = area.open(repository_name(image.planned), write=True)
        return staging.push_image(run, repository, image, mounts, lookup.fetch if lookup else None)

    def finish_image(image: Candidate, sent: Sent | None, stop: threading.Event) -> Outcome:
        repository = area.open(repository_name(image.planned), write=True).stoppable(stop)
        if own := [report.evidence for report in image.coverage.reports]:
            run.view.begin(image.cell, "attaching test results")
            reports.attach_evidence(repository, image.stored.manifest.descriptor, own, signer)
        # The tag of the plan is set last: a machine that finds it finds the results, too.
        if sent:
            manifest = image.stored.manifest
            repository.put_manifest(plan_tag(image.planned.plan), manifest.content, manifest.media_type)
        how = f"{size(sent.sent)} sent" if sent else "by another machine"
        status = f"gpu: {image.coverage.gpu_status}" if image.coverage.reports else "not tested here"
        run.view.end(image.cell, "staged", f"{how}, {status}")
        return Outcome(image=image.planned, digest=image.digest, sent=sent, coverage=image.coverage)

    run.view.add_images(image.cell for image in images)
    with run.view.live():
        outcomes = pipeline(push_image, finish_image, images, lambda image: run.view.end(image.cell, "failed"))

    # Last the release: other machines find it when all its images are complete.
    report = Report(outcomes=outcomes)
    if not images_only:
        in_order = sorted(listed, key=lambda image: image.cell)
        report.stamp = area.write(run.project, f"{run.today:%Y%m%d}", revision, in_order, signer).stamp
    return report


def find_candidate(
    run: Run, area: StagingArea, suite: Suite, planned: PlannedImage, lookup: LayerLookup | None
) -> Candidate:
    """The image to stage: from the store, else staged by another machine for the same plan, else made of known layers.

    An image from the store must have passed its tests on this machine. Raises ImageTestError, DamagedError, BuildError,
    RegistryError.
    """
    state, where = run.project.state, f"On an {ARM64} machine: " if planned.cell.arch == ARM64 else ""
    hint = f"{where}builder images {planned.id}"
    try:
        stored = stored_images.find_stored_image(run.store, planned)
    except DamagedError as error:
        raise DamagedError(f"{planned.id}: {error}", hint=hint) from error
    if stored:
        coverage = results.local_coverage(state, Requirement.of(planned, stored.manifest.digest, suite))
        if coverage.failure:
            raise ImageTestError(f"{planned.id}: {coverage.failure}", hint=hint)
        return Candidate(planned=planned, stored=stored, coverage=coverage)
    if digest := area.open(repository_name(planned)).digest_of(plan_tag(planned.plan)):
        # A job without write access may have tested it: its results, also of failures, are attached.
        stored = staging.image_of(area, StagedImage.of(planned, digest))
        coverage = results.local_coverage(state, Requirement.of(planned, digest, suite))
        return Candidate(planned=planned, stored=stored, coverage=coverage, is_staged=True)
    if lookup:
        return Candidate(planned=planned, stored=lookup.assemble_known(planned), coverage=Coverage())
    raise ImageTestError(f"{planned.id}: not built", hint=hint)
