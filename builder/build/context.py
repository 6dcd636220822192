"""Images in the engine, the test files of a run, and the record of the images that this checkout built."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from builder.common.files import write_atomically
from builder.common.text import counted, size
from builder.engine.client import Engine
from builder.engine.run import Run
from builder.evidence.suite import RUNNER, Suite
from builder.matrix.project import Project
from builder.matrix.tags import PLAN_LABEL

# How an image came into the engine: built in this run, loaded from the store, or present before.
Origin = Literal["built", "loaded", "present"]


@dataclass(frozen=True, kw_only=True)
class LoadedImage:
    """An image in the engine. `digest` is that of its manifest.

    An image built from a Dockerfile has no manifest before it is pushed: `digest` is then its id in the engine.
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
    root = _test_files(project)
    shutil.rmtree(root, ignore_errors=True)
    for name in Suite.of(*project.folders).files.keys() - {RUNNER}:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(next(path for each in project.folders if (path := each / name).is_file()), root / name)
    shutil.copyfile(project.folders[-1] / "pyproject.toml", root / "pyproject.toml")  # pytest's options
    (root / project.state.name).symlink_to("..")
    run.engine.sweep(str(root))  # containers of killed runs
    return Project(root)


def _test_files(project: Project) -> Path:
    """The root of `project_of_tests`, whose test containers have its name."""
    return project.state / "tests"


def record_built(state: Path, image_id: str) -> None:
    """Records that this checkout built an image."""
    write_atomically(state / "built" / image_id.replace(":", "-"), image_id + "\n")


def built_ids(state: Path) -> set[str]:
    """Ids of all images that this checkout built, in the engine or removed since."""
    return {path.read_text(encoding="ascii").strip() for path in (state / "built").glob("*")}


def clean(engine: Engine, project: Project, *, cache: bool) -> str:
    """Removes test containers, untagged images of this checkout and logs; returns a sentence on what was removed."""
    containers = sum(engine.sweep(str(root)) for root in (project.root, _test_files(project)))
    ids = built_ids(project.state)
    untagged = [image for image in engine.images(PLAN_LABEL) if image.id in ids and not image.tags]
    removed = [image for image in untagged if engine.remove_image(image.id)]
    for log in project.logs.glob("*.log"):
        log.unlink()
    text = f"removed {counted(containers, 'container')} and {counted(len(removed), 'image')}"
    return text + (f", freed {size(engine.prune_cache())} of build cache" if cache else "")
