"""Pushes one image: its blobs side by side, largest first, then its manifest by digest, then its tags."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder import digest as digests
from builder.errors import FileError, RegistryError, VerifyError, of_file
from builder.registry import Registry
from builder.registry_http import RefusedError

DAMAGED = ("DIGEST_INVALID", "SIZE_INVALID")
GRACE_S = 5  # for threads that wait for an answer when the user wants to end
REPAIR = "Delete the file and build the image again."


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A layer or a configuration. `path` is None where it is not in the store: the registry must have it."""

    digest: str
    size: int
    path: Path | None


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What was done: the manifest's digest, and bytes that were sent, were there already, or in another repository."""

    digest: str
    sent: int
    skipped: int
    mounted: int


def push(
    registry: Registry,
    *,
    manifest: bytes,
    media_type: str,
    blobs: Sequence[Blob],
    mount_from: Sequence[str],
    progress: Callable[[int], None],
    parallel: int = 4,
) -> Pushed:
    """Brings an image to a registry, by digest: no tag is touched.

    `mount_from` are repositories of the same registry that may have some of the blobs. `progress` hears how many bytes
    more the registry has, or fewer where it lost some: in the end all of the image's. The first failure ends the rest.
    """
    sending = _Sending(registry, {blob.digest: blob for blob in blobs}.values(), mount_from, progress)
    bytes_by = sending.run(parallel)
    digest = registry.put_manifest(digests.of_bytes(manifest), manifest, media_type)
    return Pushed(digest=digest, sent=bytes_by["sent"], skipped=bytes_by["skipped"], mounted=bytes_by["mounted"])


def tag(
    registry: Registry,
    digest: str,
    manifest: bytes,
    media_type: str,
    versioned: Sequence[str],
    moving: Sequence[str],
) -> list[str]:
    """Sets tags to a manifest that was pushed; says what was done, and what was left alone.

    No registry can move a tag only if nobody else did meanwhile. So a versioned tag that exists is never written, a
    moving one is looked at before and after, and all versioned ones come before the first moving one.
    """
    if digests.of_bytes(manifest) != digest:
        raise VerifyError(f"{registry.name}: the manifest to be tagged is not {digest}")
    told = []
    for name in versioned:
        before = registry.digest_of(name)
        if before is None:
            _put_tag(registry, name, digest, manifest, media_type)
            told.append(f"{registry.name}:{name} is {digest}")
        elif before != digest:
            told.append(f"{registry.name}:{name} stays at {before}: a versioned tag is never moved")
    for name in moving:
        before = registry.digest_of(name)
        if before != digest:
            _put_tag(registry, name, digest, manifest, media_type)
            told.append(f"{registry.name}:{name} is {digest}" + (f", was {before}" if before else ""))
    return told


def _put_tag(registry: Registry, name: str, digest: str, manifest: bytes, media_type: str) -> None:
    registry.put_manifest(name, manifest, media_type)
    after = registry.digest_of(name)
    if after != digest:
        raise RegistryError(
            f"{registry.name}: tag {name} moved from {digest} to {after or 'nothing'} while it was set",
            hint="Somebody else pushes this tag at the same time. Find out who, then run this again.",
        )


class _Sending:
    """The blobs of one image on their way."""

    def __init__(
        self, registry: Registry, blobs: Iterable[Blob], mount_from: Sequence[str], progress: Callable[[int], None]
    ) -> None:
        self._stop = threading.Event()
        self._registry = registry.stoppable(self._stop)
        self._waiting = deque(sorted(blobs, key=lambda blob: blob.size, reverse=True))
        self._mount_from = mount_from
        self._progress = progress
        self._lock = threading.Lock()
        self._ended = threading.Semaphore(0)
        self._bytes: Counter[str] = Counter()
        self._failures: list[BaseException] = []

    def run(self, parallel: int) -> Counter[str]:
        """Bytes by what was done with them. Raises the first failure, when all threads have ended."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(parallel, len(self._waiting)))]
        try:
            for thread in threads:
                thread.start()
            # Not `join`: interrupted, it takes a thread that runs for one that has ended (Python 3.11).
            for _ in threads:
                self._ended.acquire()
        except BaseException:  # the user wants to end: no long wait for a registry that is silent
            self._stop.set()
            deadline = time.monotonic() + GRACE_S
            while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
                time.sleep(0.05)
            raise
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]
        return self._bytes

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                with self._lock:
                    if not self._waiting:
                        return
                    blob = self._waiting.popleft()
                done = self._bring(blob)
                with self._lock:
                    self._bytes[done] += blob.size
        except BaseException as error:  # noqa: BLE001  raised again by `run`
            self._failures.append(error)  # the first is the reason, later ones come of its stop
            self._stop.set()
        finally:
            self._ended.release()

    def _bring(self, blob: Blob) -> str:
        """Gets one blob there in the cheapest way; which one."""
        if self._registry.has_blob(blob.digest):
            self._told(blob.size)
            return "skipped"
        for source in self._mount_from:
            if self._registry.mount(blob.digest, source):
                self._told(blob.size)
                return "mounted"
        if blob.path is None:
            raise RegistryError(
                f"{self._registry.name}: lacks blob {blob.digest}, which is not on this machine either",
                hint="Build the image again.",
            )
        self._upload(blob, blob.path)
        return "sent"

    def _upload(self, blob: Blob, path: Path) -> None:
        try:
            if path.stat().st_size != blob.size:
                raise FileError(f"damaged: it has not the {blob.size} bytes of {blob.digest} ({path})", hint=REPAIR)
            self._registry.upload(blob.digest, path, blob.size, self._told)
        except RefusedError as error:
            if error.code in DAMAGED and _hash(path) != blob.digest:
                raise FileError(f"damaged: its SHA-256 is not {blob.digest} ({path})", hint=REPAIR) from error
            raise
        except OSError as error:
            raise of_file(error) from error

    def _told(self, more: int) -> None:
        with self._lock:
            self._progress(more)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
