"""The image that a plan describes: its configuration, its manifest, and the digests of layers known on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from builder.common.errors import VerifyError
from builder.common.files import short_digest
from builder.common.lock_text import KNOWN_LAYERS
from builder.layers import oci, splice, stored_layers
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import CONFIG_TYPE, Descriptor, Image, Layer
from builder.matrix.project import Project
from builder.matrix.tags import OCI, PLAN_LABEL
from builder.plan.plan import PlannedImage
from builder.plan.settings import built_labels

SHOWN = 10  # differences


def expected_layers(project: Project, known: KnownLayers, image: PlannedImage) -> dict[int, Layer]:
    """The layers of an image whose digests are known before the download, by position.

    These are the layer of the project's files, and those in locks/layers.json.
    """
    layers: dict[int, Layer] = {}
    for number, layer in enumerate(image.layers):
        if layer.kind == "files":
            layers[number] = _files(project, image)
        elif recorded := known.get(layer.inputs):
            layers[number] = recorded
    return layers


def _files(project: Project, image: PlannedImage) -> Layer:
    entries = stored_layers.component_file_entries(stored_layers.read_component_files(project, image), ())
    with Path(os.devnull).open("wb") as discarded:
        return splice.write_layer(entries, discarded)


def compare_with_plan(
    planned: PlannedImage, expected: Mapping[int, Layer], image: Image, config: bytes, *, is_trusted: bool
) -> None:
    """Raises VerifyError unless an image has the configuration and the manifest of the plan and the expected layers.

    `expected` are of `expected_layers`, `config` is the configuration of the image. Without a trusted report or
    signature, every layer must be expected.
    """
    plan = image.labels.get(PLAN_LABEL, "")
    if plan != planned.plan:
        raise VerifyError(
            f"{planned.id}: the image differs from the plan: built from plan {short_digest(plan)[:40]!a}, but this "
            f"checkout's plan is {short_digest(planned.plan)}: check out the revision that it was built from"
        )
    # The time is set when the image is built, from its operating system.
    created = image.labels.get(f"{OCI}.created", "")
    lines = [] if re.fullmatch(oci.TIME, created, re.ASCII) else [f"invalid creation time {created[:40]!a}"]
    system = next((layer for layer in expected.values() if layer.created), None)
    if system and system.diff_id in (layer.diff_id for layer in image.layers):
        created = system.created
    stack = [
        replace(layer, unpacked=known.unpacked, toc=known.toc) if known and known.digest == layer.digest else layer
        for number, layer in enumerate(image.layers)
        for known in [expected.get(number)]
    ]
    history, labels = [oci.history_line(layer) for layer in planned.layers], built_labels(planned.plan, created)
    if len(stack) != len(planned.layers):
        lines.append(f"{len(stack)} layers, expected {len(planned.layers)}")
    elif oci.config(planned.settings, stack, history, created=created, labels=labels) != config:
        lines.append("its configuration is another one (`crane config` shows it)")
    elif oci.manifest(Descriptor.of(config, CONFIG_TYPE), stack) != image.manifest.content:
        lines.append("its manifest is another one (`crane manifest` shows it)")
    for number, (planned_layer, layer) in enumerate(zip(planned.layers, image.layers, strict=False)):
        expected_layer = expected.get(number)
        if expected_layer is None and not is_trusted:
            lines.append(
                f"layer {planned_layer.name} is not in {KNOWN_LAYERS}: commit that file on the machine that built the "
                "image"
            )
        elif expected_layer and (layer.digest, layer.diff_id) != (expected_layer.digest, expected_layer.diff_id):
            lines.append(
                f"layer {planned_layer.name} is {short_digest(layer.digest)}, expected "
                f"{short_digest(expected_layer.digest)}"
            )
    if lines:
        more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise VerifyError(f"{planned.id}: the image differs from the plan: {'; '.join([*lines[:SHOWN], *more])}")
