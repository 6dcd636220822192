"""Lists what is newer than this repository has, and adds what it can: python -m tools.upstream."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.cli import SETTINGS, main
from builder.cli.context import Context
from builder.cli.options import debug_option
from builder.common.console import View
from builder.common.errors import FetchError
from builder.compat import explain
from builder.compat.explain import Explainer
from builder.index.releases import Index, ListedPackage, parse_metadata
from builder.index.session import IndexSession
from builder.lock.resolve import Resolver
from builder.matrix import facts, support
from builder.matrix.cells import Cell
from builder.matrix.facts import Build
from builder.matrix.schema import CPU, FrameworkVersion, Matrix, required_name
from tools.facts import entry_of, missing_builds, missing_versions, read_build

_RELEASE = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}", re.ASCII)  # what matrix.yaml allows: no 2.9.1.post1
FACTS = "builder/matrix/facts.yaml"
SUPPORT_DAYS = 90
ReadBuild = Callable[[str, Version], Build]


@click.command(context_settings=SETTINGS)
@click.option("--write", is_flag=True, help=f"Add what was found to matrix.yaml and {FACTS}.")
@debug_option
@click.pass_context
def upstream(program: click.Context, write: bool) -> None:
    """List newer releases of frameworks, CUDA and engines than those of this repository, and ends of support.

    Queries the package index for the newest stable release of each version in matrix.yaml, and for newer versions. For
    a newer one, proposes the CUDA and Python versions of matrix.yaml that work with it: the first variant of each is
    resolved to wheels. The output can be pasted into matrix.yaml. Nothing is written without --write. The exit code is
    1 if the index did not answer all requests.
    """
    context: Context = program.obj
    project, session = context.project, IndexSession(context.host.index, retries=3)

    def reason(matrix: Matrix, cell: Cell) -> str:
        context.say(f"{cell.group}: resolving {cell.release}")
        return Resolver(project, context.host, View(context.err), matrix).reason(cell)

    def read(package: str, version: Version) -> Build:
        context.say(f"{package} {version}: reading the wheel")
        return read_build(session, package, version)

    explainer = Explainer(
        matrix=project.matrix,
        known=project.cells,
        catalogue=Index(context.host.index),
        facts=facts.load_facts(),
        resolve=reason,
    )
    findings = find(explainer, read, context.today)
    click.echo("\n".join(findings.lines))
    if write:
        findings.write(project.root)
    program.exit(bool(findings.failures))


@dataclass(kw_only=True)
class Findings:
    """What is newer than this repository has.

    `builds` are lines for facts.yaml by package, `facts` what is to be read elsewhere for it. `engines` are pins of
    components for which there is a newer release, `newest_engines` the others. `failures` has, by reason, the names
    of what could not be looked up.
    """

    proposals: list[Proposal] = field(default_factory=list)
    builds: list[tuple[str, str]] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    newest_engines: list[str] = field(default_factory=list)
    support: list[str] = field(default_factory=list)
    failures: dict[str, list[str]] = field(default_factory=dict)

    @contextmanager
    def looking_up(self, name: str) -> Iterator[None]:
        """Records that the index did not answer: what it answered before and later counts."""
        try:
            yield
        except FetchError as error:
            self.failures.setdefault(str(error).splitlines()[0].partition(": ")[2], []).append(name)

    @property
    def lines(self) -> Iterator[str]:
        sections = {
            "Frameworks, for matrix.yaml": [line for proposal in self.proposals for line in proposal.lines],
            f"CUDA and builds, for {FACTS}": [
                *self.facts, *(f"builds.{package} lacks {entry}" for package, entry in self.builds)
            ],
            "Engines, for components in matrix.yaml": self.engines,
            f"Ends of support within {SUPPORT_DAYS} days": self.support,
        }  # fmt: skip
        for title, lines in sections.items():
            yield f"{title}: {'' if lines else 'nothing found'}".rstrip()
            yield from (line if line.startswith("  ") else f"  {line}" for line in lines)
        if self.newest_engines:
            yield f"The newest engines are in matrix.yaml: {', '.join(self.newest_engines)}"
        yield from (f"Not looked up: {', '.join(names)}: {reason}" for reason, names in self.failures.items())
        count = len(self.proposals) + len(self.builds) + len(self.facts) + len(self.engines) + len(self.support)
        yield f"To do: {count}" if count else "Run it again" if self.failures else "Nothing to do"

    def write(self, root: Path) -> None:
        """Adds the proposals to matrix.yaml and the builds to facts.yaml."""
        matrix, known = (root / "matrix.yaml").read_text(), (root / FACTS).read_text()
        for proposal in self.proposals:
            matrix = proposal.added_to(matrix)
        for package, entry in self.builds:
            lines = known.splitlines(keepends=True)
            lines.insert(_end(lines, "builds:", f"  {package}:"), f"    {entry}\n")
            known = "".join(lines)
        (root / "matrix.yaml").write_text(matrix)
        (root / FACTS).write_text(known)


def _end(lines: Sequence[str], *keys: str) -> int:
    """The number of the line after a block of a YAML file, from the beginnings of the lines that lead to it."""
    number = -1
    for key in keys:
        number = next(place for place in range(number + 1, len(lines)) if lines[place].startswith(key))
    indent = len(keys[-1]) - len(keys[-1].lstrip())
    end = number + 1
    for place in range(number + 1, len(lines)):
        if lines[place].strip():
            if len(lines[place]) - len(lines[place].lstrip()) <= indent:
                break
            end = place + 1
    return end


def find(explainer: Explainer, read: ReadBuild, today: date) -> Findings:
    """What is newer on the index, and which support ends soon. `read` reads a build from a wheel."""
    found, matrix, catalogue = Findings(), explainer.matrix, explainer.catalogue
    for name in matrix.frameworks:
        with found.looking_up(name):
            found.proposals += propose(explainer, name)
    with found.looking_up(FACTS):
        found.facts += missing_versions(catalogue, explainer.facts)
        for package, release in missing_builds(catalogue, explainer.facts):
            with found.looking_up(f"{package} {release}"):
                found.builds.append((package, entry_of(read(package, release), release)))
    for name, component in matrix.components.items():
        for requirement in map(Requirement, component.packages):
            pin = next(iter(requirement.specifier), None)
            if pin and pin.operator == "==":
                with found.looking_up(requirement.name):
                    _compare_engine(found, explainer, name, requirement.name, Version(pin.version))
    ends = {end for cell in explainer.known for end in support.ends_of_cell(matrix, cell)}
    for end in sorted(ends, key=lambda end: end.last):
        if (end.last - today).days <= SUPPORT_DAYS and not (end.is_over(today) and end.after_support):
            found.support.append(f"{end.entry}: {end.sentence(today)}")
    return found


def _compare_engine(found: Findings, explainer: Explainer, component: str, package: str, pinned: Version) -> None:
    """Adds a line about a package that a component pins, unless it has no stable release. Raises FetchError."""
    newest = explainer.catalogue.package(package).newest
    if newest is None or not newest.wheels:
        return
    frameworks = {required_name(framework.package): framework for framework in explainer.matrix.frameworks.values()}
    requires = []
    wheels = {file.filename: file for file in explainer.catalogue.files(canonicalize_name(package))}
    wheel = wheels[newest.wheels[0]]
    metadata = parse_metadata(wheel.filename, explainer.catalogue.metadata_text(wheel))
    for requirement in metadata.requirements(explainer.known[0], ()):
        framework = frameworks.get(canonicalize_name(requirement.name))
        if framework and requirement.specifier:
            is_met = any(requirement.specifier.contains(line.release) for line in framework.versions.values())
            but = "" if is_met else ", which matrix.yaml does not have"
            requires.append(f"{requirement.name}{requirement.specifier}{but}")
    needs = f" (requires {'; '.join(requires)})" if requires else ""
    if newest.version > pinned:
        found.engines.append(f"{package} {newest.version} is newer than {pinned} in components.{component}{needs}")
    else:
        found.newest_engines.append(f"{package} {pinned}{needs}")


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

    def added_to(self, text: str) -> str:
        """matrix.yaml with the line as the last one of its framework, which changes no default, or with the release."""
        if self.entry is None:
            return text
        lines = text.splitlines(keepends=True)
        place = ("frameworks:", f"  {self.framework}:", "    versions:")
        if not self.replaces:
            lines.insert(_end(lines, *place), f"      {explain.matrix_line(self.line, self.entry)}\n")
            return "".join(lines)
        end = _end(lines, *place, f'      "{self.line}":')
        start = max(number for number in range(end) if lines[number].startswith(f'      "{self.line}":'))
        block = "".join(lines[start:end]).replace(f"release: {self.replaces}", f"release: {self.release}")
        for package in self.entry.packages:
            name, pin, version = package.partition("==")
            block = block.replace(f"{name}=={self.replaces}", package) if pin and version == self.release else block
        return "".join([*lines[:start], block, *lines[end:]])


def propose(explainer: Explainer, name: str) -> Iterator[Proposal]:
    """The newest stable release of each line of a framework, and newer lines. Raises FetchError."""
    # What matrix.yaml excludes stays excluded, and is no reason against a release.
    matrix = explainer.matrix.model_copy(update={"exclude": []})
    explainer, framework = replace(explainer, matrix=matrix), matrix.frameworks[name]
    package = Requirement(framework.package).name
    newest = max(framework.versions, key=Version)
    listed = _package(explainer, name, newest, package)
    for line, release in _newest_releases(listed, list(framework.versions)).items():
        present = framework.versions.get(line)
        if present and release > Version(present.release):
            yield _update(explainer, name, package, line, str(release))
        elif not present and Version(line) > Version(newest):
            yield _addition(explainer, name, package, line, str(release))


def _package(explainer: Explainer, name: str, line: str, package: str) -> ListedPackage:
    """The releases of a package on the index that a line takes it from, for its first CUDA."""
    indexes = explainer.matrix.indexes_of(name, line, explainer.matrix.frameworks[name].versions[line].cuda[0])
    return explainer.catalogue.package(package, next(iter(indexes.get(canonicalize_name(package), ())), ""))


def _newest_releases(package: ListedPackage, lines: Sequence[str]) -> dict[str, Version]:
    """The newest stable release of each line; lines that are not in the matrix have two numbers."""
    newest = {}
    for release in package.releases:  # the oldest first
        version = release.version
        if release.is_stable and _RELEASE.fullmatch(str(version)):
            own = (line for line in lines if version.release[: line.count(".") + 1] == Version(line).release)
            newest[next(own, f"{version.major}.{version.minor}")] = version
    return newest


def _update(explainer: Explainer, name: str, package: str, line: str, release: str) -> Proposal:
    """The line with another release, and with what is pinned to the same release."""
    framework = explainer.matrix.frameworks[name]
    present = framework.versions[line]
    packages, notes = _moved_packages(explainer, name, line, release)
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


def _moved_packages(explainer: Explainer, framework: str, line: str, release: str) -> tuple[list[str], list[str]]:
    """The packages of a line for another release, and notes: a pin to the framework's release moves with it."""
    present = explainer.matrix.frameworks[framework].versions[line]
    packages, notes = [], []
    for package in present.packages:
        name, pin, version = package.partition("==")
        if pin and version == present.release:
            moved = _package(explainer, framework, line, Requirement(name).name).release(Version(release))
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
