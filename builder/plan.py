"""The plan: what would be built, in order, with the digest of every input. No clock, no network, no engine.

Reads matrix, locks and templates; `render` and `build` read the plan. An image's `digest` covers all that its
Dockerfile is made from, so two plans with one digest give the same Dockerfile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from builder import cells, digest, layers, lock, settings, splice, tags
from builder.cells import CUDA, Cell
from builder.errors import LockError, StaleError
from builder.layers import Parts, PlannedLayer
from builder.lock import Wheel
from builder.matrix import Component, Matrix, Python
from builder.project import Project
from builder.settings import Settings

FORMAT = 3
# What every image is made from besides its components' folders.
OS_INPUTS = ("templates/os.j2", "templates/macros.j2", "templates/host/env.sh")
UV_LOCK = "locks/uv.txt"
COMMON_INPUTS = (*OS_INPUTS, "templates/Dockerfile.j2", UV_LOCK)
COMPILER = "templates/python/compile.py"


@dataclass(frozen=True, kw_only=True)
class PlannedImage:
    """One image to be.

    `uv` is the release of Python that uv provides, empty where Debian does; `references` are its full tag and its
    aliases; `requirements` what its lock was asked for; `layers` its stack, lowest first; `file_components` the
    components with files of their own; `os` the digest of the os stage's inputs.
    """

    cell: Cell
    components: tuple[str, ...]
    references: tuple[str, ...]
    base: str
    debian: str
    uv: str
    os: str
    lock: str
    digest: str
    wheels: tuple[Wheel, ...]
    layers: tuple[PlannedLayer, ...]
    file_components: tuple[str, ...]
    requirements: dict[str, list[str]]
    settings: Settings

    @property
    def id(self) -> str:
        return self.cell.id

    def of_component(self, component: str) -> tuple[Wheel, ...]:
        return tuple(wheel for wheel in self.wheels if wheel.component == component)

    @property
    def constraints(self) -> str:
        """pip's constraints file of the image."""
        return constraints(self.cell.framework, self.wheels, self.requirements)

    @property
    def bytes(self) -> int:
        return sum(wheel.size for wheel in self.wheels)


@dataclass(frozen=True, kw_only=True)
class Plan:
    images: tuple[PlannedImage, ...]
    unlocked: tuple[str, ...] = ()

    @property
    def sum_bytes(self) -> int:
        """Bytes of all wheels if no image shared any."""
        return sum(image.bytes for image in self.images)

    @property
    def unique_bytes(self) -> int:
        """Bytes of all layers of wheels, each counted once."""
        return sum({layer.inputs: layer.bytes for image in self.images for layer in image.layers}.values())

    def as_data(self) -> dict[str, Any]:
        """For `--format json`: stable, and without anything that depends on the machine."""
        return {
            "format": FORMAT,
            "images": [
                {
                    "id": image.id,
                    "cell": asdict(image.cell),
                    "references": list(image.references),
                    "base": image.base,
                    "lock": image.lock,
                    "digest": image.digest,
                    "components": list(image.components),
                    "layers": [
                        {
                            "kind": layer.kind,
                            "name": layer.name,
                            "inputs": layer.inputs,
                            "wheels": [wheel.file for wheel in layer.wheels],
                            "bytes": layer.bytes,
                        }
                        for layer in image.layers
                    ],
                }
                for image in self.images
            ],
            "not_locked": list(self.unlocked),
            "bytes": {"sum": self.sum_bytes, "unique": self.unique_bytes},
        }


def make(project: Project, chosen: Sequence[Cell]) -> Plan:
    """The plan for `chosen`; cells without a lock are listed in `unlocked`. Raises LockError, StaleError.

    All locks of the matrix are read: the order of an image's layers depends on what other images share with it.
    """
    references = tags.compute(project.matrix, project.cells)
    trees = _Trees(project.root)
    drafts: dict[str, _Draft] = {}
    for cell in project.cells:
        locked = lock.read(project.root, cell.id)
        if locked is None:
            continue
        if locked.inputs != lock.inputs(project.matrix, cell, project.together[cell.group]):
            raise StaleError(
                f"locks/{cell.id}.json does not belong to what matrix.yaml asks for now",
                hint=f"Resolve it again: builder lock {cell.id}",
            )
        drafts[cell.id] = _draft(project.matrix, cell, locked, trees)
    stacks = layers.arrange({cell_id: draft.parts for cell_id, draft in drafts.items()})
    images = [
        _image(project.matrix, drafts[cell.id], stacks[cell.id], [str(ref) for ref in references[cell.id]], trees)
        for cell in chosen
        if cell.id in drafts
    ]
    return Plan(images=tuple(images), unlocked=tuple(cell.id for cell in chosen if cell.id not in drafts))


