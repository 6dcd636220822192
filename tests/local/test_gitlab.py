"""The scripts of the jobs of a GitLab pipeline, with a shell and a stand-in for `builder`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml

from builder.matrix.project import Project
from builder.plan import plan
from builder.steps import ci
from tests.paths import ROOT

STUB = """\
builder() {
    echo "$*" >&2
    case "$*" in *github*) echo stamp=20261122 ;; esac
}
set -e
"""


def test_the_last_job_releases_what_it_listed(tmp_path: Path) -> None:
    project = Project(ROOT)
    images = plan.make_plan(project, project.groups["pt-2.15-cu132-py313"][:2]).images
    data = yaml.safe_load(ci.gitlab_pipeline(images, 10**15, publish=True))
    called: list[list[str]] = []
    for job in (job for job in data.values() if "script" in job):
        script = (STUB + "\n".join(job["script"])).replace(".venv/bin/builder", "builder")
        environ = {**os.environ, "GPU_IMAGES_SIGN": "key", "ALLOW_UNTESTED_GPU": "true"}
        done = subprocess.run(
            ["sh", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
        )
        called += [line.split() for line in done.stderr.splitlines()]
    assert [words[0] for words in called] == ["images", "stage", "stage", "release"]
    assert called[-1] == ["release", "20261122", "--allow-untested-gpu"]
