"""Sets tags of a pushed image, moves none back, and detects other pushes of the same tags.

Registries have no compare-and-swap for tags. So each tag is compared with its digest when the push began, and read
again at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.version import InvalidVersion, Version

from builder.common.errors import RegistryError, VerifyError
from builder.common.files import digest_of_bytes
from builder.layers import oci
from builder.layers.oci import Manifest
from builder.matrix.tags import OCI
from builder.registry.client import INDEXES, Repository
from builder.registry.parallel import look_up

State = Literal["set", "moved", "unchanged"]


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


def read_tags(repository: Repository, names: Iterable[str]) -> dict[str, str | None]:
    """The digests that tags name now."""
    return dict(look_up(repository.digest_of, names))


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


def tag(repository: Repository, manifest: Manifest, changes: list[TagChange], before: Mapping[str, str | None]) -> None:
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
    current = look_up(lambda change: repository.digest_of(change.tag), own)
    if lost := [(change.tag, change.digest, now) for change, now in current if now != change.digest]:
        raise _conflict(repository, lost)


def _conflict(repository: Repository, changed: Iterable[tuple[str, str | None, str | None]]) -> RegistryError:
    """The error for tags that have another digest than before, with both."""
    lines = (f"tag {tag} changed from {was or 'unset'} to {now or 'unset'}" for tag, was, now in changed)
    return RegistryError(
        f"{repository.name}: another push changed tags at the same time: {'; '.join(lines)}",
        hint="Find out who pushes the same tags, then run this again.",
    )
