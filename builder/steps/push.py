"""Publishes the tested images of the store: all images first, then tags. Nothing is signed or attached."""

from __future__ import annotations

from datetime import date

from builder.common import errors
from builder.common.console import View
from builder.common.errors import BuilderError, ImageTestError
from builder.host import Host
from builder.layers.store import Store
from builder.matrix import tags
from builder.matrix.project import Project
from builder.plan.plan import Plan
from builder.registry.client import Repository
from builder.release import publish, tagging
from builder.release.publish import PublishableImage, Released


def push(
    project: Project,
    host: Host,
    store: Store,
    view: View,
    plan: Plan,
    *,
    today: date,
    registry: str = "",
    roll_back: bool = False,
    allow_missing_arch: bool = False,
    instead: str = "builder stage && builder release",
) -> Released:
    """Publishes the images of a plan, and sets their tags; the error that ended it is in the result.

    `registry` overrides the setting in matrix.yaml. `roll_back` lets tags move to older images, `allow_missing_arch` to
    an image for fewer architectures than the matrix has, or than the tag names now. `instead` are the commands that
    publish images that no machine of their architecture has run, for a hint. Raises an error if an image is not built
    or has not passed its tests.
    """
    images, failures = publish.passed_images(project, store, plan, registry)
    if failures:
        raise errors.join(list(failures.values()), "images are not built or have not passed their tests")
    if not_run := [f"{image.cell}: {image.coverage.tests_status}" for image in images if image.coverage.is_emulated]:
        raise ImageTestError(
            "\n".join(not_run),
            hint=f"Test them on a machine of their architecture. To publish them as they are: {instead}",
        )
    result = Released(images=images)
    if not images:
        return result
    first = tagging.first_stamp(Repository(images[0].references[0], host=host, write=True), today)

    with result.until_error(view):
        # Read all tags first. So if the registry does not respond, or a tag would move back, nothing is changed.
        groups = publish.group_by_tags(images, host)
        publish.check_tags(groups, view, roll_back=roll_back, allow_missing_arch=allow_missing_arch)
        stamp = publish.free_stamp(groups, tags.stamps(first))

        # Images go up by digest, one after another. After one that fails, the others are still pushed: the next run
        # then finds them in the registry. A blob that the repository of another image has is not sent again.
        group_of = {image.cell: group for group in groups for image in group.images}
        names = {image.references[0].repository for image in images}

        def push_image(image: PublishableImage) -> None:
            repository, others = group_of[image.cell].repository, names - {image.references[0].repository}
            try:
                result.pushed[image.cell] = publish.push_image(repository, store, view, image, sorted(others))
            except BuilderError:
                view.end(image.cell, "failed")
                raise

        with view.live():
            errors.collect(push_image, images)
        for group in groups:
            if group.is_index:
                group.repository.put_manifest(group.manifest.digest, group.manifest.content, group.manifest.media_type)

        # No tag before all images are complete in the registry.
        publish.set_tags(groups, stamp, result.tags)
    return result
