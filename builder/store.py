"""The store: an OCI image layout that holds every layer and image we made, and what is remembered of them.

Blobs and `index.json` are as skopeo, oras and podman read them. Beside them lie `layers/` (what a layer was made from
-> its digests), `downloads/` (wheels that are not in a layer yet) and `tmp/`. Several processes may share a store:
blobs are written under a temporary name, synced and renamed; whoever uses it holds a shared lock, which `gc` excludes.
Source: OCI image specification, "Image Layout".
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from builder import atomic, digest
from builder.errors import BusyError, DiskError, FileError

LAYOUT = '{"imageLayoutVersion":"1.0.0"}'
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
NAME = "org.opencontainers.image.ref.name"  # annotation by which skopeo finds an image: oci:<store>:<name>
SYNC_S = 0.1
JUST_MADE_S = 2  # a temporary file may not be locked yet
FREE_STORE = "`builder gc` shows what the store holds and frees what no image uses; `--forget` gives up images too."


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """A blob, as manifests name it. Source: OCI image specification, "OCI Content Descriptors"."""

    media_type: str
    digest: str
    size: int

    def as_data(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """What no image of the store uses, as path -> bytes; `leftovers` are downloads, temporary files and records."""

    blobs: Mapping[Path, int]
    leftovers: Mapping[Path, int]

    @property
    def bytes(self) -> int:
        return sum(self.blobs.values()) + sum(self.leftovers.values())


@dataclass(frozen=True, kw_only=True)
class Use:
    """An image of the store: `bytes` of all its blobs, `own` of those that no other image has."""

    name: str
    manifest: str
    bytes: int
    own: int


class Store:
    """One store, of at most `limit` bytes (0: what the disk has). Every method may be called from several threads."""

    def __init__(self, root: Path, *, limit: int = 0) -> None:
        self.root = root
        self.limit = limit

    def prepare(self) -> None:
        """Makes the folders and files of an empty layout. Raises FileError for a folder that is something else."""
        found = [path for path in self.root.iterdir() if path.suffix != atomic.SUFFIX] if self.root.exists() else []
        if found and not (self.root / "oci-layout").exists():
            raise FileError(
                f"{self.root} is not empty and no image layout", hint="Name an empty folder, or one that is no more."
            )
        if not (self.root / "oci-layout").exists():  # first of all: a store that was half made is then known as one
            atomic.write_text(self.root / "oci-layout", LAYOUT)
        for folder in ("blobs/sha256", "layers", "downloads", "tmp"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        if not (self.root / "index.json").exists():
            self._write_index([])

    @contextmanager
    def used(self) -> Iterator[None]:
        """Holds the store against `gc` while the block runs."""
        self.prepare()
        with self._locked("lock", fcntl.LOCK_SH):
            self._sweep()
            yield

    # ---- blobs

    def path(self, blob: str) -> Path:
        """Where a blob of this digest lies, or would."""
        return self.root / "blobs/sha256" / blob.removeprefix("sha256:")

    def has(self, blob: str, size: int) -> bool:
        try:
            return self.path(blob).stat().st_size == size
        except FileNotFoundError:
            return False

    def read(self, blob: str) -> bytes:
        """A small blob, its digest checked; raises FileError."""
        try:
            data = self.path(blob).read_bytes()
        except FileNotFoundError:
            raise FileError(f"the store has no {blob}", hint="Build again; `builder gc` may have freed it.") from None
        if digest.of_bytes(data) != blob:
            self._remove_damaged(blob)
        return data

    def check(self, blobs: Iterable[str]) -> None:
        """Raises FileError if one of these blobs is not what its digest says, after removing it."""
        for blob in blobs:
            try:
                with self.path(blob).open("rb") as file:
                    found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            except FileNotFoundError:
                continue
            if found != blob:
                self._remove_damaged(blob)

    def _remove_damaged(self, blob: str) -> NoReturn:
        self.path(blob).unlink(missing_ok=True)
        raise FileError(
            f"{self.path(blob)} was damaged, and is removed",
            hint="Run the same command again: it is made anew. If it happens again, look at the disk and the memory.",
        )

    def put(self, data: bytes, media_type: str) -> Descriptor:
        """A small blob."""
        found = Descriptor(media_type=media_type, digest=digest.of_bytes(data), size=len(data))
        if not self.has(found.digest, found.size):
            self.write(lambda out: (out.write(data), found.digest)[1])
        return found

    def write(self, make: Callable[[BinaryIO], str]) -> None:
        """A blob that `make` writes to a file; it returns the digest. Nothing is left if it raises."""
        handle, temporary = tempfile.mkstemp(dir=self.root / "tmp")
        try:
            with os.fdopen(handle, "wb") as out:
                fcntl.flock(out, fcntl.LOCK_EX)  # dies with this process: see _sweep
                with _synced(out.fileno()):
                    blob = make(cast("BinaryIO", out))
                    out.flush()
                os.fsync(out.fileno())
                Path(temporary).chmod(0o644)
                Path(temporary).replace(self.path(blob))  # while it is locked
            _sync_folder(self.path(blob).parent)
        except OSError as error:
            raise of_store(error, self.root) from error
        finally:
            Path(temporary).unlink(missing_ok=True)

    @property
    def downloads(self) -> Path:
        """Where wheels lie that are not in a layer yet."""
        return self.root / "downloads"

    def _sweep(self) -> None:
        """Removes temporary files of processes that were killed: nobody holds a lock on them."""
        for path in (self.root / "tmp").iterdir():
            try:
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if time.time() - path.stat().st_mtime > JUST_MADE_S:
                        path.unlink()
            except (BlockingIOError, FileNotFoundError):
                continue

    # ---- what layers were made from

    def recall(self, key: str) -> dict[str, Any] | None:
        """What `remember` was told of `key`, if the blob of it is still there."""
        try:
            data: dict[str, Any] = json.loads(self._record(key).read_text(encoding="utf-8"))
            return data if self.has(data["digest"], data["size"]) else None
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def remember(self, key: str, data: Mapping[str, Any]) -> None:
        """`data` has at least `digest` and `size` of a blob."""
        with self._told():
            atomic.write_text(self._record(key), json.dumps(data) + "\n")

    def _record(self, key: str) -> Path:
        return self.root / "layers" / f"{key.removeprefix('sha256:')}.json"

    # ---- images

    def images(self) -> dict[str, Descriptor]:
        """Name -> manifest."""
        return {
            entry["annotations"][NAME]: Descriptor(
                media_type=entry["mediaType"], digest=entry["digest"], size=entry["size"]
            )
            for entry in self._read_index()
        }

    def name(self, image: str, manifest: Descriptor, *, instead_of: str = "") -> None:
        """Gives an image its name, and takes another from it; the one that had it before may be freed."""
        with self._told(), self._locked("index.lock", fcntl.LOCK_EX):
            gone = {image, instead_of}
            others = [entry for entry in self._read_index() if entry["annotations"][NAME] not in gone]
            entry = {**manifest.as_data(), "annotations": {NAME: image}}
            entries = sorted([*others, entry], key=lambda one: str(one["annotations"][NAME]))
            if entries != self._read_index():
                self._write_index(entries)

    def forget(self, pattern: str) -> list[str]:
        """Takes their names from the images that match a shell pattern, so that `gc` frees them; returns those."""
        with self._told(), self._locked("index.lock", fcntl.LOCK_EX):
            entries = self._read_index()
            names = [name for entry in entries if fnmatchcase(name := str(entry["annotations"][NAME]), pattern)]
            if names:
                self._write_index([entry for entry in entries if entry["annotations"][NAME] not in names])
        return names

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Says of a full disk that it is the store's."""
        try:
            yield
        except OSError as error:
            raise of_store(error, self.root) from error

    def _read_index(self) -> list[dict[str, Any]]:
        path = self.root / "index.json"
        try:
            entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["manifests"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FileError(f"{path} cannot be read: {error}") from error
        return [entry for entry in entries if NAME in (entry.get("annotations") or {})]

    def _write_index(self, entries: list[dict[str, Any]]) -> None:
        data = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}
        atomic.write_text(self.root / "index.json", json.dumps(data, indent=1) + "\n")

    # ---- size

    def size(self) -> int:
        """Bytes on disk."""
        return sum(_sizes(self.root.rglob("*")).values())

    def uses(self) -> list[Use]:
        """Every image, by name."""
        images = self.images()
        blobs = {manifest.digest: self._blobs(manifest) for manifest in images.values()}
        users = Counter(blob for found in blobs.values() for blob in found)
        return [
            Use(
                name=name,
                manifest=manifest.digest,
                bytes=sum(blobs[manifest.digest].values()),
                own=sum(size for blob, size in blobs[manifest.digest].items() if users[blob] == 1),
            )
            for name, manifest in sorted(images.items())
        ]

    def _blobs(self, manifest: Descriptor) -> dict[str, int]:
        """Digest -> size of every blob of an image; none of one whose manifest is damaged or gone."""
        try:
            data = json.loads(self.read(manifest.digest))
        except FileError:
            return {}
        return {manifest.digest: manifest.size} | {
            one["digest"]: one["size"] for one in (data["config"], *data["layers"])
        }

    def garbage(self) -> Garbage:
        """What could be freed: blobs of no named image (layers kept for the next build included), leftovers."""
        kept = {blob for manifest in self.images().values() for blob in self._blobs(manifest)}
        blobs = _sizes(path for path in (self.root / "blobs/sha256").iterdir() if f"sha256:{path.name}" not in kept)
        files = [path for folder in ("tmp", "downloads") for path in (self.root / folder).iterdir()]
        gone = {path.name for path in blobs}
        files += [path for path in (self.root / "layers").iterdir() if _blob_of(path) in gone]
        files += self.root.rglob(f".*{atomic.SUFFIX}")
        return Garbage(blobs=blobs, leftovers=_sizes(files))

    def make_room(self, need: Callable[[], int], *, wait: bool = False) -> None:
        """Frees garbage if the limit or the disk asks for it; raises DiskError if that is not enough.

        `need` says how many bytes are to be written; it is asked again after garbage is gone, which may be needed.
        """
        if self._has_room(need()):
            return
        self.gc(wait=wait)
        wanted = need()
        if not self._has_room(wanted):
            free = shutil.disk_usage(self.root).free
            limit = f", its limit is {self.limit / 1e9:.1f} GB" if self.limit else ""
            raise DiskError(
                f"{wanted / 1e9:.1f} GB are to be written to the store {self.root}: it holds {self.size() / 1e9:.1f} GB"
                f"{limit}, and the disk has {free / 1e9:.1f} GB",
                hint=FREE_STORE,
            )

    def _has_room(self, wanted: int) -> bool:
        if not wanted:
            return True
        if self.limit and self.size() + wanted > self.limit:
            return False
        return shutil.disk_usage(self.root).free > wanted

    def gc(self, *, wait: bool = False) -> Garbage:
        """Frees the garbage and returns it; raises BusyError if another process uses the store."""
        self.prepare()
        with self._locked("lock", fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)):
            found = self.garbage()
            for path in (*found.leftovers, *found.blobs):
                path.unlink(missing_ok=True)
        return found

    @contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        with (self.root / name).open("a") as file:
            try:
                fcntl.flock(file, how)
            except BlockingIOError:
                raise BusyError(
                    f"the store {self.root} is in use by another builder", hint="Wait for it, or give --wait."
                ) from None
            yield


def _blob_of(record: Path) -> str:
    """Hex digest of the blob that a record is about; empty for one that cannot be read."""
    try:
        return str(json.loads(record.read_text(encoding="utf-8"))["digest"]).removeprefix("sha256:")
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ""


def _sizes(paths: Iterable[Path]) -> dict[Path, int]:
    """Bytes of each file; another builder may remove one at any moment."""
    found = {}
    for path in paths:
        with suppress(FileNotFoundError):
            told = path.stat()
            if stat.S_ISREG(told.st_mode):
                found[path] = told.st_size
    return found


@contextmanager
def _synced(handle: int) -> Iterator[None]:
    """Has what is written go to the disk meanwhile: left to the end, that would take as long again."""
    done = threading.Event()
    failures: list[OSError] = []

    def sync() -> None:
        while not failures and not done.wait(SYNC_S):
            try:
                os.fdatasync(handle)
            except OSError as error:
                failures.append(error)  # Linux tells it once: the fsync at the end would not

    thread = threading.Thread(target=sync, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failures:
        raise failures[0]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def of_store(error: OSError, root: Path) -> Exception:
    """An error of writing to the store in our words, if it is a full disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(f"the disk of the store is full ({root})", hint=FREE_STORE)
    return error
