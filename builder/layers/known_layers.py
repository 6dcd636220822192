"""Layers that were made before: `locks/layers.json`, which is committed, has the digests that their inputs give.

The first build of a layer adds it, and every later one, on any machine, must give the same bytes. Layers of plain files
are not recorded: they take no time, and their inputs are in the checkout.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter
from pydantic.dataclasses import dataclass as model

from builder.common import atomic, digest
from builder.common.errors import BuildError
from builder.index.wheels import STRICT
from builder.layers.oci import Layer
from builder.lock import document
from builder.lock.document import KNOWN_LAYERS as PATH
from builder.plan.layer_order import PlannedLayer

FORMAT: Literal[1] = 1


def _check_digest(value: str) -> str:
    if not digest.is_digest(value):
        raise ValueError("expected sha256:<64 hex digits>")
    return value


_Digest = Annotated[str, AfterValidator(_check_digest)]
_Size = Annotated[int, Field(ge=0)]


@model(frozen=True, kw_only=True, config=STRICT)
class KnownLayer:
    """`size` and `unpacked` are bytes of the blob and of the tar in it."""

    digest: _Digest
    diff_id: _Digest
    size: _Size
    unpacked: _Size


@model(frozen=True, kw_only=True, config=STRICT)
class _File:
    layers: dict[str, KnownLayer]
    format: Literal[1] = FORMAT


_FILE = TypeAdapter(_File)
_HINT = f"Restore it with git, or delete it: the next build writes it. {PATH} must be the same on all machines."


class KnownLayers:
    """The known layers of a checkout, by their inputs. Thread-safe."""

    def __init__(self, root: Path) -> None:
        """Raises LockError if the file is damaged."""
        self._path = root / PATH
        self._lock = threading.Lock()
        self._layers = read(root)

    def get(self, planned: PlannedLayer, base: str = "") -> KnownLayer | None:
        """The layer that must be made; `base` is what an operating system is made on."""
        return self._layers.get(_key(planned, base))

    def systems(self, inputs: str) -> list[tuple[str, KnownLayer]]:
        """The known operating systems with these inputs, each with the name of what it is made on."""
        keys = (key for key in self._layers if key.partition(" ")[0] == inputs and " " in key)
        return [(key.partition(" ")[2], self._layers[key]) for key in sorted(keys)]

    def add(self, planned: PlannedLayer, layer: Layer, base: str) -> None:
        """Adds a layer, or compares it with the one that is known.

        `base` is that of the image's operating system. Raises BuildError if the same inputs gave other bytes.
        """
        recorded = KnownLayer(
            digest=layer.digest,
            diff_id=layer.diff_id,
            size=layer.size,
            unpacked=layer.unpacked,
        )
        with self._lock:
            known = self._layers.setdefault(_key(planned, base), recorded)
        check(planned, known, layer)

    def write(self) -> None:
        """Writes the file, if it differs."""
        with self._lock:
            text = dump(self._layers)
            if self._layers and (not self._path.exists() or self._path.read_text(encoding="utf-8") != text):
                atomic.write_text(self._path, text)


def check(planned: PlannedLayer, known: KnownLayer, layer: Layer) -> None:
    """Raises BuildError if a layer has other bytes than the known one with its inputs."""
    tar = (layer.diff_id, layer.unpacked) == (known.diff_id, known.unpacked)
    blob = (layer.digest, layer.size) == (known.digest, known.size)
    # Only operating systems are compressed here, and zlib's successors compress to other bytes.
    if not tar or not (blob or planned.kind == "os"):
        what = ("digest", layer.digest, known.digest)
        if planned.kind == "os" or layer.digest == known.digest:
            what = ("diff id", layer.diff_id, known.diff_id)
        raise BuildError(
            f"layer {planned.name} has the {what[0]} {what[1]}, but {PATH} records {what[2]}",
            hint="The same inputs must give the same bytes. If the recorded layer is wrong, delete its line from "
            f"{PATH}: {planned.inputs}",
        )


def _key(planned: PlannedLayer, base: str) -> str:
    """An operating system on another base has other bytes."""
    return f"{planned.inputs} {base}" if planned.kind == "os" else planned.inputs


def read(root: Path) -> dict[str, KnownLayer]:
    """The known layers of a checkout; none without the file. Raises LockError."""
    text = document.read_text(root / PATH, _HINT)
    if text is None:
        return {}
    return document.validate(_FILE, text, PATH, FORMAT, _HINT).layers


def dump(layers: dict[str, KnownLayer]) -> str:
    """The file's text, with one line for each layer, sorted by its inputs."""
    lines = [f"{json.dumps(key)}: {json.dumps(vars(layers[key]))}" for key in sorted(layers)]
    return f'{{\n "format": {FORMAT},\n "layers": {document.block("{", lines, "}")}\n}}\n'


def prune(root: Path, inputs: Collection[str]) -> bool:
    """Removes layers that no planned layer needs; returns whether there were any. Raises LockError."""
    before = read(root)
    after = {key: layer for key, layer in before.items() if key.partition(" ")[0] in inputs}
    if after != before:
        atomic.write_text(root / PATH, dump(after))
    return after != before
