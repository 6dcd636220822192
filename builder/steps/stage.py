"""Pushes the tested images of the store to staging, with their reports."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from builder.build.layer_lookup import LayerLookup
from builder.common import errors
from builder.common.console import View
from builder.common.errors import BuildError
from builder.common.reference import ImageRef
from builder.common.text import size
from builder.evidence import reports, results
from builder.evidence.results import Coverage, Requirement
from builder.evidence.signing import Signer
from builder.evidence.suite import Suite
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan.plan import Plan, PlannedImage
from builder.registry.parallel import pipeline
from builder.release import publish, tagging
from builder.release.publish import NotBuiltError, PublishableImage, PushedImage
from builder.release.staging import INDEX, StagedImage, StagingArea, image_of, name_of, plan_tag


@dataclass(frozen=True, kw_only=True)
class StagingResult:
    """The result of staging: `here` are the images of this machine, of which `sent` bytes were sent.

    `elsewhere` are those that another machine staged. `stamp` is that of the staged release, empty without one.
    """

    here: Sequence[StagedImage]
    elsewhere: Sequence[StagedImage]
    sent: int
    stamp: str = ""

    @property
    def images(self) -> list[StagedImage]:
        return sorted([*self.here, *self.elsewhere], key=lambda image: image.cell)


def stage(
    project: Project,
    store: Store,
    view: View,
    area: StagingArea,
    plan: Plan,
    *,
    today: date,
    revision: str,
    signer: Signer | None = None,
    lookup: LayerLookup | None = None,
    images_only: bool = False,
) -> StagingResult:
    """Pushes the images of a plan that passed their tests by digest, and attaches their reports, signed by `signer`.

    Then lists them as a release of today and of this `revision`. With `images_only`, lists them for the day alone. Also
    attaches this machine's results to images that another machine staged. With a `lookup`, images that are neither
    in the store nor staged are staged too, without test results.

    Raises one error for all images that are neither in the store nor in staging, before anything is sent, and one for
    all failures.
    """
    if not plan.images:  # built-in sets may be empty; an empty release would be the newest one
        return StagingResult(here=(), elsewhere=(), sent=0)
    day = tagging.first_stamp(area.open(INDEX), today)
    signer = signer and signer.with_trust(project)

    # Images that the store has and that passed their tests here.
    images, failures = publish.passed_images(project, store, plan)

    # Another machine may have staged an image that the store lacks, for the same plan, or a registry may have all its
    # layers.
    elsewhere: list[StagedImage] = []
    for planned in plan.images:
        if not isinstance(failures.get(planned.id), NotBuiltError):
            continue
        if present := area.open(_name(planned)).digest_of(plan_tag(planned.plan)):
            elsewhere.append(_staged(planned, present))
            del failures[planned.id]
        elif lookup:
            try:
                stored = lookup.assemble_known(planned)
                images.append(PublishableImage.of(project, planned, stored, Coverage()))
                del failures[planned.id]
            except BuildError as error:
                failures[planned.id] = error
    if failures:
        raise errors.join([failures[cell] for cell in sorted(failures)], "images cannot be staged")

    # Without a release, list them before any is pushed: `prune` deletes what no list names.
    here = [_staged(image.planned, image.digest) for image in images]
    if images_only:
        area.list_images(day, [*here, *elsewhere])

    # One image after another; the attachments of one go up while the next one is pushed.
    repositories = [area.repository(each.repository) for each in here]

    def push_image(image: PublishableImage) -> PushedImage:
        # Blobs may be mounted from other repositories of the same registry.
        own, others = area.repository(_name(image.planned)), [*repositories]
        fetch = None
        if lookup:
            fetch = lookup.fetch
            others += [] if image.coverage.reports else lookup.references()
        names = dict.fromkeys(other.repository for other in others if other.registry == own.registry)
        mounts = [name for name in names if name != own.repository]
        return publish.push_image(area.open(_name(image.planned), write=True), store, view, image, mounts, fetch)

    def finish_image(pushed: PushedImage, stop: threading.Event) -> int:
        image = pushed.image
        repository = pushed.repository.stoppable(stop)
        own = [report.evidence for report in image.coverage.reports]
        if own:
            view.begin(image.cell, "attaching test results")
            reports.attach_evidence(repository, image.stored.manifest.descriptor, own, signer)
        # The tag of the plan is set last: a machine that finds it finds the results, too.
        manifest = image.stored.manifest
        repository.put_manifest(plan_tag(image.planned.plan), manifest.content, manifest.media_type)
        status = f"gpu: {image.coverage.gpu_status}" if own else "not tested"
        view.end(image.cell, "staged", f"{size(pushed.sent.sent)} sent, {status}")
        return pushed.sent.sent

    # A job without rights may have tested images that another machine staged: its results, also of failures, are
    # attached too.
    by_cell, suite = {planned.id: planned for planned in plan.images}, Suite.of(*project.folders)

    def attach_results(staged: StagedImage) -> None:
        requirement = Requirement.of(by_cell[staged.cell], staged.digest, suite)
        if own := results.local_coverage(project.state, requirement).reports:
            view.begin(staged.cell, "attaching test results")
            image = image_of(area, staged)
            repository = area.open(staged.repository, write=True)
            reports.attach_evidence(repository, image.manifest.descriptor, [report.evidence for report in own], signer)
            view.end(staged.cell, "staged", "by another machine; test results attached")

    with view.live():
        sent = sum(pipeline(push_image, finish_image, images, lambda image: view.end(image.cell, "failed")))
        errors.collect(attach_results, elsewhere)

    # Last the release: other machines find it when all its images are complete.
    result = StagingResult(here=here, elsewhere=elsewhere, sent=sent)
    if images_only:
        return result
    return replace(result, stamp=area.write(project, day, revision, result.images, signer).stamp)


def _name(planned: PlannedImage) -> str:
    """The name of its repository in staging."""
    return name_of(ImageRef.parse(planned.references[0]))


def _staged(planned: PlannedImage, digest: str) -> StagedImage:
    return StagedImage(cell=planned.id, repository=_name(planned), digest=digest, plan=planned.plan)
