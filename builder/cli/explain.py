"""The command that says why: explain."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from packaging.version import Version
from rich.text import Text

from builder import explain, facts, gpu, host, lock, runson, tags
from builder.cells import Cell
from builder.cli.context import Context
from builder.errors import RefusedError, UsageError, VerifyError
from builder.explain import Resolve
from builder.host import Host
from builder.matrix import Matrix
from builder.project import Project
from builder.reference import ImageRef
from builder.registry import MANIFESTS, Registry
from builder.released import Index
from builder.resolve import Resolver
from builder.runson import Device, ImageNeeds

THIS = "this"
_INDEXES = (MANIFESTS[1], MANIFESTS[3])  # media types of manifests for several platforms
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_TOO_OLD = re.compile(r"driver \S+ is too old: .* takes ([0-9.]+[0-9]) or newer", re.ASCII)
_WORDS = {True: "runs", False: "does not run", None: "not known"}
_STYLES = {True: "green", False: "bold red", None: "yellow"}
EXAMPLES = """\b
Examples:
  builder explain pt-2.9-cu130-py39              why not, by whose metadata, and what works nearby
  builder explain tf-2.19-cu125-py311            a release, CUDA or Python that matrix.yaml does not have
  builder explain jax-0.10.2-cpu-py313-jupyter   a full release, no CUDA, a variant
  builder explain --gpu "RTX 5090" --driver 570.86.10
                                                 which cells of the matrix run there, and why others do not
  builder explain --gpu this "pt-*"              the GPUs and the driver of this machine
  builder explain --gpu 9.0 ghcr.io/org/pt-cuda:2.9
                                                 a compute capability; an image in a registry, by its labels alone
\b
Exit code: 0 where it works, 16 where it does not; with --gpu, 0 where every image that is named runs (or, where none
is named, any cell of the matrix does).
"""


@click.command(name="explain", epilog=EXAMPLES)
@click.argument("wanted", metavar="[COMBINATION | CELLS | IMAGES]...", nargs=-1)
@click.option(
    "--gpu", "gpu_name", metavar="NAME", help="A GPU by name or compute capability; `this`: those of this machine."
)
@click.option("--driver", default="", metavar="VERSION", help="Its driver, such as 570.86.10; with --gpu.")
@click.pass_obj
def explain_command(context: Context, wanted: Sequence[str], gpu_name: str | None, driver: str) -> None:
    """Say whether a combination works, or which images run on a GPU, and why not.

    COMBINATION is framework, version, CUDA, Python and variant in the form of a cell's id, in matrix.yaml or not. It is
    checked against what the package index has and what the packages' metadata requires, then resolved; nothing is
    written.

    With --gpu, CELLS are ids, patterns, sets or short tags of matrix.yaml (default: all), IMAGES are names with a
    registry, which is asked.
    """
    project = context.project
    if gpu_name is not None:
        _on_gpu(context, project, wanted, gpu_name, driver)
        return
    if driver:
        raise UsageError("--driver says nothing without --gpu")
    if len(wanted) != 1:
        raise UsageError("name one combination, or a GPU", hint="`builder explain --help` has examples.")
    asked = explain.parse(project.matrix, wanted[0])
    lent = host.read()
    told = explain.explain(
        project.matrix, project.cells, Index(lent.index), facts.load(), asked, _resolution(context, project, lent)
    )
    for line in told.lines:
        click.echo(line)
    if not told.works:
        raise RefusedError(f"{told.id} does not work")


def _resolution(context: Context, project: Project, lent: Host) -> Resolve:
    """uv's reason against a cell; none is asked for where a lock shows that there is none."""
    known = {cell.id for cell in project.cells}

    def reason(matrix: Matrix, cell: Cell) -> str:
        found = lock.read(project.root, cell.id) if cell.id in known else None
        if found and found.inputs == lock.inputs(project.matrix, cell, project.together[cell.group]):
            return ""
        context.say(f"{cell.id}: resolving")
        return Resolver(project, lent, matrix=matrix, environ=os.environ, say=context.say).reason(cell)

    return reason


@dataclass(frozen=True, kw_only=True)
class _Image:
    """Cells of one group, which have the same needs, a cell by a tag of it, or an image in a registry."""

    name: str
    needs: ImageNeeds


