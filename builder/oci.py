"""Configuration and manifest of an image, from its settings and layers. Pure.

Source: OCI image specification, "Image Configuration" and "Image Manifest". `Healthcheck` is Docker's own field, which
every reader that does not know it has to ignore.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from builder import splice
from builder.layers import PlannedLayer
from builder.settings import Settings
from builder.store import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, Descriptor

ARCHITECTURE = "amd64"
_SECOND = 1_000_000_000  # Docker counts nanoseconds
_WHEEL = re.compile(r"([A-Za-z0-9_.+!-]+\.whl)@sha256:([0-9a-f]{64})", re.ASCII)
_HISTORY = re.compile(r"wheels format=([0-9]+) python=([0-9.]+|none): (.+)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class BuiltLayer:
    """A layer that the store has; `digest` of the blob, `diff_id` of the tar in it, `size` of the blob.

    `key` is what the store remembers it by; empty if that is not needed.
    """

    planned: PlannedLayer
    digest: str
    diff_id: str
    size: int
    key: str = ""

    @property
    def descriptor(self) -> Descriptor:
        return Descriptor(media_type=LAYER_TYPE, digest=self.digest, size=self.size)


@dataclass(frozen=True, kw_only=True)
class WheelsOf:
    """What the history of a wheel layer says: file name and SHA-256 of each wheel; `python` is empty for CUDA's."""

    format: int
    python: str
    wheels: tuple[tuple[str, str], ...]


def config(settings: Settings, layers: Sequence[BuiltLayer], *, created: str, labels: Mapping[str, str]) -> bytes:
    """The configuration as JSON; `created` is RFC 3339, `labels` come after those of the settings."""
    inner: dict[str, Any] = {
        "User": settings.user,
        "Env": [f"{name}={value}" for name, value in settings.env.items()],
        "Entrypoint": list(settings.entrypoint),
        "Cmd": list(settings.command),
        "WorkingDir": settings.workdir,
        "Labels": {**settings.labels, **labels},
    }
    if settings.ports:
        inner["ExposedPorts"] = {f"{port}/tcp": {} for port in settings.ports}
    if health := settings.health:
        inner["Healthcheck"] = {
            "Test": ["CMD", *health.command],
            "Interval": health.interval * _SECOND,
            "Timeout": health.timeout * _SECOND,
            "StartPeriod": health.start_period * _SECOND,
            "Retries": health.retries,
        }
    return _json(
        {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "created": created,
            "config": inner,
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
            "history": [{"created": created, "created_by": describe(layer.planned)} for layer in layers],
        }
    )


def bare_config(layer: BuiltLayer, labels: Mapping[str, str] | None = None) -> bytes:
    """The configuration of an image of one layer that nobody is meant to run but us."""
    return _json(
        {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": {"Labels": dict(labels)} if labels else {},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]},
        }
    )


def manifest(config_blob: Descriptor, layers: Sequence[BuiltLayer]) -> bytes:
    """The manifest as JSON."""
    return _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {**config_blob.as_data(), "mediaType": CONFIG_TYPE},
            "layers": [layer.descriptor.as_data() for layer in layers],
        }
    )


def describe(layer: PlannedLayer) -> str:
    """A layer's line in the history; for wheels it names each with its SHA-256, so that anyone can make it again."""
    if layer.kind != "wheels":
        return layer.name if layer.kind == layer.name else f"{layer.kind}: {layer.name}"
    wheels = " ".join(f"{wheel.file}@sha256:{wheel.sha256}" for wheel in layer.wheels)
    return f"wheels format={splice.FORMAT} python={layer.python or 'none'}: {wheels}"


def parse_history(line: str) -> WheelsOf | None:
    """The other way round; None for a layer that is not of wheels. Raises ValueError for one that cannot be read."""
    if not line.startswith("wheels "):
        return None
    found = _HISTORY.fullmatch(line)
    wheels = [_WHEEL.fullmatch(word) for word in found[3].split(" ")] if found else []
    if not found or not all(wheels):
        raise ValueError(f"not a line about wheels: {line[:200]}")
    python = "" if found[2] == "none" else found[2]
    return WheelsOf(format=int(found[1]), python=python, wheels=tuple((one[1], one[2]) for one in wheels if one))


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).encode()
