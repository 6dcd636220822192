"""Finds and deletes what is no longer needed in staging: old releases, their images, and what is attached to them.

Nothing in the public repositories is deleted. Compares digests, because deleting a manifest deletes all its tags.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from builder.common.console import View
from builder.common.errors import VerifyError
from builder.common.files import SHA256_HEX, short_digest
from builder.common.text import counted
from builder.matrix import tags
from builder.registry import artifacts
from builder.registry.client import INDEXES, Repository
from builder.registry.transfer import map_parallel
from builder.release.staging import INDEX, PREFIX, RELEASED, StagedRelease, StagingArea

_PLAN_TAG = re.compile(rf"plan-{SHA256_HEX}", re.ASCII)
# The index of what is attached to an image; with a suffix, what cosign stores for it.
_ATTACHED_TAG = re.compile(rf"sha256-({SHA256_HEX})(?:\.[a-z]+)?", re.ASCII)
Kind = Literal["document", "image", "attachment"]


@dataclass(frozen=True, kw_only=True)
class RepositoryContents:
    """A repository's digests by tag, its images, and what is attached to each manifest, whether it exists or not.

    `missing` are those that no longer exist.
    """

    repository: Repository
    tags: Mapping[str, str]
    images: Collection[str]
    missing: Collection[str]
    attached: Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class RegistryContents:
    """The contents of staging.

    `releases` are all staged releases, the newest first. `published` are the digests behind public tags without a
    stamp, `plans` the tags of this checkout's plan.
    """

    documents: RepositoryContents
    releases: Sequence[StagedRelease]
    staged: Sequence[RepositoryContents]
    published: Collection[str]
    plans: Collection[str]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A manifest that nothing needs; `text` describes it."""

    repository: Repository
    digest: str
    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.repository.name}@{self.digest}  {self.text}"

    def as_data(self) -> dict[str, str]:
        """The item for `--format json`."""
        return {"repository": self.repository.name, "digest": self.digest, "kind": self.kind, "text": self.text}


# ---- decision


def kept(releases: Sequence[StagedRelease], published: Collection[str], keep: int) -> list[StagedRelease]:
    """The newest releases, `keep` of them, and the newest one with each image that a public tag names. Pure."""
    chosen, unlisted = [], set(published)
    for number, release in enumerate(releases):
        images = {image.digest for image in release.images}
        if number < keep or images & unlisted:
            chosen.append(release)
            unlisted -= images
    return chosen


def unneeded(contents: RegistryContents, keep: int) -> list[Item]:
    """The manifests that are not needed, in the order to delete them. Pure."""
    # Documents are first, so that none lists a deleted image. Then each image, with its plan tag, then its attachments,
    # and last the tag that lists them: after an interruption, the next run finds the rest by tag.
    current = {f"{PREFIX}{release.stamp}": release for release in kept(contents.releases, contents.published, keep)}
    needed = {image.digest for release in current.values() for image in release.images}
    documents = contents.documents
    old = {f"{PREFIX}{release.stamp}" for release in contents.releases} - current.keys()
    # Two tags may name one manifest, and deleting it deletes both.
    used = {digest for tag, digest in documents.tags.items() if tag not in old}
    gone = {digest: tag for tag, digest in documents.tags.items() if tag in old and digest not in used}
    items = [
        Item(repository=documents.repository, digest=digest, kind="document", text=gone[digest]) for digest in gone
    ]
    for repository in contents.staged:
        tagged = {digest for tag, digest in repository.tags.items() if tag in contents.plans or not _is_ours(tag)}
        items += [
            Item(repository=repository.repository, digest=image, kind="image", text=_describe(contents, image))
            for image in repository.images
            if image not in needed | tagged
        ]
    for repository in (*contents.staged, documents):
        items += _attachments(repository, {item.digest for item in items if item.repository is repository.repository})
    return items


def _is_ours(tag: str) -> bool:
    """True for a tag that `builder` or cosign sets in staging."""
    return bool(_PLAN_TAG.fullmatch(tag) or _ATTACHED_TAG.fullmatch(tag))


def _attachments(contents: RepositoryContents, gone: Collection[str]) -> list[Item]:
    """What is attached to manifests that are deleted, or no longer exist, and to no other."""
    lost = {subject for subject in contents.attached if subject in gone or subject in contents.missing}
    kept = {digest for subject, attached in contents.attached.items() if subject not in lost for digest in attached}
    kept |= set(contents.images)
    texts = {
        digest: f"attached to {short_digest(subject)}" + ("" if subject in gone else ", which no longer exists")
        for subject, attached in contents.attached.items()
        if subject in lost
        for digest in attached
        if digest not in kept
    }
    return [
        Item(repository=contents.repository, digest=digest, kind="attachment", text=text)
        for digest, text in texts.items()
    ]


