"""Installs packages that people add to the images, checks each, and writes docs/packages.md: `make packages`.

packages.yaml lists the packages. Each is installed from the package index into a new container of an image, as the
image's user. Then its check runs: Python code that loads the package's CUDA libraries, without a GPU.

A package works if the installation and its check succeed, if no version that the image pins has changed, if `pip check`
names no new conflict, and if the framework still loads its own CUDA libraries. packages-results.json has the last
result of each package: those of images that are not on this machine stay as they are.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import tarfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal, Protocol

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from builder.cli import main
from builder.cli.context import Context
from builder.common import strict_yaml, validation
from builder.common.errors import ImageTestError, UsageError, did_you_mean, for_cells
from builder.common.files import write_atomically
from builder.common.text import counted, one_line
from builder.index.host import FOLDER, Host
from builder.matrix import cells, tags
from builder.matrix.cells import Cell
from builder.matrix.project import Project

LIST = "tools/packages.yaml"
RESULTS = "tools/packages-results.json"
PAGE = "docs/packages.md"
SETTINGS = "/mnt/host"  # the folder that the files of `Host.files` name
CONSTRAINTS = "/etc/pip/constraints.txt"
TIMEOUT_S = 1800  # of each program; RAPIDS takes minutes

Text = Annotated[str, Field(min_length=1)]


class Package(BaseModel):
    """A package of packages.yaml.

    `install` are the requirements to install, by default the package's name. `debian` are packages that root installs
    before. With `resolve_only`, uv only chooses wheels. `fails` is a part of the message of a package that does not
    work. `note` is for docs/packages.md: which version fits, and why.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    cells: Annotated[list[Text], Field(min_length=1)]
    note: str = ""
    install: list[Text] = []
    installer: Literal["pip", "uv"] = "pip"
    debian: list[Text] = []
    resolve_only: bool = False
    fails: str = ""
    check: str = ""


class PackageList(BaseModel):
    """packages.yaml. `frameworks` has, by framework, code that fails if it cannot load its CUDA libraries."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    frameworks: dict[str, Text]
    packages: dict[str, Package]


class Result(BaseModel):
    """What one installation did. `fault` is why the package does not work, and empty if it does.

    `installed` has the version of each package that was named, `replaced` the packages of the image that have another
    version now: `2.4.6 -> 2.3.5`. `image` and `tested` are the days of the image and of the test.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    package: str
    cell: str
    fault: str
    installed: dict[str, str]
    replaced: dict[str, str]
    image: str
    tested: str


def read_list(root: Path) -> PackageList:
    """packages.yaml; raises MatrixError with the places of all faults."""
    return validation.validate(strict_yaml.load_yaml(root / LIST), PackageList)


def read_results(root: Path) -> list[Result]:
    """The results of earlier runs; none without the file."""
    path = root / RESULTS
    return TypeAdapter(list[Result]).validate_json(path.read_bytes()) if path.exists() else []


# ---- one package in one container


class Container(Protocol):
    """A container in which programs can be run: see RunningContainer."""

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float, *, user: str = ""
    ) -> subprocess.CompletedProcess[str]: ...


