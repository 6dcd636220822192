"""The image that a plan describes: its configuration, its manifest, and the digests of layers known on this machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from builder.common.errors import VerifyError
from builder.common.files import short_digest
from builder.common.lock_text import KNOWN_LAYERS
from builder.layers import oci, splice, stored_layers
from builder.layers.blobs import CONFIG_TYPE, Descriptor
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Image, Layer
from builder.matrix.project import Project
from builder.matrix.tags import OCI, PLAN_LABEL
from builder.plan.plan import PlannedImage
from builder.plan.settings import built_labels

SHOWN = 10  # differences


@dataclass(frozen=True, kw_only=True)
class PlannedDigests:
    """An image of the plan, and the digests of its layers that are known.

    `layers` are by their number in the image.
    """

    image: PlannedImage
    layers: Mapping[int, Layer]

    @property
    def system(self) -> Layer | None:
        return next((layer for layer in self.layers.values() if layer.created), None)


def of_plan(project: Project, known: KnownLayers, image: PlannedImage) -> PlannedDigests:
    """An image of the plan, with its layers from files of the project, and the known ones."""
    layers: dict[int, Layer] = {}
    for number, layer in enumerate(image.layers):
        if layer.kind == "files":
            layers[number] = _files(project, image)
        elif recorded := known.get(layer.inputs):
            layers[number] = recorded
    return PlannedDigests(image=image, layers=layers)


def _files(project: Project, image: PlannedImage) -> Layer:
    entries = stored_layers.component_file_entries(stored_layers.read_component_files(project, image), ())
    with Path(os.devnull).open("wb") as discarded:
        return splice.write_layer(entries, discarded)


def check_image(expected: PlannedDigests, image: Image, config: bytes, *, is_trusted: bool) -> None:
    """Raises VerifyError unless an image has the configuration of the plan and the expected layers.

    Without a trusted report or signature, every layer must be expected.
    """
    lines = differences(expected, image, config)
    created = image.labels.get(f"{OCI}.created", "")
    if not re.fullmatch(oci.TIME, created, re.ASCII):
        lines.append(f"invalid creation time {created[:40]!a}")
    for number, (planned, layer) in enumerate(zip(expected.image.layers, image.layers, strict=False)):
        expected_layer = expected.layers.get(number)
        if expected_layer is None and not is_trusted:
            lines.append(
                f"layer {planned.name} is not in {KNOWN_LAYERS}: commit that file on the machine that built the image"
            )
        elif expected_layer and (layer.digest, layer.diff_id) != (expected_layer.digest, expected_layer.diff_id):
            lines.append(
                f"layer {planned.name} is {short_digest(layer.digest)}, expected {short_digest(expected_layer.digest)}"
            )
    if lines:
        raise VerifyError(f"{expected.image.id}: the image differs from the plan: {'; '.join(_first(lines))}")


def differences(expected: PlannedDigests, image: Image, config: bytes) -> list[str]:
    """The differences between an image and the plan in manifest and configuration, one line each; the first ten.

    Digests of layers are not compared here. `config` is the configuration of the image.
    """
    planned = expected.image
    actual, actual_manifest = json.loads(config), json.loads(image.manifest.content)
    inner = actual.get("config")
    labels = inner.get("Labels") if isinstance(inner, dict) else None
    labels = labels if isinstance(labels, dict) else {}
    plan = labels.get(PLAN_LABEL)
    if plan != planned.plan:
        return [
            f"built from plan {short_digest(str(plan))}, but this checkout's plan is {short_digest(planned.plan)}: "
            "check out the revision that it was built from"
        ]
    layers, diff_ids = actual_manifest["layers"], actual["rootfs"]["diff_ids"]
    # Set when the image is built, from its operating system.
    created = str(actual.get("created", ""))
    if (system := expected.system) and system.diff_id in diff_ids:
        created = system.created
    built = built_labels(planned.plan, created)
    if len(layers) != len(planned.layers):
        inner_of_plan = json.loads(oci.config(planned.settings, [], [], created=created, labels=built))["config"]
        more = _compare("config", inner_of_plan, inner)
        return _first([f"{len(layers)} layers, expected {len(planned.layers)}", *more])
    stack = [
        replace(layer, unpacked=known.unpacked, toc=known.toc) if known and known.digest == layer.digest else layer
        for number, layer in enumerate(image.layers)
        for known in [expected.layers.get(number)]
    ]
    history = [oci.history_line(layer) for layer in planned.layers]
    expected_config = oci.config(planned.settings, stack, history, created=created, labels=built)
    expected_manifest = oci.manifest(Descriptor.of(config, CONFIG_TYPE), stack)
    lines = [*_compare("", json.loads(expected_config), actual)]
    lines += _compare("manifest", json.loads(expected_manifest), actual_manifest)
    if not lines and expected_config != config:
        lines.append("the configuration has the same values but different bytes")
    return _first(lines)


def _first(lines: list[str]) -> list[str]:
    return lines[:SHOWN] + ([f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])


def _compare(path: str, expected: Any, actual: Any) -> Iterator[str]:
    """A line for each value that differs."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted({*expected, *actual}):
            yield from _compare(f"{path}.{key}".lstrip("."), expected.get(key), actual.get(key))
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for number, values in enumerate(zip(expected, actual, strict=True)):
            yield from _compare(f"{path}[{number}]", *values)
    elif expected != actual or type(expected) is not type(actual):
        yield f"{path}: {_short(actual)}, expected {_short(expected)}"


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
