"""The command init."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click

from builder.cli.context import Context
from builder.steps.init import CiService, first_images, package_of, read_source, write_repository


@click.command(name="init")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--registry", metavar="HOST[:PORT]", default="", help="Registry of the images. Default: none, images stay local."
)
@click.option("--namespace", metavar="NAME", default="org", show_default=True, help="Their names begin with it.")
@click.option(
    "--framework", "frameworks", metavar="NAME", multiple=True, default=["pytorch"], show_default=True,
    help="pytorch, tensorflow or jax; can be given several times.",
)  # fmt: skip
@click.option("--cpu/--gpu", "is_cpu", default=False, help="Images for the CPU, or for GPUs. Default: GPUs.")
@click.option(
    "--ci", type=click.Choice(get_args(CiService)), default="github", show_default=True, help="Where CI runs."
)
@click.pass_obj
def init_command(
    context: Context,
    folder: Path,
    registry: str,
    namespace: str,
    frameworks: Sequence[str],
    is_cpu: bool,
    ci: CiService,
) -> None:
    """Write a repository for images of your own to FOLDER.

    It has matrix.yaml, which extends the one of gpu-images, and Makefile, README and the configuration of CI.
    Overwrites nothing.
    """
    source = read_source()
    images = first_images(frameworks, is_cpu=is_cpu)
    names = write_repository(folder, registry=registry, namespace=namespace, frameworks=images, source=source, ci=ci)
    context.say_written(names)
    context.say(f"make and CI install {package_of(source)[0]}")
    if "dir_info" in source:
        context.say(
            f"the wheel is missing: run `uv build --wheel --no-create-gitignore --out-dir {folder.absolute()}/wheels` "
            "in the checkout of gpu-images, then commit wheels/"
        )
    context.say(f"next: cd {folder} && make images")