class Fault(Exception):  # noqa: N818  what is wrong with a package, not with this program
    """Why a package does not work; `output` is that of the program which failed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(kw_only=True)
class Trial:
    """The installation of a package into a container, and its checks.

    `installed` and `replaced` are those of Result, `log` is what the programs printed.
    """

    name: str
    package: Package
    container: Container
    environment: Mapping[str, str] = field(default_factory=dict)
    installed: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def run(self, framework_check: str) -> None:
        """Raises Fault if the package does not work."""
        before, conflicts = self._versions(), self._conflicts()
        pinned = set(re.findall(r"^([\w.-]+)==", self._succeed(["cat", CONSTRAINTS]).stdout, re.MULTILINE))
        chosen = self._install()
        after = self._versions()
        names = {canonicalize_name(Requirement(each).name) for each in self._requirements}
        self.installed = {name: version for name, version in {**after, **chosen}.items() if name in names}
        self.replaced = {
            name: f"{version} -> {after.get(name, 'removed')}"
            for name, version in before.items()
            if after.get(name) != version
        }
        if moved := sorted(f"{name} {self.replaced[name]}" for name in pinned & self.replaced.keys()):
            raise Fault(f"replaces what the image pins: {', '.join(moved)}")
        if new := sorted(self._conflicts() - conflicts):
            raise Fault(new[0], "\n".join(new))
        if not self.package.resolve_only:
            # Two processes: libraries that the one has loaded would hide from the other that it cannot find them.
            for code in (self.package.check, framework_check):
                self._succeed(["python", "-c", code])

    @property
    def _requirements(self) -> list[str]:
        return self.package.install or [self.name]

    def _install(self) -> dict[str, str]:
        """Installs the package; with `resolve_only`, returns the versions that would be installed."""
        if debian := self.package.debian:
            for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-y", "-q", *debian]):
                self._succeed(command, user="0:0")
        if self.package.resolve_only:
            options = ["--no-progress", "--dry-run", "--only-binary=:all:"]  # a source package may not compile
            done = self._succeed(["uv", "pip", "install", *options, *self._requirements])
            return dict(re.findall(r"^ \+ ([\w.-]+)==(\S+)$", done.stderr, re.MULTILINE))
        if self.package.installer == "uv":
            self._succeed(["uv", "pip", "install", "--no-progress", *self._requirements])
        else:
            self._succeed(["pip", "install", "--no-input", "--progress-bar=off", *self._requirements])
        return {}

    def _versions(self) -> dict[str, str]:
        listed = json.loads(self._succeed(["pip", "list", "--format=json"]).stdout)
        return {canonicalize_name(entry["name"]): entry["version"] for entry in listed}

    def _conflicts(self) -> set[str]:
        """The conflicts that `pip check` prints; its status is then 1. Raises Fault if it fails in another way."""
        done = self._run(["pip", "check"])
        if done.returncode == 0:
            return set()
        if done.returncode == 1 and (conflicts := set(done.stdout.splitlines())):
            return conflicts
        raise Fault(f"pip check ended with status {done.returncode}: {error_line(done.stderr)}", done.stderr)

    def _succeed(self, command: Sequence[str], *, user: str = "") -> subprocess.CompletedProcess[str]:
        """Runs a program. Raises Fault with the line of its error if it fails."""
        done = self._run(command, user=user)
        output = done.stdout + done.stderr
        if done.returncode:
            raise Fault(error_line(output) or f"{command[0]} ended with status {done.returncode}", output)
        return done

    def _run(self, command: Sequence[str], *, user: str = "") -> subprocess.CompletedProcess[str]:
        try:
            done = self.container.run(command, self.environment, TIMEOUT_S, user=user)
        except subprocess.TimeoutExpired:
            raise Fault(f"{command[0]}: not finished within {TIMEOUT_S} s") from None
        self.log += [f"$ {' '.join(command)}", done.stdout, done.stderr]
        return done


def error_line(output: str) -> str:
    """The line that says what is wrong: the first one that begins with `ERROR:`, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error:")]
    return one_line((errors or lines or [""])[0 if errors else -1])


def environment_of(host: Host) -> dict[str, str]:
    """Variables that make apt, pip and uv in a container use this machine's settings, and keep no downloads."""
    variables = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"}
    variables |= {"APT_CONFIG": f"{SETTINGS}/apt.conf", "DEBIAN_FRONTEND": "noninteractive"}
    if host.ca:
        variables |= dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"), f"{SETTINGS}/ca.crt")
    return {**variables, **host.proxies, **host.index.for_builds()}


