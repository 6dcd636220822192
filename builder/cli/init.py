"""The command init."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click

from builder.cli.context import Context
from builder.steps.init import CiService, package_of, read_source, write_repository


@click.command(name="init")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--registry", metavar="HOST[:PORT]", help="Registry of the images. Default: none, images stay local.")
@click.option("--namespace", metavar="NAME", help="Their names begin with it. Default: org.")
@click.option(
    "--framework", "frameworks", metavar="NAME", multiple=True,
    help="pytorch, tensorflow or jax; can be given several times. Default: pytorch.",
)  # fmt: skip
@click.option("--cpu/--gpu", "is_cpu", default=None, help="Images for the CPU, or for GPUs. Default: GPUs.")
@click.option("--ci", type=click.Choice(get_args(CiService)), help="Where CI runs. Default: github.")
@click.option(
    "--workflows",
    metavar="OWNER/REPO@REF",
    help="Your copy of gpu-images on GitHub, whose workflow the new one calls. Default: a copy of that workflow.",
)
@click.option("-y", "--yes", is_flag=True, help="Ask nothing, also on a terminal: use the defaults.")
@click.pass_obj
def init_command(
    context: Context, folder: Path, registry: str | None, namespace: str | None, frameworks: Sequence[str],
    is_cpu: bool | None, ci: CiService | None, workflows: str | None, yes: bool,
) -> None:  # fmt: skip
    """Write a repository for images of your own to FOLDER.

    It has matrix.yaml, which extends the one of gpu-images, and Makefile, README and the configuration of CI. On a
    terminal, asks for what the options do not say. Overwrites nothing.
    """
    if sys.stdin.isatty() and not yes:
        if registry is None:
            registry = click.prompt("Registry (empty: none)", default="", show_default=False, err=True)
        if namespace is None:
            namespace = click.prompt("Namespace", default="org", err=True)
        if not frameworks:
            frameworks = click.prompt("Frameworks", default="pytorch", err=True).replace(",", " ").split()
        if is_cpu is None:
            is_cpu = not click.confirm("For GPUs?", default=True, err=True)
        if ci is None and workflows is None:
            ci = click.prompt("CI", type=click.Choice(get_args(CiService)), default="github", err=True)
        if workflows is None and ci != "gitlab":
            question = "Your copy of gpu-images on GitHub, OWNER/REPO@REF (empty: a copy of its workflow)"
            workflows = click.prompt(question, default="", show_default=False, err=True)
    source = read_source()
    names = write_repository(
        folder, registry=registry or "", namespace=namespace or "org", frameworks=frameworks or ("pytorch",),
        is_cpu=bool(is_cpu), source=source, ci=ci or "github", workflows=workflows or "",
    )  # fmt: skip
    context.say_written(names)
    context.say(f"make and CI install {package_of(source)[0]}")
    if "dir_info" in source:
        context.say(
            f"the wheel is missing: run `uv build --wheel --no-create-gitignore --out-dir {folder.absolute()}/wheels` "
            "in the checkout of gpu-images, then commit wheels/"
        )
    context.say(f"next: cd {folder} && make images")
