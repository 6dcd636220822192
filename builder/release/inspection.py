"""Inspects a registry: its releases, tags that are not in the matrix, and damaged or missing data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from builder.common.errors import RegistryError, VerifyError
from builder.common.reference import ImageRef
from builder.common.tasks import thread_pool
from builder.host import Host
from builder.layers import oci
from builder.matrix import tags
from builder.matrix.project import Project
from builder.registry import artifacts
from builder.registry.client import INDEXES, Repository
from builder.registry.failures import RejectedError
from builder.registry.parallel import LOOKUPS, TRANSFERS, look_up
from builder.release.staging import INDEX, StagedImage, StagingArea, name_of


def references(project: Project, registry: str) -> dict[ImageRef, set[str]]:
    """The tags of the matrix, without stamps, by public repository; `registry` overrides the setting in matrix.yaml."""
    expected: dict[ImageRef, set[str]] = {}
    for names in tags.compute(project.matrix, project.cells).values():
        for name in names:
            full = ImageRef(registry=registry or name.registry, repository=name.repository)
            expected.setdefault(full, set()).add(name.tag)
    return expected


def staged_images(area: StagingArea) -> dict[str, set[str]]:
    """The digests of the images that staged releases list, by the name of their repository in staging.

    Leaves out releases that cannot be read: `RepositoryCheck` reports them.
    """

    def read_images(stamp: str) -> tuple[StagedImage, ...]:
        with suppress(RejectedError, VerifyError):
            return area.read(stamp).images
        return ()

    digests: dict[str, set[str]] = {}
    for _, images in look_up(read_images, area.stamps()):
        for image in images:
            digests.setdefault(area.repository(image.repository).name, set()).add(image.digest)
    return digests


def full_tags(project: Project) -> set[ImageRef]:
    """The full tags of the matrix, without a registry: those that get stamps."""
    return {replace(names[0], registry="") for names in tags.compute(project.matrix, project.cells).values()}


@dataclass(frozen=True, kw_only=True)
class TagComparison:
    """The tags of a repository. `unknown` are those of no cell, `missing` those that are absent.

    `unreleased` are those with a stamp that no recorded release set.
    """

    repository: str
    unknown: tuple[str, ...]
    unreleased: tuple[str, ...]
    missing: tuple[str, ...]


def compare_tags(
    repository: Repository,
    expected: Collection[str],
    full: Collection[str],
    recorded: Collection[tuple[str, str, str]] | None,
) -> TagComparison:
    """Compares the tags of a repository with the `expected` ones. Tags of tools (`sha256-...`) are left out.

    `full` are those that get stamps. `recorded` is that of `recorded_tags`: without it, any stamp is accepted.
    """
    present = repository.list_tags()
    stamped = sorted(tag for tag in present if _unstamped(tag) in full and tag not in expected)
    others = {*expected, *stamped}
    digests = dict(look_up(repository.digest_of, stamped)) if recorded is not None else {}
    return TagComparison(
        repository=repository.name,
        unknown=tuple(sorted(tag for tag in present if not (tag in others or tag.startswith("sha256-")))),
        unreleased=tuple(
            tag
            for tag, digest in digests.items()
            # The day alone: a second release of a day may find the stamp of the first taken.
            for day in [tag.rpartition("-")[2].partition(".")[0]]
            if (f"{repository.name}:{_unstamped(tag)}", day, digest) not in (recorded or ())
        ),
        missing=tuple(sorted(set(expected).difference(present))),
    )


def recorded_tags(area: StagingArea) -> set[tuple[str, str, str]]:
    """The full tag, day and digest of each tag of the recorded releases. Raises RegistryError, VerifyError."""
    return {
        (image.references[0], stamp.partition(".")[0], image.tagged or image.digest)
        for stamp, released in look_up(area.released, area.released_stamps())
        if released
        for image in released.images
    }


def _unstamped(tag: str) -> str:
    """A tag without its stamp; empty if it has none."""
    name, _, stamp = tag.rpartition("-")
    return name if tags.is_stamp(stamp) else ""


def require_contents(public: Sequence[Repository], area: StagingArea | None) -> None:
    """Raises RegistryError if there is nothing to check: the name of the registry may be wrong.

    Before the first release, the public repositories are empty.
    """
    if area and not (area.stamps() or area.lists()):
        raise RegistryError(
            f"nothing is staged in {area.repository(INDEX)}",
            hint=f"Check the name of the staging place. If it is right, stage images first: builder stage{area.option}",
        )
    if not area and not any(each.list_tags() for each in public):
        raise RegistryError(
            f"nothing is published in {', '.join(each.name for each in public)}",
            hint="Check the name of the registry, and `namespace` in matrix.yaml.",
        )


def repositories(project: Project, host: Host, area: StagingArea | None, registry: str) -> list[Repository]:
    """The public repositories, those of staging, and that of the releases. Raises RegistryError if there are none."""
    public = list(references(project, registry))
    staged = [area.repository(name) for name in (*map(name_of, public), INDEX)] if area else []
    named = [each for each in (*public, *staged) if each.registry]
    if not named:
        raise RegistryError(
            "matrix.yaml names neither a registry nor staging", hint="Set `registry` there, or use --to."
        )
    return [Repository(reference, host=host, write=False) for reference in dict.fromkeys(named)]


@dataclass(kw_only=True)
class RepositoryCheck:
    """Reads everything reachable from the tags of a repository, and from the digests `also`, with what is attached.

    Many tags may name one image: each manifest and each blob is read once, several at a time. `read` is called with
    numbers of bytes. Unless `fast`, the hash of every blob is compared. `manifests` and `blobs` were checked.
    """

    repository: Repository
    also: Collection[str] = ()
    fast: bool = False
    read: Callable[[int], None] = lambda _: None
    manifests: set[str] = field(default_factory=set)
    blobs: set[str] = field(default_factory=set)

    def faults(self) -> Iterator[str]:
        """A line for each fault. Raises RegistryError for a registry that does not respond."""
        # The manifests to read by digest, each with the first name that leads to it: first those of tags.
        names: dict[str, str] = {}
        for tag, digest in look_up(self._digest_of, self.repository.list_tags()):
            names.setdefault(digest, f"{self.repository.name}:{tag}")
        for digest in self.also:
            names.setdefault(digest, f"{self.repository.name}@{digest}")
        blobs: dict[str, tuple[int, str]] = {}
        while names:
            self.manifests |= names.keys()
            below: dict[str, str] = {}
            for (_, name), (fault, own_blobs, manifests) in look_up(self._read_manifest, names.items()):
                if fault:
                    yield fault
                for digest, size in own_blobs.items():
                    blobs.setdefault(digest, (size, name))
                for digest, described in manifests.items():
                    below.setdefault(digest, described)
            names = {digest: name for digest, name in below.items() if digest not in self.manifests}
        self.blobs |= blobs.keys()
        with thread_pool(LOOKUPS if self.fast else TRANSFERS, "check") as pool:
            yield from filter(None, pool.map(self._blob_fault, blobs.items()))

    def _digest_of(self, tag: str) -> str:
        """The digest that a tag names; the tag if there is none: reading its manifest then has the same fault."""
        with suppress(RejectedError):
            return self.repository.digest_of(tag) or tag
        return tag

    def _read_manifest(self, named: tuple[str, str]) -> tuple[str, Mapping[str, int], Mapping[str, str]]:
        """The fault of a manifest, or an empty string; the sizes of its blobs, and the names of the manifests below it.

        Both by digest; the names are for messages.
        """
        reference, name = named
        blobs: Mapping[str, int] = {}
        manifests: dict[str, str] = {}
        try:
            manifest = self.repository.manifest(reference)
            if manifest is None:
                return f"{name}: the manifest is missing", {}, {}
            is_index = manifest.media_type in INDEXES
            if is_index:
                manifests = {entry: f"{name}, {entry}" for entry in artifacts.entries(manifest.content, name)}
            else:
                blobs = oci.read_blobs(manifest.content)
            if not is_index or oci.read_platforms(manifest.content):  # a list of attachments has none itself
                # Registries without this API list what is attached under a tag, which is read as every tag is.
                for page in self.repository.referrers(manifest.digest) or ():
                    manifests |= {entry: f"{name}, attached {entry}" for entry in artifacts.entries(page, name)}
        except (RejectedError, VerifyError) as error:
            return f"{name}: {error}", blobs, manifests
        return "", blobs, manifests

    def _blob_fault(self, blob: tuple[str, tuple[int, str]]) -> str:
        digest, (size, name) = blob
        try:
            if self.fast and not self.repository.has_blob(digest):
                return f"{name}: blob {digest} is missing"
            if not (self.fast or self.repository.blob_matches(digest, size, self.read)):
                return f"{name}: blob {digest} is damaged"
        except RejectedError as error:
            return f"{name}: blob {digest}: {error}"
        return ""
