"""Commands about registries: push, verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich.text import Text

from builder import digest, host, publish, tags, verify
from builder.assemble import UNTESTED
from builder.cli.context import CELLS_HELP, Context, cells_argument, current_plan
from builder.errors import FetchError, UsageError, VerifyError
from builder.fetch import Fetcher
from builder.host import Host
from builder.reference import ImageRef
from builder.registry import Registry
from builder.store import Store
from builder.verify import Source
from builder.view import Meter, View

_STYLES = {"same": "green", "different": "bold red", "failed": "bold red", "not derived": "dim"}


@click.command(name="push", epilog=CELLS_HELP)
@cells_argument
@click.option("--to", "registry", default="", metavar="HOST[:PORT]", help="Another registry than matrix.yaml names.")
@click.pass_obj
def push_command(context: Context, wanted: Sequence[str], registry: str) -> None:
    """Publish images that passed their tests: by digest, then their tags.

    Credentials are those of `docker login`. What the registry has is not sent again. A full tag
    (2.9.1-cu128-py311) is set once and never moved; tags that say less (2.9) move when all images are there.
    """
    project = context.project
    if registry:
        try:
            ImageRef(registry=registry, repository="x")
        except ValueError as error:
            raise UsageError(f"--to: {error}") from error
    made = current_plan(project, project.select(wanted))
    store = context.store
    with store.used():
        chosen = publish.targets(project, store, made, registry)
        told = publish.publish(host.read(), View(context.err), store, chosen)
    for line in told:
        context.say(line)
    context.say(f"{len(chosen)} images published")


@click.command(name="verify")
@click.argument("image")
@click.pass_obj
def verify_command(context: Context, image: str) -> None:
    """Make the wheel layers of IMAGE again from the index, and compare their digests.

    IMAGE is a cell's id or a tag (of the store), or a reference with a registry: ghcr.io/org/pt-cuda:2.9. Of an image
    in a registry only manifest and configuration are read.
    """
    lent = host.read()
    store = context.store
    with store.used():
        found = source(context, store, lent, image)
        view = View(context.err)
        fetcher = Fetcher(lent.index, store.downloads, got=Meter(view, "wheels", "fetched", 0).add)
        findings = []
        with view.shown():
            for finding in verify.verify(found, fetcher):
                findings.append(finding)
                state = Text(f"{finding.state:<12}", style=_STYLES[finding.state])
                detail = f"  ({finding.detail})" if finding.detail else ""
                told = f"{digest.short(finding.digest)}  {finding.layer}{detail}"
                context.out.print(state, Text(told), overflow="fold")
    bad = [finding for finding in findings if finding.state == "different"]
    failed = [finding for finding in findings if finding.state == "failed"]
    same = [finding for finding in findings if finding.state == "same"]
    if bad:
        raise VerifyError(
            f"{image}: {len(bad)} of {len(findings)} layers are not what their history says",
            hint="Look for who made this image, and do not use it until that is explained.",
        )
    if failed:
        raise FetchError(
            f"{image}: {len(failed)} of {len(findings)} layers could not be compared; the others are right",
            hint="See what each line says. If the index did not answer, run this again.",
        )
    if not same:
        raise VerifyError(f"{image}: has no layer of wheels that could be compared")
    rest = len(findings) - len(same)
    context.say(f"{image}: {len(same)} layers of wheels are what the index gives, {rest} not derived")


@dataclass(frozen=True)
class _InStore:
    store: Store
    digest: str

    def manifest(self) -> bytes:
        return self.store.read(self.digest)

    def read_blob(self, digest: str) -> bytes:
        return self.store.read(digest)

    def has_blob(self, digest: str) -> bool:
        return self.store.path(digest).exists()


@dataclass(frozen=True)
class _InRegistry:
    registry: Registry
    name: str

    def manifest(self) -> bytes:
        found = self.registry.manifest(self.name)
        if found is None:
            raise VerifyError(f"{self.registry.name} has no {self.name}")
        return found.content

    def read_blob(self, digest: str) -> bytes:
        return self.registry.read_blob(digest)

    def has_blob(self, digest: str) -> bool:
        return self.registry.has_blob(digest)


def source(context: Context, store: Store, lent: Host, image: str) -> Source:
    known = store.images()
    if image in known:
        return _InStore(store, known[image].digest)
    try:
        reference = ImageRef.parse(image)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if reference.registry:
        name = reference.digest or reference.tag or "latest"
        return _InRegistry(Registry(reference, host=lent, write=False), name)
    full = next((str(names[0]) for cell, names in _tags(context).items() if image in (cell, *map(str, names))), "")
    for name in (full, full + UNTESTED):
        if name in known:
            return _InStore(store, known[name].digest)
    raise UsageError(
        f"the store {store.root} has no image {image!r}",
        hint="It has: " + (", ".join(known) or "none") + ". For one in a registry write registry/name:tag.",
    )


def _tags(context: Context) -> dict[str, tuple[ImageRef, ...]]:
    project = context.project
    return dict(tags.compute(project.matrix, project.cells))
