"""The command that holds facts.yaml against the real wheels."""

from __future__ import annotations

from collections.abc import Sequence

import click
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder import facts, host
from builder.cli.context import Context
from builder.errors import StaleError, UsageError
from builder.facts import Build, Facts
from builder.matrix import CPU, Matrix
from builder.wheelfacts import Compiled, Wheels


@click.command(name="facts")
@click.argument("wanted", metavar="[PACKAGE==VERSION]...", nargs=-1)
@click.pass_obj
def facts_command(context: Context, wanted: Sequence[str]) -> None:
    """Check builder/facts.yaml against the wheels on the index (default: what matrix.yaml names).

    Reads single files out of the wheels and installs nothing: at most 12 MB each.
    """
    known = facts.load()
    builds = [_parse(one) for one in wanted] or of_matrix(context.project.matrix, known)
    wheels = Wheels(host.read().index)
    faults = []
    for package, release in builds:
        found = wheels.compiled(package, release)
        told = compare(known.builds.get(package, {}).get(release), found, package, release)
        said = told or f"same: CUDA {found.cuda}, {' '.join(found.architectures)}"
        click.echo(f"{package} {release}: {said}")
        if told:
            faults.append(f"{package} {release}")
    if faults:
        raise StaleError(
            f"builder/facts.yaml is not what the wheels say: {', '.join(faults)}",
            hint="Correct or add the entries shown.",
        )


def of_matrix(matrix: Matrix, known: Facts) -> list[tuple[str, str]]:
    """Package and release of all GPU code that a matrix asks for."""
    builds = {
        (known.compiled_package(framework.package, cuda), entry.release): None
        for framework in matrix.frameworks.values()
        for entry in framework.versions.values()
        for cuda in entry.cuda
        if cuda != CPU
    }
    return list(builds)


def compare(known: Build | None, found: Compiled, package: str, release: str) -> str:
    """How the file differs from a wheel, in words; empty if it does not."""
    if known is None:
        cudnn = f', cudnn: "{found.cudnn}"' if found.cudnn else ""
        listed = ", ".join(found.architectures)
        entry = f'{{cuda: "{found.cuda}"{cudnn}, architectures: [{listed}], source: {found.source}}}'
        return f"facts.yaml lacks it; add to builds.{package}:\n    {release}: {entry}"
    pairs = {
        "CUDA": (known.cuda, found.cuda),
        "cuDNN": (known.cudnn, found.cudnn),
        "architectures": (" ".join(known.architectures), " ".join(found.architectures)),
    }
    told = [f"{name} {its or 'none'}, not {mine or 'none'}" for name, (mine, its) in pairs.items() if mine != its]
    return f"differs: the wheel says {'; '.join(told)}" if told else ""


def _parse(text: str) -> tuple[str, str]:
    try:
        requirement = Requirement(text)
        (pin,) = requirement.specifier
        if pin.operator == "==":
            Version(pin.version)  # "2.9.*" is none
            return canonicalize_name(requirement.name), pin.version
    except (InvalidRequirement, ValueError):
        pass
    raise UsageError(f"{text!r} is no exact release", hint="Write it as torch==2.9.1.")
