"""The commands that make images: images, build."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from builder.build import disk, operating_systems
from builder.build.assemble import Assembler
from builder.build.context import ImageProvider, RunContext
from builder.build.dockerfile import DockerfileBuilder
from builder.build.layer_lookup import LayerLookup
from builder.cli import machine
from builder.cli.context import Context
from builder.cli.options import (
    CELLS_HELP,
    cells_argument,
    format_option,
    given,
    jobs_option,
)
from builder.common.errors import BuilderError, LockError, StaleError, join
from builder.common.text import duration
from builder.compat import gpus
from builder.debian.archives import Archives, Kept
from builder.debian.os_lock import DebianPackage
from builder.layers import garbage, known_layers
from builder.layers.known_layers import KnownLayers
from builder.lock import update
from builder.matrix.cells import Cell
from builder.plan import plan, render
from builder.plan.plan import Plan, PlannedImage
from builder.steps import images
from builder.steps.images import Options, Outcome

ASSEMBLE, DOCKERFILE = "assemble", "dockerfile"

METHOD = click.option(
    "--method",
    type=click.Choice([ASSEMBLE, DOCKERFILE]),
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
_LOCKED = click.option(
    "--locked/--no-locked",
    envvar="GPU_IMAGES_LOCKED",
    show_envvar=True,
    help="Fail at the start if a locked package of an operating system that must be made is neither in the store nor "
    "in any archive; for CI. Default: lock the current versions, which changes locks/, and go on.",
)
REPORT = (
    format_option("json: print the result for each image to standard output."),
    click.option(
        "--junit",
        type=click.Path(file_okay=False, path_type=Path),
        help="Write JUnit reports of the image tests to this folder, one file per image and kind of test.",
    ),
)


def command(name: str, *options: Callable[..., Any]) -> Callable[[Callable[..., None]], click.Command]:
    """A command for CELLS, with --jobs, --start-engine and these options."""

    def decorate(function: Callable[..., None]) -> click.Command:
        function = click.pass_obj(function)
        for option in reversed((cells_argument, jobs_option, *options, machine.start_option)):
            function = option(function)
        return click.command(name=name, epilog=CELLS_HELP)(function)

    return decorate


@command("images", METHOD, _LOCKED, gpu_option, *REPORT)
def images_command(context: Context, /, patterns: Sequence[str], **options: Any) -> None:
    """Build, test and tag images.

    Skips what is already done: an image that is up to date and has passed its tests is neither built nor tested again.

    If needed locked Debian packages are no longer in any archive, locks the current ones and lists the changes. With
    --locked, fails instead.
    """
    if failure := images.failure(make_selected(context, context.project.select(patterns), **options), "images failed"):
        raise failure


def make_selected(
    context: Context, chosen: Sequence[Cell], *, method: str = ASSEMBLE, locked: bool = False,
    form: str = "text", start_engine: bool, **values: Any
) -> list[Outcome]:  # fmt: skip
    """Makes the images of cells, and shows what was done. A failure of an image is in its outcome.

    `values` are those of `Options`.
    """
    began = time.monotonic()
    options = Options(**values)
    project = context.project
    has_new_locks = False
    try:
        with context.locked(project, "images" if options.test else "build"):
            planned = render.load_checked_plan(project, chosen)
            run = machine.connect(context, project, start=start_engine)
            store = context.store
            lookup = LayerLookup(project, run.host, run.view, store, KnownLayers(project.root))
            with image_provider(context, run, method, options.jobs, lookup) as provider:
                to_make = provider.systems_to_make(planned.images)
            archives = Archives(project.matrix, run.host, run.view.say_once)

            def is_kept(package: DebianPackage) -> bool:
                return store.has(f"sha256:{package.sha256}", package.size)

            if has_new_locks := _lock_stale_systems(run, planned, to_make, archives, is_kept, locked=locked):
                planned = render.load_checked_plan(project, chosen)
                lookup = LayerLookup(project, run.host, run.view, store, KnownLayers(project.root))

            try:
                if method == ASSEMBLE:
                    garbage.make_room(store, partial(disk.store_bytes, store, planned.images), wait=context.wait)
                with image_provider(context, run, method, options.jobs, lookup, archives) as provider:
                    outcomes = images.make_images(run, provider, planned, options)
            except BuilderError as error:  # `refresh` reports it with the failures of its locks
                outcomes = [Outcome(image=image, error=error) for image in planned.images]
        show_outcomes(context, run, planned, outcomes, began=began, form=form)
        return outcomes
    finally:
        if has_new_locks:  # also after a failure or Ctrl-C: the checkout has changed
            context.say(
                "locks/ changed, because Debian updated packages:\n"
                "  git diff locks                                shows the changes\n"
                "  git commit -m 'Update Debian packages' locks  keeps them\n"
                "  git restore locks                             undoes them"
            )


@command("build", METHOD, _LOCKED)
def build_command(context: Context, /, **values: Any) -> None:
    """Build images, without testing or tagging them."""
    click.get_current_context().invoke(images_command, **values, test=False)


def _lock_stale_systems(
    run: RunContext, planned: Plan, to_make: Sequence[PlannedImage], archives: Archives, is_kept: Kept, *, locked: bool
) -> bool:
    """Locks current packages for the operating systems of `to_make` whose locked packages are gone.

    Returns whether there were any. With `locked` (--locked), raises StaleError instead, or the error of locking them.
    """
    project = run.project
    requests = {image.os_request for image in to_make}
    new, failures = update.current_locks_of_stale(project, requests, archives, run.host, is_kept, run.view.say)
    if locked and failures:
        raise join(failures, "locks failed")
    for failure in failures:  # without --locked, only the images that need this operating system fail, when built
        run.view.say(f"cannot lock current packages: {failure}")
    if not new:
        return False
    if locked:
        options = given("gpu_mode", "junit", "jobs", "patterns")
        command = f"builder images --no-locked{options}"
        raise operating_systems.refuse_stale(run, planned.images, new, command)
    operating_systems.lock_current(run, planned.images, new)
    # No image has the layers of the earlier packages any more; `builder render --check` would report them.
    with suppress(LockError, StaleError):  # other cells are not locked, or their locks are out of date
        complete = plan.make_locked_plan(project, project.cells)
        known_layers.prune(project.root, {layer.inputs for image in complete.images for layer in image.layers})
    return True


@contextmanager
def image_provider(
    context: Context,
    run: RunContext,
    method: str,
    jobs: int,
    lookup: LayerLookup | None = None,
    archives: Archives | None = None,
) -> Iterator[ImageProvider]:
    """The way to build; for the method `assemble`, with the store held against `builder gc`."""
    if method == DOCKERFILE:
        yield DockerfileBuilder(run, lookup=lookup)
        return
    store = context.store
    store.prepare()
    with store.used():
        yield Assembler(run, store, jobs=jobs, lookup=lookup, archives=archives)


def show_outcomes(
    context: Context,
    run: RunContext,
    planned: Plan,
    outcomes: Sequence[Outcome],
    *,
    began: float,
    form: str,
) -> None:
    """Shows what was done for the images of a plan since `began`, of `time.monotonic`."""
    seconds = time.monotonic() - began
    if form == "json":
        context.print_json({"images": [outcome.as_data() for outcome in outcomes], "seconds": round(seconds, 1)})
        return
    context.say(f"{images.summary(outcomes)} ({duration(seconds)})")
    if times := images.times(run.view.spent, {image.id for image in planned.images}):
        context.say(f"total time by step, parallel work added up: {times}")
