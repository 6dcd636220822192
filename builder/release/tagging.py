"""Public tags: which images share them, which may move, and setting them.

First, every image gets the stamped tag of the release, which never moves; then the other tags move. So no tag names an
image of half a release. Images that differ only in architecture share their tags, which name an index of the images.

Registries have no compare-and-swap for tags. So each tag is compared with its digest when the push began, and read
again at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from packaging.version import InvalidVersion, Version

from builder.common.console import View
from builder.common.errors import RegistryError, VerifyError
from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.engine.run import Run
from builder.layers import oci
from builder.layers.oci import Manifest
from builder.matrix import tags
from builder.matrix.tags import OCI
from builder.registry.client import INDEXES, Repository
from builder.registry.failures import RejectedError
from builder.registry.transfer import map_parallel, transfer_each
from builder.release.staging import Candidate, cells_by_arch

State = Literal["set", "moved", "unchanged"]
WITHOUT_ARCH = "on machines of that architecture, `docker pull` then fails, or pulls an image that does not run"


@dataclass(frozen=True, kw_only=True)
class TagChange:
    """The result for one tag: `set` for the first time, `moved` from another image, or `unchanged`."""

    name: str
    tag: str
    digest: str
    before: str | None
    state: State

    @property
    def is_change(self) -> bool:
        return self.state != "unchanged"

    def __str__(self) -> str:
        return f"{self.name}:{self.tag} is {self.digest}" + (f", was {self.before}" if self.state == "moved" else "")


@dataclass(frozen=True, kw_only=True)
class TagGroup:
    """Images with the same tags: they differ only in their architecture.

    `cells` are the ids of all cells of the matrix with these tags, by architecture. `manifest` is the one that the tags
    will name; `before` has the digest of each moving tag when the push began, and `listed` are all tags of the
    repository then.
    """

    images: Sequence[Candidate]
    cells: Mapping[str, str]
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


def read_tags(repository: Repository, names: Iterable[str]) -> dict[str, str | None]:
    """The digests that tags name now."""
    return dict(map_parallel(repository.digest_of, names))


def backward(named: Mapping[str, Mapping[str, str]], images: Mapping[str, Mapping[str, str]]) -> str:
    """The reason that `images` are older than those that a tag has `named` until now, or an empty string.

    Also empty if their age is unknown. Both are the labels of images by architecture, see `named_images`. Compares the
    releases of the framework, then the times of the newest Debian packages.
    """
    version, created = f"{OCI}.version", f"{OCI}.created"
    for arch, before in named.items():
        after = images.get(arch, {})
        if not {version, created} <= before.keys() & after.keys():
            continue
        try:
            if Version(after[version]) < Version(before[version]):
                return f"from release {before[version]} to {after[version]}"
        except InvalidVersion:
            continue
        if after[created] < before[created]:  # RFC 3339 in UTC: the order of the texts is that of the times
            return f"from Debian packages of {before[created][:10]} to those of {after[created][:10]}"
    return ""


def named_images(repository: Repository, reference: str) -> dict[str, dict[str, str]]:
    """The labels of the image that a tag or digest names, by architecture. For an index, the labels of all its images.

    Raises VerifyError or RejectedError if an image cannot be read.
    """
    manifest = repository.manifest(reference)
    if manifest is None:
        raise VerifyError(f"the manifest {reference} is missing")
    if manifest.media_type not in INDEXES:
        return dict([oci.read_labels(manifest.content, repository.read_blob)])
    images: dict[str, dict[str, str]] = {}
    for arch, digest in oci.read_platforms(manifest.content).items():
        entry = repository.manifest(digest)
        if entry is None:
            raise VerifyError(f"the manifest {digest} is missing")
        _, images[arch] = oci.read_labels(entry.content, repository.read_blob)
    return images


def tag_manifest(
    repository: Repository, manifest: Manifest, changes: list[TagChange], before: Mapping[str, str | None]
) -> None:
    """Sets tags to a pushed manifest; appends to `changes` after each tag.

    `before` has the digest of each tag when the push began. Raises RegistryError for a tag that changed since. Call
    `confirm` at the end.
    """
    if digest_of_bytes(manifest.content) != manifest.digest:
        raise VerifyError(f"{repository.name}: the digest of the manifest to tag is not {manifest.digest}")
    for name, was in before.items():
        now = repository.digest_of(name)
        if now not in (was, manifest.digest):
            raise _conflict(repository, [(name, was, now)])
        state: State = "unchanged"
        if now != manifest.digest:
            repository.put_manifest(name, manifest.content, manifest.media_type)
            state = "moved" if now else "set"
        change = TagChange(name=repository.name, tag=name, digest=manifest.digest, before=now, state=state)
        changes.append(change)


def confirm(repository: Repository, changes: Iterable[TagChange]) -> None:
    """Raises RegistryError unless each tag still names the digest that it was set to.

    Call it after the last tag: registries have no compare-and-swap, so another push may have won the race for any tag.
    """
    own = [change for change in changes if change.name == repository.name]
    current = map_parallel(lambda change: repository.digest_of(change.tag), own)
    if lost := [(change.tag, change.digest, now) for change, now in current if now != change.digest]:
        raise _conflict(repository, lost)


def _conflict(repository: Repository, changed: Iterable[tuple[str, str | None, str | None]]) -> RegistryError:
    """The error for tags that have another digest than before, with both."""
    lines = (f"tag {tag} changed from {was or 'unset'} to {now or 'unset'}" for tag, was, now in changed)
    return RegistryError(
        f"{repository.name}: another push changed tags at the same time: {'; '.join(lines)}",
        hint="Find out who pushes the same tags, then run this again.",
    )


# ---- the tags of a release


def group_by_tags(run: Run, images: Iterable[Candidate]) -> list[TagGroup]:
    """The images that share their tags, together, and the digests that these tags name now. Raises RegistryError."""
    by_references: dict[tuple[ImageRef, ...], list[Candidate]] = {}
    for image in images:
        by_references.setdefault(image.references, []).append(image)
    references = {names[0].name: names[0] for names in by_references}
    repositories = {name: Repository(reference, host=run.host, write=True) for name, reference in references.items()}
    # One list for each repository: tags that are new need no request of their own.
    tags_of = {name: set(repository.list_tags()) for name, repository in repositories.items()}

    def read_group(sharing: Sequence[Candidate]) -> TagGroup:
        names = sharing[0].references
        repository, listed = repositories[names[0].name], tags_of[names[0].name]
        cells = cells_by_arch(run.project, sharing[0].planned)
        manifest = sharing[0].stored.manifest
        # An engine that needs an architecture reports a clear error for an index that lacks it. With a manifest, it
        # would pull an image that does not run there.
        if len(cells) > 1:
            manifests = {image.arch: image.stored.manifest.descriptor for image in sharing}
            manifest = Manifest.of(oci.platform_index(manifests), oci.INDEX_TYPE)
        return TagGroup(
            images=sharing,
            cells=cells,
            repository=repository,
            manifest=manifest,
            # All of them: a list may be old, and lack a tag that exists.
            before=read_tags(repository, [name.tag for name in names]),
            listed=listed,
        )

    return [group for _, group in map_parallel(read_group, by_references.values())]


def check_tags(groups: Sequence[TagGroup], view: View, *, roll_back: bool, allow_missing_arch: bool) -> None:
    """Raises RegistryError if a tag would move back, or would have no image for an architecture.

    A tag moves back to an older release or to older Debian packages, or from an image that cannot be read, so that its
    age is unknown: `roll_back` allows it. `allow_missing_arch` allows a tag without an image for an architecture of the
    matrix, or for one that it has now.
    """
    moving_back: list[str] = []
    missing: list[str] = []
    for group in groups:
        labels = {image.arch: image.stored.labels for image in group.images}
        named: dict[str, dict[str, dict[str, str]]] = {}
        for tag, before in group.before.items():
            if not before or before == group.manifest.digest:
                continue
            name = f"{group.repository.name}:{tag}"
            try:
                named[before] = named.get(before) or named_images(group.repository, before)
            except (VerifyError, RejectedError) as error:
                moving_back.append(f"{name} names an image that cannot be read: {error}")
                with suppress(VerifyError, RejectedError):  # an unreadable image still has its architectures
                    index = group.repository.manifest(before)
                    if index and index.media_type in INDEXES:
                        named[before] = {arch: {} for arch in oci.read_platforms(index.content)}
                continue
            if reason := backward(named[before], labels):
                moving_back.append(f"{name} would move back {reason}")
        needed = {arch for by_arch in (group.cells, *named.values()) for arch in by_arch}
        for arch in sorted(needed - labels.keys()):
            missing.append(f"{group.images[0].references[0]} would have no image for {arch}")
    if moving_back and not roll_back:
        raise RegistryError(
            "nothing was pushed: these tags would move back, or the images that they name now cannot be read\n"
            + "\n".join(f"  {line}" for line in moving_back),
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
        tag_manifest(group.repository, group.manifest, changes, {group.stamped(stamp): None})

    def set_moving(_: Repository, group: TagGroup) -> None:
        tag_manifest(group.repository, group.manifest, changes, group.before)

    for repository, sharing in by_repository.items():
        transfer_each(repository, set_stamped, [group for group in sharing if not group.is_released])
    for repository, sharing in by_repository.items():
        transfer_each(repository, set_moving, sharing)
    for repository in by_repository:
        confirm(repository, changes)
