"""The commands that make images: images, build, test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from builder.build import disk, images, os_stage
from builder.build.assemble import Assembler
from builder.build.dockerfile import DockerfileBuilder
from builder.build.images import Options, Outcome
from builder.build.work import Method, Work
from builder.cli import engine
from builder.cli.context import Context
from builder.cli.options import (
    CELLS_HELP,
    FREE,
    Size,
    cells_argument,
    format_option,
    jobs_option,
    sign_option,
    staging_option,
)
from builder.common.errors import BuilderError, ImageTestError, UsageError
from builder.common.units import duration
from builder.compat import gpus
from builder.layers import garbage
from builder.plan import current
from builder.plan.plan import Plan

if TYPE_CHECKING:
    from builder.registry.signing import Signer

ASSEMBLE, DOCKERFILE = "assemble", "dockerfile"

_METHOD = click.option(
    "--method",
    type=click.Choice([ASSEMBLE, DOCKERFILE]),
    default=ASSEMBLE,
    show_default=True,
    help="assemble: turn wheels into layers directly. dockerfile: build the Dockerfile in images/, step by step.",
)
_OS_LAYER = click.option(
    "--os-layer",
    "os_way",
    type=click.Choice(get_args(os_stage.Way)),
    default="auto",
    show_default=True,
    help="How to build operating systems that the store does not have. mmdebstrap: without the engine; needs root on "
    "Debian or Ubuntu. buildkit: build the `os` stage of the Dockerfile, on the base image of matrix.yaml. auto: "
    "mmdebstrap where it can run, else buildkit.",
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
_REPORT = (
    format_option("json: print the result for each image to standard output."),
    click.option(
        "--junit",
        type=click.Path(file_okay=False, path_type=Path),
        help="Write JUnit reports of the image tests to this folder, one file per image and kind of test.",
    ),
)

_STAGED = (
    click.option(
        "--staged", "stamp", default="", metavar="STAMP", help="Test a staged release: its stamp, or `newest`."
    ),
    staging_option,
    sign_option,
)
NEWEST = "newest"


def _command(name: str, *options: Callable[..., Any]) -> Callable[[Callable[..., None]], click.Command]:
    """A command for CELLS, with --jobs, --start-engine and these options."""

    def decorate(function: Callable[..., None]) -> click.Command:
        function = click.pass_obj(function)
        for option in reversed((cells_argument, jobs_option, *options, engine.start_option)):
            function = option(function)
        return click.command(name=name, epilog=CELLS_HELP)(function)

    return decorate


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A command that makes images, with its options. `stamp` is a release at the staging `place` to test.

    `names`: the command line names cells, all of which must be in the release.
    """

    command: str
    options: Options
    stamp: str = ""
    names: bool = False
    place: str = ""
    signer: Signer | None = None
    method: str = ASSEMBLE
    os_way: os_stage.Way = "auto"
    max_disk: int = 0
    prune_cache: bool = False
    form: str = "text"
    start_engine: bool = False

    @classmethod
    def of(cls, command: str, values: Mapping[str, Any]) -> _Request:
        """`values` are those of both classes. Raises UsageError."""
        names = {field.name for field in fields(Options)}
        options = Options(**{name: value for name, value in values.items() if name in names})
        others = {name: value for name, value in values.items() if name not in names}
        request = cls(command=command, options=options, **others)
        if request.max_disk and request.method == DOCKERFILE:
            raise UsageError("--max-disk needs --method assemble: the store has no images built from a Dockerfile")
        if request.os_way != "auto" and request.method == DOCKERFILE:
            raise UsageError("--os-layer needs --method assemble: Dockerfiles use the base image of matrix.yaml")
        if request.stamp and request.method == DOCKERFILE:
            raise UsageError("--staged needs --method assemble: staged images are assembled")
        if request.prune_cache and not request.max_disk:
            raise UsageError("--prune-cache needs --max-disk")
        return request


@_command("images", _METHOD, _OS_LAYER, *_DISK, gpu_option, *_REPORT)
def images_command(context: Context, /, patterns: Sequence[str], **values: Any) -> None:
    """Build, test and tag images.

    Skips what is already done: an image that is up to date and has passed its tests is neither built nor tested again.
    """
    _run(context, patterns, _Request.of("images", values))


@_command("build", _METHOD, _OS_LAYER, *_DISK)
def build_command(context: Context, /, patterns: Sequence[str], **values: Any) -> None:
    """Build images, without testing or tagging them."""
    _run(context, patterns, _Request.of("build", values | {"test": False}))


