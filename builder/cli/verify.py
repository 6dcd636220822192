"""The command verify."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import click
from rich.text import Text

from builder.cli.context import Context, parse_image
from builder.cli.options import identity_option, issuer_option, key_option, trusted_signers
from builder.common import errors
from builder.common.errors import BuilderError
from builder.common.files import short_digest
from builder.index.wheels import arch_of
from builder.matrix.schema import Arch
from builder.release.attestations import Finding
from builder.release.image_sources import ALL
from builder.steps.verify import VerifyOptions, verdict, verify_named


@click.command(name="verify")
@click.argument("image")
@click.option("--rebuild", is_flag=True, help="Also build the image again, from nothing, and compare its digest.")
@key_option
@identity_option
@issuer_option
@click.option(
    "--arch",
    type=click.Choice([*get_args(Arch), ALL]),
    default=lambda: arch_of(platform.machine()),
    show_default="that of this machine",
    help="If IMAGE names images for several architectures in a registry: the one to check.",
)
@click.pass_obj
def verify_command(
    context: Context, /, image: str, rebuild: bool, keys: Sequence[str], identity: str, issuer: str, arch: str,
) -> None:  # fmt: skip
    """Check who signed IMAGE, and compare it with its plan.

    IMAGE is a cell id or a tag of an image in the store, or an image in a registry: ghcr.io/org/pt-cuda:2.9.

    \b
    For an image in a registry, --key and --identity name the trusted signers,
    or else `evidence` in matrix.yaml. Checks:
      signature     is for this image (and index), its cell and its tag
      test results  are signed, for this image, and passed
      provenance    is signed, and for the plan and wheels of this image
      parent        has the lowest layers of an image of `builder add`
    In a checkout that has the cell, with or without a signer:
      plan          configuration and layers are as this checkout plans them

    With --rebuild, builds the image again in a temporary store, without layers of a registry, and compares the digest.
    This needs the checkout at the revision that the image was built from, and takes as long as the first build.
    """
    signers = trusted_signers(keys, identity, issuer)
    run = context.run(context.find_project(ignore_invalid=bool(signers)))
    reference, options = parse_image(image), VerifyOptions(arch=arch, signers=signers, rebuild=rebuild)
    findings: list[Finding] = []
    failures: list[BuilderError] = []
    with run.store.used(), run.view.live():
        named = verify_named(run, reference, options)
        for source, found in named:
            name = image
            if len(named) > 1:
                name = f"{image} ({source.cell})"
                context.out.print(Text(f"{source.cell}:"))
            before = len(findings)
            for finding in found:
                findings.append(finding)
                state = Text(f"{finding.state:<12}", style="bold red" if finding.state == "different" else "green")
                detail = f"  ({finding.detail})" if finding.detail else ""
                part = Text(f"{short_digest(finding.digest)}  {finding.part}{detail}")
                context.out.print(state, part, overflow="fold")
            if failed := verdict(name, findings[before:]):
                failures.append(failed)

    if failures:
        raise errors.join(failures, "images are not as expected")
    counts = Counter(finding.state for finding in findings)
    unsigned = "" if counts["signed"] else "; no signature was checked"
    context.say(f"{image}: verified: {', '.join(f'{number} {state}' for state, number in counts.items())}{unsigned}")
