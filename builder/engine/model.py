"""Docker Engine as its API describes it: the engine, and an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """`store` is overlay2 (image id = config digest) or containerd (image id = manifest digest).

    `has_nvidia_cdi`: it has GPUs of NVIDIA as devices of the Container Device Interface, which need no runtime.
    """

    version: str
    store: str
    root: str
    runtimes: tuple[str, ...]
    architecture: str
    cpus: int
    memory: int
    is_local: bool
    has_nvidia_cdi: bool = False

    @property
    def has_nvidia(self) -> bool:
        return "nvidia" in self.runtimes or self.has_nvidia_cdi


@dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """An image in the engine. `created` is RFC 3339, `size` is in bytes, unpacked, `layers` are diff ids."""

    id: str
    labels: Mapping[str, str]
    tags: tuple[str, ...]
    size: int
    created: str
    layers: tuple[str, ...] = ()