def _describe(registry: RegistryContents, image: str) -> str:
    stamps = {
        release.stamp: released.cell
        for release in registry.releases
        for released in release.images
        if released.digest == image
    }
    if not stamps:
        return "in no release"
    is_released = any(f"{RELEASED}{stamp}" in registry.documents.tags for stamp in stamps)
    return f"{min(stamps.values())}  staged {', '.join(stamps)}, {'' if is_released else 'not '}released"


# ---- registry


def read_registries(
    area: StagingArea, public: Sequence[Repository], plans: Collection[str], view: View
) -> RegistryContents:
    """Reads staging, and the tags of the public repositories.

    Raises VerifyError, RegistryError if anything that may be needed cannot be read.
    """
    releases = [release for _, release in map_parallel(partial(_release, area), area.stamps())]
    images: dict[str, set[str]] = {repository.name.rpartition("/")[2]: set() for repository in public}
    for image in (image for release in releases for image in release.images):
        images.setdefault(image.repository, set()).add(image.digest)
    return RegistryContents(
        documents=_read_repository(area.open(INDEX), (), view),
        releases=releases,
        staged=[_read_repository(area.open(name), listed, view) for name, listed in images.items()],
        published=set().union(*(_published(repository) for repository in public)),
        plans=plans,
    )


def _release(area: StagingArea, stamp: str) -> StagedRelease:
    try:
        return area.read(stamp)
    except VerifyError as error:
        raise VerifyError(
            f"release {stamp} cannot be read, so it is unknown which images are needed; nothing was deleted: {error}",
            hint=f"If its images are not needed, delete {area.repository(INDEX)}:{PREFIX}{stamp} in the registry, "
            "then run this again.",
        ) from error


def _published(repository: Repository) -> set[str]:
    """The digests behind the public tags without a stamp. If a tag names an index, also the digests of its images."""
    names = repository.list_tags()
    moving = [tag for tag in names if not (_is_ours(tag) or tags.is_stamp(tag.rpartition("-")[2]))]
    named = set(_digests(repository, moving).values())

    def entries(digest: str) -> list[str]:
        manifest = repository.manifest(digest)
        is_index = manifest is not None and manifest.media_type in INDEXES
        return artifacts.entries(manifest.content, f"{repository.name}@{digest}") if manifest and is_index else []

    return named.union(*(below for _, below in map_parallel(entries, named)))


def _read_repository(repository: Repository, listed: Collection[str], view: View) -> RepositoryContents:
    """Reads a repository of staging; `listed` are the digests of its images that releases list."""
    view.begin(repository.name, "reading")
    present = _digests(repository, repository.list_tags())
    named = {*listed, *(digest for tag, digest in present.items() if not _ATTACHED_TAG.fullmatch(tag))}
    subjects = sorted({*named, *_subjects(present)})
    attached = dict(map_parallel(lambda subject: _attached(repository, subject, present), subjects))
    # A signed attachment has a tag of its own, but is not an image.
    attachments = {digest for subject, digests in attached.items() for digest in digests if digest != subject}
    images = {*named, *subjects} - (attachments - named)
    existing = _digests(repository, images)
    view.end(repository.name, "done", counted(len(existing), "manifest"))
    return RepositoryContents(
        repository=repository,
        tags=present,
        images=list(existing),
        missing=images - existing.keys(),
        attached=attached,
    )


def _subjects(names: Iterable[str]) -> list[str]:
    """The images to which something is attached by tag."""
    return sorted({f"sha256:{match[1]}" for name in names if (match := _ATTACHED_TAG.fullmatch(name))})


def _attached(repository: Repository, subject: str, present: Mapping[str, str]) -> list[str]:
    """The digests attached to an image, last the manifests of its tags: one of them may be the list of all others."""
    tagged = [digest for tag, digest in present.items() if _subjects([tag]) == [subject]]
    return [*artifacts.attached(repository, subject), *tagged]


def _digests(repository: Repository, names: Iterable[str]) -> dict[str, str]:
    """The digests of manifests by tag (or digest), without those that do not exist."""
    return {name: digest for name, digest in map_parallel(repository.digest_of, names) if digest}


def delete(items: Sequence[Item], view: View) -> int:
    """Deletes manifests, in this order; returns the number of those that existed. Raises RegistryError."""
    deleted = 0
    view.begin("prune", "deleting")
    try:
        for item in items:
            deleted += item.repository.delete_manifest(item.digest)
            if view.console.is_terminal:
                view.note("prune", f"{deleted} of {len(items)}")
    except BaseException:
        view.end("prune", "failed", f"{deleted} of {counted(len(items), 'manifest')} deleted")
        raise
    view.end("prune", "done")
    return deleted
