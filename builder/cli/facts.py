"""`builder facts`: checks facts.yaml against the wheels on the index."""

from __future__ import annotations

from collections.abc import Sequence

import click
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.cli.context import Context
from builder.common.errors import StaleError, UsageError
from builder.index.session import IndexSession
from builder.index.wheel_facts import read_build
from builder.matrix import facts
from builder.matrix.facts import Build, Facts
from builder.matrix.schema import CPU, Matrix


@click.command(name="facts")
@click.argument("requirements", metavar="[PACKAGE==VERSION]...", nargs=-1)
@click.pass_obj
def facts_command(context: Context, requirements: Sequence[str]) -> None:
    """Check builder/matrix/facts.yaml against the wheels on the index.

    The file lists the CUDA version and the GPU architectures that each framework release was compiled for, which are
    not in any metadata. Without arguments, checks the releases in matrix.yaml. Prints the entry to add if one is
    missing. Reads single files of the wheels, at most 12 MB each, and installs nothing.
    """
    known = facts.load()
    releases = [_parse(text) for text in requirements] or _of_matrix(context.project.matrix, known)
    session = IndexSession(context.host.index)
    outdated = []
    for package, release in releases:
        build = read_build(session, package, release)
        difference = compare(known.builds.get(package, {}).get(release), build, package, release)
        same = f"same: CUDA {build.cuda}, {' '.join(build.architectures)}"
        click.echo(f"{package} {release}: {difference or same}")
        if difference:
            outdated.append(f"{package} {release}")
    if outdated:
        raise StaleError(
            f"builder/matrix/facts.yaml does not match the wheels: {', '.join(outdated)}",
            hint="Correct or add the entries shown.",
        )


def _of_matrix(matrix: Matrix, known: Facts) -> list[tuple[str, str]]:
    """Package and release of all GPU code in the matrix."""
    releases = {
        (known.compiled_package(framework.package, cuda), entry.release): None
        for framework in matrix.frameworks.values()
        for entry in framework.versions.values()
        for cuda in entry.cuda
        if cuda != CPU
    }
    return list(releases)


def compare(known: Build | None, build: Build, package: str, release: str) -> str:
    """How the entry in facts.yaml differs from the build in a wheel; empty if it does not."""
    if known is None:
        cudnn = f', cudnn: "{build.cudnn}"' if build.cudnn else ""
        architectures = ", ".join(build.architectures)
        entry = f'{{cuda: "{build.cuda}"{cudnn}, architectures: [{architectures}], source: {build.source}}}'
        return f"missing in facts.yaml; add to builds.{package}:\n    {release}: {entry}"
    pairs = {
        "CUDA": (known.cuda, build.cuda),
        "cuDNN": (known.cudnn, build.cudnn),
        "architectures": (" ".join(known.architectures), " ".join(build.architectures)),
    }
    differences = [f"{name} {new or 'none'}, not {old or 'none'}" for name, (old, new) in pairs.items() if old != new]
    return f"differs: the wheel has {'; '.join(differences)}" if differences else ""


def _parse(text: str) -> tuple[str, str]:
    try:
        requirement = Requirement(text)
        (pin,) = requirement.specifier
        if pin.operator == "==":
            Version(pin.version)  # raises for "2.9.*"
            return canonicalize_name(requirement.name), pin.version
    except (InvalidRequirement, ValueError):
        pass
    raise UsageError(f"{text!r} is not an exact release: use e.g. torch==2.9.1")
