"""Known layers: `locks/layers.json`, which is committed, maps the inputs of each layer to its digests.

The first build of a layer adds it, and every later one, on any machine, must give the same bytes. Layers of plain files
are not recorded: they take no time, and their inputs are in the checkout.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as model

from builder.common import lock_text
from builder.common.errors import BuildError, LockError
from builder.common.files import write_atomically
from builder.common.lock_text import KNOWN_LAYERS as PATH
from builder.index.wheels import STRICT
from builder.layers.oci import Layer
from builder.plan.layer_order import PlannedLayer

FORMAT: Literal[4] = 4


@model(frozen=True, kw_only=True, config=STRICT)
class _File:
    """`layers` are layers of wheels and of bytecode, `systems` operating systems; both are keyed by their inputs."""

    layers: dict[str, Layer]
    systems: dict[str, Layer]
    format: Literal[4] = FORMAT


_FILE = TypeAdapter(_File)
_HINT = f"Restore an intact version, or delete it: the next build writes it. {PATH} must be the same on all machines."


class KnownLayers:
    """The known layers of a checkout, by their inputs. Thread-safe."""

    def __init__(self, root: Path) -> None:
        """Raises LockError if the file is damaged."""
        self._path = root / PATH
        self._lock = threading.Lock()
        self._layers = _read(root)

    def get(self, inputs: str) -> Layer | None:
        """The layer that a build must give; None if it is not known."""
        return self._layers.get(inputs)

    def add(self, planned: PlannedLayer, layer: Layer) -> None:
        """Adds a layer, or compares it with the known one. Raises BuildError if the same inputs gave other bytes."""
        with self._lock:
            known = self._layers.setdefault(planned.inputs, layer)
        check_layer(planned.name, planned.inputs, known, layer)

    def write(self) -> None:
        """Writes the file, if it differs."""
        with self._lock:
            text = _dump(self._layers)
            if self._layers and (not self._path.exists() or self._path.read_text(encoding="utf-8") != text):
                write_atomically(self._path, text)


def check_layer(name: str, inputs: str, known: Layer, layer: Layer) -> None:
    """Raises BuildError if a layer has other bytes than the known one with its inputs."""
    for field, value in vars(layer).items():
        if value != (recorded := vars(known)[field]):
            raise BuildError(  # both values may be long lists of paths
                f"layer {name} has {field} {value!s:.200}, but {PATH} records {recorded!s:.200}",
                hint="The same inputs must give the same bytes. If the recorded layer is wrong, delete its line from "
                f"{PATH}: {inputs}",
            )


def _read(root: Path) -> dict[str, Layer]:
    """The known layers of a checkout by their inputs; none without the file. Raises LockError."""
    text = lock_text.read_lock_text(root / PATH, _HINT)
    if text is None:
        return {}
    file = lock_text.validate_lock(_FILE, text, PATH, FORMAT, _HINT)
    layers = file.layers | file.systems
    if json.loads(_dump(layers)) != json.loads(text):  # the type allows an operating system without its own fields
        raise LockError(f"{PATH} is damaged: a layer lacks a field", hint=_HINT)
    return layers


def _dump(layers: Mapping[str, Layer]) -> str:
    """The file's text, with one line for each layer, sorted by its inputs."""
    blocks = []
    for is_system in (False, True):
        lines = [
            f"{json.dumps(inputs)}: {json.dumps(layer.as_record())}"
            for inputs, layer in sorted(layers.items())
            if bool(layer.created) is is_system
        ]
        blocks.append(lock_text.json_block("{", lines, "}"))
    return f'{{\n "format": {FORMAT},\n "layers": {blocks[0]},\n "systems": {blocks[1]}\n}}\n'


def prune(root: Path, inputs: Collection[str], *, check: bool = False) -> bool:
    """Removes layers that no planned layer needs, unless `check`; returns True if there are any. Raises LockError."""
    before = _read(root)
    after = {key: layer for key, layer in before.items() if key in inputs}
    if after != before and not check:
        write_atomically(root / PATH, _dump(after))
    return after != before
