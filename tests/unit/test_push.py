"""What is sent, in which order, and what happens to tags, with a registry in memory."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from builder import push as pushing
from builder.digest import of_bytes
from builder.errors import FileError, RegistryError, VerifyError
from builder.push import Blob, Pushed
from builder.registry import Registry
from builder.registry_http import RefusedError, StoppedError

IMAGE = "application/vnd.oci.image.manifest.v1+json"
MANIFEST, OTHER = b'{"one": 1}', b'{"two": 2}'
DIGEST, OTHERS = of_bytes(MANIFEST), of_bytes(OTHER)


class FakeRegistry(Registry):
    """Blobs and tags in memory; `calls` says what was done, in order."""

    def __init__(self, *, has: Iterable[Blob] = (), others: dict[str, Sequence[Blob]] | None = None) -> None:
        self.name = "registry.example.test/a/b"
        self.has = {blob.digest for blob in has}
        self.others = {name: {blob.digest for blob in blobs} for name, blobs in (others or {}).items()}
        self.tags: dict[str, str] = {}
        self.calls: list[str] = []
        self.on_upload: Callable[[str], None] = lambda _: None
        self.on_put: Callable[[str], None] = lambda _: None
        self.stop = threading.Event()
        self.running = self.most = 0
        self._lock = threading.Lock()

    def stoppable(self, stop: threading.Event) -> Registry:
        self.stop = stop
        return self

    def has_blob(self, digest: str) -> bool:
        return digest in self.has

    def mount(self, digest: str, source: str) -> bool:
        self.calls.append(f"mount from {source}")
        return digest in self.others.get(source, set())

    def upload(self, digest: str, path: Path, size: int, sent: Callable[[int], None]) -> None:
        with self._lock:
            self.calls.append(f"upload {size}")
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            sent(size)
            self.on_upload(digest)
            if of_bytes(path.read_bytes()) != digest:
                raise RefusedError("no", status=400, code="DIGEST_INVALID")
        finally:
            with self._lock:
                self.running -= 1

    def digest_of(self, reference: str) -> str | None:
        return self.tags.get(reference)

    def put_manifest(self, reference: str, content: bytes, media_type: str) -> str:
        self.calls.append(f"put {reference}")
        assert media_type == IMAGE
        self.tags[reference] = of_bytes(content)
        self.on_put(reference)
        return of_bytes(content)


@pytest.fixture
def blobs(tmp_path: Path) -> list[Blob]:
    """Of 10, 30 and 20 bytes."""
    made = []
    for size in (10, 30, 20):
        content = bytes([size]) * size
        (tmp_path / str(size)).write_bytes(content)
        made.append(Blob(digest=of_bytes(content), size=size, path=tmp_path / str(size)))
    return made


def push(
    registry: Registry, blobs: Sequence[Blob], *, mount_from: Sequence[str] = (), parallel: int = 1
) -> tuple[Pushed, list[int]]:
    """Pushes; what was done, and what progress heard. No thread is left in any case."""
    told: list[int] = []
    try:
        pushed = pushing.push(
            registry, manifest=MANIFEST, media_type=IMAGE, blobs=blobs, mount_from=mount_from, progress=told.append,
            parallel=parallel,
        )  # fmt: skip
    finally:
        assert [one.name for one in threading.enumerate() if "(_work)" in one.name] == []
    return pushed, told


def test_largest_first_and_the_manifest_last(blobs: list[Blob]) -> None:
    registry = FakeRegistry()
    pushed, told = push(registry, blobs)
    assert registry.calls == ["upload 30", "upload 20", "upload 10", f"put {DIGEST}"]
    assert pushed == Pushed(digest=DIGEST, sent=60, skipped=0, mounted=0)
    assert told == [30, 20, 10]


def test_the_cheapest_way_for_each(blobs: list[Blob]) -> None:
    registry = FakeRegistry(has=blobs[:1], others={"c": blobs[1:2]})
    pushed, told = push(registry, blobs, mount_from=["none", "c"])
    assert pushed == Pushed(digest=DIGEST, sent=20, skipped=10, mounted=30)
    assert registry.calls == [
        "mount from none", "mount from c", "mount from none", "mount from c", "upload 20", f"put {DIGEST}",
    ]  # fmt: skip
    assert sum(told) == 60


def test_the_same_blob_twice_is_sent_once(blobs: list[Blob]) -> None:
    registry = FakeRegistry()
    pushed, told = push(registry, [blobs[0], blobs[0]])
    assert registry.calls == ["upload 10", f"put {DIGEST}"]
    assert pushed.sent == sum(told) == 10


def test_side_by_side(blobs: list[Blob]) -> None:
    registry = FakeRegistry()
    together = threading.Barrier(2)
    registry.on_upload = lambda digest: None if digest == blobs[0].digest else _wait(together)
    push(registry, blobs, parallel=2)
    assert registry.most == 2


def _wait(barrier: threading.Barrier) -> None:
    barrier.wait(10)


def test_what_is_not_in_the_store(blobs: list[Blob]) -> None:
    away = [Blob(digest=blob.digest, size=blob.size, path=None) for blob in blobs]
    pushed, _ = push(FakeRegistry(has=blobs[:1], others={"c": blobs[1:]}), away, mount_from=["c"])
    assert pushed == Pushed(digest=DIGEST, sent=0, skipped=10, mounted=50)
    registry = FakeRegistry(has=blobs[:2])
    with pytest.raises(RegistryError, match=f"a/b: lacks blob {blobs[2].digest}"):
        push(registry, away)
    assert registry.calls == []


@pytest.mark.parametrize("content", [b"x" * 30, b"x" * 29, None])
def test_a_damaged_file_is_named(blobs: list[Blob], content: bytes | None) -> None:
    path = blobs[1].path
    assert path is not None
    path.unlink() if content is None else path.write_bytes(content)
    registry = FakeRegistry()
    with pytest.raises(FileError) as caught:
        push(registry, blobs)
    assert str(path) in str(caught.value)
    assert str(caught.value).startswith("damaged") == (content is not None)
    assert f"put {DIGEST}" not in registry.calls
    assert ("upload 30" in registry.calls) == (content == b"x" * 30), "only the registry sees that one"


def test_a_digest_that_only_the_registry_finds_wrong(blobs: list[Blob]) -> None:
    registry = FakeRegistry()

    def refuse(_: str) -> None:
        raise RefusedError("it says so", status=400, code="DIGEST_INVALID")

    registry.on_upload = refuse
    with pytest.raises(RefusedError, match="it says so"):
        push(registry, blobs)


def test_the_first_failure_ends_the_rest(blobs: list[Blob]) -> None:
    """The one that failed is told, not those that were stopped; what waits is not begun."""
    registry = FakeRegistry()
    begun = threading.Event()

    def upload(digest: str) -> None:
        if digest == blobs[1].digest:
            begun.set()
            if registry.stop.wait(10):
                raise StoppedError("stopped")
        else:
            begun.wait(10)
            raise RegistryError("the reason")

    registry.on_upload = upload
    with pytest.raises(RegistryError, match="the reason"):
        push(registry, blobs, parallel=2)
    assert set(registry.calls) == {"upload 30", "upload 20"}


def test_a_bug_is_not_swallowed(blobs: list[Blob]) -> None:
    registry = FakeRegistry()
    registry.on_upload = lambda _: print(1 / 0)
    with pytest.raises(ZeroDivisionError):
        push(registry, blobs)


def test_the_user_wants_to_end(blobs: list[Blob], monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are told to stop, and one that waits for a registry that is silent is not waited for."""
    registry = FakeRegistry()
    silent = threading.Event()
    monkeypatch.setattr(pushing, "GRACE_S", 0.2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without

    def upload(_: str) -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        silent.wait(30)

    registry.on_upload = upload
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pushing.push(
            registry, manifest=MANIFEST, media_type=IMAGE, blobs=blobs, mount_from=[], progress=lambda _: None,
            parallel=1,
        )  # fmt: skip
    assert 0.2 <= time.monotonic() - start < 10
    left = [one for one in threading.enumerate() if "(_work)" in one.name]
    assert [one.daemon for one in left] == [True], "it would keep the program from ending"
    silent.set()
    left[0].join(10)
    assert registry.calls == ["upload 30"], "the others were begun all the same"


def tag(registry: Registry, versioned: Sequence[str], moving: Sequence[str]) -> list[str]:
    return pushing.tag(registry, DIGEST, MANIFEST, IMAGE, versioned, moving)


def test_versioned_tags_are_never_moved() -> None:
    registry = FakeRegistry()
    registry.tags = {"1.0.0": OTHERS, "1.0.1": DIGEST}
    told = tag(registry, ["1.0.0", "1.0.1", "1.0.2"], [])
    assert registry.calls == ["put 1.0.2"]
    assert registry.tags == {"1.0.0": OTHERS, "1.0.1": DIGEST, "1.0.2": DIGEST}
    assert told == [
        f"{registry.name}:1.0.0 stays at {OTHERS}: a versioned tag is never moved",
        f"{registry.name}:1.0.2 is {DIGEST}",
    ]


def test_moving_tags_move() -> None:
    registry = FakeRegistry()
    registry.tags = {"a": OTHERS, "b": DIGEST}
    assert tag(registry, [], ["a", "b", "c"]) == [
        f"{registry.name}:a is {DIGEST}, was {OTHERS}",
        f"{registry.name}:c is {DIGEST}",
    ]
    assert registry.calls == ["put a", "put c"]
    assert set(registry.tags.values()) == {DIGEST}


def test_moving_tags_come_last() -> None:
    registry = FakeRegistry()
    tag(registry, ["1.0.0", "1.0.1"], ["1.0", "1"])
    assert registry.calls == ["put 1.0.0", "put 1.0.1", "put 1.0", "put 1"]


@pytest.mark.parametrize("kind", ["versioned", "moving"])
@pytest.mark.parametrize("after", [OTHERS, ""])
def test_who_loses_a_race_says_so(kind: str, after: str) -> None:
    registry = FakeRegistry()
    registry.on_put = lambda name: registry.tags.update({name: after}) if after else registry.tags.clear()
    with pytest.raises(RegistryError, match=f"tag x moved from {DIGEST} to {after or 'nothing'} while") as caught:
        tag(registry, ["x"], ["y"]) if kind == "versioned" else tag(registry, [], ["x", "y"])
    assert registry.name in str(caught.value)
    assert registry.calls == ["put x"], "the other tags are left alone"


def test_only_the_manifest_that_was_meant_is_tagged() -> None:
    registry = FakeRegistry()
    with pytest.raises(VerifyError, match="is not sha256:"):
        pushing.tag(registry, OTHERS, MANIFEST, IMAGE, ["1.0"], [])
    assert registry.calls == []
