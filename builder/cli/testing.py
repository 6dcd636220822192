"""The command that tests images which are built or staged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from builder.build import outcomes
from builder.build.assemble import find_image
from builder.build.image_tests import new_tester
from builder.cli import machine
from builder.cli.context import Context
from builder.cli.images import REPORT, command, gpu_option, show_outcomes
from builder.cli.options import sign_option, staging_option
from builder.common.errors import ImageTestError, UsageError
from builder.evidence.signing import Signer
from builder.layers.known_layers import KnownLayers
from builder.plan import render
from builder.release.staging import StagingArea
from builder.steps.images import Options
from builder.steps.test import complete_tests, plan_of_release, retest_images

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
    project, store = context.project, context.store
    chosen = project.select(patterns or (("*",) if stamp else ()))
    with context.locked(project, "test"):
        run = machine.connect(context, project, start=start_engine)
        if stamp:
            area = StagingArea.of(project, place, run.host)
            release = area.read("" if stamp == NEWEST else stamp)
            planned = plan_of_release(run, release, {cell.id for cell in chosen}, own_arch=not patterns)
        else:
            planned = render.load_checked_plan(project, chosen)
        tester = new_tester(run, planned.images, jobs=options.jobs, gpu_mode=options.gpu_mode, junit=options.junit)
        store.prepare()
        with store.used():
            if stamp:
                signer = signer and signer.with_trust(project)
                done = complete_tests(
                    run, store, area, release, planned, tester, jobs=options.jobs, signer=signer, attach=not no_attach
                )
            else:
                known = KnownLayers(project.root)
                found = {image.id: find_image(run, store, image, known) for image in planned.images}
                done = retest_images(run, tester, planned, found, options.jobs)
    show_outcomes(context, run, done, began=began, form=form)
    tested = any(outcome.coverage or isinstance(outcome.error, ImageTestError) for outcome in done)
    if failed := outcomes.failure(done, "images failed" if tested else "images were not tested"):
        raise failed
