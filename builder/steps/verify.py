"""Verifies an image of a registry or of the store: who signed it, and that it is what the checkout plans.

Without a checkout, only the signature, and what the signer attached, is checked. Nothing is derived again: the same
inputs give the same bytes, so that `--rebuild` makes the image again, and compares one digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from builder.build.assemble import Assembler
from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import SystemLayers
from builder.common import git
from builder.common.errors import RegistryError, StaleError, UsageError, VerifyError
from builder.common.files import short_digest
from builder.common.reference import ImageRef
from builder.engine.run import Run
from builder.evidence.signing import Trust
from builder.layers.known_layers import KnownLayers
from builder.layers.store import Store
from builder.matrix.schema import Trusted
from builder.matrix.tags import ADDED_LABEL, PARENT_LABEL
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.release import expected
from builder.release.additions import BASE_NAME
from builder.release.attestations import Attestations, Finding
from builder.release.image_sources import ALL, ImageSource, RegistrySource, find_images


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """`arch` is for an image of several architectures in a registry. `rebuild` makes the image again.

    `signers` are the trusted signers; if empty, matrix.yaml names them.
    """

    arch: str
    signers: Sequence[Trusted] = ()
    rebuild: bool = False


def verify_named(run: Run, reference: ImageRef, options: VerifyOptions) -> list[tuple[ImageSource, Iterator[Finding]]]:
    """The images that a name means, with their findings, which are made as they are read.

    Raises UsageError if there is no such image.
    """
    if options.signers and not reference.registry:
        raise UsageError(
            f"{reference} has no registry, and images of the store are not signed",
            hint="Name the registry, e.g. docker.io/org/pt-cuda:2.9.",
        )
    # Without signers and without a checkout, nobody is trusted.
    trust = Trust(signers=options.signers, root=Path.cwd())
    if run.checkout and not options.signers:
        trust = Trust.of(run.checkout)
    return [
        (source, verify_image(run, source, reference, trust, rebuild=options.rebuild))
        for source in find_images(run, reference, options.arch)
    ]


def verify_image(
    run: Run, source: ImageSource, reference: ImageRef, trust: Trust, *, rebuild: bool = False
) -> Iterator[Finding]:
    """The findings for an image; none if there is nothing to compare it with.

    Raises VerifyError for an invalid image, RegistryError, SigningError.
    """
    # The signature comes first. Without a trusted one, nothing else is read: an unknown author would choose it.
    attestations = None
    if isinstance(source, RegistrySource) and trust.signers:
        attestations = Attestations(source=source, reference=reference, trust=trust)
        for signature in attestations.signatures():
            yield signature
            if signature.state != "signed":
                return

    planned = None if ADDED_LABEL in source.image.labels else _planned_image(run, source.cell)
    if rebuild and not planned:
        raise UsageError(f"{reference}: no cell to build again", hint="Use a checkout with its cell, locked.")

    # An image that `builder add` made begins with its parent. Any other is the one that this checkout plans.
    own = source.contents
    if ADDED_LABEL in source.image.labels:
        if attestations:
            count, finding = _compare_parent(run, source, trust)
            own = own[count:]
            yield finding
    elif planned:
        yield _compare_plan(run, source, planned, is_signed=attestations is not None)

    if attestations:
        yield attestations.test_results()
        yield attestations.provenance(own)
    if rebuild and planned:
        if attestations and attestations.revision != (here := git.state(run.project.root)):
            run.view.say(f"made from commit {attestations.revision or 'none'}; this checkout is {here or 'no commit'}")
        digest, made = source.image.manifest.digest, rebuild_image(run, planned)
        if made == digest:
            yield Finding(part="built again", digest=digest, state="same")
        else:
            detail = f"this checkout makes {short_digest(made)}"
            yield Finding(part="built again", digest=digest, state="different", detail=detail)


def verdict(image: str, findings: Sequence[Finding]) -> VerifyError | None:
    """The error unless there is something to compare the image with, and nothing differs."""
    if not findings:
        return VerifyError(
            f"{image}: neither a signer nor a plan to check it with",
            hint="Name its signer with --key or --identity, or run this in the checkout that built it.",
        )
    if count := sum(finding.state == "different" for finding in findings):
        return VerifyError(
            f"{image}: {count} of {len(findings)} parts are not as expected",
            hint="Do not use this image until you know who built it and why it differs.",
        )
    return None


def rebuild_image(run: Run, planned: PlannedImage) -> str:
    """Builds an image in an empty store, with no layer of a registry and no known one. Returns its digest."""
    if error := run.engine.info().foreign_error(planned.cell.arch):
        raise error
    # In the checkout's folder of temporary files, which the next command empties if this one is killed.
    with run.project.locked("builder verify"), run.project.scratch() as folder:
        empty = replace(run, store=Store(Path(folder) / "store"))
        assembler = Assembler(SystemLayers.of(LayerLookup(empty, KnownLayers(Path(folder)))))
        with empty.store.used(), closing(assembler):
            assembler.start([planned])
            return assembler.assemble(planned).manifest.digest


def _compare_parent(run: Run, source: ImageSource, trust: Trust) -> tuple[int, Finding]:
    """Compares the lowest layers with the layers of the parent that the labels name. Raises VerifyError.

    Also returns the number of the parent's layers: 0 if the parent is in no registry, since its layers then count as
    the image's own.
    """
    labels = source.image.labels
    try:
        named, digest = ImageRef.parse(labels.get(BASE_NAME, "")), labels.get(PARENT_LABEL) or "none"
        reference = replace(named, tag="", digest=digest)
    except ValueError as error:
        raise VerifyError(f"the image has invalid labels of its parent: {error}") from error
    if not reference.registry:
        detail = f"{reference.name} is in no registry, only this image names it"
        return 0, Finding(part="parent", digest=digest, state="signed", detail=detail)
    try:
        [parent, *_] = find_images(run, reference, ALL)
    except RegistryError as error:
        detail = f"{reference.name} cannot be read: {error}"
        return 0, Finding(part="parent", digest=digest, state="different", detail=detail)
    layers = parent.image.layers
    if source.image.layers[: len(layers)] != layers:
        return 0, Finding(
            part="parent", digest=digest, state="different", detail=f"{reference.name} does not have its lowest layers"
        )
    assert isinstance(parent, RegistrySource)
    [*_, signature] = Attestations(source=parent, reference=reference, trust=trust).signatures()
    signed = signature.detail if signature.state == "signed" else "no trusted signer signed it, only this image"
    return len(layers), Finding(part="parent", digest=digest, state="same", detail=f"{reference.name}: {signed}")


def _compare_plan(run: Run, source: ImageSource, planned: PlannedImage, *, is_signed: bool) -> Finding:
    """Compares the manifest and the configuration with the plan, and the layers with `locks/layers.json`."""
    layers, image = expected.expected_layers(run.project, KnownLayers(run.project.root), planned), source.image
    try:
        config = source.read_blob(image.config.digest)
        expected.compare_with_plan(planned, layers, image, config, is_trusted=is_signed)
    except VerifyError as error:
        return Finding(part="plan", digest=image.manifest.digest, state="different", detail=str(error))
    return Finding(part="plan", digest=image.manifest.digest, state="as planned")


def _planned_image(run: Run, cell: str) -> PlannedImage | None:
    """The image that the checkout plans for a cell; None if it has no such cell, or its locks are stale."""
    if not run.checkout:
        return None
    try:
        images = plan.make_plan(
            run.checkout, [candidate for candidate in run.checkout.cells if candidate.id == cell]
        ).images
    except (UsageError, StaleError):
        return None
    return images[0] if images else None
