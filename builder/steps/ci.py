"""Plans for CI: of git revisions, of the images that changed, and in parts for machines with little disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from builder.common import git
from builder.common.console import View
from builder.common.errors import BuilderError
from builder.common.text import counted
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import AMD64, ARM64, NOT_BUILT, Arch, Matrix
from builder.plan import plan
from builder.plan.plan import PlannedImage


def plan_digests(project: Project, revision: str, view: View) -> dict[str, str]:
    """Cell id -> digest of its plan in a git revision; empty for a revision that this program cannot plan.

    Without the cells of a team's repository for which another release of gpu-images recorded another plan. Raises
    UsageError if there is no such revision.
    """
    if not revision.strip("0"):  # GitHub's `before` of the first push to a new branch is all zeros
        return {}
    with project.scratch() as folder:
        git.export(project.root, revision, Path(folder))
        before = Project(Path(folder))
        try:
            digests = {image.id: image.plan for image in plan.make_plan(before, before.cells).images}
            plans = before.recorded() or digests
            return {cell: digest for cell, digest in digests.items() if plans.get(cell) == digest}
        except BuilderError as error:
            view.say(f"{revision} cannot be planned, so all images count as changed: {error}")
            return {}


# Bytes of disk for each byte of wheels: in the store, in the engine's containerd store, which keeps the layers that it
# has unpacked, and unpacked (measured for torch 2.9.1: 1.8).
ON_DISK = 3.8
RUNNER_DISK = 14_000_000_000  # bytes that a hosted runner of GitHub has at least
MAX_IMAGES = 10  # the most in one part: the tests of an image take minutes
# Labels of GitHub's runners, and the label of self-hosted ones besides `self-hosted` and `linux`.
RUNNERS: dict[Arch, dict[str, str]] = {
    AMD64: {"runner": "ubuntu-24.04", "label": "x64"},
    ARM64: {"runner": "ubuntu-24.04-arm", "label": "arm64"},
}


def changed_images(before: Mapping[str, str], images: Sequence[PlannedImage]) -> list[PlannedImage]:
    """The images whose plan is not the one that their cell had `before` (cell id -> digest)."""
    return [image for image in images if before.get(image.id) != image.plan]


def split_by_disk(images: Sequence[PlannedImage], disk: int) -> list[list[PlannedImage]]:
    """Parts of about `disk` bytes, with every layer that their images have counted once.

    Images of one group stay together where they fit. A part has at least one image, however large, at most
    MAX_IMAGES, and one architecture.
    """
    parts: list[list[PlannedImage]] = []
    layers: dict[str, int] = {}
    order = sorted(images, key=lambda image: (image.cell.arch, image.cell.cuda, image.cell.group, len(image.layers)))
    for image in order:
        added = {layer.inputs: layer.bytes for layer in image.layers}
        is_full = parts and (
            parts[-1][0].cell.arch != image.cell.arch
            or len(parts[-1]) == MAX_IMAGES
            or sum((layers | added).values()) * ON_DISK > disk
        )
        if is_full or not parts:
            parts.append([])
            layers = {}
        parts[-1].append(image)
        layers |= added
    return parts


def updates(matrix: Matrix, cells: Sequence[Cell]) -> dict[str, list[str]]:
    """The built-in sets of cells whose locks are updated separately: by Debian release, and by framework.

    So a set that fails does not keep another set from being updated. The sets are in the order of matrix.yaml, without
    empty sets. Cells that were not built yet and cells for arm64 are in none of these sets; the sets `not-built` and
    `arm64` are in both lists.
    """
    built = [cell for cell in cells if cell.arch == AMD64 and not matrix.python[cell.python].not_built]
    releases = {matrix.python[cell.python].debian for cell in built}
    frameworks = {cell.framework for cell in built}
    others = [NOT_BUILT] if any(matrix.python[cell.python].not_built for cell in cells) else []
    others += [ARM64] if any(cell.arch == ARM64 for cell in cells) else []
    return {
        "debian": [*(name for name in matrix.debian if name in releases), *others],
        "frameworks": [*(name for name in matrix.frameworks if name in frameworks), *others],
    }


def github_outputs(images: Sequence[PlannedImage], disk: int = RUNNER_DISK) -> dict[str, str]:
    """Outputs of a GitHub Actions step: `parts`, the matrix of a job, and all `cells`.

    The matrix has the cells of each part, and the labels of runners for it.
    """
    matrix = {
        "include": [
            {
                "name": f"{part[0].id} ({counted(len(part), 'image')})",
                "cells": " ".join(image.id for image in part),
                **RUNNERS[part[0].cell.arch],
            }
            for part in split_by_disk(images, disk)
        ]
    }
    return {"parts": json.dumps(matrix), "cells": " ".join(image.id for image in images)}


def gitlab_pipeline(images: Sequence[PlannedImage], disk: int = RUNNER_DISK, *, publish: bool = False) -> str:
    """A child pipeline of GitLab CI, with a job for each part.

    With `publish`, these jobs push what passed its tests to staging, and a last job signs the results and releases the
    images. Only this job is in the environment `release`, to which the variables with the private key are limited.
    """
    jobs: dict[str, Any] = {}
    for part in split_by_disk(images, disk):
        # Cells are in the commands: a variable of a job loses to one of the same name in the parent pipeline.
        cells = " ".join(image.id for image in part)
        build, stage = f"builder images {cells} --junit .builder/junit", f"builder stage {cells} --images-only"
        jobs[f"images of {part[0].id} ({counted(len(part), 'image')})"] = {
            "stage": "images", "tags": ["docker", part[0].cell.arch], "timeout": "2h",
            "script": [f".venv/bin/{command}" for command in ([build, stage] if publish else [build])],
        }  # fmt: skip
    if jobs and publish:
        cells = " ".join(image.id for image in images)
        jobs["release"] = {
            "stage": "release", "tags": ["release"],
            "environment": {"name": "release"}, "resource_group": "release",
            "script": [
                ': "${GPU_IMAGES_SIGN:?without a key, the release would not be signed}"',
                f".venv/bin/builder stage {cells} --format github > staged",
                "stamp=$(sed -n 's/^stamp=//p' staged)",
                'test "$ALLOW_UNTESTED_GPU" != true || allow=--allow-untested-gpu',
                '.venv/bin/builder release "$stamp" $allow',
            ],
        }  # fmt: skip
    if not jobs:  # GitLab creates no pipeline without a job, and the parent's job fails
        jobs["nothing to build"] = {"tags": ["docker"], "inherit": {"default": False}, "script": ["true"]}
    login = 'printf %s "$CI_REGISTRY_PASSWORD" | docker login "$CI_REGISTRY" -u "$CI_REGISTRY_USER" --password-stdin'
    locked = {"GPU_IMAGES_LOCKED": "1"} if publish else {}  # what is staged must match this commit
    paths, reports = [".builder/evidence/", ".builder/logs/"], {"junit": ".builder/junit/*.xml"}
    pipeline = {
        "stages": ["images", "release"],
        "workflow": {"rules": [{"when": "always"}]},  # without rules, no job of a child runs for a merge request
        "variables": {"DOCKER_CONFIG": "$CI_PROJECT_DIR/.builder/docker", **locked},
        "default": {
            "before_script": ["make .venv/.ready", *([login] if publish else [])],
            "after_script": [".venv/bin/builder gc"],  # its failure is ignored: another job may use the store
            "artifacts": {"when": "always", "expire_in": "1 week", "paths": paths, "reports": reports},
        },
    }
    return yaml.safe_dump(pipeline | jobs, sort_keys=False, width=10_000)