def make_locked(project: Project, chosen: Sequence[Cell]) -> Plan:
    """As `make`, but a cell without a lock is a LockError."""
    made = make(project, chosen)
    if made.unlocked:
        raise LockError(
            f"not locked: {', '.join(made.unlocked[:5])}{' ...' if len(made.unlocked) > 5 else ''}",
            hint=f"Resolve first: builder lock {made.unlocked[0]}",
        )
    return made


class _Trees:
    """Digests of template folders, each read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, dict[str, str]] = {}

    def of(self, name: str) -> dict[str, str]:
        if name not in self._known:
            path = self._root / name
            self._known[name] = digest.of_tree(self._root, path) if path.exists() else {}
        return self._known[name]


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A cell with what its layers are made from."""

    cell: Cell
    locked: lock.Lock
    components: dict[str, Component]
    file_components: tuple[str, ...]
    parts: Parts


def _draft(matrix: Matrix, cell: Cell, locked: lock.Lock, trees: _Trees) -> _Draft:
    names = cells.components(matrix, cell)
    components = {name: matrix.components[name] for name in names}
    if strange := {wheel.component for wheel in locked.wheels} - set(names):
        raise LockError(
            f"locks/{cell.id}.json has wheels of {', '.join(sorted(strange))}, which is no component of the cell",
            hint=f"Make it again: builder lock {cell.id}",
        )
    files = {name: found for name in names if (found := trees.of(f"templates/{name}/files"))}
    return _Draft(
        cell=cell,
        locked=locked,
        components=components,
        file_components=tuple(files),
        parts=Parts(
            framework=cell.framework,
            components=names,
            python=cell.python,
            wheels=locked.wheels,
            os=digest.of_data(_os_inputs(matrix, cell, components, trees)),
            files=digest.of_data(
                [splice.FORMAT, cell.python, files, constraints(cell.framework, locked.wheels, locked.requirements)]
            ),
            compiler=digest.of_data(trees.of(COMPILER)),
        ),
    )


def _os_inputs(matrix: Matrix, cell: Cell, components: dict[str, Component], trees: _Trees) -> list[Any]:
    python = matrix.python[cell.python]
    release = python.debian
    by_uv = [python.uv, trees.of(UV_LOCK)] if python.uv else []  # each uv knows one build of a release
    return [
        [release, matrix.debian[release].image, cell.python, *by_uv],
        apt_packages(python, components.values()),
        [trees.of(name) for name in OS_INPUTS],
    ]


def constraints(framework: str, wheels: Iterable[Wheel], requirements: Mapping[str, Sequence[str]]) -> str:
    """What pip must not replace in a running container: the framework, what was asked for with it, and its CUDA.

    The framework is more than one package: jaxlib and jax-cuda12-plugin belong to jax.
    """
    asked = [canonicalize_name(Requirement(one).name) for one in requirements.get(framework, ())]
    pinned = sorted(
        (wheel.name, wheel.version)
        for wheel in wheels
        if wheel.component == CUDA or wheel.name in asked or (asked and wheel.name.startswith(asked[0]))
    )
    return "".join(f"{name}=={version}\n" for name, version in pinned)


def apt_packages(python: Python, components: Iterable[Component]) -> list[str]:
    """Debian packages of a Python and of all components, each once, in alphabetical order."""
    return sorted({*python.packages, *(package for component in components for package in component.apt)})


def _image(
    matrix: Matrix, draft: _Draft, stack: tuple[PlannedLayer, ...], references: list[str], trees: _Trees
) -> PlannedImage:
    cell, components = draft.cell, draft.components
    release = matrix.python[cell.python].debian
    base = matrix.debian[release].image
    without_plan = settings.of_image(
        matrix, cell, components, reference=references[0], lock=draft.locked.digest, plan=""
    )
    inputs = {
        "format": FORMAT,
        "settings": asdict(without_plan),
        "cell": asdict(cell),
        "base": [base, release],
        "image": references[0].rsplit(":", 1)[0],
        # As lists: the order of components and of their variables is the order in the Dockerfile.
        "components": [
            [name, part.model_dump(exclude={"env"}), list(part.env.items())] for name, part in components.items()
        ],
        "lock": draft.locked.digest,
        "layers": [[layer.name, layer.inputs] for layer in stack],
        "files": [trees.of(name) for name in (*COMMON_INPUTS, *(f"templates/{name}" for name in components))],
    }
    plan_digest = digest.of_data(inputs)
    return PlannedImage(
        cell=cell,
        components=tuple(components),
        references=tuple(references),
        base=base,
        debian=release,
        uv=matrix.python[cell.python].uv or "",
        os=draft.parts.os,
        lock=draft.locked.digest,
        digest=plan_digest,
        wheels=draft.locked.wheels,
        layers=stack,
        file_components=draft.file_components,
        requirements=draft.locked.requirements,
        settings=replace(without_plan, labels={**without_plan.labels, settings.PLAN_LABEL: plan_digest}),
    )
