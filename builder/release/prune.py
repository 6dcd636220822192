"""Finds and deletes what is no longer needed: old releases in staging, and what is attached to deleted images.

Public image tags are never deleted. Compares digests, because deleting a manifest deletes all its tags.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

from builder.common.console import View
from builder.common.errors import VerifyError
from builder.common.files import SHA256_HEX, short_digest
from builder.common.text import counted
from builder.evidence import reports
from builder.evidence.results import Evidence
from builder.layers import oci
from builder.matrix import tags
from builder.registry import artifacts
from builder.registry.client import INDEXES, Repository
from builder.registry.parallel import look_up
from builder.release.staging import INDEX, PREFIX, RELEASED, StagedRelease, StagingArea

NEW = timedelta(days=7)  # another machine may still list an image that was tested or staged this recently
_PLAN_TAG = re.compile(rf"plan-{SHA256_HEX}", re.ASCII)
# The index of what is attached to an image; with a suffix, what cosign stores for it.
_ATTACHED_TAG = re.compile(rf"sha256-({SHA256_HEX})(?:\.[a-z]+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class RepositoryContents:
    """A repository's digests by tag, its images, and what is attached to each image, whether it exists or not.

    `images` have their newest evidence; None if no report can be read, or none was. `attached` also has the signatures
    of what is attached to an image, and what an index of images names.
    """

    repository: Repository
    tags: Mapping[str, str]
    images: Mapping[str, Evidence | None]
    attached: Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class RegistryContents:
    """The contents of staging and of the public repositories.

    `releases` are all staged ones, the newest first; `lists` those of images that were staged without a release, by
    tag. `published` are the digests that public tags without a stamp name, `plans` the tags of this checkout's plan.
    """

    documents: RepositoryContents
    releases: Sequence[StagedRelease]
    lists: Mapping[str, StagedRelease]
    staged: Sequence[RepositoryContents]
    public: Sequence[RepositoryContents]
    published: Collection[str]
    plans: Collection[str]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A manifest that nothing needs; `text` describes it."""

    repository: Repository
    digest: str
    kind: Literal["document", "image", "attachment"]
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


def unneeded(contents: RegistryContents, keep: int, now: datetime) -> list[Item]:
    """The manifests that are not needed, in the order to delete them. Pure."""
    # Documents are first, so that none lists a deleted image. Then each image, with its plan tag, then its attachments,
    # and last the tag that lists them: after an interruption, the next run finds the rest by tag.
    current = {f"{PREFIX}{release.stamp}": release for release in kept(contents.releases, contents.published, keep)}
    first_day = (now - NEW).strftime("%Y%m%d")
    current |= {tag: staged for tag, staged in contents.lists.items() if staged.stamp >= first_day}
    needed = {image.digest for release in current.values() for image in release.images}
    documents = contents.documents
    old = {*(f"{PREFIX}{release.stamp}" for release in contents.releases), *contents.lists} - current.keys()
    # Two tags may name one manifest, and deleting it deletes both.
    used = {digest for tag, digest in documents.tags.items() if not (tag in old or _ATTACHED_TAG.fullmatch(tag))}
    items = [
        Item(repository=documents.repository, digest=digest, kind="document", text=tag)
        for tag, digest in documents.tags.items()
        if tag in old and digest not in used
    ]
    for repository in contents.staged:
        tagged = {digest for tag, digest in repository.tags.items() if tag in contents.plans or not _is_ours(tag)}
        new = {image for image in repository.images if _is_new(repository, image, now)}
        items += _items(contents, repository, needed | tagged | new)
    for repository in contents.public:
        tagged = {digest for tag, digest in repository.tags.items() if not _ATTACHED_TAG.fullmatch(tag)}
        items += _items(contents, repository, tagged | set(repository.images))
    return items + _items(contents, documents, used)  # signatures of documents


def _is_ours(tag: str) -> bool:
    """True for a tag that `builder` or cosign sets in staging."""
    return bool(_PLAN_TAG.fullmatch(tag) or _ATTACHED_TAG.fullmatch(tag))


def _is_new(contents: RepositoryContents, image: str, now: datetime) -> bool:
    """True if the newest report of an image is new; without a report, if it has the tag of a plan."""
    if evidence := contents.images[image]:
        with suppress(ValueError):  # it has no time, or the 13th month
            return now - datetime.fromisoformat(evidence.finished) < NEW
    return any(digest == image and _PLAN_TAG.fullmatch(tag) for tag, digest in contents.tags.items())


