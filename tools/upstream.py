"""Proposes newer releases of the frameworks than those of matrix.yaml: python -m tools.upstream."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import click
from packaging.requirements import Requirement
from packaging.version import Version

from builder.cli import SETTINGS, main
from builder.cli.context import Context
from builder.cli.options import debug_option
from builder.common.console import View
from builder.common.errors import UsageError, did_you_mean
from builder.compat import explain
from builder.compat.explain import Explainer
from builder.index.releases import Index
from builder.lock.resolve import Resolver
from builder.matrix import facts
from builder.matrix.cells import Cell
from builder.matrix.schema import CPU, FrameworkVersion, Matrix

_RELEASE = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}", re.ASCII)  # what matrix.yaml allows: no 2.9.1.post1


@click.command(context_settings=SETTINGS)
@click.argument("frameworks", metavar="[FRAMEWORK]...", nargs=-1)
@debug_option
@click.pass_obj
def upstream(context: Context, frameworks: Sequence[str]) -> None:
    """Propose newer releases of the frameworks for matrix.yaml. Default: of all frameworks.

    Queries the package index for the newest stable release of each version in matrix.yaml, and for newer versions. For
    a newer one, proposes the CUDA and Python versions of matrix.yaml that work with it: the first variant of each is
    resolved to wheels. The output can be pasted into matrix.yaml. Nothing is written.
    """
    project, settings = context.project, context.host
    present = project.matrix.frameworks
    if unknown := [name for name in frameworks if name not in present]:
        raise UsageError(f"no framework {unknown[0]!r} in matrix.yaml{did_you_mean(unknown[0], present)}")

    def reason(matrix: Matrix, cell: Cell) -> str:
        context.say(f"{cell.group}: resolving {cell.release}")
        return Resolver(project, settings, View(context.err), matrix).reason(cell)

    explainer = Explainer(
        matrix=project.matrix,
        known=project.cells,
        catalogue=Index(settings.index),
        facts=facts.load_facts(),
        resolve=reason,
    )
    are_newest = True
    for framework in frameworks or present:
        context.say(f"{framework}: getting the list of releases")
        for proposal in propose(explainer, framework):
            click.echo("\n".join(proposal.lines))
            are_newest = False
    if are_newest:
        message = f"no newer releases of {', '.join(frameworks)}"
        click.echo(message if frameworks else "all frameworks are at their newest releases")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A line of a framework. `replaces` is the release that it has now, empty for a new line.

    `entry` is None if nothing in matrix.yaml works with the release; `notes` are what was left out and why.
    """

    framework: str
    package: str
    line: str
    release: str
    replaces: str
    entry: FrameworkVersion | None
    notes: tuple[str, ...]

    @property
    def lines(self) -> Iterator[str]:
        """Text that can be pasted into matrix.yaml."""
        place = f"frameworks.{self.framework}.versions"
        what = f'newer than {self.replaces} in {place}."{self.line}"' if self.replaces else f"new in {place}"
        but = "" if self.entry else ", but no CUDA and Python version of matrix.yaml work with it"
        yield f"      # {self.package} {self.release} is {what}{but}."
        yield from (f"      #   {note}" for note in self.notes)
        if self.entry:
            yield f"      {explain.matrix_line(self.line, self.entry)}"


def propose(explainer: Explainer, name: str) -> Iterator[Proposal]:
    """The newest stable release of each line of a framework, and newer lines. Raises FetchError."""
    # What matrix.yaml excludes stays excluded, and is no reason against a release.
    matrix = explainer.matrix.model_copy(update={"exclude": []})
    explainer, framework = replace(explainer, matrix=matrix), matrix.frameworks[name]
    package = Requirement(framework.package).name
    newest = max(framework.versions, key=Version)
    catalogue = _catalogue(explainer, name, newest)
    for line, release in _newest_releases(catalogue, package, list(framework.versions)).items():
        present = framework.versions.get(line)
        if present and release > Version(present.release):
            yield _update(explainer, name, package, line, str(release))
        elif not present and Version(line) > Version(newest):
            yield _addition(explainer, name, package, line, str(release))


def _catalogue(explainer: Explainer, name: str, line: str) -> Index:
    """The catalogue with the indexes of a line, for its first CUDA."""
    indexes = explainer.matrix.indexes_of(name, line, explainer.matrix.frameworks[name].versions[line].cuda[0])
    return explainer.catalogue.with_indexes({package: next(iter(names)) for package, names in indexes.items()})


def _newest_releases(catalogue: Index, package: str, lines: Sequence[str]) -> dict[str, Version]:
    """The newest stable release of each line; lines that are not in the matrix have two numbers."""
    newest = {}
    for release in catalogue.package(package).releases:  # the oldest first
        version = release.version
        if release.is_stable and _RELEASE.fullmatch(str(version)):
            own = (line for line in lines if version.release[: line.count(".") + 1] == Version(line).release)
            newest[next(own, f"{version.major}.{version.minor}")] = version
    return newest


