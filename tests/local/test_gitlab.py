"""The scripts of the jobs of a GitLab pipeline, with a shell and a stand-in for `builder`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from builder.matrix.project import Project
from builder.plan import plan
from builder.steps import ci
from tests.paths import ROOT

STUB = """\
builder() {{
    echo "$*" >&2
    case $1 in
        stage) case "$*" in *github*) echo stamp={stamp}; echo parts=x ;; esac; return {staged} ;;
        images) return {built} ;;
    esac
}}
set -e
"""


@pytest.mark.parametrize(
    ("stamp", "built", "staged", "commands", "status"),
    [
        ("20261122", 0, 0, ["images", "stage", "stage", "release"], [0, 0]),
        ("20261122", 9, 18, ["images", "stage", "stage", "release"], [18, 18]),
        ("", 9, 4, ["images", "stage", "stage"], [4, 4]),
    ],
)
def test_an_image_that_fails_does_not_stop_the_release_of_the_others(
    tmp_path: Path, stamp: str, built: int, staged: int, commands: list[str], status: list[int]
) -> None:  # fmt: skip
    """The jobs fail, and the last one releases what was staged."""
    project = Project(ROOT)
    images = plan.make_plan(project, project.groups["pt-2.15-cu132-py313"][:2]).images
    data = yaml.safe_load(ci.gitlab_pipeline(images, 10**15, publish=True))
    called, codes = [], []
    for job in (job for job in data.values() if "script" in job):
        script = STUB.format(stamp=stamp, built=built, staged=staged) + "\n".join(job["script"])
        script = script.replace(".venv/bin/builder", "builder")
        environ = {**os.environ, "GPU_IMAGES_SIGN": "key"} if "environment" in job else os.environ
        done = subprocess.run(
            ["sh", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        called += [line.split() for line in done.stderr.splitlines()]
        codes.append(done.returncode)
    assert [words[0] for words in called] == commands
    assert codes == status
    if "release" in commands:
        assert called[-1] == ["release", stamp, "--skip-incomplete"]