def _on_gpu(context: Context, project: Project, wanted: Sequence[str], name: str, driver: str) -> None:
    known = facts.load()
    devices, driver = _devices(name, driver)
    images = [*_images(project, wanted)]
    refused: set[str] = set()
    for device in devices:
        named = device.spoken != device.name or device.capability in device.name
        capability = "" if named else f" (compute capability {device.capability})"
        click.echo(f"{device.spoken}{capability}{f', driver {driver}' if driver else ''}:")
        for image in images:
            verdict = runson.judge(device, driver, image.needs, known)
            if not verdict.runs:
                refused.add(image.name)
            state = Text(f"  {_WORDS[verdict.runs]:<14}", style=_STYLES[verdict.runs])
            told = "; ".join(_strongest(verdict.reasons))
            context.out.print(state, Text(f"{image.name}{': ' if told else ''}{told}"), sep="", soft_wrap=True)
    if (wanted and refused) or len(refused) == len(images):
        raise RefusedError(f"{len(refused)} of {len(images)} do not run there, or nobody knows it")


def _strongest(reasons: Sequence[str]) -> list[str]:
    """Of several that find the driver too old, only the one that takes the newest: that one serves the others too."""
    oldest = {one: Version(found[1]) for one in reasons if (found := _TOO_OLD.fullmatch(one))}
    kept = max(oldest, key=lambda one: oldest[one], default="")
    return [one for one in reasons if one not in oldest or one == kept]


def _devices(name: str, driver: str) -> tuple[Sequence[Device], str]:
    if name != THIS:
        return [runson.find_gpu(name, facts.load())], driver
    found, gpus = gpu.read()
    if not gpus:
        raise UsageError(
            "no NVIDIA driver with a GPU answers on this machine", hint='Name one: --gpu "RTX 5090" --driver 570.86.10'
        )
    different = {(one.name, one.capability): one for one in gpus}
    return list(different.values()), driver or found


def _images(project: Project, wanted: Sequence[str]) -> Iterator[_Image]:
    """Cells by ids and patterns first. A name with a registry is what is published there, whatever is built here."""
    by_tag = _by_tag(project)
    images = [one for one in wanted if one in by_tag or "/" in one]
    patterns = [one for one in wanted if one not in images]
    groups: dict[str, list[Cell]] = {}
    if patterns or not images:
        for cell in project.select(patterns or ("*",)):
            groups.setdefault(cell.group, []).append(cell)
    for group, members in groups.items():
        suffixes = [cell.suffix for cell in members]
        name = group + (suffixes[0] if len(suffixes) == 1 else f"{{{','.join(suffixes)}}}")
        yield _Image(name=name, needs=_needs(project, members[0]))
    lent: Host | None = None
    for one in images:
        try:
            reference = ImageRef.parse(one)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if not reference.registry and (found := by_tag.get(one)):
            yield _Image(name=f"{one} ({found.id})", needs=_needs(project, found))
            continue
        lent = lent or host.read()
        labels = labels_of(Registry(reference, host=lent, write=False), reference.digest or reference.tag or "latest")
        yield _Image(name=one, needs=runson.needs_of_labels(labels))


def _by_tag(project: Project) -> dict[str, Cell]:
    """Cells by their tags without registry: org/pt-cuda:2.9, and pt-cuda:2.9."""
    by_id = {cell.id: cell for cell in project.cells}
    found = {}
    for cell, names in tags.compute(project.matrix, project.cells).items():
        for tag in names:
            short = f"{tag.repository}:{tag.tag}"
            found[short] = found[short.rsplit("/", maxsplit=1)[-1]] = by_id[cell]
    return found


def _needs(project: Project, cell: Cell) -> ImageNeeds:
    build = facts.load().build(project.matrix.frameworks[cell.framework].package, cell.release, cell.cuda)
    return runson.needs_of_build(cell.cuda, build, facts.load(), cell.framework)


def labels_of(registry: Registry, name: str) -> Mapping[str, str]:
    """Labels of an image in a registry; of one for several platforms, of that for ours. No layer is read."""
    found = registry.manifest(name)
    try:
        if found and found.media_type in _INDEXES:
            listed = _json(found.content)["manifests"]
            ours = [one["digest"] for one in listed if _is_ours(one.get("platform", {}))]
            found = registry.manifest(_digest(ours[0])) if ours else None
        if found is None:
            raise VerifyError(f"{registry.name} has no {name} for Linux on {lock.PLATFORM}")
        config = _json(registry.read_blob(_digest(_json(found.content)["config"]["digest"])))
        labels = config.get("config", {}).get("Labels") or {}
        return {str(key): str(value) for key, value in labels.items()}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise VerifyError(f"{registry.name}: the manifest or configuration of {name} cannot be read") from error


def _is_ours(platform: Mapping[str, Any]) -> bool:
    return (platform.get("os"), platform.get("architecture")) == ("linux", "amd64")


def _digest(told: Any) -> str:
    """What goes into an address; what is then read is checked against it."""
    if not isinstance(told, str) or not _DIGEST.fullmatch(told):
        raise ValueError
    return told


def _json(content: bytes) -> dict[str, Any]:
    found = json.loads(content)
    if not isinstance(found, dict):
        raise TypeError
    return found
