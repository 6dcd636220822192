"""Parts of `builder stage` and `builder release`: images with their tags and stamps, and pushing them by digest.

First, every image gets the stamped tag of the release, which never moves; then the other tags move. So no tag names an
image of half a release. Images that differ only in architecture share their tags, which name an index of the images.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from builder.common.console import Meter, View
from builder.common.errors import DamagedError, ImageTestError, RegistryError, UsageError, VerifyError
from builder.common.reference import ImageRef
from builder.engine.run import Run
from builder.evidence import results
from builder.evidence.results import Coverage, Requirement
from builder.evidence.suite import Suite
from builder.index.host import Host
from builder.layers import oci, stored_images
from builder.layers.oci import Descriptor, Image, Manifest
from builder.matrix import tags
from builder.matrix.project import Project
from builder.matrix.schema import ARM64
from builder.plan.plan import PlannedImage
from builder.registry import transfer
from builder.registry.client import INDEXES, Repository
from builder.registry.failures import RejectedError
from builder.registry.parallel import look_up
from builder.registry.parallel import transfer as transfer_each
from builder.registry.transfer import Sent
from builder.release import tagging
from builder.release.scan import UNSCANNED
from builder.release.tagging import TagChange

WITHOUT_ARCH = "on machines of that architecture, `docker pull` then fails, or pulls an image that does not run"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An image to stage or to publish, its coverage by tests, and the references to publish it under.

    The full tag is first among `references`; `cells` are the ids of all cells of the matrix with these references, by
    architecture. `is_staged` is True if another machine staged the image. For a release, `sbom` is the image's SBOM,
    and `scan` the result of the scanner in matrix.yaml.
    """

    planned: PlannedImage
    stored: Image
    coverage: Coverage
    references: tuple[ImageRef, ...]
    cells: Mapping[str, str]
    is_staged: bool = False
    sbom: bytes = b""
    scan: str = UNSCANNED

    @classmethod
    def of(cls, project: Project, planned: PlannedImage, stored: Image, coverage: Coverage) -> Candidate:
        """The image with its references and cells."""
        return cls(
            planned=planned,
            stored=stored,
            coverage=coverage,
            references=references(planned),
            cells={
                cell.arch: cell.id for cell in project.cells if replace(cell, arch=planned.cell.arch) == planned.cell
            },
        )

    @property
    def cell(self) -> str:
        return self.planned.id

    @property
    def arch(self) -> str:
        return self.planned.cell.arch

    @property
    def digest(self) -> str:
        return self.stored.manifest.digest


@dataclass(frozen=True, kw_only=True)
class TagGroup:
    """Images with the same tags: they differ only in their architecture.

    `manifest` is the one that the tags will name; `before` has the digest of each moving tag when the push began, and
    `listed` are all tags of the repository then.
    """

    images: Sequence[Candidate]
    repository: Repository
    manifest: Manifest
    before: Mapping[str, str | None]
    listed: Collection[str]

    @property
    def is_index(self) -> bool:
        """True if the matrix has these images for several architectures."""
        return self.manifest.media_type == oci.INDEX_TYPE

    @property
    def is_released(self) -> bool:
        """True if the full tag names the manifest already."""
        return self.before[self.images[0].references[0].tag] == self.manifest.digest

    def stamped(self, stamp: str) -> str:
        """The full tag with a stamp; empty if the images are released already."""
        return "" if self.is_released else tags.stamped(self.images[0].references[0], stamp).tag


class NotBuiltError(ImageTestError):
    """The store does not have the image."""


def require_registry(project: Project) -> None:
    """Raises UsageError without a registry to publish to."""
    if not project.matrix.registry:
        raise UsageError("no registry in matrix.yaml", hint='Set `registry: "registry.example.com"` there.')


def references(image: PlannedImage) -> tuple[ImageRef, ...]:
    """The references of an image, the full tag first."""
    return tuple(ImageRef.parse(text) for text in image.references)


def passed_image(run: Run, suite: Suite, planned: PlannedImage) -> Candidate:
    """The image of the store, which passed its tests. Raises NotBuiltError, ImageTestError, DamagedError."""
    try:
        stored = stored_images.find_stored_image(run.store, planned)
        if stored is None:
            raise NotBuiltError("not built")
        coverage = results.local_coverage(run.project.state, Requirement.of(planned, stored.manifest.digest, suite))
        if coverage.failure:
            raise ImageTestError(coverage.failure)
    except (DamagedError, ImageTestError) as error:
        where = f"On an {ARM64} machine: " if planned.cell.arch == ARM64 else ""
        raise type(error)(f"{planned.id}: {error}", hint=f"{where}builder images {planned.id}") from error
    return Candidate.of(run.project, planned, stored, coverage)


# ---- tags and stamps


def group_by_tags(images: Iterable[Candidate], host: Host) -> list[TagGroup]:
    """The images that share their tags, together, and the digests that these tags name now. Raises RegistryError."""
    by_references: dict[tuple[ImageRef, ...], list[Candidate]] = {}
    for image in images:
        by_references.setdefault(image.references, []).append(image)
    references = {name.name: name for names in by_references for name in names}
    repositories = {name: Repository(reference, host=host, write=True) for name, reference in references.items()}
    # One list for each repository: the stamped tags of a release are new, and need no request of their own.
    listed = {name: set(repository.list_tags()) for name, repository in repositories.items()}

    def read_group(item: tuple[tuple[ImageRef, ...], list[Candidate]]) -> TagGroup:
        names, sharing = item
        repository = repositories[names[0].name]
        before = tagging.read_tags(repository, [name.tag for name in names])
        manifest = tagged_manifest(sharing)
        return TagGroup(
            images=sharing,
            repository=repository,
            manifest=manifest,
            before=before,
            listed=listed[names[0].name],
        )

    return [group for _, group in look_up(read_group, by_references.items())]


