"""The command that tests images which are built or staged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from builder.cli import machine
from builder.cli.context import Context
from builder.cli.images import ASSEMBLE, REPORT, command, gpu_option, image_provider, show_outcomes
from builder.cli.options import sign_option, staging_option
from builder.common.errors import ImageTestError, UsageError
from builder.evidence.signing import Signer
from builder.plan import render
from builder.plan.plan import Plan
from builder.release.staging import StagingArea
from builder.steps import images
from builder.steps.images import Options
from builder.steps.test import StagedImages, only_for, test_staged

NEWEST = "newest"


@command(
    "test", gpu_option, *REPORT,
    click.option(
        "--staged", "stamp", default="", metavar="STAMP", help="Test a staged release: its stamp, or `newest`."
    ),
    click.option(
        "--no-attach", is_flag=True,
        help="With --staged: keep the results in .builder/evidence; `builder stage` attaches them. For machines that "
        "may only read from the registry.",
    ),
    staging_option,
    sign_option,
)  # fmt: skip
def test_command(
    context: Context, /, patterns: Sequence[str], *, stamp: str, no_attach: bool, place: str,
    signer: Signer | None, form: str, start_engine: bool, **values: Any
) -> None:  # fmt: skip
    """Run the tests of built or staged images.

    Without --staged, runs all tests of built images, including those that passed before.

    With --staged, downloads the images of a release from staging, runs the tests that their reports lack (on a machine
    with a GPU, the GPU tests), and attaches the results. CELLS selects images of the release; the default is all of
    them for the architecture of this machine. Several machines may test different cells at the same time.
    """
    began = time.monotonic()
    options = Options(**values)
    if no_attach and not stamp:
        raise UsageError("--no-attach needs --staged: only results of staged images are attached")
    project = context.project
    chosen = {cell.id for cell in project.select(patterns or (("*",) if stamp else ()))}
    with context.locked(project, "test"):
        run = machine.connect(context, project, start=start_engine)
        if stamp:
            staging_place = StagingArea.of(project, place, run.host)
            signer = signer and signer.with_trust(project)
            release = staging_place.read("" if stamp == NEWEST else stamp)
            staged = {image.cell: image for image in release.images}
            if patterns and (missing := sorted(chosen - staged.keys())):
                raise UsageError(
                    f"release {release.stamp} does not have {missing[0]}", hint=f"It has: {', '.join(staged)}"
                )
            # All cells of the release: which of its images must pass which thorough tests depends on them.
            planned = render.load_checked_plan(project, release.cells(project))
            planned = Plan(images=tuple(image for image in planned.images if image.id in chosen))
            if not patterns:
                planned = only_for(run.engine.info().arch, planned, context.say)
            if stale := [image.id for image in planned.images if staged[image.id].plan != image.digest]:
                raise release.stale(stale[0])
            with context.store.used():
                staged_images = StagedImages(run, context.store, staging_place, staged, signer, attach=not no_attach)
                outcomes = test_staged(run, staged_images, planned, options)
        else:
            planned = render.load_checked_plan(project, project.select(patterns))
            with image_provider(context, run, ASSEMBLE, options.jobs) as provider:
                outcomes = images.retest(run, provider, planned, options)
    show_outcomes(context, run, planned, outcomes, began=began, form=form)
    tested = any(outcome.coverage or isinstance(outcome.error, ImageTestError) for outcome in outcomes)
    if failed := images.failure(outcomes, "images failed" if tested else "images were not tested"):
        raise failed
