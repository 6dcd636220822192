"""Builds cells by both methods and compares the images: every path, and the configuration.

    .venv/bin/python tests/equal.py pt-2.9-cu128-py311

Takes some minutes for a real image. The one by Dockerfile is removed afterwards.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from builder.build.assemble import Assembler
from builder.build.dockerfile import DockerfileBuilder
from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import SystemLayers
from builder.cli.context import Context
from builder.engine.run import Run
from builder.plan import plan
from builder.plan.plan import Plan, PlannedImage
from builder.steps.images import build_test_tag

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.integration.tree import differences, inspect, tree  # noqa: E402  after the path

SHOWN = 40


def main(cells: list[str]) -> int:
    """Compares; 1 if there is a difference."""
    context = Context(root=ROOT)
    project = context.project
    run = context.run(project)
    status = 0
    for image in plan.make_locked_plan(project, project.select(cells)).images:
        with run.store.used():
            assembled = _built(run, Assembler(SystemLayers.of(LayerLookup.of(run))), image)
        by_dockerfile = _built(run, DockerfileBuilder(SystemLayers.of(LayerLookup.of(run))), image)
        found: dict[str, tuple[Any, Any]] = {
            **differences(tree(assembled), tree(by_dockerfile)),
            **differences(inspect(assembled), inspect(by_dockerfile)),
        }
        for path, (one, other) in list(found.items())[:SHOWN]:
            context.say(f"{path}\n  assembled:     {one}\n  by Dockerfile: {other}")
        context.say(f"{image.id}: {len(found)} differences between {assembled[7:19]} and {by_dockerfile[7:19]}")
        status |= bool(found)
        subprocess.run(["docker", "rmi", by_dockerfile], check=False, capture_output=True)
    return status


def _built(run: Run, maker: Assembler | DockerfileBuilder, image: PlannedImage) -> str:
    [outcome] = build_test_tag(run, maker, None, Plan(images=(image,)), 1)
    if outcome.error:
        raise outcome.error
    assert outcome.loaded
    return outcome.loaded.id


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
