"""Sets tags of a pushed image, moves none back, and detects other pushes of the same tags.

Registries have no compare-and-swap for tags. So each tag is compared with its digest when the push began, and read
again at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from builder.common import digest as digests
from builder.common.errors import RegistryError, VerifyError
from builder.layers import oci
from builder.matrix.tags import OCI
from builder.registry.client import Manifest, Registry
from builder.registry.failures import RejectedError

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

    def as_data(self) -> dict[str, Any]:
        """For `--format json`."""
        reference = f"{self.name}:{self.tag}"
        return {"reference": reference, "before": self.before, "after": self.digest, "state": self.state}


@dataclass(frozen=True, kw_only=True)
class Age:
    """The age of an image: the framework's release, and the time of its newest Debian package (RFC 3339)."""

    version: str
    created: str

    @classmethod
    def of_labels(cls, labels: Mapping[str, str]) -> Age | None:
        """None for an image without these labels."""
        version, created = labels.get(f"{OCI}.version"), labels.get(f"{OCI}.created")
        return None if version is None or created is None else cls(version=version, created=created)

    def behind(self, other: Age) -> str:
        """How this image is older than another; empty if it is not, or if its release cannot be parsed."""
        try:
            if Version(self.version) < Version(other.version):
                return f"from release {other.version} to {self.version}"
        except InvalidVersion:
            return ""
        if self.created < other.created:
            return f"from Debian packages of {other.created[:10]} to those of {self.created[:10]}"
        return ""


def read(registry: Registry, names: Iterable[str]) -> dict[str, str | None]:
    """The digests that tags name now."""
    return {name: registry.digest_of(name) for name in names}


def backward(registry: Registry, tags: Mapping[str, str | None], digest: str, age: Age) -> list[str]:
    """A line for each tag that would move to an older image."""
    lines = []
    for name, before in tags.items():
        if before in (None, digest):
            continue
        other = _age(registry, before or "")
        if other and (way := age.behind(other)):
            lines.append(f"{registry.name}:{name} would move back {way}")
    return lines


def _age(registry: Registry, digest: str) -> Age | None:
    """None for an image without an age, or that cannot be read: its tag may move to any image."""
    try:
        manifest = registry.manifest(digest)
        return Age.of_labels(oci.read_labels(manifest.content, registry.read_blob)) if manifest else None
    except (VerifyError, RejectedError):
        return None


def tag(registry: Registry, manifest: Manifest, changes: list[TagChange], before: Mapping[str, str | None]) -> None:
    """Sets tags to a pushed manifest; appends to `changes` after each.

    `before` has the digest of each tag when the push began. Raises RegistryError for a tag that changed since.
    """
    if digests.of_bytes(manifest.content) != manifest.digest:
        raise VerifyError(f"{registry.name}: the digest of the manifest to tag is not {manifest.digest}")
    for name, was in before.items():
        now = registry.digest_of(name)
        if now not in (was, manifest.digest):
            raise _conflict(registry, [_difference(name, was, now)])
        state: State = "unchanged"
        if now != manifest.digest:
            registry.put_manifest(name, manifest.content, manifest.media_type)
            state = "moved" if now else "set"
        change = TagChange(name=registry.name, tag=name, digest=manifest.digest, before=now, state=state)
        changes.append(change)
        if change.is_change:
            confirm(registry, [change])


def confirm(registry: Registry, changes: Iterable[TagChange]) -> None:
    """Raises RegistryError unless the tags still name what they were set to."""
    current = [(change, registry.digest_of(change.tag)) for change in changes]
    if lost := [_difference(change.tag, change.digest, now) for change, now in current if now != change.digest]:
        raise _conflict(registry, lost)


def _difference(tag: str, was: str | None, now: str | None) -> str:
    return f"tag {tag} changed from {was or 'unset'} to {now or 'unset'}"


def _conflict(registry: Registry, lines: Sequence[str]) -> RegistryError:
    return RegistryError(
        f"{registry.name}: another push changed tags at the same time: {'; '.join(lines)}",
        hint="Find out who pushes the same tags, then run this again.",
    )