def _update(explainer: Explainer, name: str, package: str, line: str, release: str) -> Proposal:
    """The line with another release, and with what is pinned to the same release."""
    framework = explainer.matrix.frameworks[name]
    present = framework.versions[line]
    packages, notes = _moved_packages(_catalogue(explainer, name, line), present, release)
    entry = present.model_copy(update={"release": release, "packages": packages})
    framework = framework.model_copy(update={"versions": {**framework.versions, line: entry}})
    frameworks = {**explainer.matrix.frameworks, name: framework}
    explainer = replace(explainer, matrix=explainer.matrix.model_copy(update={"frameworks": frameworks}))
    entry_that_works, reasons = _working_entry(explainer, name, line, entry)
    return Proposal(
        framework=name, package=package, line=line, release=release, replaces=present.release, entry=entry_that_works,
        notes=(*notes, *reasons),
    )  # fmt: skip


def _addition(explainer: Explainer, name: str, package: str, line: str, release: str) -> Proposal:
    """A line with all CUDA and Python versions of the matrix that work; the first are those of its newest line.

    Not the Pythons whose images were not built yet.
    """
    matrix = explainer.matrix
    versions = matrix.frameworks[name].versions
    newest = versions[max(versions, key=Version)]
    cudas = dict.fromkeys([*newest.cuda, *matrix.cuda])
    pythons = [name for name in dict.fromkeys([*newest.python, *matrix.python]) if not matrix.python[name].not_built]
    entry_that_works, reasons = _working_entry(
        explainer, name, line, FrameworkVersion(release=release, cuda=list(cudas), python=pythons)
    )
    notes = [f"packages of the newest version, not included: {', '.join(newest.packages)}"] if newest.packages else []
    return Proposal(
        framework=name, package=package, line=line, release=release, replaces="", entry=entry_that_works,
        notes=(*notes, *reasons),
    )  # fmt: skip


def _moved_packages(catalogue: Index, present: FrameworkVersion, release: str) -> tuple[list[str], list[str]]:
    """The packages of a line for another release, and notes: a pin to the framework's release moves with it."""
    packages, notes = [], []
    for package in present.packages:
        name, pin, version = package.partition("==")
        if pin and version == present.release:
            moved = catalogue.package(Requirement(name).name).release(Version(release))
            if moved and moved.is_stable:
                package = f"{name}=={release}"  # noqa: PLW2901  the same package
            else:
                notes.append(f"{name} has no release {release}: check {package}")
        packages.append(package)
    return packages, notes


def _working_entry(
    explainer: Explainer, name: str, line: str, entry: FrameworkVersion
) -> tuple[FrameworkVersion | None, list[str]]:
    """The entry with the largest product of its CUDA and Python versions that works, and why others do not."""
    framework, variant = explainer.matrix.frameworks[name], next(iter(explainer.matrix.variants))
    cells = {
        (cuda, python): Cell(
            framework=name, short=framework.short, line=line, release=entry.release, cuda=cuda, python=python,
            variant=variant,
        )
        for cuda in entry.cuda
        for python in entry.python
    }  # fmt: skip
    refusals = {
        pair: next(filter(None, (explainer.refusal(replace(cell, arch=arch)) for arch in entry.arch_on(cell.cuda))), "")
        for pair, cell in cells.items()
    }
    cudas, pythons = _largest_product(entry, refusals)
    if not cudas:
        return None, [f"{_cuda_name(cuda)}: {refusals[cuda, entry.python[0]]}" for cuda in entry.cuda]
    drafts = [explainer.entry(cells[cuda, python]) for cuda in cudas for python in pythons]
    update = {
        "cuda": cudas,
        "python": pythons,
        "constraints": list(dict.fromkeys(bound for draft in drafts for bound in draft.constraints)),
        "components": list(dict.fromkeys(component for draft in drafts for component in draft.components)),
    }
    return entry.model_copy(update=update), _left_out(entry, refusals, cudas, pythons)


def _largest_product(entry: FrameworkVersion, refusals: Mapping[tuple[str, str], str]) -> tuple[list[str], list[str]]:
    """A line has every CUDA version with every Python version."""
    accepted = {python: [cuda for cuda in entry.cuda if not refusals[cuda, python]] for python in entry.python}
    products = [
        (cudas, [python for python, others in accepted.items() if set(cudas) <= set(others)])
        for cudas in accepted.values()
    ]
    return max(products, key=lambda product: len(product[0]) * len(product[1]))


def _left_out(
    entry: FrameworkVersion, refusals: Mapping[tuple[str, str], str], cudas: Sequence[str], pythons: Sequence[str]
) -> list[str]:
    """A line for each CUDA and Python version that is not in the product, with the first reason."""
    notes = {}
    for cuda in entry.cuda:
        if cuda not in cudas:
            notes[_cuda_name(cuda)] = next(filter(None, (refusals[cuda, python] for python in pythons)))
    for python in entry.python:
        if python not in pythons:
            notes[f"Python {python}"] = next(filter(None, (refusals[cuda, python] for cuda in cudas)))
    return [f"left out {name}: {reason}" for name, reason in notes.items()]


def _cuda_name(cuda: str) -> str:
    return cuda if cuda == CPU else f"CUDA {cuda}"


if __name__ == "__main__":
    main(upstream, obj=Context())
