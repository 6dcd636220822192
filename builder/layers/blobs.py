"""Content-addressed files of a store: each blob is named by its digest, and is written atomically.

Writes a blob under a temporary name, syncs it and renames it. Source: OCI image specification, "Image Layout".
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from isal import igzip, isal_zlib

from builder.common.errors import DamagedError, store_error
from builder.common.files import digest_of_bytes

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
PLAIN_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
SYNC_S = 0.1  # between two syncs of a file that is being written
NEW_FILE_S = 2  # a temporary file may not be locked yet
CHUNK = 1 << 20
PLAIN_CHUNK = 1 << 18
REPAIR = "Delete the damaged blobs as docs/troubleshooting.md shows, then build the image again."

InflateError = cast("type[Exception]", isal_zlib.error)  # its stub declares an instance


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """A blob, as manifests name it. Source: OCI image specification, "OCI Content Descriptors"."""

    media_type: str
    digest: str
    size: int

    @classmethod
    def of(cls, content: bytes, media_type: str) -> Descriptor:
        return cls(media_type=media_type, digest=digest_of_bytes(content), size=len(content))

    def as_data(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass
class NewBlob:
    """A blob that is being written to `file`; its writer sets `digest`."""

    file: BinaryIO
    digest: str = ""


class Blobs:
    """The blobs of the store in the folder `root`. Every method may be called from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root

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
                blob.digest = descriptor.digest
        return descriptor

    @contextmanager
    def new_blob(self) -> Iterator[NewBlob]:
        """A blob to write in the block, which sets its digest. An exception leaves nothing behind."""
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
                path = self.path(blob.digest)
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
