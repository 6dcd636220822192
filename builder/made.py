"""Layers that the store has, by what they are made from; and making those of wheels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from builder import splice, wheel
from builder.cells import CUDA
from builder.errors import BuildError, FetchError
from builder.layers import PlannedLayer
from builder.oci import BuiltLayer
from builder.splice import Source, SpliceError
from builder.store import Store
from builder.wheel import Place, WheelError


def recall(store: Store, layer: PlannedLayer, key: str = "") -> BuiltLayer | None:
    """The layer, if the store has it. `key` if not all that it is made from was known when it was planned."""
    found = store.recall(key or layer.inputs)
    if found is None:
        return None
    return BuiltLayer(
        planned=layer,
        digest=found["digest"],
        diff_id=found["diff_id"],
        size=found["size"],
        key=key or layer.inputs,
    )


def remember(store: Store, layer: PlannedLayer, write: Callable[[BinaryIO], splice.Layer], key: str = "") -> BuiltLayer:
    """Has `write` write the layer's blob, and keeps what became of it."""
    made: list[splice.Layer] = []

    def run(out: BinaryIO) -> str:
        made.append(write(out))
        return made[0].digest

    store.write(run)
    sources = [[one.path, one.offset, one.length] for one in made[0].sources]
    data = {
        "digest": made[0].digest,
        "diff_id": made[0].diff_id,
        "size": made[0].size,
        "sources": sources,
        "files": made[0].files,
    }
    store.remember(key or layer.inputs, data)
    return BuiltLayer(
        planned=layer, digest=made[0].digest, diff_id=made[0].diff_id, size=made[0].size, key=key or layer.inputs
    )


def sources_of(store: Store, layer: PlannedLayer) -> list[Source]:
    """The Python files of a layer of wheels."""
    found = store.recall(layer.inputs)
    if found is None:
        raise BuildError(f"the store lost the layer {layer.name} during the build", hint="Run the same command again.")
    return [Source(path=path, offset=offset, length=length) for path, offset, length in found["sources"]]


def check_paths(store: Store, image_id: str, layers: Sequence[BuiltLayer], taken: Collection[str]) -> None:
    """Raises BuildError if two layers have different files for one path: which one counts would depend on their order.

    `taken` are paths of the operating system where wheels go too. Wheels of one namespace may share a file.
    """
    found: dict[str, tuple[BuiltLayer, list[object]]] = {}
    for layer in layers:
        for path, *what in (store.recall(layer.key) or {}).get("files", ()):
            first, known = found.setdefault(path, (layer, what))
            if path in taken:
                raise BuildError(f"{image_id}: /{path} is in the os layer and in {layer.planned.name}")
            if known != what:
                raise BuildError(
                    f"{image_id}: {first.planned.name} and {layer.planned.name} have different files for /{path}",
                    hint="Two of their wheels do not fit together: pin other versions in matrix.yaml.",
                )
    names = {path: layer.planned.name for path, (layer, _) in found.items()} | dict.fromkeys(taken, "the os layer")
    above: dict[str, str] = {}
    for path, name in names.items():
        folder = path.rpartition("/")[0]
        while folder and folder not in above:
            above[folder] = name
            folder = folder.rpartition("/")[0]
    for path in sorted(above.keys() & names.keys()):
        raise BuildError(f"{image_id}: /{path} is a folder in {above[path]} and something else in {names[path]}")


def place_of(layer: PlannedLayer) -> Place:
    return wheel.CUDA if layer.component == CUDA else wheel.environment(layer.python)


def wheels(store: Store, layer: PlannedLayer, files: Sequence[Path]) -> BuiltLayer:
    """Makes a layer of wheels, whose `files` are in the order of the layer's wheels. Raises FetchError, DiskError."""
    with ExitStack() as stack:
        opened = [
            (one.file, stack.enter_context(path.open("rb", buffering=splice.CHUNK)))
            for one, path in zip(layer.wheels, files, strict=True)
        ]
        try:
            return remember(store, layer, lambda out: splice.write(wheel.layer_entries(opened, place_of(layer)), out))
        except (WheelError, SpliceError) as error:
            raise FetchError(str(error), hint="The wheel itself is faulty: pin another version.") from error
