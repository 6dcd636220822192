"""Looks at what a registry has: its releases, tags that are not in the matrix, and damaged or missing data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from builder.common.errors import RegistryError, VerifyError
from builder.common.reference import ImageRef
from builder.index.host import Host
from builder.layers import oci
from builder.matrix import tags
from builder.matrix.project import Project
from builder.registry import artifacts
from builder.registry.client import Registry
from builder.registry.failures import RejectedError
from builder.registry.staging import INDEX, Place, name_of


def references(project: Project, registry: str) -> dict[ImageRef, set[str]]:
    """The tags of the matrix, without stamps, by public repository; `registry` overrides the setting in matrix.yaml."""
    expected: dict[ImageRef, set[str]] = {}
    for names in tags.compute(project.matrix, project.cells).values():
        for name in names:
            full = ImageRef(registry=registry or name.registry, repository=name.repository)
            expected.setdefault(full, set()).add(name.tag)
    return expected


def staged_images(place: Place) -> dict[str, set[str]]:
    """The digests of the images that staged releases list, by the name of their repository in staging.

    Leaves out releases that cannot be read: `Check` reports them.
    """
    digests: dict[str, set[str]] = {}
    for stamp in place.stamps():
        with suppress(RejectedError, VerifyError):
            for image in place.read(stamp).images:
                digests.setdefault(place.open(image.repository).name, set()).add(image.digest)
    return digests


def unknown_tags(present: Iterable[str], expected: Collection[str]) -> list[str]:
    """The tags of a repository that the matrix does not have, without those of tools (`sha256-...`)."""
    return sorted(
        tag for tag in present if not (tag in expected or _is_stamped(tag, expected) or tag.startswith("sha256-"))
    )


def _is_stamped(tag: str, known: Collection[str]) -> bool:
    name, _, stamp = tag.rpartition("-")
    return name in known and tags.is_stamp(stamp)


def repositories(project: Project, host: Host, place: Place | None, registry: str) -> list[Registry]:
    """The public repositories, those of staging, and that of the releases. Raises RegistryError if there are none."""
    public = list(references(project, registry))
    staged = [place.repository(name) for name in (*map(name_of, public), INDEX)] if place else []
    named = [each for each in (*public, *staged) if each.registry]
    if not named:
        raise RegistryError(
            "matrix.yaml names neither a registry nor staging", hint="Set `registry` there, or use --to."
        )
    return [Registry(reference, host=host, write=False) for reference in dict.fromkeys(named)]


@dataclass(kw_only=True)
class Check:
    """Reads everything reachable from the tags of a repository, and from the digests `also`, with what is attached.

    `read` is called with numbers of bytes.

    Unless `fast`, the hash of every blob is compared. `manifests` and `blobs` are what was checked.
    """

    registry: Registry
    also: Collection[str] = ()
    fast: bool = False
    read: Callable[[int], None] = lambda _: None
    manifests: set[str] = field(default_factory=set)
    blobs: set[str] = field(default_factory=set)

    def faults(self) -> Iterator[str]:
        """A line for each fault. Raises RegistryError for a registry that does not respond."""
        for tag in self.registry.list_tags():
            yield from self._manifest(tag, f"{self.registry.name}:{tag}")
        for digest in self.also:
            yield from self._manifest(digest, f"{self.registry.name}@{digest}")

    def _manifest(self, reference: str, name: str) -> Iterator[str]:
        if reference in self.manifests:
            return
        try:
            manifest = self.registry.manifest(reference)
            if manifest is None:
                yield f"{name}: the manifest is missing"
                return
            self.manifests |= {reference, manifest.digest}
            if manifest.media_type == oci.INDEX_TYPE:
                for entry in artifacts.entries(manifest.content, name):
                    yield from self._manifest(entry, f"{name}, {entry}")
                return
            for digest, size in oci.read_blobs(manifest.content).items():
                yield from self._blob(digest, size, name)
            for digest in artifacts.attached(self.registry, manifest.digest):
                yield from self._manifest(digest, f"{name}, attached {digest}")
        except (RejectedError, VerifyError) as error:
            yield f"{name}: {error}"

    def _blob(self, digest: str, size: int, name: str) -> Iterator[str]:
        if digest in self.blobs:
            return
        self.blobs.add(digest)
        try:
            if self.fast and not self.registry.has_blob(digest):
                yield f"{name}: blob {digest} is missing"
            elif not (self.fast or self.registry.blob_matches(digest, size, self.read)):
                yield f"{name}: blob {digest} is damaged"
        except RejectedError as error:
            yield f"{name}: blob {digest}: {error}"
