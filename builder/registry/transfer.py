"""Parallel requests to registries: look-ups, uploads and downloads of blobs, and a pipeline of images."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from builder.common import errors
from builder.common.errors import BuilderError, DamagedError, NoRegistryError, RegistryError, of_file
from builder.common.tasks import thread_pool
from builder.common.text import size
from builder.layers.oci import Descriptor
from builder.layers.store import REPAIR, Store
from builder.registry.client import Repository
from builder.registry.failures import RejectedError, StoppedError

DAMAGED = ("DIGEST_INVALID", "SIZE_INVALID")
State = Literal["sent", "mounted", "present"]
LOOKUPS = 8  # small requests, which mostly wait for the registry
CHECKS = 4  # of images: a check starts programs of its own, cosign or a scanner
FINISH_THREADS = 8  # of images, which mostly wait for the registry; each starts one cosign at a time
NOTICE_S = 1  # seconds until an interrupt is noticed, at most
GRACE_S = 5  # seconds for requests that wait for a response when the command is interrupted
_Input = TypeVar("_Input")
_Begun = TypeVar("_Begun")
_Output = TypeVar("_Output")


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The bytes of a push: those that were sent, mounted from another repository, or already present."""

    sent: int
    mounted: int
    present: int

    def __str__(self) -> str:
        parts = [(self.sent, "sent"), (self.mounted, "mounted"), (self.present, "already present")]
        return ", ".join(f"{size(count)} {state}" for count, state in parts if count)


def map_parallel(
    function: Callable[[_Input], _Output], inputs: Iterable[_Input], parallel: int = LOOKUPS
) -> list[tuple[_Input, _Output]]:
    """Calls the function for all inputs at once; returns inputs and results, in order. Raises the first error."""
    listed = list(inputs)
    with thread_pool(parallel, "lookup") as pool:
        return list(zip(listed, pool.map(function, listed), strict=True))


def transfer_each(
    repository: Repository, function: Callable[[Repository, _Input], _Output], inputs: Iterable[_Input]
) -> list[_Output]:
    """Calls the function for `transfers` inputs at once; returns the results, in order.

    The first error stops all other transfers, and is raised. The registry that the function gets raises StoppedError
    then, as it does after an interrupt.
    """
    stop = threading.Event()
    stoppable = repository.stoppable(stop)
    failures: list[BaseException] = []

    def run(item: _Input) -> _Output:
        try:
            if stop.is_set():
                raise StoppedError(f"{repository.name}: stopped")
            return function(stoppable, item)
        except BaseException as error:
            failures.append(error)  # the first is the cause, later ones result from the stop
            stop.set()
            raise

    with thread_pool(repository.transfers, "transfer") as pool:
        try:
            futures = [pool.submit(run, item) for item in inputs]
            # A signal that arrives just before a wait begins is noticed when the wait ends.
            while wait(futures, timeout=NOTICE_S).not_done:
                pass
        finally:
            stop.set()
    if failures:
        raise failures[0]
    return [future.result() for future in futures]


def pipeline(
    begin: Callable[[_Input], _Begun],
    finish: Callable[[_Input, _Begun, threading.Event], _Output],
    inputs: Iterable[_Input],
    on_failure: Callable[[_Input], None],
) -> list[_Output]:
    """Calls `begin` for one input at a time, and `finish` for it and its result in a thread, while the next one begins.

    Returns the results of `finish`, in order. Calls `on_failure` for each input with an error, and raises one error for
    all of them at the end. No more inputs begin when a registry cannot be reached. `finish` also gets an event, which
    an interrupt sets.
    """
    stop, is_unreachable = threading.Event(), threading.Event()

    def fail(item: _Input, error: BuilderError) -> None:
        if isinstance(error, NoRegistryError):
            is_unreachable.set()
        on_failure(item)

    def end(item: _Input, begun: _Begun) -> _Output:
        try:
            return finish(item, begun, stop)
        except BuilderError as error:
            if not stop.is_set():
                fail(item, error)
            raise

    finishing: list[Future[_Output]] = []
    with thread_pool(FINISH_THREADS, "finish") as pool:
        try:
            for item in inputs:
                if is_unreachable.is_set():
                    break  # without this, a command tried an unreachable registry again for each of 75 images
                try:
                    finishing.append(pool.submit(end, item, begin(item)))
                except BuilderError as error:
                    fail(item, error)
                    finishing.append(Future())  # in order, with the errors of the threads
                    finishing[-1].set_exception(error)
            return errors.collect(lambda future: future.result(), finishing)
        except BaseException:
            stop.set()
            wait(finishing, timeout=GRACE_S)
            raise


