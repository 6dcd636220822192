"""Makes `os` layers: BuildKit runs the `os` stage of a rendered Dockerfile, `builder.flatten` makes one layer of it.

What a stage's inputs were last made into is remembered in the store and used until `rebase` makes it anew: within one
store, the same inputs have one `os` layer.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as model

from builder import build, context, digest, flatten
from builder.base import Base
from builder.flatten import Flattened
from builder.layers import PlannedLayer
from builder.oci import BuiltLayer
from builder.plan import PlannedImage
from builder.store import Store
from builder.work import Work


@model(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True))
class OsLayer:
    """An `os` layer of the store. `created` is RFC 3339: the time of its newest package.

    `base` is the name of the image below it, `python` Debian's versions of Python and zlib, `taken` what it has in
    /opt, `folders` those that are not 0755 root:root.
    """

    digest: str
    diff_id: str
    size: int
    created: str
    base: str
    python: str
    taken: tuple[str, ...]
    folders: tuple[str, ...]

    def built(self, planned: PlannedLayer) -> BuiltLayer:
        return BuiltLayer(planned=planned, digest=self.digest, diff_id=self.diff_id, size=self.size)


_OS_LAYER = TypeAdapter(OsLayer)


def recall(store: Store, inputs: str) -> OsLayer | None:
    """The layer that these inputs were last made into."""
    data = store.recall(inputs)
    try:
        return None if data is None else _OS_LAYER.validate_json(json.dumps(data))
    except ValidationError:
        return None


def context_of(work: Work, image: PlannedImage) -> bytes:
    """What the image's `os` stage is built from."""
    return context.make(work.project.root, image, work.host.files(image.debian, index_too=False))


def make(work: Work, store: Store, image: PlannedImage, tar: bytes, from_: Base, *, fresh: bool) -> OsLayer:
    """Builds the image's `os` stage from `tar` and remembers its layer. Raises BuildError, EngineError or DiskError."""
    image_id = build.run(work, image.id, row(image), tar, from_, target="os", fresh=fresh)
    try:
        with work.project.scratch() as scratch:
            archive = Path(scratch) / "saved.tar"
            with archive.open("wb") as out:
                work.engine.save(image_id, out)
            flat = _flatten(store, archive, image.cell.python)
    finally:
        work.engine.remove_image(image_id)
    layer = OsLayer(
        digest=flat.digest,
        diff_id=flat.diff_id,
        size=flat.size,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(flat.newest)),
        base=from_.name,
        python=f"{flat.python} uv:{image.uv}" if image.uv else flat.python,
        taken=flat.taken,
        folders=flat.folders,
    )
    store.remember(image.os, asdict(layer))
    return layer


def row(image: PlannedImage) -> str:
    """What the stage is called in views and logs."""
    return f"os-{image.debian}-py{image.cell.python}-{digest.short(image.os)[:6]}"


def _flatten(store: Store, archive: Path, python: str) -> Flattened:
    layers = flatten.saved_layers(archive, archive.parent)
    archive.unlink()
    made: list[Flattened] = []

    def write(out: BinaryIO) -> str:
        made.append(flatten.write(layers, python, out))
        return made[0].digest

    store.write(write)
    return made[0]
