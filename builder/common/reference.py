"""Image references: one type for parsing and printing.

Grammar: distribution/reference, as in Docker. `localhost:5000/a/b:24` has a registry, `a/b:24` has none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from ipaddress import ip_address

from builder.common.files import is_digest

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_REGISTRY = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[([0-9a-fA-F:]+)\])(?::([0-9]{{1,5}}))?", re.ASCII)


def _is_registry(text: str) -> bool:
    match = _REGISTRY.fullmatch(text)
    try:
        return match is not None and ip_address(match[1] or "::").version == 6 and 0 < int(match[2] or 443) < 1 << 16
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True, order=True)
class ImageRef:
    """An image reference. `registry` is empty for Docker's default."""

    registry: str = ""
    repository: str
    tag: str = ""
    digest: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid part."""
        checks = (
            (
                "an image name: use lower-case letters, digits, and . _ - / between them",
                self.repository,
                len(self.repository) <= 255 and _NAME.fullmatch(self.repository),
            ),
            ("a registry", self.registry, not self.registry or _is_registry(self.registry)),
            ("a tag", self.tag, not self.tag or _TAG.fullmatch(self.tag)),
            ("a digest", self.digest, not self.digest or is_digest(self.digest)),
        )
        for label, value, is_valid in checks:
            if not is_valid:
                raise ValueError(f"{value[:60]!r} is not {label}")

    def __str__(self) -> str:
        prefix = f"{self.registry}/" if self.registry else ""
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{prefix}{self.repository}{tag}{digest}"

    @property
    def name(self) -> str:
        """The reference without tag and digest."""
        return str(ImageRef(registry=self.registry, repository=self.repository))

    @property
    def target(self) -> str:
        """The digest, else the tag, else `latest`."""
        return self.digest or self.tag or "latest"

    @classmethod
    def parse(cls, text: str) -> ImageRef:
        """Parses a reference. Raises a ValueError that names the invalid part."""
        rest, _, digest = text.partition("@")
        if "@" in text and not digest:
            raise ValueError(f"{text!r} has an empty digest")
        registry = ""
        head, slash, tail = rest.partition("/")
        # Docker's rule: the first part is a registry if it has a dot or a port, or is localhost.
        if slash and ("." in head or ":" in head or head == "localhost"):
            registry, rest = head, tail
        repository, colon, tag = rest.partition(":")
        if colon and not tag:
            raise ValueError(f"{text!r} has an empty tag")
        return cls(registry=registry, repository=repository, tag=tag, digest=digest)


def staged_repository(staging: str, registry: str, name: str) -> ImageRef:
    """The repository of staged images of a name. Raises ValueError.

    `staging` is a registry, optionally with a prefix for names, or a prefix alone: then the registry is `registry`. A
    prefix that ends with a hyphen begins the last part of the names: `docker.io/org/staging-`.
    """
    reference = ImageRef.parse(f"{staging}{name}" if staging.endswith("-") else f"{staging}/{name}")
    return replace(reference, registry=reference.registry or registry)
