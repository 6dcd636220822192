"""Releases staged images: reads their reports from the registry, and publishes them if all are covered.

Only the checkout and the registry are needed. The published images are recorded beside the staged release, before
the first tag, in an artifact with the tag `released-<stamp>`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from builder.build.outcomes import Outcome, Report
from builder.common import git
from builder.common.errors import BuilderError, RegistryError
from builder.common.text import listed
from builder.engine.run import Run
from builder.evidence import reports, sbom_and_provenance
from builder.evidence.results import OWN
from builder.layers.oci import Manifest
from builder.matrix import support, tags
from builder.matrix.project import Project
from builder.plan.plan import PlannedImage
from builder.registry import artifacts, transfer
from builder.registry.client import Repository
from builder.registry.transfer import Sent, pipeline
from builder.release import staging, tagging
from builder.release.release_checks import EXEMPTIONS, Exemption, ReleaseChecks, ReleaseOptions
from builder.release.staging import Candidate, StagedImage, StagedRelease, StagingArea
from builder.release.tagging import TagGroup

NOBODY = "nobody who is trusted"  # in place of a signer, beside others
SHOWN = 10  # cells in a message


def release(
    run: Run, area: StagingArea, staged: StagedRelease, planned: Mapping[str, PlannedImage], options: ReleaseOptions
) -> Report:
    """Publishes the images of a staged release, and sets their tags; the error that ended it is in the report.

    `planned` are the images of this checkout by cell, planned for the cells of the release alone: which tests an image
    must pass depends on the other images of the command. Raises one error for all images that may not be released.
    """
    # Check all images before anything changes: an image that may not be released holds back all of them.
    images = ReleaseChecks(run, area, staged, planned, options).check_images()
    if options.signer is None:
        run.view.say("this release is unsigned: users cannot check who made its images. To sign it: --sign KEY")
    own = [image.cell for image in images if OWN in image.coverage.signers]
    if own and run.project.matrix.evidence:  # without `evidence`, results need no signature
        run.view.say(f"the release will record `{OWN}` for {listed(own, SHOWN)}: only this machine ran their tests")
    matrix = run.project.matrix
    for version, cells in support.not_built(matrix, [image.planned.cell for image in images]).items():
        run.view.say(
            f"{cells}: built and tested: delete `not_built` of python.{version} "
            f"({matrix.where('python', version, 'not_built')}), to add them to the set `all`"
        )
    report = Report(stamp=staged.stamp)
    if options.check_only:
        report.outcomes = [
            Outcome(image=image.planned, digest=image.digest, coverage=image.coverage) for image in images
        ]
        return report
    if not options.roll_back:
        _require_newest(area, staged, images)
    with _changes_reported(run, report), run.store.used():
        publish_images(run, area, staged, images, options, report)
    return report


def roll_back(run: Run, area: StagingArea, stamp: str) -> Report | None:
    """Moves the tags of all cells to the images that they named after a release, by the stamped tags.

    Needs no staged release. Returns None if no image has a tag with this stamp, or if the release was
    interrupted before all of its images had their stamped tag. Images whose first release is newer keep their tags.
    Raises UsageError for an invalid stamp.
    """
    record, report, public = area.released(stamp), Report(stamp=stamp), set[str]()
    tagged = {name: image.tagged for image in (record.images if record else ()) for name in image.references[:1]}
    listed: dict[str, list[str]] = {}
    targets: list[tuple[Repository, Manifest, dict[str, str | None]]] = []
    for names in dict.fromkeys(tags.compute(run.project.matrix, run.project.cells).values()):
        full = names[0]
        repository = Repository(full, host=run.host, write=True)
        if full.name not in listed:
            listed[full.name] = repository.list_tags()
        stamps = tags.stamps_of(full.tag, listed[full.name])
        public.update(stamps)
        earlier = [other for other in stamps if tags.stamp_order(other) <= tags.stamp_order(stamp)]
        manifest = repository.manifest(tags.stamped(full, earlier[0]).tag) if earlier else None
        # An image that had not changed since an earlier release got no tag with this stamp: compare the digest.
        if str(full) in tagged and tagged[str(full)] != (manifest.digest if manifest else ""):
            return None
        if manifest:
            targets.append((repository, manifest, tagging.read_tags(repository, [name.tag for name in names])))
    if stamp not in public:
        return None
    with _changes_reported(run, report):
        area.mark_rolled_back(public, stamp)
        for repository, manifest, before in targets:
            tagging.tag_manifest(repository, manifest, report.tags, before)
        for repository in {repository.name: repository for repository, _, _ in targets}.values():
            tagging.confirm(repository, report.tags)
    return report


@contextmanager
def _changes_reported(run: Run, report: Report) -> Iterator[None]:
    """Puts the error that ends the `with` block into the report, with the tags that were changed before."""
    try:
        yield
    except BuilderError as error:
        report.error = error
        if report.changed:
            changed = [f"  {change}" for change in report.changed]
            text = "\n".join([str(error), "tags changed before the failure:", *changed])
            report.error = type(error)(text, hint=error.hint)
    except BaseException:  # Ctrl-C: the report is lost, so name the tags here
        for change in report.changed:
            run.view.say(f"changed before the interruption: {change}")
        raise


def publish_images(
    run: Run,
    area: StagingArea,
    staged: StagedRelease,
    images: Sequence[Candidate],
    options: ReleaseOptions,
    report: Report,
) -> None:
    """Pushes images with their documents, signs them, and sets their tags. Adds to the report what was done."""
    project, store, view, allowed = run.project, run.store, run.view, options.allowed
    signer = options.signer and options.signer.with_trust(project)

    # Read all tags first. So if the registry does not respond, or a tag would move back, nothing is changed.
    groups = tagging.group_by_tags(run, images)
    tagging.check_tags(groups, view, roll_back=options.roll_back, allow_missing_arch="missing-arch" in allowed)
    stamp = tagging.free_stamp(groups, tags.stamps(staged.stamp))  # a later one if another release has its tags
    group_of = {image.cell: group for group in groups for image in group.images}

    # Record what will be published before the first tag is set. If this run is interrupted, the record still names
    # the release that set the tags, and no older release moves them back.
    before = area.released(staged.stamp)
    if (record := _new_record(before, staged, groups, allowed)) != before:
        area.record(record)

    # Tags may also move back to a staged release. CI must not publish the newer release again.
    area.mark_rolled_back(area.released_stamps() if options.roll_back else (), stamp or staged.stamp)

    # Images go up by digest, one after another; the attachments of one go up while the next one is pushed.
    names = {image.references[0].repository for image in images}

    def push_image(image: Candidate) -> Sent:
        # Staging has all blobs. The registry mounts them from there, or else from the repository of another image.
        # One that can do neither gets them by way of this machine.
        mounts = sorted(names - {image.references[0].repository})
        fetch = partial(transfer.fetch_blob, area.open(staging.name_of(image.references[0])), store)
        repository = group_of[image.cell].repository
        return staging.push_image(run, repository, image, mounts, fetch, _mountable(area, image))

    def finish_image(image: Candidate, sent: Sent, stop: threading.Event) -> Outcome:
        group = group_of[image.cell]
        repository = group.repository.stoppable(stop)
        view.begin(image.cell, "attaching test results and statements")
        _attach_documents(repository, area, image)
        if signer:
            notes, statements = _annotations(image.cell, group, stamp), _statements(project, image)
            signer.sign_manifest(repository, image.stored.manifest.descriptor, notes, statements)
        view.end(image.cell, "complete", str(sent))
        return Outcome(image=image.planned, digest=image.digest, sent=sent, coverage=image.coverage)

    view.add_images(image.cell for image in images)
    with view.live():
        report.outcomes = pipeline(push_image, finish_image, images, lambda image: view.end(image.cell, "failed"))

    # Images for several architectures get one tag, which names an index of them. It is signed as the cell without
    # an architecture: `cosign verify` of a tag does not depend on whether it names an index.
    for group in groups:
        if group.is_index:
            manifest, cell = group.manifest, group.images[0].planned.cell
            group.repository.put_manifest(manifest.digest, manifest.content, manifest.media_type)
            if signer:
                annotations = _annotations(f"{cell.axes}{cell.suffix}", group, stamp)
                signer.sign_manifest(group.repository, manifest.descriptor, annotations)

    # No tag before all images are complete in the registry: none names an image of half a release.
    tagging.set_tags(groups, stamp, report.tags)


def _require_newest(area: StagingArea, staged: StagedRelease, images: Sequence[Candidate]) -> None:
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
    before: StagedRelease | None,
    staged: StagedRelease,
    groups: Sequence[TagGroup],
    allowed: Collection[Exemption],
) -> StagedRelease:
    """The record of the release, which continues the record of its earlier runs, `before`."""
    released = []
    for group in groups:
        for image in group.images:
            signers = image.coverage.signers
            update = {
                "tagged": group.manifest.digest,
                "references": tuple(map(str, image.references)),
                "gpu": image.coverage.gpu_status,
                "signer": ", ".join(name or NOBODY for name in signers) if any(signers) else "",
                "scan": image.scan,
            }
            released.append(StagedImage.of(image.planned, image.digest).model_copy(update=update))
    is_complete = all(len(group.images) == len(group.cells) for group in groups)
    used = [name for name in EXEMPTIONS if name in allowed and not (name == "missing-arch" and is_complete)]
    own = {image.cell for image in released}
    return StagedRelease(
        stamp=staged.stamp,
        revision=staged.revision,
        # Images that an earlier run published and this one leaves out: their tags are set.
        images=(*released, *(image for image in (before.images if before else ()) if image.cell not in own)),
        allowed=tuple(dict.fromkeys((*(before.allowed if before else ()), *used))),
    )


def _mountable(area: StagingArea, image: Candidate) -> str:
    """The name of the repository in staging, if the registry of the release can mount blobs from it; else empty."""
    staged = area.repository(staging.name_of(image.references[0]))
    return staged.repository if staged.registry == image.references[0].registry else ""


def _attach_documents(repository: Repository, area: StagingArea, image: Candidate) -> None:
    """Attaches the reports that count, and the SBOM."""
    source = area.open(staging.name_of(image.references[0]))
    with artifacts.attaching(repository, image.stored.manifest.descriptor) as attachments:
        for report in image.coverage.reports:
            attachments.copy(source, report.artifact, _mountable(area, image))
        attachments.add(sbom_and_provenance.SBOM_TYPE, {sbom_and_provenance.SBOM_TYPE: image.sbom})


def _statements(project: Project, image: Candidate) -> dict[str, bytes]:
    """The predicates to sign for an image, by kind."""
    # The commit of the checkout, whose plan was compared with the image: the document in staging is not signed.
    provenance = sbom_and_provenance.provenance(
        image.planned, source=project.matrix.source, revision=git.state(project.root)
    )
    statements = {sbom_and_provenance.SBOM: image.sbom, sbom_and_provenance.PROVENANCE: provenance}
    if test_result := reports.test_result(image.coverage):
        statements[reports.TEST_RESULT] = test_result
    return statements


def _annotations(cell: str, group: TagGroup, stamp: str) -> dict[str, str]:
    """The annotations of a signature: the cell, the full tag, and the stamped tag if the image gets it now."""
    full, stamped = group.images[0].references[0], group.stamped(stamp)
    annotations = {"cell": cell, "image": staging.name_of(full), "tag": full.tag}
    return annotations | ({"release": stamped} if stamped else {})
