"""Parts of a plan for machines with little disk. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from builder.common.units import counted
from builder.plan.plan import PlannedImage

# Bytes of disk for each byte of wheels: in the store, and unpacked in the engine (measured for torch 2.9.1: 1.8).
ON_DISK = 2.8
MAX_IMAGES = 10  # the most in one part: the tests of an image take minutes


def changed(before: Mapping[str, str], images: Sequence[PlannedImage]) -> list[PlannedImage]:
    """The images whose plan is not the one that their cell had `before` (cell id -> digest)."""
    return [image for image in images if before.get(image.id) != image.digest]


def split(images: Sequence[PlannedImage], disk: int) -> list[list[PlannedImage]]:
    """Parts that take about `disk` bytes each, with every layer that their images have counted once.

    Images of one group stay together where they fit. A part has at least one image, however large.
    """
    parts: list[list[PlannedImage]] = []
    layers: dict[str, int] = {}
    for image in sorted(images, key=lambda image: (image.cell.cuda, image.cell.group, len(image.layers))):
        added = {layer.inputs: layer.bytes for layer in image.layers}
        if not parts or len(parts[-1]) == MAX_IMAGES or sum((layers | added).values()) * ON_DISK > disk:
            parts.append([])
            layers = {}
        parts[-1].append(image)
        layers |= added
    return parts


def for_github(parts: Sequence[Sequence[PlannedImage]]) -> dict[str, list[dict[str, str]]]:
    """The matrix of a GitHub Actions job, with the cells of each part."""
    return {
        "include": [
            {"name": f"{part[0].id} ({counted(len(part), 'image')})", "cells": " ".join(image.id for image in part)}
            for part in parts
        ]
    }
