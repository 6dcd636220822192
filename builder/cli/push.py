"""The command push."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from builder.cli.context import Context
from builder.cli.options import CELLS_HELP, cells_argument, format_option, roll_back_option, to_option
from builder.common.console import View
from builder.common.errors import UsageError
from builder.common.units import counted, duration
from builder.matrix import tags
from builder.plan import current
from builder.registry import publish
from builder.registry.publish import Published, Publisher


@click.command(name="push", epilog=CELLS_HELP)
@cells_argument
@to_option
@roll_back_option
@format_option("json: print digests, bytes, seconds, and tags before and after, to standard output.")
@click.pass_obj
def push_command(context: Context, patterns: Sequence[str], registry: str, roll_back: bool, form: str) -> None:
    """Publish images that passed their tests.

    Pushes the images by digest to the registry in matrix.yaml, then sets their tags. Uses the credentials of `docker
    login`. Skips data that the registry already has. A new image gets a tag with today's date
    (2.9.1-cu128-py311-20261122), which never moves. The other tags move once all images are in the registry.

    The images are not signed, and have no test results attached: `builder stage` and `builder release` do that. If
    matrix.yaml lists signers under `evidence`, `push` refuses.
    """
    began = time.monotonic()
    project = context.project
    publish.require_registry(project, registry)
    if project.matrix.evidence:
        raise UsageError(
            "matrix.yaml requires signed test results (`evidence`), and `builder push` publishes without them",
            hint="Use `builder stage` and `builder release`.",
        )
    images = current.make(project, project.select(patterns))
    store = context.store
    with store.used():
        chosen = publish.targets(project, store, images, registry)
        result = Publisher(
            host=context.host, view=View(context.err), store=store, stamps=tags.stamps(today()), roll_back=roll_back
        ).publish(chosen)
    seconds = time.monotonic() - began
    show(context, result, form, seconds=round(seconds, 1))
    if form == "text":
        sent, changed = counted(len(chosen), "image"), counted(len(result.changed), "tag")
        context.say(f"{sent} in the registry, {changed} changed ({duration(seconds)})")


def show(context: Context, result: Published, form: str, **data: Any) -> None:
    """Prints what a push or a release did; `data` is for JSON. Raises its error."""
    if form == "json":
        context.print_json(result.as_data() | data)
    if result.error:
        raise result.error
    if form == "text":
        for line in result.lines:
            context.say(line)


def today() -> str:
    """The stamp of a release today, in UTC."""
    return time.strftime("%Y%m%d", time.gmtime())
