"""The command add."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import click
from rich.text import Text

from builder.cli.context import Context, parse_image
from builder.cli.options import format_option
from builder.common.console import View
from builder.common.errors import UsageError
from builder.lock import requirements
from builder.matrix.schema import Arch
from builder.release.image_sources import ALL
from builder.steps.add import Added, Addition, add


@click.command(name="add")
@click.argument("parent")
@click.argument("packages", nargs=-1)
@click.option(
    "-r",
    "--requirements",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of requirements, as for pip. Hashes are compared. Repeat the option for several.",
)
@click.option("-t", "--tag", "target", required=True, help="The image to make: REGISTRY/NAME:TAG.")
@click.option(
    "--arch",
    type=click.Choice([*get_args(Arch), ALL]),
    default=ALL,
    show_default=True,
    help="If PARENT names images for several architectures: the one to use.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be added.")
@format_option()
@click.pass_obj
def add_command(
    context: Context, /, parent: str, packages: Sequence[str], files: Sequence[Path], target: str, arch: str,
    dry_run: bool, form: str
) -> None:  # fmt: skip
    """Put packages on an image, without building it.

    PARENT is an image that builder made, in a registry or in the store. Its packages stay as they are: what would
    replace the framework or CUDA is refused. From registry to registry, only the new layers are sent. Needs no Docker
    and no checkout.

    The request and the chosen wheels are labels of the image.
    """
    requested = [requirements.parse_requirement(text, "command line") for text in packages]
    requested += [each for file in files for each in requirements.read_requirements(file)]
    if not requested:
        raise UsageError("nothing to add", hint="Name packages, or a file of requirements with -r.")
    addition = Addition(parent=parse_image(parent), target=parse_image(target), requested=requested)
    if not addition.target.registry or addition.target.digest:
        raise UsageError(f"{target} is no tag in a registry", hint="Use REGISTRY/NAME:TAG, e.g. ghcr.io/org/vision:1.")
    began, view = time.monotonic(), View(context.err)

    def show(step: str, result: str) -> None:
        if form == "text":
            context.out.print(Text(f"{step:<8} {result}  {time.monotonic() - began:.1f} s"), soft_wrap=True)

    project = None
    with suppress(UsageError):  # without a checkout
        project = context.project
    store = context.store
    with store.used(), view.live():
        [added] = add([addition], project, context.host, store, view, show, arch=arch, dry_run=dry_run)
    if form == "json":
        context.print_json(_as_data(added))


def _as_data(added: Added) -> dict[str, Any]:
    return {
        "image": str(added.addition.target),
        "digest": added.digest,
        "parent": str(added.addition.parent),
        "images": [
            {
                "arch": each.parent.arch,
                "parent": each.parent.image.manifest.digest,
                "digest": each.image.manifest.digest if added.digest else "",
                "wheels": [wheel.file for wheel in each.wheels],
                "kept": len(each.parent.packages),
                "layers": [layer.as_record() for layer in each.layers],
            }
            for each in added.images
        ],
    }
