"""The command verify."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import get_args

import click
from pydantic import TypeAdapter, ValidationError
from rich.text import Text

from builder.cli.context import Context, parse_image
from builder.cli.options import format_option, trusted_options, trusted_signers
from builder.common import errors
from builder.common.console import View
from builder.common.errors import BuilderError, UsageError
from builder.common.files import short_digest
from builder.common.validation import message_of
from builder.index.wheels import arch_of
from builder.matrix.schema import Arch, IndexAddress, IndexName
from builder.release.image_sources import ALL
from builder.release.verify import Finding, verdict
from builder.steps.verify import VerifyOptions, verify_named

_INDEXES = TypeAdapter(dict[IndexName, IndexAddress])
_STYLES = {"unknown": "yellow", "different": "bold red", "failed": "bold red"}  # others are green


def _parse_indexes(context: click.Context, option: click.Parameter, values: Sequence[str]) -> Mapping[str, str]:
    try:
        return _INDEXES.validate_python(dict(value.partition("=")[::2] for value in values))
    except ValidationError as error:  # its input may have a password: not shown
        first = error.errors(include_url=False, include_input=False)[0]
        raise click.BadParameter(f"expected NAME=URL: {message_of(first)}") from None


@click.command(name="verify")
@click.argument("image")
@click.option("--fast", is_flag=True, help="Do not check the hashes of blobs. Damaged blobs are not detected.")
@click.option(
    "--allow-unknown",
    is_flag=True,
    help="Accept layers that cannot be checked on this machine, such as Debian packages.",
)
@trusted_options
@click.option(
    "--arch",
    type=click.Choice([*get_args(Arch), ALL]),
    default=lambda: arch_of(platform.machine()),
    show_default="that of this machine",
    help="If IMAGE names images for several architectures in a registry: the one to check.",
)
@click.option(
    "--index",
    "indexes",
    multiple=True,
    metavar="NAME=URL",
    callback=_parse_indexes,
    help="The address of a package index that the SBOM of IMAGE names. Repeat it for several. The login is read "
    "from UV_INDEX_<NAME>_USERNAME and UV_INDEX_<NAME>_PASSWORD, netrc, or pip's settings.",
)
@format_option("json: print the results to standard output.")
@click.pass_obj
def verify_command(
    context: Context, /, image: str, fast: bool, allow_unknown: bool, keys: Sequence[str], identity: str, issuer: str,
    arch: str, indexes: Mapping[str, str], form: str
) -> None:  # fmt: skip
    """Check the signature and contents of IMAGE against its plan.

    IMAGE is a cell id or a tag of an image in the store, or an image in a registry: ghcr.io/org/pt-cuda:2.9. An image
    in a registry is downloaded; with --fast, only its manifest, configuration and attachments, and the end of each
    layer of wheels.

    Checks the hash of every blob, and rebuilds the wheel layers from the package indexes. In a checkout, compares the
    configuration and the layer of plain files with its plan, and the other layers with locks/layers.json and with those
    that were built here.

    \b
    For an image in a registry, the trusted signers are those of --key and --identity, or else those of `evidence` in
    matrix.yaml. Checks:
      signature     is for this image, its cell and the tag of IMAGE; also that of the image index, if IMAGE names one
      test results  are signed, for this image, and passed
      SBOM          is signed; lists exactly the packages that the image's files record (not checked with --fast)
      provenance    is signed; is for the plan of this image
    For an image that `builder add` made, reads its parent by digest, and derives the configuration from it again.

    Works without a checkout: parts that cannot be compared on this machine are accepted if the image is signed.

    Downloads a wheel only from the index that the plan or the signed SBOM names. Without the address of that index, see
    --index, the layer is not rebuilt.

    Results: same (the configuration of the plan, or derived from the parent), derived (rebuilt with the same bytes),
    known (in locks/layers.json, or built here), signed (by a trusted signer). Any other result is a failure: unknown
    (nothing to compare it with), different, failed (could not be compared).
    """
    signers = trusted_signers(keys, identity, issuer)
    project = None
    with suppress(UsageError):  # without a checkout
        project = context.project
    reference, options = parse_image(image), VerifyOptions(arch=arch, fast=fast, signers=signers, indexes=indexes)

    store, view = context.store, View(context.err)
    findings: list[Finding] = []
    failures: list[BuilderError] = []
    with store.used(), view.live():
        named = verify_named(reference, options, project, context.host, store, view)
        for source, found in named:
            name = image
            if len(named) > 1:
                name = f"{image} ({source.cell})"
                if form == "text":
                    context.out.print(Text(f"{source.cell}:"))
            before = len(findings)
            for finding in found:
                findings.append(finding)
                if form == "text":
                    state = Text(f"{finding.state:<12}", style=_STYLES.get(finding.state, "green"))
                    detail = f"  ({finding.detail})" if finding.detail else ""
                    part = Text(f"{short_digest(finding.digest)}  {finding.layer}{detail}")
                    context.out.print(state, part, overflow="fold")
            if failed := verdict(name, findings[before:], allow_unknown=allow_unknown):
                failures.append(failed)

    failure = errors.join(failures, "images are not as expected") if failures else None
    if form == "json":
        parts = list(map(asdict, findings))
        error = str(failure) if failure else None
        context.print_json({"image": image, "hashed": not fast, "parts": parts, "error": error})
    if failure:
        raise failure
    if form == "text":
        counts = Counter(finding.state for finding in findings)
        states = ", ".join(f"{number} {state}" for state, number in counts.items())
        context.say(f"{image}: verified: {states}{'; blobs were not hashed' if fast else ''}")
