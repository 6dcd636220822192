"""Parts of a plan for machines with little disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.steps import ci

HUGE = 10**15
NEWBIRD = '"3.11": {debian: newbird}'


@pytest.fixture
def images(tiny: Project) -> list[PlannedImage]:
    return list(plan.make_plan(tiny, tiny.cells).images)


def need(part: list[PlannedImage]) -> float:
    return sum({layer.inputs: layer.bytes for image in part for layer in image.layers}.values()) * ci.ON_DISK


def test_changed_images(images: list[PlannedImage]) -> None:
    before = {image.id: image.plan for image in images}
    assert ci.changed_images(before, images) == []
    del before[images[0].id]
    before[images[1].id] = "sha256:other"
    assert ci.changed_images(before, images) == images[:2]


def test_parts_fit_and_have_every_image_once(images: list[PlannedImage]) -> None:
    largest = max(need([image]) for image in images)
    for disk in (largest, largest * 1.5):
        parts = ci.split_by_disk(images, int(disk) + 1)
        assert sorted(image.id for part in parts for image in part) == sorted(image.id for image in images)
        assert max(map(need, parts)) <= disk + 1
    assert len(ci.split_by_disk(images, int(largest) + 1)) > 1
    assert len(ci.split_by_disk(images[: ci.MAX_IMAGES], HUGE)) == 1


def test_images_of_a_group_are_in_one_part_where_they_fit(images: list[PlannedImage]) -> None:
    """They share most of their layers."""
    groups = {image.cell.group for image in images}
    for group in groups:
        members = [image for image in images if image.cell.group == group]
        assert len(ci.split_by_disk(members, int(need(members)) + 1)) == 1


def test_updates_are_separate_for_each_debian_release_and_framework(tiny: Project) -> None:
    """Only those of the selected cells. Each name selects its cells."""
    assert ci.updates(tiny.matrix, tiny.cells) == {"debian": ["oldbird", "newbird"], "frameworks": ["ember", "quartz"]}
    chosen = tiny.select(["newbird"])
    assert {cell.python for cell in chosen} == {"3.11"}
    assert len(chosen) == sum(cell.python == "3.11" for cell in tiny.cells)
    assert ci.updates(tiny.matrix, tiny.select(["em-*-py39"])) == {"debian": ["oldbird"], "frameworks": ["ember"]}


@pytest.mark.parametrize(
    ("old", "new", "debian", "name"),
    [
        (NEWBIRD, f'{NEWBIRD[:-1]}, not_built: "nobody can fetch it"}}', ["oldbird"], "not-built"),
        ('python: ["3.11"]}', 'python: ["3.11"], arch: [amd64, arm64]}', ["oldbird", "newbird"], "arm64"),
    ],
)
def test_cells_in_no_other_set_are_updated_separately(
    edit: Callable[[str, str], Project], old: str, new: str, debian: list[str], name: str
) -> None:
    """Their locks would become old."""
    project = edit(old, new)
    sets = ci.updates(project.matrix, project.cells)
    assert sets == {"debian": [*debian, name], "frameworks": ["ember", "quartz", name]}
    for names in sets.values():
        assert set(project.select(names)) == set(project.cells)


def test_the_matrix_of_a_github_job(images: list[PlannedImage]) -> None:
    outputs = ci.github_outputs(images[:2], HUGE)
    cells = f"{images[0].id} {images[1].id}"
    part = {"name": f"{images[0].id} (2 images)", "cells": cells, "runner": "ubuntu-24.04", "label": "x64"}
    assert json.loads(outputs["parts"]) == {"include": [part]}
    assert outputs["cells"] == cells
    assert ci.github_outputs([]) == {"parts": '{"include": []}', "cells": ""}


def test_a_part_has_one_architecture_and_the_runner_for_it(images: list[PlannedImage]) -> None:
    arm64 = [replace(image, cell=replace(image.cell, arch="arm64")) for image in images[:2]]
    parts = json.loads(ci.github_outputs([arm64[0], *images[:2], arm64[1]], HUGE)["parts"])["include"]
    assert [(part["cells"].split(), part["runner"], part["label"]) for part in parts] == [
        ([image.id for image in images[:2]], "ubuntu-24.04", "x64"),
        ([image.id for image in arm64], "ubuntu-24.04-arm", "arm64"),
    ]


# ---- GitLab


def pipeline(images: list[PlannedImage], disk: int = HUGE, *, publish: bool = False) -> dict[str, Any]:
    data = yaml.safe_load(ci.gitlab_pipeline(images, disk, publish=publish))
    schema = resources.files("check_jsonschema.builtin_schemas.vendor") / "gitlab-ci.json"
    jsonschema.validate(data, json.loads(schema.read_text(encoding="utf-8")))
    assert isinstance(data, dict)
    return data


def jobs(data: dict[str, Any]) -> dict[str, Any]:
    return {name: job for name, job in data.items() if isinstance(job, dict) and "script" in job}


def test_a_pipeline_of_gitlab_has_a_job_for_each_part(images: list[PlannedImage]) -> None:
    arm64 = replace(images[2], cell=replace(images[2].cell, arch="arm64"))
    data = pipeline([*images[:2], arm64])
    first, second = jobs(data).values()
    assert list(jobs(data)) == [f"images of {images[0].id} (2 images)", f"images of {arm64.id} (1 image)"]
    build = f".venv/bin/builder images {images[0].id} {images[1].id} --junit .builder/junit"
    assert first["script"] == [build]
    assert (first["tags"], second["tags"]) == (["docker", "amd64"], ["docker", "arm64"])
    assert {first["stage"], second["stage"]} <= set(data["stages"])
    artifacts = data["default"]["artifacts"]
    assert (artifacts["when"], artifacts["reports"]) == ("always", {"junit": ".builder/junit/*.xml"})
    assert data["workflow"] == {"rules": [{"when": "always"}]}, "else no job runs for a merge request"
    assert "release" not in data
    assert "GPU_IMAGES_LOCKED" not in data["variables"]
    assert "docker login" not in str(data), "a merge request needs no credentials"


def test_only_the_job_that_releases_gets_the_key(images: list[PlannedImage]) -> None:
    """GitLab gives variables that are limited to an environment to its jobs alone."""
    data = pipeline(images[:2], publish=True)
    building, release = jobs(data).values()
    assert release["environment"] == {"name": "release"}
    assert release["tags"] == ["release"], "a runner that runs no image"
    assert "environment" not in building
    assert "artifacts" not in release, "it has those of the jobs before it, as it names no others"
    assert {"dependencies", "needs"}.isdisjoint(release)
    assert release["resource_group"] == "release"
    assert data["stages"].index(building["stage"]) < data["stages"].index(release["stage"])
    assert data["variables"]["GPU_IMAGES_LOCKED"] == "1"


def test_gpu_tests_are_left_out_only_if_a_variable_says_so(images: list[PlannedImage]) -> None:
    """`false` must not release them."""
    script = jobs(pipeline(images[:1], publish=True))["release"]["script"]
    [line] = [line for line in script if "--allow-untested-gpu" in line]
    assert line == 'test "$ALLOW_UNTESTED_GPU" != true || allow=--allow-untested-gpu'
    assert ".venv/bin/builder release" in script[script.index(line) + 1]
    assert script[script.index(line) + 1].endswith(" $allow")


@pytest.mark.parametrize("publish", [False, True])
def test_a_pipeline_has_a_job_even_if_there_is_nothing_to_build(publish: bool) -> None:
    """GitLab refuses one without jobs, and the job that starts it fails."""
    assert list(jobs(pipeline([], publish=publish))) == ["nothing to build"]
