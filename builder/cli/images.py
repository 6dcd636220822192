"""The commands that make images: images, build."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from builder.build import disk, images, locked_packages
from builder.build.assemble import Assembler
from builder.build.dockerfile import DockerfileBuilder
from builder.build.images import Options, Outcome
from builder.build.layer_lookup import LayerLookup
from builder.build.work import Method, Work
from builder.cli import engine
from builder.cli.context import Context
from builder.cli.options import (
    CELLS_HELP,
    FREE,
    Size,
    cells_argument,
    format_option,
    given,
    jobs_option,
)
from builder.common.errors import BuilderError, LockError, StaleError, UsageError, join
from builder.common.units import duration
from builder.compat import gpus
from builder.layers import garbage, known_layers
from builder.layers.known_layers import KnownLayers
from builder.lock import update
from builder.plan import current, plan
from builder.plan.plan import Plan

ASSEMBLE, DOCKERFILE = "assemble", "dockerfile"

METHOD = click.option(
    "--method",
    type=click.Choice([ASSEMBLE, DOCKERFILE]),
    default=ASSEMBLE,
    show_default=True,
    help="assemble: turn wheels into layers directly. dockerfile: build the Dockerfile in images/, step by step.",
)
_DISK = (
    click.option(
        "--max-disk",
        type=Size(positive=True, free=True),
        default=0,
        help="Maximum disk space for the store and Docker Engine together, e.g. 40GB, or `free`: what they take now "
        "and what is free, less 2 GB. To free space, images of this checkout are removed from the engine; the store "
        "keeps them.",
    ),
    click.option(
        "--prune-cache",
        is_flag=True,
        help="With --max-disk: if necessary, also empty the engine's build cache, which all projects share.",
    ),
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
    help="Fail at the start if Debian's archives no longer have a locked package of an operating system that must be "
    "made; for CI. Default: lock the current versions, which changes locks/, and go on.",
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
        for option in reversed((cells_argument, jobs_option, *options, engine.start_option)):
            function = option(function)
        return click.command(name=name, epilog=CELLS_HELP)(function)

    return decorate


@dataclass(frozen=True, kw_only=True)
class Request:
    """A command that makes or tests images, with its options."""

    command: str
    options: Options
    method: str = ASSEMBLE
    max_disk: int = 0
    prune_cache: bool = False
    locked: bool = False
    form: str = "text"
    start_engine: bool = False

    @classmethod
    def of(cls, command: str, values: Mapping[str, Any]) -> Request:
        """`values` are those of both classes. Raises UsageError."""
        names = {field.name for field in fields(Options)}
        options = Options(**{name: value for name, value in values.items() if name in names})
        others = {name: value for name, value in values.items() if name not in names}
        request = cls(command=command, options=options, **others)
        if request.max_disk and request.method == DOCKERFILE:
            raise UsageError("--max-disk needs --method assemble: the store has no images built from a Dockerfile")
        if request.prune_cache and not request.max_disk:
            raise UsageError("--prune-cache needs --max-disk")
        return request


@command("images", METHOD, *_DISK, _LOCKED, gpu_option, *REPORT)
def images_command(context: Context, /, patterns: Sequence[str], **values: Any) -> None:
    """Build, test and tag images.

    Skips what is already done: an image that is up to date and has passed its tests is neither built nor tested again.

    If Debian has replaced locked packages that are needed, locks the current ones and lists the changes. With --locked,
    fails instead.
    """
    _make_images(context, patterns, Request.of("images", values))


@command("build", METHOD, *_DISK, _LOCKED)
def build_command(context: Context, /, patterns: Sequence[str], **values: Any) -> None:
    """Build images, without testing or tagging them."""
    _make_images(context, patterns, Request.of("build", values | {"test": False}))


def _make_images(context: Context, patterns: Sequence[str], request: Request) -> None:
    """Makes images, shows what was done, and raises what failed."""
    began = time.monotonic()
    project = context.project
    chosen = project.select(patterns)
    with context.locked(project, request.command):
        planned = current.make(project, chosen)
        work = engine.connect(context, project, start=request.start_engine)
        lookup = LayerLookup(project, work.host, work.view, context.store, KnownLayers(project.root))
        has_new_locks = False
        try:
            if has_new_locks := _lock_stale_systems(context, work, planned, request, lookup):
                planned = current.make(project, chosen)
                lookup = LayerLookup(project, work.host, work.view, context.store, KnownLayers(project.root))
            outcomes = _make(context, work, planned, request, lookup)
        except BaseException:
            if has_new_locks:
                _say_changed_locks(context)
            raise
    show_outcomes(context, work, planned, outcomes, request, began)
    if has_new_locks:
        _say_changed_locks(context)
    if failed := images.failure(outcomes, "images failed"):
        raise failed


def show_outcomes(
    context: Context, work: Work, planned: Plan, outcomes: Sequence[Outcome], request: Request, began: float
) -> None:
    """Shows what was done for the images of a plan since `began`, as `time.monotonic` has it."""
    seconds = time.monotonic() - began
    if request.form == "json":
        context.print_json({"images": [outcome.as_data() for outcome in outcomes], "seconds": round(seconds, 1)})
        return
    where = " in the store" if request.max_disk else ""
    context.say(f"{images.summary(outcomes, len(planned.images), where)} ({duration(seconds)})")
    if times := images.times(work.view.spent, {image.id for image in planned.images}):
        context.say(f"total time by step, parallel work added up: {times}")


def _say_changed_locks(context: Context) -> None:
    context.say(
        "locks/ changed, because Debian updated packages:\n"
        "  git diff locks                                shows the changes\n"
        "  git commit -m 'Update Debian packages' locks  keeps them\n"
        "  git restore locks                             undoes them"
    )


def _lock_stale_systems(context: Context, work: Work, planned: Plan, request: Request, lookup: LayerLookup) -> bool:
    """Locks current packages for operating systems that must be made and whose locked ones are gone; whether any were.

    Raises StaleError instead with --locked. What cannot be locked again fails when it is built, with --locked at once.
    """
    with image_provider(context, work, request, lookup) as method:
        to_make = method.systems_to_make(planned.images)
    project = work.project
    requests = {image.system for image in to_make}
    new, failures = update.current_locks_of_stale(project, requests, work.host, work.view.say)
    if request.locked and failures:
        raise join(failures, "locks failed")
    for failure in failures:
        work.view.say(f"cannot lock current packages: {failure}")
    if not new:
        return False
    if request.locked:
        command = f"builder images --no-locked{given('method', 'max_disk', 'jobs', 'patterns')}"
        raise locked_packages.refuse_stale(work, planned.images, new, command)
    locked_packages.lock_current(work, planned.images, new)
    with suppress(LockError, StaleError):  # other cells are not locked, or their locks are out of date
        complete = plan.make_locked(project, project.cells)
        known_layers.prune(project.root, {layer.inputs for image in complete.images for layer in image.layers})
    return True


def _make(context: Context, work: Work, planned: Plan, request: Request, lookup: LayerLookup) -> list[Outcome]:
    """With --max-disk, makes one group of images after another, without those that the store has."""
    outcomes: list[Outcome] = []
    if request.max_disk == FREE:
        context.store.prepare()
        request = replace(request, max_disk=disk.free_limit(work, context.store))
    for part in _parts(context, work, planned, request):
        try:
            if request.max_disk:
                disk.make_room(work, context.store, part, request.max_disk, prune_cache=request.prune_cache)
            if request.method == ASSEMBLE:
                needed = partial(disk.store_bytes, context.store, part.images)
                garbage.make_room(context.store, needed, wait=context.wait)
            with image_provider(context, work, request, lookup) as method:
                outcomes += images.make_images(work, method, part, request.options)
        except BuilderError as error:
            outcomes += [Outcome(image=image, error=error) for image in part.images]
    return outcomes


def _parts(context: Context, work: Work, planned: Plan, request: Request) -> list[Plan]:
    if not request.max_disk:
        return [planned]
    context.store.prepare()
    # With --gpu require, an image in the store may lack a GPU test; `images.make_images` checks each one.
    if request.options.gpu_mode != gpus.REQUIRE:
        planned = disk.outstanding(work, context.store, planned, test=request.options.test)
    return disk.groups(planned)


@contextmanager
def image_provider(
    context: Context, work: Work, request: Request, lookup: LayerLookup | None = None
) -> Iterator[Method]:
    """The way to build; holds the store for the method `assemble`."""
    if request.method == DOCKERFILE:
        yield DockerfileBuilder(work)
        return
    store = context.store
    store.prepare()
    with store.used():
        yield Assembler(work, store, jobs=request.options.jobs, lookup=lookup)
