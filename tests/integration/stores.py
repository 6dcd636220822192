"""What is in a store of the tests, and whether all of it is whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def faults(store: Path) -> list[str]:
    """What a reader of the store would trip over: a blob that is not what its name says, or that is missing."""
    found = []
    names = set()
    for path in (store / "blobs/sha256").iterdir():
        names.add(path.name)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != path.name:
                found.append(f"{path.name} holds other bytes")
    for image, digest in images(store).items():
        found += [f"{image} lacks {one}" for one in blobs_of(store, digest) if one.removeprefix("sha256:") not in names]
    return found


def leftovers(store: Path) -> list[str]:
    """Temporary files and downloads."""
    found = [path for folder in ("tmp", "downloads") for path in (store / folder).iterdir()]
    return [str(path) for path in (*found, *store.rglob(".*.tmp"))]


def images(store: Path) -> dict[str, str]:
    """Name -> digest of the manifest."""
    index = json.loads((store / "index.json").read_text(encoding="utf-8"))
    return {one["annotations"]["org.opencontainers.image.ref.name"]: one["digest"] for one in index["manifests"]}


def read(store: Path, digest: str) -> dict[str, Any]:
    """A manifest or configuration."""
    found: dict[str, Any] = json.loads(path(store, digest).read_bytes())
    return found


def path(store: Path, digest: str) -> Path:
    return store / "blobs/sha256" / digest.removeprefix("sha256:")


def blobs_of(store: Path, digest: str) -> dict[str, int]:
    """Digest -> size, of the manifest, the configuration and every layer of an image."""
    manifest = read(store, digest)
    sizes = {one["digest"]: one["size"] for one in (manifest["config"], *manifest["layers"])}
    return {digest: path(store, digest).stat().st_size, **sizes}


def layers(store: Path, digest: str) -> list[tuple[str, str]]:
    """Line of the history and digest of the blob, of each layer, lowest first."""
    manifest = read(store, digest)
    lines = [str(one["created_by"]) for one in read(store, manifest["config"]["digest"])["history"]]
    return list(zip(lines, [str(one["digest"]) for one in manifest["layers"]], strict=True))


def os_records(store: Path) -> list[Path]:
    """Where the store remembers what an os stage was made into."""
    found = [path for path in (store / "layers").iterdir() if "created" in json.loads(path.read_text(encoding="utf-8"))]
    assert found, "the store remembers no os layer"
    return found


def flip(store: Path, digest: str) -> Path:
    """Changes one byte in the middle of a blob, as a failing disk would; the file."""
    damaged = path(store, digest)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    return damaged