@_command("test", _METHOD, gpu_option, *_REPORT, *_STAGED)
def test_command(context: Context, /, patterns: Sequence[str], **values: Any) -> None:
    """Run the tests of built or staged images.

    Without --staged, runs all tests of built images, including those that passed before.

    With --staged, downloads the images of a release from staging, runs the tests that their reports lack (on a machine
    with a GPU, the GPU tests), and attaches the results. CELLS selects images of the release; the default is all of
    them. Several machines may test different cells at the same time.
    """
    request = replace(_Request.of("test", values), names=bool(patterns))
    _run(context, patterns or (("*",) if request.stamp else ()), request)


def _run(context: Context, patterns: Sequence[str], request: _Request) -> None:
    began = time.monotonic()
    project = context.project
    chosen = project.select(patterns)
    step = _test_staged if request.stamp else _retest if request.command == "test" else _make
    with context.locked(project, request.command):
        planned = current.make(project, chosen)
        work = engine.connect(context, project, start=request.start_engine)
        outcomes = step(context, work, planned, request)
    seconds = time.monotonic() - began
    if request.form == "json":
        context.print_json({"images": [outcome.as_data() for outcome in outcomes], "seconds": round(seconds, 1)})
    else:
        where = " in the store" if request.max_disk else ""
        context.say(f"{images.summary(outcomes, len(planned.images), where)} ({duration(seconds)})")
        if times := images.times(work.view.spent, {image.id for image in planned.images}):
            context.say(f"total time by step, parallel work added up: {times}")
    tested = any(outcome.proof or isinstance(outcome.error, ImageTestError) for outcome in outcomes)
    what = "images failed" if tested or step is _make else "images were not tested"
    if failed := images.failure(outcomes, what):
        raise failed


def _retest(context: Context, work: Work, planned: Plan, request: _Request) -> list[Outcome]:
    with _method(context, work, planned, request) as method:
        return images.retest(work, method, planned, request.options)


def _test_staged(context: Context, work: Work, planned: Plan, request: _Request) -> list[Outcome]:
    from builder.build.staged_tests import StagedImages  # noqa: PLC0415  0.1 s, which other commands would pay
    from builder.registry.staging import Place  # noqa: PLC0415

    staging_place = Place.of(work.project, request.place, work.host)
    release = staging_place.read("" if request.stamp == NEWEST else request.stamp)
    staged = {image.cell: image for image in release.images}
    chosen = tuple(image for image in planned.images if image.id in staged)
    if request.names and (missing := [image.id for image in planned.images if image.id not in staged]):
        raise UsageError(f"release {release.stamp} does not have {missing[0]}", hint=f"It has: {', '.join(staged)}")
    if stale := [image.id for image in chosen if staged[image.id].plan != image.digest]:
        raise release.stale(stale[0])
    store = context.store
    with store.used():
        method = StagedImages(work, store, staging_place, staged, request.signer)
        return images.complete(work, method, Plan(images=chosen), request.options)


def _make(context: Context, work: Work, planned: Plan, request: _Request) -> list[Outcome]:
    """With --max-disk, makes one group of images after another, without those that the store has."""
    outcomes: list[Outcome] = []
    if request.max_disk == FREE:
        context.store.prepare()
        request = replace(request, max_disk=disk.free_limit(work, context.store))
    for part in _parts(context, work, planned, request):
        try:
            if request.max_disk:
                disk.make_room(work, context.store, part, request.max_disk, prune_cache=request.prune_cache)
            with _method(context, work, part, request) as method:
                outcomes += images.run(work, method, part, request.options)
        except BuilderError as error:
            outcomes += [Outcome(image=image, error=error) for image in part.images]
    return outcomes


def _parts(context: Context, work: Work, planned: Plan, request: _Request) -> list[Plan]:
    if not request.max_disk:
        return [planned]
    context.store.prepare()
    # With --gpu require, an image in the store may lack a GPU test; `images.run` checks each one.
    if request.options.gpu_mode != gpus.REQUIRE:
        planned = disk.outstanding(work, context.store, planned, test=request.options.test)
    return disk.groups(planned)


@contextmanager
def _method(context: Context, work: Work, planned: Plan, request: _Request) -> Iterator[Method]:
    """The way to build; holds the store for the method `assemble`."""
    if request.method == DOCKERFILE:
        yield DockerfileBuilder(work)
        return
    store = context.store
    store.prepare()
    garbage.make_room(store, lambda: disk.store_bytes(store, planned.images), wait=context.wait)
    with store.used():
        yield Assembler(work, store, os_way=request.os_way)
