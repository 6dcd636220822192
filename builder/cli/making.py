"""Commands that make images: images, build, test, rebase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from builder import errors, gpu, host, images, maxdisk
from builder.assemble import Assembler, missing_bytes
from builder.build import DockerfileBuilder
from builder.cli.context import CELLS_HELP, Context, Size, cells_argument, current_plan, jobs_option
from builder.errors import BuilderError, UsageError
from builder.images import Method
from builder.plan import Plan
from builder.view import View, duration
from builder.work import Work

ASSEMBLE, DOCKERFILE = "assemble", "dockerfile"


def _method_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--method",
        type=click.Choice([ASSEMBLE, DOCKERFILE]),
        default=ASSEMBLE,
        show_default=True,
        help="Assemble layers from wheels, or build the rendered Dockerfile step by step.",
    )(command)


def _max_disk_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--max-disk",
        type=Size(positive=True),
        default=0,
        help="Most bytes that store and engine may take together, such as 40GB. Images that the store keeps leave the "
        "engine when the next need the room, then the engine's build cache; what is in the store is not made again.",
    )(command)


def _gpu_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--gpu",
        "gpu_mode",
        type=click.Choice(list(gpu.MODES)),
        default=gpu.AUTO,
        show_default=True,
        help="GPU tests: `require` fails before anything is built where they cannot run, and runs those that never "
        "were; `auto` runs them where a GPU has enough free memory; `off` leaves them out. What was not run says "
        "`gpu: not run`, and why. Images for the CPU have none.",
    )(command)


@contextmanager
def _making(context: Context, work: Work, made: Plan, method: str, *, fresh: bool = False) -> Iterator[Method]:
    if method == DOCKERFILE:
        yield DockerfileBuilder(work)
        return
    store = context.store
    store.prepare()
    store.make_room(lambda: missing_bytes(store, made.images), wait=context.wait)
    with store.used():
        yield Assembler(work, store, fresh=fresh)


def _run(
    context: Context,
    wanted: Sequence[str],
    command: str,
    method: str,
    *,
    jobs: int,
    test: bool = True,
    tag: bool = True,
    fresh: bool = False,
    max_disk: int = 0,
    gpu_mode: gpu.Mode = gpu.AUTO,
) -> None:
    began = time.monotonic()
    project = context.project
    chosen = project.select(wanted)
    if max_disk and method == DOCKERFILE:
        raise UsageError("--max-disk is for assembled images: a Dockerfile's live in the engine alone")
    with context.alone(project, command):
        made = current_plan(project, chosen)
        work = context.work(project, View(context.err), host.read())
        parts = [made]
        if max_disk:
            context.store.prepare()
            # With --gpu require, what the store has may lack a GPU test: whether it does is asked image by image.
            left = made if gpu_mode == gpu.REQUIRE else maxdisk.rest(work, context.store, made, test=test)
            parts = maxdisk.parts(left)
        failures: list[BuilderError] = []
        count = 0
        for part in parts:
            try:
                if max_disk:
                    maxdisk.make_room(work, context.store, part, max_disk)
                with _making(context, work, part, method, fresh=fresh) as maker:
                    count += images.run(work, maker, part, jobs=jobs, test=test, tag=tag, gpu_mode=gpu_mode)
            except BuilderError as error:
                failures.append(error)
        if failures:
            raise errors.join(failures)
    took = duration(time.monotonic() - began)
    rest = len(made.images) - count
    what = "built, tested and tagged" if tag else "built"
    done = f"{count} images {what}, " if count else ""
    where = " in the store" if max_disk else ""
    context.say(f"{done}{rest} images up to date{where} ({took})")


@click.command(name="images", epilog=CELLS_HELP)
@cells_argument
@jobs_option
@_method_option
@_max_disk_option
@_gpu_option
@click.pass_obj
def images_command(
    context: Context, wanted: Sequence[str], jobs: int, method: str, max_disk: int, gpu_mode: gpu.Mode
) -> None:
    """Build, test and tag; what is done already is not done again."""
    _run(context, wanted, "images", method, jobs=jobs, max_disk=max_disk, gpu_mode=gpu_mode)


@click.command(name="build", epilog=CELLS_HELP)
@cells_argument
@jobs_option
@_method_option
@_max_disk_option
@click.pass_obj
def build_command(context: Context, wanted: Sequence[str], jobs: int, method: str, max_disk: int) -> None:
    """Build only: no tests, no tags."""
    _run(context, wanted, "build", method, jobs=jobs, test=False, tag=False, max_disk=max_disk)


@click.command(name="rebase", epilog=CELLS_HELP)
@cells_argument
@jobs_option
@click.pass_obj
def rebase_command(context: Context, wanted: Sequence[str], jobs: int) -> None:
    """Make images anew on today's Debian packages; every other layer stays as it is.

    The base image is pulled or put together again, Debian's packages are installed from an empty cache, and the images
    are assembled on the result, tested and tagged. If no package changed, nothing changes.
    """
    _run(context, wanted, "rebase", ASSEMBLE, jobs=jobs, fresh=True)


@click.command(name="test", epilog=CELLS_HELP)
@cells_argument
@jobs_option
@_method_option
@_gpu_option
@click.pass_obj
def test_command(context: Context, wanted: Sequence[str], jobs: int, method: str, gpu_mode: gpu.Mode) -> None:
    """Run the tests of images that are built, again."""
    project = context.project
    chosen = project.select(wanted)
    with context.alone(project, "test"):
        made = current_plan(project, chosen)
        work = context.work(project, View(context.err), host.read())
        with _making(context, work, made, method) as maker:
            images.retest(work, maker, made, jobs=jobs, gpu_mode=gpu_mode)
