"""The store: an OCI image layout with every layer and image that was built, and their records.

Blobs and `index.json` can be read by skopeo, oras and podman. A blob is named by its digest; it is written under a
temporary name, synced and renamed. Beside them lie `layers/` (records: the inputs of a layer -> its digests),
`downloads/` (wheels that are not in a layer yet) and `tmp/`. Several processes may share a store: each holds a shared
lock, which excludes `gc`. Source: OCI image specification, "Image Layout".
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from isal import igzip

from builder.common.errors import BusyError, DamagedError, FileError, VerifyError, store_error
from builder.common.files import TEMPORARY_SUFFIX, digest_of_bytes, is_digest, write_atomically
from builder.layers import oci
from builder.layers.estargz import CHUNK, InflateError
from builder.layers.oci import Descriptor

SYNC_S = 0.1  # between two syncs of a file that is being written
NEW_FILE_S = 2  # a temporary file may not be locked yet
PLAIN_CHUNK = 1 << 18
REPAIR = "Delete the damaged blobs as docs/troubleshooting.md shows, then build the image again."
BLOBS = "blobs/sha256"
PACKAGES = "packages"  # in a record beside that of an operating system: the blobs of its Debian packages
WITHOUT_INDEX = "Delete the store: the next build makes its layers and images again."


@dataclass
class NewBlob:
    """A blob that is being written to `file`. Its writer sets `stored_as`, the digest by which it is stored."""

    file: BinaryIO
    stored_as: str = ""


class Store:
    """One store of at most `limit` bytes (0: limited by the disk). Every method may be called from several threads."""

    def __init__(self, root: Path, *, limit: int = 0) -> None:
        self.root = root
        self.limit = limit
        self.index = root / "index.json"
        self.downloads = root / "downloads"  # wheels that are not in a layer yet

    def prepare(self) -> None:
        """Creates the folders and files of an empty layout. Raises FileError for a folder that is something else."""
        layout = self.root / "oci-layout"
        if not layout.exists():  # written first, so that an interrupted `prepare` can be repeated
            if self.root.exists() and any(path.suffix != TEMPORARY_SUFFIX for path in self.root.iterdir()):
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
        if not (self.root / "oci-layout").exists():
            raise FileError(f"no store in {self.root}", hint="Check --store, or build an image: it creates the store.")

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

    # ---- blobs

    def path(self, blob: str) -> Path:
        """The path of a blob with this digest, whether it exists or not."""
        return self.root / "blobs/sha256" / blob.removeprefix("sha256:")

    def has(self, blob: str, size: int) -> bool:
        try:
            return self.path(blob).stat().st_size == size
        except FileNotFoundError:
            return False

    def read(self, blob: str) -> bytes:
        """A small blob. Raises DamagedError if it is missing or does not match its digest."""
        try:
            data = self.path(blob).read_bytes()
        except FileNotFoundError:
            raise DamagedError(f"blob {blob} is missing from the store", hint=REPAIR, blob=blob) from None
        if digest_of_bytes(data) != blob:
            raise DamagedError(f"{self.path(blob)} does not match its digest", hint=REPAIR, blob=blob)
        return data

    def chunks(self, blob: str) -> Iterator[bytes]:
        """The bytes of a blob."""
        with self.path(blob).open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def inflated(self, blob: str) -> Iterator[bytes]:
        """The bytes that a gzip blob inflates to. Raises DamagedError if it is not gzip."""
        try:
            with igzip.open(self.path(blob)) as file:  # type: ignore[no-untyped-call]
                while chunk := file.read(PLAIN_CHUNK):
                    yield chunk
        except (EOFError, gzip.BadGzipFile, InflateError) as error:
            raise DamagedError(f"{self.path(blob)} is not valid gzip: {error}", hint=REPAIR, blob=blob) from error

    def matches(self, blob: str) -> bool:
        """True if the blob exists and matches its digest."""
        file_hash = hashlib.sha256()
        try:
            for chunk in self.chunks(blob):
                file_hash.update(chunk)
        except FileNotFoundError:
            return False
        return f"sha256:{file_hash.hexdigest()}" == blob

    def remove_damaged(self, blobs: Iterable[str]) -> None:
        """Removes the first of these blobs that does not match its digest, and raises DamagedError for it.

        A build calls it, so that the next build makes the blob again. Skips missing blobs.
        """
        for blob in blobs:
            if self.path(blob).exists() and not self.matches(blob):
                self.discard(blob)
                raise DamagedError(
                    f"{self.path(blob)} did not match its digest and was removed",
                    hint="Run the same command again to rebuild it. If this happens again, check the disk and memory.",
                    blob=blob,
                )

    def discard(self, blob: str) -> None:
        """Removes a blob, so that it is made again when it is needed."""
        self.path(blob).unlink(missing_ok=True)

    def put(self, data: bytes, media_type: str) -> Descriptor:
        """Stores a small blob."""
        descriptor = Descriptor.of(data, media_type)
        if not self.has(descriptor.digest, descriptor.size):
            with self.new_blob() as blob:
                blob.file.write(data)
                blob.stored_as = descriptor.digest
        return descriptor

    @contextmanager
    def new_blob(self) -> Iterator[NewBlob]:
        """Yields a blob to write. Set its `stored_as` in the block.

        The blob is stored when the block ends without an exception.
        """
        handle, name = tempfile.mkstemp(dir=self.root / "tmp")
        temporary = Path(name)
        try:
            with self.disk_errors(), os.fdopen(handle, "wb") as out:
                fcntl.flock(out, fcntl.LOCK_EX)  # released when this process ends: see remove_leftovers
                with _synced(out.fileno()):
                    blob = NewBlob(file=cast("BinaryIO", out))
                    yield blob
                    out.flush()
                os.fsync(out.fileno())
                temporary.chmod(0o644)  # skopeo and other users read it
                path = self.path(blob.stored_as)
                temporary.replace(path)  # while it is locked
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        finally:
            temporary.unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Removes temporary files of killed processes: no process holds a lock on them."""
        for path in (self.root / "tmp").iterdir():
            try:
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if time.time() - path.stat().st_mtime > NEW_FILE_S:
                        path.unlink()
            except (BlockingIOError, FileNotFoundError):
                continue

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Raises DiskError for a full disk, which names the store."""
        try:
            yield
        except OSError as error:
            raise store_error(error, self.root) from error

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


@contextmanager
def _synced(handle: int) -> Iterator[None]:
    """Syncs the file while it is written: a single sync at the end would take as long again."""
    done = threading.Event()
    failures: list[OSError] = []

    def sync() -> None:
        while not failures and not done.wait(SYNC_S):
            try:
                os.fdatasync(handle)
            except OSError as error:
                failures.append(error)  # Linux reports it once: the fsync at the end would succeed

    thread = threading.Thread(target=sync, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failures:
        raise failures[0]