def files_of(host: Host, release: str) -> io.BytesIO:
    """A tar with this machine's settings for apt and its CA certificates, for a container."""
    files = {f"{FOLDER}/apt.conf": b"", **host.files(release, with_index=False)}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(f"{SETTINGS[1:]}/{Path(path).name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    archive.seek(0)
    return archive


# ---- the results


def updated(known: Iterable[Result], new: Iterable[Result], listed: PackageList, project: Project) -> list[Result]:
    """The results in the order of the list, the new ones in place of older ones; without what is listed no more."""
    by_key = {(result.package, result.cell): result for result in (*known, *new)}
    keys = [(name, cell.id) for name, package in listed.packages.items() for cell in cells_of(project, package)]
    return [by_key[key] for key in keys if key in by_key]


def cells_of(project: Project, package: Package) -> tuple[Cell, ...]:
    """The cells of a package; raises UsageError for a pattern that matches none."""
    return cells.select(project.matrix, project.cells, package.cells)


def surprise(package: Package, fault: Fault | None) -> str:
    """What differs from what packages.yaml expects; empty if nothing does."""
    if not package.fails:
        return str(fault or "")
    if not fault:
        return "works now: delete the key `fails`"
    return "" if package.fails in f"{fault} {fault.output}" else f"fails in another way: {fault}"


def page(results: Iterable[Result], listed: PackageList) -> str:
    """docs/packages.md."""
    text = HEAD
    for cell, group in groupby(sorted(results, key=attrgetter("cell")), key=attrgetter("cell")):
        of_cell = list(group)
        days = sorted({f"{result.tested} (image of {result.image})" for result in of_cell})
        rows = [(_command(result, listed.packages[result.package]), _result(result, listed)) for result in of_cell]
        text += f"\n## {cell}\n\nTested on {', '.join(days)}.\n"
        if working := [command for command, said in rows if said == "works."]:
            text += "\n" + textwrap.fill(f"These work: {', '.join(working)}.", 100, break_on_hyphens=False) + "\n"
        if others := [row for row in rows if row[1] != "works."]:
            text += "\n" + "".join(f"- {command}: {said}\n" for command, said in others)
    return text


def _command(result: Result, package: Package) -> str:
    """What to install, and the versions that this was: `peft` 0.21.2."""
    requirements = " ".join(map(shlex.quote, package.install or [result.package]))
    versions = ", ".join(result.installed[name] for name in sorted(result.installed))
    return f"`{'uv pip install ' * (package.installer == 'uv')}{requirements}` {versions}".rstrip()


def _result(result: Result, listed: PackageList) -> str:
    package = listed.packages[result.package]
    verdict = "**does not work**" if result.fault else "resolves; not installed" if package.resolve_only else "works"
    is_expected = bool(package.fails) == bool(result.fault)
    notes = [f"First, as root: `apt-get install {' '.join(package.debian)}`."] if package.debian else []
    notes.append(package.note if package.note and is_expected else result.fault)
    notes += [f"Replaces {name} {change}." for name, change in result.replaced.items()]
    return one_line(" ".join([f"{verdict}.", *filter(None, notes)]))


HEAD = """\
# Packages that people add

The results of `pip install` (or `uv pip install`) in the images, as their user and without a GPU. A
package works if its check loads its CUDA libraries, what the image pins does not change, and `pip
check` names no new conflict. `make packages` tries the packages of
[packages.yaml](../tools/packages.yaml), and writes this page.

For what `builder add` refuses, use [a Dockerfile](team-images.md#debian-packages-files-and-services).
"""


# ---- the command


def record(project: Project, listed: PackageList, new: Sequence[Result]) -> None:
    """Writes the results and docs/packages.md."""
    kept = updated(read_results(project.root), new, listed, project)
    data = json.dumps([result.model_dump() for result in kept], indent=1)
    write_atomically(project.root / RESULTS, data + "\n")
    write_atomically(project.root / PAGE, page(kept, listed))


def run_all(context: Context, listed: PackageList, plan: Sequence[tuple[str, Cell]], *, keep: bool) -> list[str]:
    """Tests packages, records each result at once with `keep`, and returns what differs from the list."""
    project = context.project
    work = context.run(project)
    references = tags.compute(project.matrix, project.cells)
    differences: list[str] = []
    missing: dict[str, str] = {}
    with work.view.live():
        for name, cell in plan:
            reference = tags.local_name(str(references[cell.id][0]), cell)
            if (found := work.engine.image(reference)) is None:
                missing[cell.id] = reference
                continue
            row = f"{cell.id} {name}"
            work.view.begin(row, "testing")
            fault = None
            with work.engine.running(
                found.id, checkout=str(project.root), network_mode=work.host.network or None
            ) as container:
                container.put(files_of(work.host, project.matrix.python[cell.python].debian))
                package = listed.packages[name]
                environment = environment_of(work.host)
                trial = Trial(name=name, package=package, container=container, environment=environment)
                try:
                    trial.run(listed.frameworks[cell.framework])
                except Fault as error:
                    fault = error
            log = project.logs / "{}.package-{}.log".format(cell.id, re.sub(r"[^\w.]+", "-", name).strip("-"))
            write_atomically(log, work.host.hide("\n".join(trial.log)))
            result = Result(
                package=name, cell=cell.id, fault=work.host.hide(str(fault or "")), installed=trial.installed,
                replaced=trial.replaced, image=found.labels.get(f"{tags.OCI}.created", found.created)[:10],
                tested=str(context.today),
            )  # fmt: skip
            if keep:
                record(project, listed, [result])
            if difference := work.host.hide(surprise(package, fault)):
                differences.append(f"  {row}: {difference} (log: {log.relative_to(project.root)})")
            versions = ", ".join(f"{each} {version}" for each, version in trial.installed.items())
            work.view.end(row, "failed" if difference else "done", difference or result.fault or versions)
    for reference in missing.values():
        context.say(f"{reference} is not on this machine: its packages were not tested")
    if len(missing) == len({cell for _, cell in plan}):
        raise UsageError("no package was tested", hint=f"Make an image: {for_cells('builder images', list(missing))}")
    return differences


@click.command()
@click.option("--cells", "patterns", default="", metavar="CELLS", help="Only for these cells: ids, patterns or sets.")
@click.option("--packages", "names", default="", metavar="NAMES", help="Only these packages, separated by spaces.")
@click.option("--no-record", is_flag=True, help=f"Write neither {RESULTS} nor {PAGE}.")
@click.option("--render", is_flag=True, help=f"Only write {PAGE} again.")
@click.option("--list-cells", is_flag=True, help="Only print the ids of the cells of these packages, as JSON.")
@click.pass_obj
def packages(context: Context, *, patterns: str, names: str, no_record: bool, render: bool, list_cells: bool) -> None:
    """Install packages into images, and check that they work. Skips images that are not on this machine."""
    project = context.project
    listed = read_list(project.root)
    if unknown := sorted(set(names.split()) - listed.packages.keys()):
        raise UsageError(f"{LIST} has no package {unknown[0]!r}{did_you_mean(unknown[0], listed.packages)}")
    selected = project.select(patterns.split() or ["*"])
    plan = [
        (name, cell)
        for name, package in listed.packages.items()
        if name in names.split() or not names
        for cell in cells_of(project, package)
        if cell in selected
    ]
    if not plan:
        raise UsageError(f"{LIST} has no such packages for these cells")
    if list_cells:
        click.echo(json.dumps(list(dict.fromkeys(cell.id for _, cell in plan))))
    elif render:
        record(project, listed, [])
    elif differences := run_all(context, listed, plan, keep=not no_record):
        raise ImageTestError("\n".join([f"{counted(len(differences), 'package')} not as listed", *differences]))


if __name__ == "__main__":
    main(packages, obj=Context())
