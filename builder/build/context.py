"""Images in the engine, and the test files of a run."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Literal

from builder.engine.run import Run
from builder.evidence.suite import RUNNER, Suite
from builder.matrix.project import Project

# How an image came into the engine: built in this run, loaded from the store, or present before.
Origin = Literal["built", "loaded", "present"]


@dataclass(frozen=True, kw_only=True)
class LoadedImage:
    """An image in the engine. `digest` is the digest of the image's manifest.

    An image built from a Dockerfile has no manifest before a push: `digest` is then the image's id in the engine.
    """

    id: str
    digest: str
    origin: Origin = "present"


def project_of_tests(run: Run) -> Project:
    """The checkout, or a copy of its test files, so that all are below one root. The checkout must be locked.

    Test files import each other, so those of a team that extends the shipped ones are copied together. The copy has the
    state of the checkout.
    """
    project = run.project
    if len(project.folders) == 1:
        return project
    root = project.state / "tests"
    shutil.rmtree(root, ignore_errors=True)
    for name in Suite.of(*project.folders).files.keys() - {RUNNER}:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(next(path for folder in project.folders if (path := folder / name).is_file()), root / name)
    shutil.copyfile(project.folders[-1] / "pyproject.toml", root / "pyproject.toml")  # pytest's options
    (root / project.state.name).symlink_to("..")
    return Project(root)