def _items(registry: RegistryContents, contents: RepositoryContents, roots: Iterable[str]) -> list[Item]:
    """The images that are not among the roots, and what is attached to deleted images."""
    needed, queue = set[str](), [*roots]
    while queue:
        if (digest := queue.pop()) not in needed:
            needed.add(digest)
            queue += contents.attached.get(digest, ())
    texts = {image: _describe(registry, image, contents.images[image]) for image in contents.images}
    present = {*contents.images, *contents.tags.values(), *_attachments(contents.attached)}
    for subject, attached in contents.attached.items():
        if subject not in needed:
            gone = "" if subject in present else ", which no longer exists"
            for digest in attached:
                texts.setdefault(digest, f"attached to {short_digest(subject)}{gone}")
    return [
        Item(
            repository=contents.repository,
            digest=digest,
            kind="image" if digest in contents.images else "attachment",
            text=text,
        )
        for digest, text in texts.items()
        if digest not in needed
    ]


def _describe(registry: RegistryContents, image: str, evidence: Evidence | None) -> str:
    stamps = {
        release.stamp: each.cell for release in registry.releases for each in release.images if each.digest == image
    }
    if not stamps:
        return f"{ascii(evidence.cell)[1:-1] if evidence else 'unknown cell'}  in no release"
    is_released = any(f"{RELEASED}{stamp}" in registry.documents.tags for stamp in stamps)
    return f"{min(stamps.values())}  staged {', '.join(stamps)}, {'' if is_released else 'not '}released"


def summary(items: Iterable[Item]) -> str:
    """The numbers of items by kind: 1 document, 2 images."""
    kinds = Counter(item.kind for item in items)
    return ", ".join(counted(number, kind) for kind, number in kinds.items())


# ---- registry


def read_registries(
    area: StagingArea, public: Sequence[Repository], plans: Collection[str], keep: int, view: View
) -> RegistryContents:
    """Reads staging and the public repositories; `keep` is that of `unneeded`.

    Raises VerifyError, RegistryError if anything that may be needed cannot be read.
    """
    index, document = area.open(INDEX), partial(_document, area)
    releases = [release for _, release in look_up(document, (f"{PREFIX}{stamp}" for stamp in area.stamps()))]
    lists = dict(look_up(document, area.lists()))
    listed = [image for release in (*releases, *lists.values()) for image in release.images]
    published: set[str] = set()
    for repository in public:
        names = repository.list_tags()
        moving = [tag for tag in names if not (_is_ours(tag) or tags.is_stamp(tag.rpartition("-")[2]))]
        named = set(_digests(repository, moving).values())
        published |= named.union(*_entries(repository, named - {image.digest for image in listed}).values())
    images: dict[str, set[str]] = {repository.name.rpartition("/")[2]: set() for repository in public}
    for image in listed:
        images.setdefault(image.repository, set()).add(image.digest)
    safe = {image.digest for release in kept(releases, published, keep) for image in release.images}
    staged = {name: area.open(name) for name in images}
    others = [each for each in public if each.name not in {repository.name for repository in staged.values()}]
    tagged = _digests(index, index.list_tags())
    signed = {*_subjects(tagged), *(digest for tag, digest in tagged.items() if tag.startswith(PREFIX))}
    attached = dict(look_up(lambda subject: _attached(index, subject, tagged), signed))
    return RegistryContents(
        documents=RepositoryContents(repository=index, tags=tagged, images={}, attached=attached),
        releases=releases,
        lists=lists,
        staged=[_read_staged(repository, images[name], safe, view) for name, repository in staged.items()],
        public=[_read_public(repository, view) for repository in others],
        published=published,
        plans=plans,
    )


def _document(area: StagingArea, tag: str) -> StagedRelease:
    """The release or the list of images with this tag."""
    stamp = tag.removeprefix(PREFIX)
    is_list = stamp == tag
    try:
        return area.read_list(tag) if is_list else area.read(stamp)
    except VerifyError as error:
        name = f"list {tag}" if is_list else f"release {stamp}"
        raise VerifyError(
            f"{name} cannot be read, so it is unknown which images are needed; nothing was deleted: {error}",
            hint=f"If its images are not needed, delete {area.repository(INDEX)}:{tag} in the registry, "
            "then run this again.",
        ) from error