def tagged_manifest(images: Sequence[Candidate]) -> Manifest:
    """The manifest that their tags name: that of the image if the matrix has one architecture, else an index.

    An engine that needs an architecture reports a clear error for an index that lacks it. With a manifest, it would
    pull an image that does not run there.
    """
    if len(images[0].cells) == 1:
        return images[0].stored.manifest
    manifests = {image.arch: image.stored.manifest.descriptor for image in images}
    return Manifest.of(oci.platform_index(manifests), oci.INDEX_TYPE)


def check_tags(groups: Sequence[TagGroup], view: View, *, roll_back: bool, allow_missing_arch: bool) -> None:
    """Raises RegistryError if a tag would move back, or would have no image for an architecture.

    A tag moves back to an older release or to older Debian packages, or from an image that cannot be read, so that its
    age is unknown: `roll_back` allows it. `allow_missing_arch` allows a tag without an image for an architecture of the
    matrix, or for one that it has now.
    """
    backward: list[str] = []
    missing: list[str] = []
    for group in groups:
        labels = {image.arch: image.stored.labels for image in group.images}
        named: dict[str, dict[str, dict[str, str]]] = {}
        for tag, before in group.before.items():
            if not before or before == group.manifest.digest:
                continue
            name = f"{group.repository.name}:{tag}"
            try:
                named[before] = named.get(before) or tagging.named_images(group.repository, before)
            except (VerifyError, RejectedError) as error:
                backward.append(f"{name} names an image that cannot be read: {error}")
                with suppress(VerifyError, RejectedError):  # an unreadable image still has its architectures
                    index = group.repository.manifest(before)
                    if index and index.media_type in INDEXES:
                        named[before] = {arch: {} for arch in oci.read_platforms(index.content)}
                continue
            if reason := tagging.backward(named[before], labels):
                backward.append(f"{name} would move back {reason}")
        needed = {arch for by_arch in (group.images[0].cells, *named.values()) for arch in by_arch}
        for arch in sorted(needed - labels.keys()):
            missing.append(f"{group.images[0].references[0]} would have no image for {arch}")
    if backward and not roll_back:
        raise RegistryError(
            "nothing was pushed: these tags would move back, or the images that they name now cannot be read\n"
            + "\n".join(f"  {line}" for line in backward),
            hint="Run `make refresh` to build on current packages, or use --roll-back to move the tags anyway.",
        )
    if missing and allow_missing_arch:
        for line in missing:
            view.say(line.replace("would have", "has"))
    elif missing:
        raise RegistryError(
            "nothing was pushed: these tags would have no image for an architecture that matrix.yaml has, or that "
            "they have now\n" + "\n".join(f"  {line}" for line in missing),
            hint="Publish the images for all architectures together: `builder stage` on machines of all of them, then "
            f"`builder release`. Or use --allow-missing-arch: {WITHOUT_ARCH}",
        )


def free_stamp(groups: Sequence[TagGroup], stamps: Iterable[str]) -> str:
    """The first stamp whose tags no other image has; empty if all images are released. Raises RegistryError."""
    new = [group for group in groups if not group.is_released]
    if not new:
        return ""
    for stamp in stamps:
        if all(
            group.stamped(stamp) not in group.listed
            or group.repository.digest_of(group.stamped(stamp)) == group.manifest.digest
            for group in new
        ):
            return stamp
    raise RegistryError(
        "nothing was pushed: other images have the tags of this release", hint="Stage the images again."
    )


def set_tags(groups: Sequence[TagGroup], stamp: str, changes: list[TagChange]) -> None:
    """Sets the stamped tags, then moves the other ones; appends to `changes` after each tag.

    Call it when all images are complete in the registry: so no tag names an image of half a release. Raises
    RegistryError if another push changes the same tags.
    """
    by_repository: dict[Repository, list[TagGroup]] = {}
    for group in groups:
        by_repository.setdefault(group.repository, []).append(group)

    # With the group's own repository, which does not stop between a tag that was set and its entry in `changes`.
    def set_stamped(_: Repository, group: TagGroup) -> None:
        # It was free when the stamp was chosen: if it is taken now, another push has set it.
        tagging.tag(group.repository, group.manifest, changes, {group.stamped(stamp): None})

    def set_moving(_: Repository, group: TagGroup) -> None:
        tagging.tag(group.repository, group.manifest, changes, group.before)

    for repository, sharing in by_repository.items():
        transfer_each(repository, set_stamped, [group for group in sharing if not group.is_released])
    for repository, sharing in by_repository.items():
        transfer_each(repository, set_moving, sharing)
    for repository in by_repository:
        tagging.confirm(repository, changes)


# ---- pushing


def push_image(
    run: Run,
    repository: Repository,
    image: Candidate,
    mount_from: Sequence[str],
    fetch: Callable[[Descriptor], Path] | None = None,
    source: str = "",
) -> Sent:
    """Pushes an image by digest, with its progress in the view; sets no tag.

    `mount_from`, `fetch` and `source` are as in `transfer.send_image`.
    """
    stored = (image.stored.config, *(layer.descriptor for layer in image.stored.layers))
    paths = {blob: run.store.path(blob.digest) for blob in stored}
    files = {blob: path if path.exists() else None for blob, path in paths.items()}
    progress = Meter(run.view, image.cell, "checked or sent", sum(blob.size for blob in files)).add
    return transfer.send_image(
        repository,
        image.stored.manifest,
        files,
        fetch=fetch,
        source=source,
        mount_from=mount_from,
        progress=progress,
    )
