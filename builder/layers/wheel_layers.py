"""Layers that the store records by their inputs, and how those of wheels are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from builder.common.errors import BuildError, FetchError
from builder.layers import known_layers, splice, wheel
from builder.layers.oci import KnownLayer, Layer
from builder.layers.splice import Source, SpliceError, WrittenLayer
from builder.layers.store import Store
from builder.layers.wheel_zip import WheelError
from builder.plan.layer_order import PlannedLayer


def get(store: Store, planned: PlannedLayer) -> Layer | None:
    """The layer, if the store has it and a valid record of it."""
    record = store.get_record(planned.inputs)
    if record is None or not all(isinstance(record.get(name), list) for name in ("sources", "files")):
        return None
    try:
        recorded = KnownLayer(**{field.name: record[field.name] for field in fields(KnownLayer)})
    except (KeyError, ValidationError):
        return None
    return recorded.built(planned)


def put(
    store: Store, planned: PlannedLayer, write: Callable[[BinaryIO], WrittenLayer], known: KnownLayer | None = None
) -> Layer:
    """Stores the layer that `write` writes, and its record. Raises BuildError if it is not the `known` one."""

    def write_known(out: BinaryIO) -> WrittenLayer:
        written = write(out)
        if known:
            known_layers.check(planned, known, written)
        return written

    layer = store.write(write_known)
    recorded = KnownLayer(digest=layer.digest, diff_id=layer.diff_id, size=layer.size, unpacked=layer.unpacked)
    sources = [[source.path, source.offset, source.length] for source in layer.sources]
    store.put_record(planned.inputs, {**vars(recorded), "sources": sources, "files": layer.files})
    return recorded.built(planned)


def put_known(store: Store, planned: PlannedLayer, known: KnownLayer) -> Layer:
    """Records a layer of bytecode whose blob the store has. Its paths are those of the layers that it was made from."""
    store.put_record(planned.inputs, {**vars(known), "sources": [], "files": []})
    return known.built(planned)


def sources_of(store: Store, inputs: str, layer: Layer) -> list[Source]:
    """The Python files of a layer of wheels that was made from these inputs."""
    record = store.get_record(inputs)
    if record is None:
        raise BuildError(
            f"layer {layer.digest} disappeared from the store during the build",
            hint="Run the same command again to rebuild it.",
        )
    return [Source(path=path, offset=offset, length=length) for path, offset, length in record["sources"]]


def check_paths(store: Store, image_id: str, layers: Iterable[PlannedLayer], taken: Collection[str]) -> None:
    """Raises BuildError if two layers, which the store has, have different files for one path.

    Their order would decide which file is used. `taken` are paths of the operating system in folders that wheels use.
    Wheels of one namespace may share a file.
    """
    files: dict[str, tuple[str, list[object]]] = {}
    for layer in layers:
        for path, *file in (store.get_record(layer.inputs) or {}).get("files", ()):
            first_name, first = files.setdefault(path, (layer.name, file))
            if path in taken:
                raise BuildError(f"{image_id}: /{path} is in the os layer and in {layer.name}")
            if first != file:
                raise BuildError(
                    f"{image_id}: {first_name} and {layer.name} have different files for /{path}",
                    hint="Two of their wheels are incompatible: pin other versions in matrix.yaml.",
                )
    names = {path: name for path, (name, _) in files.items()} | dict.fromkeys(taken, "the os layer")
    folders: dict[str, str] = {}
    for path, name in names.items():
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders[folder] = name
            folder = folder.rpartition("/")[0]
    for path in sorted(folders.keys() & names.keys()):
        raise BuildError(f"{image_id}: /{path} is a folder in {folders[path]} and something else in {names[path]}")


def write(wheels: Iterable[tuple[str, Path]], python: str, out: BinaryIO, *, diff_id: str = "") -> WrittenLayer:
    """Writes a layer of wheels (file name, path), in this order; `python` is empty for CUDA wheels.

    With the `diff_id` of a known layer, nothing is inflated: the caller compares the digest.

    Raises WheelError, SpliceError, FileNotFoundError.
    """
    with ExitStack() as stack:
        files = [(name, stack.enter_context(path.open("rb", buffering=splice.CHUNK))) for name, path in wheels]
        place = wheel.environment(python) if python else wheel.CUDA
        return splice.write(wheel.layer_entries(files, place), out, diff_id=diff_id)


def make(store: Store, planned: PlannedLayer, paths: Sequence[Path], known: KnownLayer | None = None) -> Layer:
    """Stores a layer of wheels; `paths` are in the order of the layer's wheels.

    Raises FetchError, DiskError, and BuildError if it is not the `known` one.
    """
    wheels = [(file.file, path) for file, path in zip(planned.wheels, paths, strict=True)]
    diff_id = known.diff_id if known else ""
    try:
        return put(store, planned, lambda out: write(wheels, planned.python, out, diff_id=diff_id), known)
    except (WheelError, SpliceError) as error:
        raise FetchError(str(error), hint="The wheel itself is invalid: pin another version.") from error
