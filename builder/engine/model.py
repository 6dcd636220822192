"""Docker Engine as its API describes it: the engine, an image, and the request for a build."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """`store` is overlay2 (image id = config digest) or containerd (image id = manifest digest)."""

    version: str
    store: str
    root: str
    buildkit: bool
    runtimes: tuple[str, ...]
    architecture: str
    cpus: int
    memory: int
    is_local: bool

    @property
    def has_nvidia(self) -> bool:
        return "nvidia" in self.runtimes


@dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """An image in the engine. `created` is RFC 3339, `size` is in bytes, unpacked, `layers` are diff ids."""

    id: str
    labels: Mapping[str, str]
    tags: tuple[str, ...]
    size: int
    created: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """A build by BuildKit; `context` is a tar, `target` a stage (default: the last)."""

    context: bytes
    dockerfile: str
    arguments: Mapping[str, str]
    labels: Mapping[str, str]
    network: str = ""
    target: str = ""

    @property
    def parameters(self) -> dict[str, str]:
        """Parameters of the API. Source: Docker Engine API, POST /build with version=2."""
        optional = {"networkmode": self.network, "target": self.target}
        return {
            "version": "2",
            "dockerfile": self.dockerfile,
            "buildargs": json.dumps(dict(self.arguments)),
            "labels": json.dumps(dict(self.labels)),
            "rm": "1",
            **{name: value for name, value in optional.items() if value},
        }
