"""Which blobs are sent, in which order, with a registry in memory."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import RegistryError
from builder.common.files import digest_of_bytes
from builder.layers.oci import CONFIG_TYPE, LAYER_TYPE, Descriptor, Manifest
from builder.layers.store import Store
from builder.registry import transfer
from builder.registry.client import Repository
from builder.registry.failures import RejectedError, StoppedError
from builder.registry.transfer import Sent
from tests.fakes.registry import MemoryRegistry
from tests.fakes.wire import CONTENT as BLOB
from tests.fakes.wire import DIGEST as BLOB_DIGEST
from tests.fakes.wire import Reply, connect
from tests.unit.registry.fixtures import Lay

IMAGE = "application/vnd.oci.image.manifest.v1+json"
MANIFEST, OTHER = b'{"one": 1}', b'{"two": 2}'
DIGEST, OTHERS = digest_of_bytes(MANIFEST), digest_of_bytes(OTHER)
CONTENT = Manifest.of(MANIFEST, IMAGE)
Files = dict[Descriptor, Path]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Blobs of 10, 30 and 20 bytes."""
    files = {}
    for size in (10, 30, 20):
        content = bytes([size]) * size
        (tmp_path / str(size)).write_bytes(content)
        files[Descriptor(media_type=LAYER_TYPE, digest=digest_of_bytes(content), size=size)] = tmp_path / str(size)
    return files


@pytest.fixture
def blobs(files: Files) -> list[Descriptor]:
    return list(files)


def push(
    registry: Repository, files: Mapping[Descriptor, Path | None], *, transfers: int = 1, **options: Any
) -> tuple[Sent, list[int]]:
    """Pushes; the result and the progress. No thread is left in any case."""
    progress: list[int] = []
    registry.transfers = transfers
    try:
        pushed = transfer.send_blobs(registry, files, progress=progress.append, **options)
    finally:
        assert workers() == []
    return pushed, progress


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("transfer")]


def test_the_largest_is_first(files: Files) -> None:
    registry = MemoryRegistry()
    pushed, progress = push(registry, files)
    assert registry.calls == ["upload 30", "upload 20", "upload 10"]
    assert pushed == Sent(sent=60, present=0, mounted=0)
    assert progress == [30, 20, 10]


def test_the_cheapest_way_for_each(files: Files, blobs: list[Descriptor]) -> None:
    registry = MemoryRegistry(has=blobs[:1], others={"c": blobs[1:2]})
    pushed, progress = push(registry, files, mount_from=["none", "c"])
    assert pushed == Sent(sent=20, present=10, mounted=30)
    assert registry.calls == [
        "mount from none", "mount from c", "mount from none", "mount from c", "upload 20",
    ]  # fmt: skip
    assert sum(progress) == 60


def test_a_repository_that_has_all_blobs_is_asked_first_and_once(files: Files, blobs: list[Descriptor]) -> None:
    """Each blob was looked for before it was mounted, and again for each image that has it."""
    registry = MemoryRegistry(others={"staging": blobs})
    for _ in range(2):
        push(registry, files, source="staging")
    assert registry.calls == ["mount from staging"] * 3


def test_the_same_blob_twice_is_sent_once(files: Files, blobs: list[Descriptor]) -> None:
    """A layer may have the bytes of the configuration."""
    registry = MemoryRegistry()
    path = files[blobs[0]]
    pushed, progress = push(registry, {blobs[0]: path, replace(blobs[0], media_type=CONFIG_TYPE): path})
    assert registry.calls == ["upload 10"]
    assert pushed.sent == sum(progress) == 10


def test_blobs_are_sent_in_parallel(files: Files, blobs: list[Descriptor]) -> None:
    registry = MemoryRegistry()
    together = threading.Barrier(2)

    def upload(digest: str) -> None:
        if digest != blobs[0].digest:
            together.wait(10)

    registry.on_upload = upload
    push(registry, files, transfers=2)
    assert registry.most == 2


def test_a_blob_that_is_not_in_the_store(blobs: list[Descriptor]) -> None:
    away = dict.fromkeys(blobs)
    pushed, _ = push(MemoryRegistry(has=blobs[:1], others={"c": blobs[1:]}), away, mount_from=["c"])
    assert pushed == Sent(sent=0, present=10, mounted=50)


def test_a_digest_that_only_the_registry_rejects(files: Files) -> None:
    registry = MemoryRegistry()

    def refuse(_: str) -> None:
        raise RejectedError("wrong digest", status=400, code="DIGEST_INVALID")

    registry.on_upload = refuse
    with pytest.raises(RejectedError):
        push(registry, files)


def test_the_first_failure_ends_the_rest(files: Files, blobs: list[Descriptor]) -> None:
    """Its error is raised, not those of stopped uploads; waiting blobs are not sent."""
    registry = MemoryRegistry()
    begun = threading.Event()

    def upload(digest: str) -> None:
        if digest == blobs[1].digest:
            begun.set()
            if registry.stop.wait(10):
                raise StoppedError("stopped")
        else:
            begun.wait(10)
            raise RegistryError("the cause")

    registry.on_upload = upload
    with pytest.raises(RegistryError, match="the cause"):
        push(registry, files, transfers=2)
    assert set(registry.calls) == {"upload 30", "upload 20"}


def test_a_bug_is_not_swallowed(files: Files) -> None:
    registry = MemoryRegistry()
    registry.on_upload = lambda _: print(1 / 0)
    with pytest.raises(ZeroDivisionError):
        push(registry, files)


def test_an_interrupt_ends_the_push(files: Files) -> None:
    """Threads stop, except one that waits for a registry that does not respond: the process ends with it."""
    registry = MemoryRegistry()
    answered = threading.Event()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not set in background jobs of a shell

    def upload(_: str) -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        answered.wait(30)

    registry.on_upload = upload
    registry.transfers = 1
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        transfer.send_blobs(registry, files)
    assert time.monotonic() - start < 10
    assert registry.stop.is_set()
    [left] = workers()
    answered.set()
    left.join(10)
    assert not left.is_alive()
    assert registry.calls == ["upload 30"], "no other blob is sent"


def test_a_blob_that_is_neither_here_nor_there_is_fetched(files: Files, blobs: list[Descriptor]) -> None:
    """From staging, if the registry cannot mount it."""
    registry = MemoryRegistry(has=blobs[:1], others={"staging": blobs[1:2]})
    pushed, _ = push(registry, dict.fromkeys(blobs), fetch=files.__getitem__, mount_from=["staging"])
    assert pushed.sent == blobs[2].size
    assert registry.calls.count(f"upload {blobs[2].size}") == 1


# ---- downloads


def test_only_what_the_store_lacks_is_downloaded_once(lay: Lay, store: Store) -> None:
    wire = lay(lambda _: Reply(body=BLOB))
    present = store.put(b"present", LAYER_TYPE)
    missing = Descriptor(media_type=LAYER_TYPE, digest=BLOB_DIGEST, size=len(BLOB))
    assert transfer.fetch_blobs(connect(), store, [present, missing, missing]) == len(BLOB)
    assert wire.lines == [f"GET /v2/a/b/blobs/{BLOB_DIGEST}"]
    assert store.read(BLOB_DIGEST) == BLOB
