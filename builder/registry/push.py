"""Pushes one image: its blobs in parallel, largest first, then its manifest by digest."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from builder.common.errors import DamagedError, RegistryError, of_file
from builder.layers.blobs import REPAIR
from builder.registry.client import Manifest, Registry
from builder.registry.failures import RejectedError

DAMAGED = ("DIGEST_INVALID", "SIZE_INVALID")
GRACE_S = 5  # for threads that wait for a response when the push is interrupted
State = Literal["sent", "mounted", "present"]


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A layer or a configuration.

    `path` is None if it is not in the store: the registry must have it, or `fetch` downloads it and returns its path.
    """

    digest: str
    size: int
    path: Path | None
    fetch: Callable[[], Path] | None = None


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The manifest's digest, and bytes that were sent, mounted from another repository, or already present."""

    digest: str
    sent: int
    mounted: int
    present: int


def push(
    registry: Registry,
    manifest: Manifest,
    blobs: Iterable[Blob],
    *,
    mount_from: Sequence[str] = (),
    progress: Callable[[int], None] = lambda _: None,
    parallel: int = 4,
) -> Pushed:
    """Pushes an image by digest; sets no tag. The first failure ends the push. Creates the repository if necessary.

    `mount_from` are repositories of the same registry that may have some of the blobs. `progress` is called with the
    number of bytes gained, negative for bytes lost; they add up to the size of all blobs.
    """
    registry.create_missing()
    unique = {blob.digest: blob for blob in blobs}.values()
    sizes = _BlobPush(registry, unique, mount_from, progress).run(parallel)
    digest = registry.put_manifest(manifest.digest, manifest.content, manifest.media_type)
    return Pushed(digest=digest, sent=sizes["sent"], mounted=sizes["mounted"], present=sizes["present"])


class _BlobPush:
    """Pushes the blobs of one image, in several threads."""

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
        self._sizes: Counter[State] = Counter()
        self._failures: list[BaseException] = []

    def run(self, parallel: int) -> Counter[State]:
        """Bytes by state. Raises the first failure when all threads have ended."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(parallel, len(self._waiting)))]
        try:
            for thread in threads:
                thread.start()
            # Not `join`: after an interrupt it reports a running thread as ended (Python 3.11).
            for _ in threads:
                self._ended.acquire()
        except BaseException:  # interrupted: do not wait long for a registry that does not respond
            self._stop.set()
            deadline = time.monotonic() + GRACE_S
            while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
                time.sleep(0.05)
            raise
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]
        return self._sizes

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                with self._lock:
                    if not self._waiting:
                        return
                    blob = self._waiting.popleft()
                state = self._push(blob)
                with self._lock:
                    self._sizes[state] += blob.size
        except BaseException as error:  # noqa: BLE001  raised again by `run`
            self._failures.append(error)  # the first is the cause, later ones result from the stop
            self._stop.set()
        finally:
            self._ended.release()

    def _push(self, blob: Blob) -> State:
        """Pushes one blob in the cheapest way."""
        if self._registry.has_blob(blob.digest):
            self._report(blob.size)
            return "present"
        for source in self._mount_from:
            if self._registry.mount(blob.digest, source):
                self._report(blob.size)
                return "mounted"
        path = blob.path or (blob.fetch() if blob.fetch else None)
        if path is None:
            raise RegistryError(
                f"{self._registry.name}: blob {blob.digest} is missing in the registry and in the store",
                hint="Build the image again.",
            )
        self._upload(blob, path)
        return "sent"

    def _upload(self, blob: Blob, path: Path) -> None:
        try:
            if path.stat().st_size != blob.size:
                raise _damaged(blob, f"its size is not {blob.size} bytes")
            self._registry.upload(blob.digest, path, blob.size, self._report)
        except RejectedError as error:
            if error.code in DAMAGED and _hash(path) != blob.digest:
                raise _damaged(blob, f"its SHA-256 is not {blob.digest}") from error
            raise
        except OSError as error:
            raise of_file(error) from error

    def _report(self, count: int) -> None:
        with self._lock:
            self._progress(count)


def _damaged(blob: Blob, reason: str) -> DamagedError:
    return DamagedError(f"damaged: {reason} ({blob.path})", hint=REPAIR, blob=blob.digest)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