# ---- blobs


def send_blobs(
    repository: Repository,
    files: Mapping[Descriptor, Path | None],
    *,
    fetch: Callable[[Descriptor], Path] | None = None,
    source: str = "",
    mount_from: Sequence[str] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> Sent:
    """Sends the blobs of an image, in parallel, the largest first. The first failure ends the push.

    `files` has the path of every layer and of the configuration, or None for a blob that the store lacks: the registry
    must have the blob, or `fetch` downloads it and returns its path. `source` is a repository of the same registry with
    all blobs; the repositories in `mount_from` may have some blobs. `progress` is called with numbers of bytes,
    negative if bytes must be sent again; the numbers add up to the size of all blobs.
    """
    lock = threading.Lock()

    def report(count: int) -> None:
        with lock:
            progress(count)

    def push_blob(stoppable: Repository, blob: Descriptor) -> State:
        """Pushes one blob in the cheapest way: a mount needs no question before it, and succeeds for a present blob."""
        is_present = blob.digest in repository.known
        is_mounted = not is_present and bool(source) and stoppable.mount(blob.digest, source)
        if not (is_present or is_mounted):
            is_present = stoppable.has_blob(blob.digest)
        if is_present or is_mounted or any(stoppable.mount(blob.digest, other) for other in mount_from):
            report(blob.size)
            return "present" if is_present else "mounted"
        path = files[blob] or (fetch(blob) if fetch else None)
        if path is None:
            raise RegistryError(
                f"{repository.name}: blob {blob.digest} is missing in the registry and in the store",
                hint="Build the image again.",
            )
        damage = ""
        try:
            if path.stat().st_size == blob.size:
                stoppable.upload(blob.digest, path, blob.size, report)
            else:
                damage = f"its size is not {blob.size} bytes"
        except RejectedError as error:
            if error.code not in DAMAGED:
                raise
            # The file is hashed only now: it may have gigabytes, and the registry checks each digest anyway.
            with path.open("rb") as file:
                if f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == blob.digest:
                    raise
            damage = f"its SHA-256 is not {blob.digest}"
        except OSError as error:
            raise of_file(error) from error
        if damage:
            raise DamagedError(f"damaged: {damage} ({path})", hint=REPAIR, blob=blob.digest)
        return "sent"

    # The largest first: a large blob that begins last would be sent alone, while the other threads have nothing to do.
    unique = {blob.digest: blob for blob in files}.values()
    largest_first = sorted(unique, key=lambda blob: blob.size, reverse=True)
    sizes: Counter[State] = Counter()
    for blob, state in zip(largest_first, transfer_each(repository, push_blob, largest_first), strict=True):
        sizes[state] += blob.size
        repository.known.add(blob.digest)
    return Sent(sent=sizes["sent"], mounted=sizes["mounted"], present=sizes["present"])


def fetch_blobs(
    repository: Repository, store: Store, blobs: Iterable[Descriptor], progress: Callable[[int], None] = lambda _: None
) -> int:
    """Downloads the blobs that the store lacks, the largest first; returns their number of bytes.

    `progress` is called with numbers of bytes. Raises RegistryError, DiskError.
    """
    missing = {blob.digest: blob for blob in blobs if not store.has(blob.digest, blob.size)}.values()

    def download(source: Repository, blob: Descriptor) -> int:
        with store.new_blob() as written:
            source.download(blob.digest, blob.size, written.file, progress)
            written.stored_as = blob.digest
        return blob.size

    return sum(transfer_each(repository, download, sorted(missing, key=lambda blob: -blob.size)))


def fetch_blob(repository: Repository, store: Store, blob: Descriptor) -> Path:
    """Downloads a blob unless the store has it; returns its path. Raises RegistryError, DiskError."""
    fetch_blobs(repository, store, [blob])
    return store.path(blob.digest)
