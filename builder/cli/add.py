"""The command add."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click
from rich.text import Text

from builder.cli.context import Context, parse_image
from builder.cli.options import identity_option, issuer_option, key_option, sign_option, trusted_signers
from builder.common.errors import UsageError
from builder.common.text import duration
from builder.evidence.signing import Signer, Trust
from builder.matrix.schema import Arch
from builder.release.additions import Addition, AdditionRequest, read_requested, read_team_file, read_variables
from builder.release.image_sources import ALL
from builder.steps.add import AddOptions, add, repeated_addition


@click.command(
    name="add",
    epilog="""\b
Examples:
  builder add ghcr.io/org/pt-cuda:2.14 peft -t ghcr.io/org/llm:1
  builder add org/pt-cuda:2.14-jupyter -r requirements.txt -t llm:1
  builder add --refresh ghcr.io/org/llm:1
""",
)
@click.argument("parent", required=False)
@click.argument("packages", nargs=-1)
@click.option(
    "-r",
    "--requirements",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of requirements as for pip. Hashes are compared. Repeat the option for several.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a variable, which everyone who can pull the image can read. Repeat for several.",
)
@click.option(
    "--index",
    default="",
    metavar="INDEX",
    help="Take the PACKAGES that this index has from it: a name in matrix.yaml, an address, or a folder of wheels.",
)
@click.option("--keep", is_flag=True, help="Keep every package of PARENT at its version, or fail.")
@click.option(
    "-t",
    "--tag",
    "target",
    default="",
    metavar="IMAGE",
    help="The image to make: REGISTRY/NAME:TAG, or NAME:TAG in Docker.",
)
@click.option(
    "--refresh",
    default="",
    metavar="IMAGE",
    help="Put what is on IMAGE on what the tag of its parent names now, and move its tag. Takes no other request.",
)
@click.option(
    "--arch",
    type=click.Choice([*get_args(Arch), ALL]),
    default=ALL,
    show_default=True,
    help="If PARENT names images for several architectures: the one to use.",
)
@click.option(
    "-f",
    "--file",
    "team",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Make the images of this file (docs/team-images.md). Takes no other request.",
)
@click.option(
    "--test",
    is_flag=True,
    help="First import each package in Docker, and run `pip check`. If this fails, nothing is pushed.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be added.")
@key_option
@identity_option
@issuer_option
@sign_option
@click.pass_obj
def add_command(
    context: Context, /, parent: str | None, packages: Sequence[str], files: Sequence[Path], env: Sequence[str],
    index: str, keep: bool, target: str, refresh: str, arch: str, team: Path | None, test: bool, dry_run: bool,
    keys: Sequence[str], identity: str, issuer: str, signer: Signer | None
) -> None:  # fmt: skip
    """Put packages on an image, without building it.

    PARENT is an image that builder made, in a registry or in the store. As with `uv pip install`, its framework and
    CUDA stay as they are; other packages change version only if a requested one needs it. With --key or --identity, or
    `evidence` in matrix.yaml, the signature of PARENT is checked first.

    From registry to registry, only the new layers are sent. Needs Docker only for --test, and no checkout: without
    one, name an image of the store by its full tag, which `builder gc --dry-run` shows.

    The request is in a label of the image, so --refresh needs no file. If IMAGE names no
    registry (-t vision:1), it is loaded into Docker instead, and tested as with --test.
    """
    began = time.monotonic()
    trust = Trust(signers=trusted_signers(keys, identity, issuer), root=Path.cwd())
    project = context.find_project(ignore_invalid=bool(trust.signers))
    run = context.run(project)
    if project and not trust.signers:
        trust = Trust.of(project)

    is_request = bool(parent or files or env or target or index or keep)
    if (bool(refresh), bool(team), is_request).count(True) != 1 or (is_request and not (parent and target)):
        raise UsageError(
            "name a PARENT and the image to make (-t), or an image to --refresh, or a file of images (-f)",
            hint="For example: builder add org/pt-cuda:2.14-jupyter transformers -t org/llm:1",
        )
    with run.store.used(), run.view.live():
        options = AddOptions(arch=arch, dry_run=dry_run, test=test, trust=trust, signer=signer)
        if refresh:
            additions = [repeated_addition(run, parse_image(refresh), options)]
        elif team:
            additions = read_team_file(team)
        else:
            requested = read_requested(packages, files, "command line")
            request = AdditionRequest(requirements=requested, env=read_variables(env), index=index, keep=keep)
            additions = [Addition(parent=parse_image(parent or ""), target=parse_image(target), request=request)]
        digests = add(run, additions, options)
    for image, digest in digests.items():
        took = duration(time.monotonic() - began)
        context.out.print(Text(f"{image}@{digest}  in {took}"), soft_wrap=True)
    if not test and any(image.registry for image in digests):
        context.say("nothing was tested: --test imports each package, and runs `pip check`")
