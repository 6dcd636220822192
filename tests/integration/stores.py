"""The contents of a store of the tests, and whether they are complete."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from builder.common.console import View
from builder.engine.client import Engine
from builder.engine.load import Loader
from builder.layers.oci import Layer
from builder.layers.store import Store


def faults(store: Path) -> list[str]:
    """Errors of a store: blobs that are missing or do not match their digest."""
    result = []
    names = set()
    for path in (store / "blobs/sha256").iterdir():
        names.add(path.name)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != path.name:
                result.append(f"{path.name} holds other bytes")
    for image, digest in images(store).items():
        result += [
            f"{image} lacks {entry}" for entry in blobs_of(store, digest) if entry.removeprefix("sha256:") not in names
        ]
    return result


def leftovers(store: Path) -> list[str]:
    """Temporary files and downloads."""
    result = [path for folder in ("tmp", "downloads") for path in (store / folder).iterdir()]
    return [str(path) for path in (*result, *store.rglob(".*.tmp"))]


def images(store: Path) -> dict[str, str]:
    """The digests of manifests, by name."""
    index = json.loads((store / "index.json").read_text(encoding="utf-8"))
    return {entry["annotations"]["org.opencontainers.image.ref.name"]: entry["digest"] for entry in index["manifests"]}


def read(store: Path, digest: str) -> dict[str, Any]:
    """A manifest or configuration."""
    result: dict[str, Any] = json.loads(path(store, digest).read_bytes())
    return result


def path(store: Path, digest: str) -> Path:
    return store / "blobs/sha256" / digest.removeprefix("sha256:")


def blobs_of(store: Path, digest: str) -> dict[str, int]:
    """Sizes by digest, of the manifest, the configuration and every layer of an image."""
    manifest = read(store, digest)
    sizes = {entry["digest"]: entry["size"] for entry in (manifest["config"], *manifest["layers"])}
    return {digest: path(store, digest).stat().st_size, **sizes}


def layers(store: Path, digest: str) -> list[tuple[str, str]]:
    """Line of the history and digest of each layer, lowest first."""
    manifest = read(store, digest)
    lines = [str(entry["created_by"]) for entry in read(store, manifest["config"]["digest"])["history"]]
    return list(zip(lines, [str(entry["digest"]) for entry in manifest["layers"]], strict=True))


def flip(store: Path, digest: str) -> Path:
    """Changes one byte in the middle of a blob, like a failing disk; returns the file."""
    damaged = path(store, digest)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    return damaged


def os_records(store: Path) -> list[dict[str, Any]]:
    """The records of operating systems."""
    records = (json.loads(path.read_text(encoding="utf-8")) for path in sorted((store / "layers").glob("*.json")))
    return [record for record in records if "taken" in record]


def load_system(store: Path, label: str) -> str:
    """Loads an image of the only operating system of a store into the engine, with a label; returns its id."""
    [record] = os_records(store)
    layer = Layer(**{name: record[name] for name in ("digest", "diff_id", "size", "unpacked", "toc")})
    return Loader(Engine.connect(), Store(store), label, View(Console(quiet=True))).load_bare(layer)
