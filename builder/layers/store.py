"""The store: an OCI image layout with every layer and image that was built, and their records.

Blobs and `index.json` can be read by skopeo, oras and podman. Beside them lie `layers/` (records: the inputs of a layer
-> its digests), `downloads/` (wheels that are not in a layer yet) and `tmp/`. Several processes may share a store: each
holds a shared lock, which excludes `gc`. Source: OCI image specification, "Image Layout".
"""

from __future__ import annotations

import fcntl
import json
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from builder.common.errors import BusyError, DamagedError, FileError, VerifyError
from builder.common.files import TEMPORARY_SUFFIX, is_digest, write_atomically
from builder.layers import oci
from builder.layers.blobs import Blobs, Descriptor

BLOBS = "blobs/sha256"
PACKAGES = "packages"  # in a record beside that of an operating system: the blobs of its Debian packages
WITHOUT_INDEX = "Delete the store: the next build makes its layers and images again."


class Store(Blobs):
    """One store of at most `limit` bytes (0: limited by the disk). Every method may be called from several threads."""

    def __init__(self, root: Path, *, limit: int = 0) -> None:
        super().__init__(root)
        self.limit = limit
        self.index = root / "index.json"
        self.downloads = root / "downloads"  # wheels that are not in a layer yet

    def prepare(self) -> None:
        """Creates the folders and files of an empty layout. Raises FileError for a folder that is something else."""
        layout = self.root / "oci-layout"
        if not layout.exists():  # written first, so that an interrupted `prepare` can be repeated
            is_used = self.root.exists() and any(path.suffix != TEMPORARY_SUFFIX for path in self.root.iterdir())
            if is_used and not self._exists():
                raise FileError(
                    f"{self.root} is neither empty nor an image layout", hint="Use an empty or a new folder."
                )
            write_atomically(layout, oci.LAYOUT)
        for folder in ("blobs/sha256", "layers", "downloads", "tmp"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        if not self.index.exists():
            if any((self.root / "blobs/sha256").iterdir()):
                raise DamagedError(f"{self.index} is missing, but the store has blobs", hint=WITHOUT_INDEX)
            self.write_index({})

    def require(self) -> None:
        """Raises FileError if there is no store. Writes nothing."""
        if not self._exists():
            raise FileError(f"no store in {self.root}", hint="Check --store, or build an image: it creates the store.")

    def _exists(self) -> bool:
        """True if there is a store. Its layout file is constant: `prepare` writes a deleted one again."""
        parts = (self.index, self.root / "layers", self.root / "blobs/sha256")
        return (self.root / "oci-layout").exists() or all(path.exists() for path in parts)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Excludes `gc` while the block runs."""
        self.prepare()
        with self.locked(fcntl.LOCK_SH):
            self.remove_leftovers()
            yield

    @contextmanager
    def locked(self, operation: int, name: str = "lock") -> Iterator[None]:
        """Holds a lock file of the store; `operation` is that of flock. Raises BusyError for LOCK_NB on a held lock."""
        with (self.root / name).open("a") as file:
            try:
                fcntl.flock(file, operation)
            except BlockingIOError:
                raise BusyError(
                    f"the store {self.root} is in use by another builder",
                    hint="Run this again when it has ended.",
                ) from None
            yield

    def size(self) -> int:
        """Bytes on disk."""
        return sum(sizes(self.root.rglob("*")).values())

    # ---- records of layers and images

    def get_record(self, key: str) -> dict[str, Any] | None:
        """The record of `key`; None if there is none or its blob is missing."""
        record = read_record(self._record(key))
        return record if record and self.has(record["digest"], record["size"]) else None

    def put_record(self, key: str, data: Mapping[str, Any]) -> None:
        """Records `data` by `key`. It has at least the `digest` and `size` of a blob."""
        with self.disk_errors():
            write_atomically(self._record(key), json.dumps(data) + "\n")

    def _record(self, key: str) -> Path:
        return self.root / "layers" / f"{key.removeprefix('sha256:')}.json"

    # ---- names of images

    def images(self) -> dict[str, Descriptor]:
        """Name -> manifest. Raises DamagedError or FileError if the index cannot be read."""
        try:
            return oci.read_index(self.index.read_bytes())
        except (FileNotFoundError, VerifyError) as error:
            reason = error if isinstance(error, VerifyError) else "it is missing"
            raise DamagedError(f"cannot read {self.index}: {reason}", hint=WITHOUT_INDEX) from error
        except OSError as error:
            raise FileError(f"cannot read {self.index}: {error.strerror}") from error

    def name(self, image: str, manifest: Descriptor, *, instead_of: str = "") -> None:
        """Sets the name of an image and removes another; `gc` may then free the image that had the name before."""
        self.remove_names([instead_of], {image: manifest})

    def remove_names(self, names: Collection[str], added: Mapping[str, Descriptor] = {}) -> None:
        """Removes names of images, so that `gc` frees what only these images use, and sets the names in `added`."""
        with self.disk_errors(), self.locked(fcntl.LOCK_EX, "index.lock"):
            before = self.images()
            after = {name: manifest for name, manifest in before.items() if name not in names} | dict(added)
            if after != before:
                self.write_index(after)

    def write_index(self, images: Mapping[str, Descriptor]) -> None:
        """Replaces the index. The caller holds its lock."""
        write_atomically(self.index, oci.layout_index(images))


def read_record(path: Path) -> dict[str, Any]:
    """A record of a layer or image; empty if it cannot be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) and "size" in record and is_digest(record.get("digest")) else {}


def sizes(paths: Iterable[Path]) -> dict[Path, int]:
    """Bytes of each file. Another builder may remove a file at any moment: it is then left out."""
    bytes_of = {}
    for path in paths:
        with suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                bytes_of[path] = status.st_size
    return bytes_of
