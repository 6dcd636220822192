"""The command bundle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from builder.cli.context import Context
from builder.cli.options import CELLS_HELP, cells_argument, format_option, to_option
from builder.common import errors
from builder.common.console import Meter, View
from builder.common.errors import RegistryError, UsageError
from builder.common.reference import ImageRef
from builder.common.text import counted, duration, size
from builder.layers import bundle, images, oci
from builder.layers.blobs import Descriptor
from builder.plan import render
from builder.plan.plan import PlannedImage
from builder.registry import artifacts, publish, transfer
from builder.registry.client import INDEXES, Manifest, Registry


@click.command(name="bundle", epilog=CELLS_HELP)
@cells_argument
@click.option(
    "-o",
    "--output",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, e.g. images.tar. An existing file is replaced when the new one is complete.",
)
@click.option(
    "--released",
    is_flag=True,
    help="Take the images that the full tags name in the registry, with everything that is attached to them: test "
    "results, SBOM, scans, signatures, provenance. Default: the images of the store, without attachments.",
)
@to_option
@format_option()
@click.pass_obj
def bundle_command(
    context: Context, patterns: Sequence[str], path: Path, released: bool, registry: str, form: str
) -> None:
    """Write images to one file, for a network without internet.

    The file is a tar of an OCI image layout. In a checkout of the same commit, `builder images --from FILE` builds the
    images of it, without any download. skopeo and oras copy the images to a registry: docs/closed-networks.md.

    Images of the store must have passed their tests. The same images give the same file, byte for byte.
    """
    began = time.monotonic()
    project, store, view = context.project, context.store, View(context.err)
    if released:
        publish.require_registry(project, registry)
    elif registry:
        raise UsageError("--to needs --released: without it, the images are taken from the store")
    planned = render.load_checked_plan(project, project.select(patterns))
    names: dict[str, Descriptor] = {}  # manifests, by repository and tag
    blobs: dict[str, int] = {}  # sizes, by digest

    def fetch(group: Sequence[PlannedImage]) -> None:
        """Downloads released images with the same tags, and what is attached to them, to the store."""
        references = publish.references(group[0], registry)
        full = references[0]
        source = Registry(full, host=context.host, write=False)
        manifests: dict[str, Manifest] = {}
        for image in group:
            manifest = source.image_manifest(full.tag, image.cell.arch)
            if manifest is None or oci.read_labels(manifest.content, source.read_blob)[0] != image.cell.arch:
                raise RegistryError(
                    f"{image.id}: {full} is not in the registry",
                    hint="Release it, or omit --released to take the image of the store. Its state: "
                    + f"builder status {image.id}"
                    + (f" --to {registry}" if registry else ""),
                )
            manifests[image.id] = manifest
        # The signature of an index is for all of its images, and each image has its own.
        index = source.manifest(full.tag)
        if index and index.media_type in INDEXES and len(oci.read_platforms(index.content)) == len(group):
            manifests[f"index of {group[0].id}"] = index
        for row, manifest in manifests.items():
            view.begin(row, "downloading")
            stored = store.put(manifest.content, manifest.media_type)
            blobs[stored.digest] = stored.size
            if manifest is not index:
                sizes = transfer.fetch_image(source, store, manifest, Meter(view, row, "downloaded", 0).add)
                blobs.update(sizes)
            attached, sizes = artifacts.fetch_attached(source, store, manifest.digest)
            names.update({_name(replace(full, tag=tag)): each for tag, each in attached.items()})
            blobs.update(sizes)
            view.end(row, "done", f"with {counted(len(sizes), 'blob')} of attachments")
        names.update({_name(reference): stored for reference in references})

    with store.used(), view.live():
        if released:
            groups: dict[tuple[str, ...], list[PlannedImage]] = {}
            for image in planned.images:
                groups.setdefault(image.references, []).append(image)
            errors.collect(fetch, groups.values(), "images cannot be bundled")
        else:
            for targets in publish.by_tags(publish.targets(project, store, planned)):
                # One image of several architectures is written as itself, not as an index that lacks the others.
                manifest = publish.tagged_manifest(targets) if len(targets) > 1 else targets[0].manifest
                tagged = store.put(manifest.content, manifest.media_type)
                names.update({_name(reference): tagged for reference in targets[0].references})
                blobs[tagged.digest] = tagged.size
                for target in targets:
                    blobs.update(images.blobs(store, target.digest))
        meter = Meter(view, str(path), "written", sum(blobs.values()))
        written = bundle.write_bundle(path, store, names, blobs, meter.add)
    if form == "json":
        digests = {name: manifest.digest for name, manifest in sorted(names.items())}
        context.print_json({"file": str(path), "bytes": written, "names": digests})
        return
    seconds = duration(time.monotonic() - began)
    context.say(f"written: {path}, {counted(len(planned.images), 'image')}, {size(written)} ({seconds})")


def _name(reference: ImageRef) -> str:
    """The name of a manifest in the file: it is in the same repository of any registry."""
    return f"{reference.repository}:{reference.tag}"
