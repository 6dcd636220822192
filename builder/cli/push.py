"""The commands push and verify."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import click
from rich.text import Text

from builder.cli.context import Context
from builder.cli.options import CELLS_HELP, cells_argument, to_option
from builder.common import digest
from builder.common.console import Meter, View
from builder.common.errors import FetchError, RegistryError, StaleError, UsageError, VerifyError
from builder.common.reference import ImageRef
from builder.common.units import counted, duration
from builder.index import host
from builder.index.download import Fetcher
from builder.index.host import Host
from builder.layers import images as stored_images
from builder.layers.store import Store
from builder.matrix import tags
from builder.plan import current, plan
from builder.registry import expected, publish, verify
from builder.registry.client import Registry
from builder.registry.expected import Expected
from builder.registry.publish import Published
from builder.registry.verify import Check, Finding, Source

_STYLES = {
    "derived": "green",
    "known": "green",
    "same": "green",
    "unknown": "yellow",
    "different": "bold red",
    "failed": "bold red",
}


@click.command(name="push", epilog=CELLS_HELP)
@cells_argument
@to_option
@click.option("--roll-back", is_flag=True, help="Allow tags to move to an older release or older Debian packages.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True,
    help="json: print digests, bytes, seconds, and tags before and after, to standard output.",
)  # fmt: skip
@click.pass_obj
def push_command(context: Context, patterns: Sequence[str], registry: str, roll_back: bool, form: str) -> None:
    """Publish images that passed their tests.

    Pushes the images by digest to the registry in matrix.yaml, then sets their tags. Uses the credentials of `docker
    login`. Skips data that the registry already has. A new image gets a tag with today's date
    (2.9.1-cu128-py311-20261122), which never moves. The other tags move once all images are in the registry.
    """
    began = time.monotonic()
    project = context.project
    publish.require_registry(project, registry)
    images = current.make(project, project.select(patterns))
    store = context.store
    with store.used():
        chosen = publish.targets(project, store, images, registry)
        request = publish.Request(stamps=tags.stamps(today()), roll_back=roll_back)
        result = publish.publish(host.read(), View(context.err), store, chosen, request)
    seconds = time.monotonic() - began
    show(context, result, form, seconds=round(seconds, 1))
    if form == "text":
        sent, changed = counted(len(chosen), "image"), counted(len(result.changed), "tag")
        context.say(f"{sent} in the registry, {changed} changed ({duration(seconds)})")


def show(context: Context, result: Published, form: str, **data: Any) -> None:
    """Prints what a push or a release did; `data` is for JSON. Raises its error."""
    if form == "json":
        click.echo(json.dumps(result.as_data() | data, indent=1))
    if result.error:
        raise result.error
    if form == "text":
        for line in result.lines:
            context.say(line)


def today() -> str:
    """The stamp of a release today, in UTC."""
    return time.strftime("%Y%m%d", time.gmtime())


@click.command(name="verify")
@click.argument("image")
@click.option("--fast", is_flag=True, help="Do not check the hashes of blobs. Damaged blobs are not detected.")
@click.option(
    "--allow-unknown",
    is_flag=True,
    help="Accept layers that cannot be checked on this machine, such as Debian packages.",
)
@click.pass_obj
def verify_command(context: Context, image: str, fast: bool, allow_unknown: bool) -> None:
    """Check that IMAGE matches the plan of this checkout.

    Compares the configuration with the plan, checks the hash of every blob, rebuilds the wheel layers from the package
    index and the layer of plain files from the checkout, and compares the other layers with those that were built here.

    IMAGE is a cell id or a tag of an image in the store, or an image in a registry: ghcr.io/org/pt-cuda:2.9. An image
    in a registry is downloaded; with --fast, only its manifest and configuration are.

    Results: same (the configuration of the plan), derived (rebuilt with the same bytes), known (this machine built it).
    Any other result is a failure: unknown (nothing to compare it with), different, failed (could not be compared).
    """
    settings = host.read()
    store = context.store
    with store.used():
        checked = source(context, store, settings, image)
        view = View(context.err)
        findings = []
        with view.live():
            check = Check(
                fetcher=Fetcher(settings.index, store.downloads, progress=Meter(view, "wheels", "fetched", 0).add),
                expected=_expected(context, store, checked),
                fast=fast,
                read=Meter(view, "blobs", "hashed", 0).add,
            )
            for finding in verify.verify(checked, check):
                findings.append(finding)
                state = Text(f"{finding.state:<12}", style=_STYLES[finding.state])
                detail = f"  ({finding.detail})" if finding.detail else ""
                part = Text(f"{digest.short(finding.digest)}  {finding.layer}{detail}")
                context.out.print(state, part, overflow="fold")
    _require_pass(image, findings, allow_unknown=allow_unknown)
    counts = Counter(finding.state for finding in findings)
    parts = ", ".join(f"{number} {state}" for state, number in counts.items())
    context.say(f"{image}: verified: {parts}{'; blobs were not hashed' if fast else ''}")


def _require_pass(image: str, findings: Sequence[Finding], *, allow_unknown: bool) -> None:
    """Raises VerifyError or FetchError unless every part was checked and matches."""
    counts = Counter(finding.state for finding in findings)
    if count := counts["different"]:
        raise VerifyError(
            f"{image}: {count} of {len(findings)} parts differ from the plan",
            hint="Do not use this image until you know who built it and why it differs.",
        )
    if count := counts["failed"]:
        raise FetchError(
            f"{image}: {count} of {len(findings)} parts could not be compared; the others match",
            hint="See the lines above. If the index did not respond, run this again.",
        )
    if any(finding.state == "unknown" and finding.layer == verify.CONFIGURATION for finding in findings):
        raise VerifyError(
            f"{image}: no plan to compare its configuration with",
            hint="Run this in the checkout that built it, with its cell locked.",
        )
    if (count := counts["unknown"]) and not allow_unknown:
        raise VerifyError(
            f"{image}: {count} of {len(findings)} parts cannot be checked on this machine",
            hint="Build the image here with `builder build`, or accept these parts with --allow-unknown.",
        )
    if not counts["derived"]:
        raise VerifyError(f"{image}: no layer could be rebuilt")


def _expected(context: Context, store: Store, image: Source) -> Expected | None:
    """The image of this checkout's plan for the same cell; None if there is no such plan."""
    cell = verify.cell_of(image)
    try:
        project = context.project
        images = plan.make(project, [each for each in project.cells if each.id == cell]).images
    except (UsageError, StaleError):
        return None
    return expected.of_plan(project.root, store, images[0]) if images else None


def source(context: Context, store: Store, settings: Host, image: str) -> Source:
    """An image by its reference in a registry, or by a name, cell or tag in the store."""
    try:
        reference = ImageRef.parse(image)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if reference.registry:
        return _in_registry(Registry(reference, host=settings, write=False), reference)
    stored = store.images()
    if names := stored_images.match(stored, image, context.references()):
        return Source(
            manifest=store.read(stored[names[0]].digest),
            read_blob=store.read,
            has_blob=lambda blob: store.path(blob).exists(),
            matches=lambda blob, size, read: store.has(blob, size) and store.matches(blob, read),
        )
    raise UsageError(
        f"the store {store.root} has no image {image!r}",
        hint=f"Images in the store: {', '.join(stored) or 'none'}. For an image in a registry, use REGISTRY/NAME:TAG.",
    )


def _in_registry(registry: Registry, reference: ImageRef) -> Source:
    name = reference.digest or reference.tag or "latest"
    manifest = registry.manifest(name)
    if manifest is None:
        raise RegistryError(f"{registry.name} has no {name}", hint="Check the tag.")
    return Source(
        manifest=manifest.content,
        read_blob=cache(registry.read_blob),
        has_blob=registry.has_blob,
        matches=registry.blob_matches,
    )
