"""The plan: what would be built, in order, with the digest of every input. No clock, no network, no engine.

Reads matrix, locks and templates; `render` and `build` read the plan. An image's `digest` covers all that its
Dockerfile is made from, so two plans with one digest give the same Dockerfile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from builder import cells, digest, lock, tags
from builder.cells import Cell
from builder.errors import LockError, StaleError
from builder.lock import Wheel
from builder.matrix import Component, Matrix
from builder.project import Project

FORMAT = 1
# What every image is made from besides its components' folders.
COMMON_INPUTS = ("templates/Dockerfile.j2", "templates/macros.j2", "templates/host/env.sh", "locks/uv.txt")

LayerKind = Literal["os", "wheels", "files"]


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """`inputs` is the digest of what the layer is made from; `bytes` is known for wheels only (as downloaded)."""

    kind: LayerKind
    component: str
    inputs: str
    wheels: tuple[Wheel, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(wheel.size for wheel in self.wheels)


@dataclass(frozen=True, kw_only=True)
class PlannedImage:
    """One image to be. `references` are its full tag and its aliases; `requirements` what its lock was asked for."""

    cell: Cell
    components: tuple[str, ...]
    references: tuple[str, ...]
    base: str
    lock: str
    digest: str
    layers: tuple[PlannedLayer, ...]
    requirements: dict[str, list[str]]

    @property
    def id(self) -> str:
        return self.cell.id

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        return tuple(wheel for layer in self.layers for wheel in layer.wheels)

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)


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
        """Bytes of all wheels, each counted once."""
        return sum({wheel.sha256: wheel.size for image in self.images for wheel in image.wheels}.values())

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
                            "component": layer.component,
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
    """The plan for `chosen`; cells without a lock are listed in `unlocked`. Raises LockError, StaleError."""
    references = tags.compute(project.matrix, project.cells)
    trees = _Trees(project.root)
    images, unlocked = [], []
    for cell in chosen:
        locked = lock.read(project.root, cell.id)
        if locked is None:
            unlocked.append(cell.id)
            continue
        if locked.inputs != lock.inputs(project.matrix, cell, project.groups[cell.group]):
            raise StaleError(
                f"locks/{cell.id}.json does not belong to what matrix.yaml asks for now",
                hint=f"Resolve it again: builder lock {cell.id}",
            )
        images.append(_image(project.matrix, cell, locked, [str(ref) for ref in references[cell.id]], trees))
    return Plan(images=tuple(images), unlocked=tuple(unlocked))


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


def _image(matrix: Matrix, cell: Cell, locked: lock.Lock, references: list[str], trees: _Trees) -> PlannedImage:
    names = cells.components(matrix, cell)
    parts = {name: matrix.components[name] for name in names}
    if strange := {wheel.component for wheel in locked.wheels} - set(names):
        raise LockError(
            f"locks/{cell.id}.json has wheels of {', '.join(sorted(strange))}, which is no component of the cell",
            hint=f"Make it again: builder lock {cell.id}",
        )
    base = matrix.debian[matrix.python[cell.python].debian].image
    layers = [_os_layer(parts, base)]
    # CUDA first: it is what most images share. Then in the order of the components.
    for name in sorted(names, key=lambda name: name != "cuda"):
        if wheels := locked.of_component(name):
            layers.append(
                PlannedLayer(
                    kind="wheels",
                    component=name,
                    inputs=digest.of_data([wheel.sha256 for wheel in wheels]),
                    wheels=wheels,
                )
            )
    for name in names:
        if files := trees.of(f"templates/{name}/files"):
            layers.append(PlannedLayer(kind="files", component=name, inputs=digest.of_data(files)))
    inputs = {
        "format": FORMAT,
        "cell": asdict(cell),
        "base": [base, matrix.python[cell.python].debian],
        "image": references[0].rsplit(":", 1)[0],
        "driver": matrix.cuda[cell.cuda].driver,
        # As lists: the order of components and of their variables is the order in the Dockerfile.
        "components": [
            [name, part.model_dump(exclude={"env"}), list(part.env.items())] for name, part in parts.items()
        ],
        "lock": locked.digest,
        "files": [trees.of(name) for name in (*COMMON_INPUTS, *(f"templates/{name}" for name in names))],
    }
    return PlannedImage(
        cell=cell,
        components=names,
        references=tuple(references),
        base=base,
        lock=locked.digest,
        digest=digest.of_data(inputs),
        layers=tuple(layers),
        requirements=locked.requirements,
    )


def _os_layer(parts: dict[str, Component], base: str) -> PlannedLayer:
    apt = sorted({package for part in parts.values() for package in part.apt})
    return PlannedLayer(kind="os", component="base", inputs=digest.of_data({"base": base, "apt": apt}))
