"""The command verify."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from builder.cli.context import Context, parse_image
from builder.cli.options import format_option
from builder.common import digest
from builder.common.console import Meter, View
from builder.common.errors import BuilderError, FetchError, RegistryError, StaleError, UsageError, VerifyError
from builder.common.reference import ImageRef
from builder.index.download import Fetcher
from builder.layers import images as stored_images
from builder.layers import oci
from builder.layers.store import Store
from builder.matrix.schema import Trusted
from builder.plan import plan
from builder.registry import claims, expected, verify
from builder.registry.claims import Claims
from builder.registry.client import Registry
from builder.registry.expected import Expected
from builder.registry.signing import Trust
from builder.registry.verify import Check, Finding, Source

_STYLES = {"unknown": "yellow", "different": "bold red", "failed": "bold red"}  # others are green


@click.command(name="verify")
@click.argument("image")
@click.option("--fast", is_flag=True, help="Do not check the hashes of blobs. Damaged blobs are not detected.")
@click.option(
    "--allow-unknown",
    is_flag=True,
    help="Accept layers that cannot be checked on this machine, such as Debian packages.",
)
@click.option(
    "--key",
    "keys",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A public key of cosign that verifies the image's signature. Repeat the option to accept any of several keys.",
)
@click.option("--identity", default="", help="An identity, such as a workflow, that must have signed the image.")
@click.option("--issuer", default="", help="The OpenID Connect issuer of --identity.")
@format_option("json: print the results to standard output.")
@click.pass_obj
def verify_command(context: Context, /, image: str, fast: bool, allow_unknown: bool, form: str, **signers: Any) -> None:
    """Check the signature and contents of IMAGE against its plan.

    IMAGE is a cell id or a tag of an image in the store, or an image in a registry: ghcr.io/org/pt-cuda:2.9. An image
    in a registry is downloaded; with --fast, only its manifest, configuration and attachments are.

    Checks the hash of every blob, and rebuilds the wheel layers from the package index. In a checkout, compares the
    configuration and the layer of plain files with its plan, and the other layers with locks/layers.json and with those
    that were built here.

    \b
    For an image in a registry, the trusted signers are those of --key and --identity, or else those of `evidence` in
    matrix.yaml. Checks:
      signature     is for this image, its cell and the tag of IMAGE
      test results  are signed, for this image, and passed
      SBOM          is signed; lists exactly the packages that the image's files record (not checked with --fast)
      provenance    is signed; is for the plan of this image
    Works without a checkout: parts that cannot be compared on this machine are accepted if the image is signed.

    Results: same (the configuration of the plan), derived (rebuilt with the same bytes), known (in locks/layers.json,
    or built here), signed (by a trusted signer). Any other result is a failure: unknown (nothing to compare it with),
    different, failed (could not be compared).
    """
    store, view, trust = context.store, View(context.err), _trust(context, image, **signers)
    registry = registry_of(context, image)
    with store.used():
        checked = source(context, store, image, registry)
        check = Check(
            fetcher=Fetcher(context.host.index, store.downloads, progress=Meter(view, "wheels", "fetched", 0).add),
            expected=_expected(context, store, checked),
            fast=fast,
            read=Meter(view, "blobs", "hashed", 0).add,
        )
        image_claims = _claims(checked, image, registry, trust)
        findings = []
        with view.live():
            for finding in claims.findings(checked, check, image_claims, store.root / "tmp"):
                findings.append(finding)
                if form == "json":
                    continue
                state = Text(f"{finding.state:<12}", style=_STYLES.get(finding.state, "green"))
                detail = f"  ({finding.detail})" if finding.detail else ""
                part = Text(f"{digest.short(finding.digest)}  {finding.layer}{detail}")
                context.out.print(state, part, overflow="fold")
    failure = _failure(image, findings, allow_unknown=allow_unknown)
    if form == "json":
        parts = list(map(asdict, findings))
        error = str(failure) if failure else None
        context.print_json({"image": image, "hashed": not fast, "parts": parts, "error": error})
    if failure:
        raise failure
    if form == "json":
        return
    counts = Counter(finding.state for finding in findings)
    states = ", ".join(f"{number} {state}" for state, number in counts.items())
    context.say(f"{image}: verified: {states}{'; blobs were not hashed' if fast else ''}")


def _trust(context: Context, image: str, keys: Sequence[str], identity: str, issuer: str) -> Trust:
    """Whom to trust: the signers of the options, else those of the checkout, if there is one."""
    if bool(identity) != bool(issuer):
        raise UsageError("--identity and --issuer must be used together")
    signers = [Trusted.model_construct(key=key) for key in keys]
    if identity:
        signers.append(Trusted(identity=identity, issuer=issuer))
    if signers and not parse_image(image).registry:
        raise UsageError(
            f"{image} has no registry, and images of the store are not signed",
            hint="Name the registry, e.g. docker.io/org/pt-cuda:2.9.",
        )
    if signers:
        return Trust(signers=signers, root=Path.cwd())
    try:
        return Trust.of(context.project)
    except UsageError:
        return Trust(signers=(), root=Path.cwd())


def _claims(checked: Source, image: str, registry: Registry | None, trust: Trust) -> Claims | None:
    """The claims about an image in a registry; None for one of the store, and without trusted signers."""
    reference = parse_image(image)
    if not (registry and trust.signers):
        return None
    if not (reference.tag or reference.digest):
        reference = replace(reference, tag=reference.target)
    stored = oci.read_image(checked.manifest, checked.read_blob)
    return Claims(registry=registry, reference=reference, image=stored, trust=trust)


def _failure(image: str, findings: Sequence[Finding], *, allow_unknown: bool) -> BuilderError | None:
    """The error unless every part was checked and matches."""
    counts = Counter(finding.state for finding in findings)
    if count := counts["different"]:
        return VerifyError(
            f"{image}: {count} of {len(findings)} parts are not as expected",
            hint="Do not use this image until you know who built it and why it differs.",
        )
    if count := counts["failed"]:
        return FetchError(
            f"{image}: {count} of {len(findings)} parts could not be compared; the others match",
            hint="See the lines above. If the index did not respond, run this again.",
        )
    if any(finding.state == "unknown" and finding.layer == verify.CONFIGURATION for finding in findings):
        return VerifyError(
            f"{image}: no plan to compare its configuration with",
            hint="Run this in the checkout that built it, with its cell locked, or check its signature with --key.",
        )
    if (count := counts["unknown"]) and not allow_unknown:
        return VerifyError(
            f"{image}: {count} of {len(findings)} parts cannot be checked on this machine",
            hint="Build the image here with `builder build`, or accept these parts with --allow-unknown.",
        )
    if not counts["derived"]:
        return VerifyError(f"{image}: no layer could be rebuilt", hint="Check that `builder` built this image.")
    return None


def _expected(context: Context, store: Store, image: Source) -> Expected | None:
    """The image of this checkout's plan for the same cell; None if there is no such plan."""
    cell = verify.cell_of(image)
    try:
        project = context.project
        images = plan.make(project, [each for each in project.cells if each.id == cell]).images
    except (UsageError, StaleError):
        return None
    if not images:
        return None
    return expected.of_plan(project.root, store, images[0], oci.read_image(image.manifest, image.read_blob))


def registry_of(context: Context, image: str) -> Registry | None:
    """The registry that a reference names; None for an image of the store."""
    reference = parse_image(image)
    return Registry(reference, host=context.host, write=False) if reference.registry else None


def source(context: Context, store: Store, image: str, registry: Registry | None) -> Source:
    """An image by its reference in a registry, or by a name, cell or tag in the store."""
    if registry:
        return _in_registry(registry, parse_image(image))
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
    name = reference.target
    manifest = registry.manifest(name)
    if manifest is None:
        raise RegistryError(f"{registry.name} has no {name}", hint="Check the tag.")
    return Source(
        manifest=manifest.content,
        read_blob=cache(registry.read_blob),
        has_blob=registry.has_blob,
        matches=registry.blob_matches,
    )
