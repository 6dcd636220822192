"""Pushes the tested images of the store to staging, with their reports."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from builder.build.layer_lookup import LayerLookup
from builder.common import errors
from builder.common.console import Meter, View
from builder.common.errors import BuilderError, BuildError
from builder.common.reference import ImageRef
from builder.common.text import size
from builder.evidence import reports, results
from builder.evidence.results import Coverage, Requirement
from builder.evidence.signing import Signer
from builder.evidence.suite import Suite
from builder.layers.blobs import wheel_file
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan.plan import Plan, PlannedImage
from builder.registry import artifacts, transfer
from builder.registry.client import Repository
from builder.registry.parallel import pipeline
from builder.release import publish
from builder.release.publish import NotBuiltError
from builder.release.staging import StagedImage, StagingArea, image_of, name_of, plan_tag


@dataclass(frozen=True, kw_only=True)
class StagingResult:
    """The staged images of a plan: those of this machine, for which `sent` bytes were sent, and those of others.

    `left_out` are the errors of the images that are neither.
    """

    here: tuple[StagedImage, ...]
    elsewhere: tuple[StagedImage, ...]
    sent: int
    left_out: tuple[BuilderError, ...] = ()

    @property
    def images(self) -> list[StagedImage]:
        return sorted([*self.here, *self.elsewhere], key=lambda image: image.cell)


@dataclass(frozen=True, kw_only=True)
class _ImageToStage:
    """An image to push, and its coverage by tests: None for an image that was not tested."""

    staged: StagedImage
    stored: Image
    coverage: Coverage | None


def stage_images(  # noqa: PLR0913  the options of the command
    project: Project,
    store: Store,
    view: View,
    place: StagingArea,
    plan: Plan,
    *,
    signer: Signer | None = None,
    lookup: LayerLookup | None = None,
    listed_on: str = "",
    skip_incomplete: bool = False,
) -> StagingResult:
    """Pushes the images of a plan that passed their tests by digest, and attaches their reports, signed by `signer`.

    Also attaches this machine's results to images that another machine staged.

    With a `lookup`, images that are neither here nor staged are staged too, without test results. With a day in
    `listed_on`, they are listed for this day before any is pushed, so that `prune` keeps them. Raises one error for all
    images that are neither in the store nor in staging, before anything is sent, and one for all failures. With
    `skip_incomplete`, the former are left out, unless that leaves none.
    """
    # What the store has and passed its tests here.
    targets, failures = publish.collect(project, store, plan)
    by_cell, suite = {planned.id: planned for planned in plan.images}, Suite.of(project.root)
    images = [
        _ImageToStage(
            staged=_staged(by_cell[target.cell], target.digest), stored=target.stored, coverage=target.coverage
        )
        for target in targets
    ]

    # What it lacks: another machine may have staged it for the same plan, or a registry may have all its layers.
    elsewhere: list[StagedImage] = []
    for planned in plan.images:
        if not isinstance(failures.get(planned.id), NotBuiltError):
            continue
        if present := place.open(_name(planned)).digest_of(plan_tag(planned.digest)):
            elsewhere.append(_staged(planned, present))
            del failures[planned.id]
        elif lookup:
            try:
                stored = lookup.assemble_known(planned)
                images.append(
                    _ImageToStage(staged=_staged(planned, stored.manifest.digest), stored=stored, coverage=None)
                )
                del failures[planned.id]
            except BuildError as error:
                failures[planned.id] = error
    left_out = tuple(failures[cell] for cell in sorted(failures))
    if left_out and not (skip_incomplete and (images or elsewhere)):
        raise errors.join(left_out, "images cannot be staged")
    here = tuple(image.staged for image in images)
    if listed_on:
        place.list_images(listed_on, [*here, *elsewhere])

    # One image after another; what is attached to one goes up while the next one is pushed.
    repositories = {image.staged.repository: place.repository(image.staged.repository) for image in images}

    def push_image(image: _ImageToStage) -> tuple[_ImageToStage, Repository, int]:
        repository = place.open(image.staged.repository, write=True)
        # Blobs may be mounted from other repositories of the same registry.
        own, others = repositories[image.staged.repository], list(repositories.values())
        if lookup and image.coverage is None:
            others += lookup.references()
        names = dict.fromkeys(other.repository for other in others if other.registry == own.registry)
        blobs = publish.blobs_of(store, image.stored)
        meter = Meter(view, image.staged.cell, "checked or sent", sum(blob.size for blob in blobs))
        mounts = [name for name in names if name != own.repository]
        fetch = lookup.fetch if lookup else None
        pushed = transfer.push_image(
            repository, image.stored.manifest, blobs, fetch=fetch, mount_from=mounts, progress=meter.add
        )
        return image, repository, pushed.sent

    def finish_image(pushed: tuple[_ImageToStage, Repository, int], stop: threading.Event) -> int:
        image, repository, sent = pushed
        manifest = image.stored.manifest
        repository = repository.stoppable(stop)
        if image.coverage:
            view.begin(image.staged.cell, "attaching test results")
            results = [report.evidence for report in image.coverage.reports]
            reports.attach_evidence(repository, manifest.descriptor, results, signer)
        built = [wheel for wheel in by_cell[image.staged.cell].wheels if wheel.source]
        with artifacts.attaching(repository, manifest.descriptor) as attachments:
            for wheel in built:
                file = wheel_file(wheel)
                path = store.path(file.digest) if store.has(file.digest, file.size) else None
                if path or repository.has_blob(file.digest):
                    attachments.add_file(file, path, {artifacts.TITLE: wheel.file})
                else:
                    view.say_once(f"{wheel.file} is not in the store: staged without it")
        # Last the tag of the plan: whoever finds it finds the results, too.
        repository.put_manifest(plan_tag(image.staged.plan), manifest.content, manifest.media_type)
        status = f"gpu: {image.coverage.gpu_status}" if image.coverage else "not tested"
        view.end(image.staged.cell, "staged", f"{size(sent)} sent, {status}")
        return sent

    def attach_results(staged: StagedImage) -> None:
        """Attaches this machine's results, also of failures, to an image that another machine staged."""
        requirement = Requirement.of(by_cell[staged.cell], staged.digest, suite)
        if own := results.local_coverage(project.state, requirement).reports:
            view.begin(staged.cell, "attaching test results")
            image = image_of(place, staged)
            repository = place.open(staged.repository, write=True)
            reports.attach_evidence(repository, image.manifest.descriptor, [report.evidence for report in own], signer)
            view.end(staged.cell, "staged", "by another machine; test results attached")

    with view.live():
        sent = sum(pipeline(push_image, finish_image, images, lambda image: view.end(image.staged.cell, "failed")))
        errors.collect(attach_results, elsewhere)
    return StagingResult(here=here, elsewhere=tuple(elsewhere), sent=sent, left_out=left_out)


def _name(planned: PlannedImage) -> str:
    return name_of(ImageRef.parse(planned.references[0]))


def _staged(planned: PlannedImage, digest: str) -> StagedImage:
    return StagedImage(cell=planned.id, repository=_name(planned), digest=digest, plan=planned.digest)