def _read_staged(
    repository: Repository, listed: Collection[str], safe: Collection[str], view: View
) -> RepositoryContents:
    """A repository of staging; `listed` are its images in releases. Reports of the images `safe` are not read."""
    view.begin(repository.name, "reading")
    present = _digests(repository, repository.list_tags())
    planned = {digest for tag, digest in present.items() if _PLAN_TAG.fullmatch(tag)}
    subjects = sorted({*listed, *planned, *_subjects(present)})
    attached = dict(look_up(lambda subject: _attached(repository, subject, present), subjects))
    # The signatures of reports have tags only in registries without the referrers API.
    attachments = _attachments(attached)
    attached |= look_up(lambda subject: _attached(repository, subject, present), attachments - attached.keys())
    images = _digests(repository, ({*subjects} - attachments) | {*listed, *planned})
    # If the repository is a public one too: what its tags name.
    for index, entries in _entries(
        repository, {digest for tag, digest in present.items() if not _is_ours(tag)}
    ).items():
        attached[index] = [*attached.get(index, ()), *entries]
    newest = look_up(lambda image: None if image in safe else _newest(repository, image), images)
    view.end(repository.name, "done", counted(len(images), "image"))
    return RepositoryContents(repository=repository, tags=present, images=dict(newest), attached=attached)


def _read_public(repository: Repository, view: View) -> RepositoryContents:
    """A public repository: the images to which something is attached by tag, and this for those that do not exist."""
    view.begin(repository.name, "reading")
    names = repository.list_tags()
    subjects = _subjects(names)
    images = dict.fromkeys(_digests(repository, subjects))
    missing = [subject for subject in subjects if subject not in images]
    # If no image is missing, nothing is deleted, and the digests of thousands of tags need not be read.
    present = _digests(repository, names) if missing else {}
    attached = dict(look_up(lambda subject: _attached(repository, subject, present), subjects if missing else []))
    view.end(repository.name, "done", counted(len(subjects), "image"))
    return RepositoryContents(repository=repository, tags=present, images=images, attached=attached)


def _subjects(names: Iterable[str]) -> list[str]:
    """The images to which something is attached by tag."""
    return sorted({f"sha256:{match[1]}" for name in names if (match := _ATTACHED_TAG.fullmatch(name))})


def _attachments(attached: Mapping[str, Iterable[str]]) -> set[str]:
    """The digests that are attached to other manifests."""
    return {digest for subject, digests in attached.items() for digest in digests if digest != subject}


def _attached(repository: Repository, subject: str, present: Mapping[str, str]) -> list[str]:
    """The digests attached to an image, last the manifests of its tags: one of them may be the list of all others."""
    tagged = [digest for tag, digest in present.items() if _subjects([tag]) == [subject]]
    return [*artifacts.attached(repository, subject), *tagged]


def _entries(repository: Repository, digests: Iterable[str]) -> dict[str, list[str]]:
    """The digests that each index among these manifests names. Raises VerifyError for an invalid one."""

    def entries(digest: str) -> list[str]:
        manifest = repository.manifest(digest)
        is_index = manifest is not None and manifest.media_type in INDEXES
        return artifacts.entries(manifest.content, f"{repository.name}@{digest}") if manifest and is_index else []

    return {digest: named for digest, named in look_up(entries, digests) if named}


def _newest(repository: Repository, image: str) -> Evidence | None:
    """The evidence of the newest report of an image that can be read."""
    found: list[Evidence] = []
    for documents in artifacts.documents(repository, image, reports.TYPE):
        with suppress(VerifyError):
            found.append(oci.parse_document(Evidence, documents.get(reports.TYPE, b""), "report"))
    return max(found, key=lambda evidence: evidence.finished, default=None)


def _digests(repository: Repository, names: Iterable[str]) -> dict[str, str]:
    """The digests of manifests by tag (or digest), without those that do not exist."""
    return {name: digest for name, digest in look_up(repository.digest_of, names) if digest}


def delete(items: Sequence[Item], view: View) -> int:
    """Deletes manifests, in this order; returns the number of those that existed. Raises RegistryError."""
    deleted = 0
    view.begin("prune", "deleting")
    try:
        for item in items:
            deleted += item.repository.delete_manifest(item.digest)
            if view.is_live:
                view.note("prune", f"{deleted} of {len(items)}")
    except BaseException:
        view.end("prune", "failed", f"{deleted} of {counted(len(items), 'manifest')} deleted")
        raise
    view.end("prune", "done")
    return deleted
