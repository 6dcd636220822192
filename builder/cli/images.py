"""The commands that make and test images: images, build, test."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from builder.build import outcomes
from builder.build.assemble import find_image
from builder.build.gpu_command import GpuCommand
from builder.build.image_tests import new_tester
from builder.build.outcomes import Outcome
from builder.cli import options
from builder.cli.context import Context
from builder.common.errors import ImageTestError, UsageError
from builder.common.text import counted, duration
from builder.compat import gpus
from builder.evidence.signing import Signer
from builder.layers.known_layers import KnownLayers
from builder.plan import render
from builder.release.staging import StagingArea
from builder.steps.images import ASSEMBLE, ImageOptions, Method, make_images
from builder.steps.test import StagedTestOptions, complete_tests, plan_of_release, retest_images

NEWEST = "newest"

_method_option = click.option(
    "--method",
    type=click.Choice(get_args(Method)),
    default=ASSEMBLE,
    show_default=True,
    help="assemble: turn wheels into layers directly. dockerfile: build the Dockerfile in images/, step by step.",
)
gpu_option = click.option(
    "--gpu",
    "gpu_mode",
    type=click.Choice(list(gpus.MODES)),
    default=gpus.AUTO,
    show_default=True,
    help="Whether to run GPU tests. require: fail at the start if they cannot run; also run tests that were skipped "
    "in earlier runs. auto: run them if a GPU has enough free memory. off: skip them. If they are skipped, the status "
    "of the image shows `gpu: not run` and the reason. CPU images have no GPU tests.",
)
_locked_option = click.option(
    "--locked/--no-locked",
    envvar="GPU_IMAGES_LOCKED",
    show_envvar=True,
    help="Fail at the start if a locked package of an operating system that must be made is neither in the store nor "
    "in any archive; for CI. Default: lock the current versions, which changes locks/, and go on.",
)
_junit_option = click.option(
    "--junit",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write JUnit reports of the image tests to this folder, one file per image and kind of test.",
)


@click.command(name="images", epilog=options.CELLS_HELP)
@options.cells_argument
@options.jobs_option
@_method_option
@_locked_option
@gpu_option
@_junit_option
@options.start_option
@click.pass_obj
def images_command(context: Context, /, patterns: Sequence[str], **values: Any) -> None:
    """Build, test and tag images.

    Skips what is already done: an image that is up to date and has passed its tests is neither built nor tested again.

    If needed locked Debian packages are no longer in any archive, locks the current ones and lists the changes. With
    --locked, fails instead.
    """
    _make(context, "images", patterns, **values)


@click.command(name="build", epilog=options.CELLS_HELP)
@options.cells_argument
@options.jobs_option
@_method_option
@_locked_option
@options.start_option
@click.pass_obj
def build_command(context: Context, /, patterns: Sequence[str], **values: Any) -> None:
    """Build images, without testing or tagging them."""
    _make(context, "build", patterns, test=False, **values)


def _make(context: Context, name: str, patterns: Sequence[str], *, start_engine: bool, **values: Any) -> None:
    """Makes images for the command `name`; `values` are fields of `ImageOptions`."""
    began = time.monotonic()
    project = context.project
    with project.locked(f"builder {name}"):
        planned = render.load_checked_plan(project, project.select(patterns))
        run = context.run(project, start_engine=start_engine)
        done = make_images(run, planned, ImageOptions(**values))
    show_outcomes(context, done, began=began)
    if failure := outcomes.failure(done):
        raise failure


@click.command(name="test", epilog=options.CELLS_HELP)
@options.cells_argument
@options.jobs_option
@gpu_option
@_junit_option
@click.option(
    "--staged",
    "stamp",
    default="",
    is_flag=False,
    flag_value=NEWEST,
    metavar="[STAMP]",
    help="Test the staged release STAMP. Default: the newest.",
)
@click.option(
    "--no-attach",
    is_flag=True,
    help="With --staged: keep the results in .builder/evidence; `builder stage` attaches them. For machines that may "
    "only read from the registry.",
)
@options.sign_option
@options.start_option
@click.pass_obj
def test_command(
    context: Context, /, patterns: Sequence[str], *, stamp: str, no_attach: bool,
    signer: Signer | None, start_engine: bool, **values: Any
) -> None:  # fmt: skip
    """Run the tests of built or staged images.

    Without --staged, runs all tests of built images, including those that passed before.

    With --staged, downloads the images of a release from staging, runs the tests that their reports lack (on a machine
    with a GPU, the GPU tests), and attaches the results. CELLS selects images of the release; the default is all of
    them for the architecture of this machine. Several machines may test different cells at the same time.

    If matrix.yaml has `test.gpu_command`, that command runs the GPU tests of all, --jobs images at a time, on other
    machines. This machine then needs neither a GPU nor an engine.
    """
    began = time.monotonic()
    how = ImageOptions(**values)
    if no_attach and not stamp:
        raise UsageError("--no-attach needs --staged: only results of staged images are attached")
    project, store = context.project, context.store
    chosen = project.select(patterns or (("*",) if stamp else ()))
    command: GpuCommand | None = None
    with project.locked("builder test"):
        run = context.run(project, start_engine=start_engine)
        if stamp:
            area = StagingArea.of(project, run.host)
            release = area.read("" if stamp == NEWEST else stamp)
            if project.matrix.test and how.gpu_mode != gpus.OFF:
                command = GpuCommand(project.matrix.test.gpu_command, run.host.names, project.root)
            planned = plan_of_release(
                run, release, {cell.id for cell in chosen}, own_arch=not patterns and command is None
            )
        else:
            planned = render.load_checked_plan(project, chosen)
        tester = new_tester(
            run, planned.images, jobs=how.jobs, gpu_mode=how.gpu_mode, junit=how.junit, gpu_command=command
        )
        store.prepare()
        with store.used():
            if stamp:
                staged_options = StagedTestOptions(jobs=how.jobs, signer=signer, attach=not no_attach)
                done = complete_tests(run, area, release, planned, tester, staged_options)
            else:
                known = KnownLayers(project.root)
                found = {image.id: find_image(run, image, known) for image in planned.images}
                done = retest_images(run, tester, planned, found, how.jobs)
    show_outcomes(context, done, began=began)
    tested = any(outcome.coverage or isinstance(outcome.error, ImageTestError) for outcome in done)
    if failed := outcomes.failure(done, "images failed" if tested else "images were not tested"):
        raise failed


def show_outcomes(context: Context, done: Sequence[Outcome], *, began: float) -> None:
    """Shows the results for images since `began`, a time of `time.monotonic`."""
    context.say(f"{summary(done)} ({duration(time.monotonic() - began)})")


def summary(done: Sequence[Outcome]) -> str:
    """A summary of the results: `4 images: 1 built, 1 tested, 1 tagged, 2 up to date, 1 failed`."""
    passed = [outcome for outcome in done if not outcome.error]
    counts = {
        "built": sum(outcome.origin == "built" for outcome in passed),
        "loaded from the store": sum(outcome.origin == "loaded" for outcome in passed),
        "tested": sum(outcome.tested for outcome in passed),
        "tagged": sum(outcome.tagged for outcome in passed),
        "up to date": sum(outcome.is_up_to_date for outcome in passed),
        "failed": len(done) - len(passed),
    }
    steps = ", ".join(f"{count} {step}" for step, count in counts.items() if count)
    return f"{counted(len(done), 'image')}: {steps}" if done else "no images"
