"""The store: an image layout that others can read, whole files or none, and nothing freed that is in use."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from builder import oci
from builder.errors import BusyError, DiskError, FileError
from builder.layers import PlannedLayer
from builder.oci import BuiltLayer
from builder.store import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, Descriptor, Store, Use

KEY = "sha256:" + "a" * 64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.prepare()
    return made


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def image(store: Store, name: str, *layers: bytes) -> Descriptor:
    """An image of these layers, under a name."""
    planned = PlannedLayer(kind="os", name="os", component="base", inputs="")
    blobs = [store.put(layer, LAYER_TYPE) for layer in layers]
    built = [BuiltLayer(planned=planned, digest=blob.digest, diff_id="sha256:x", size=blob.size) for blob in blobs]
    config = store.put(b'{"name":"' + name.encode() + b'"}', CONFIG_TYPE)
    manifest = store.put(oci.manifest(config, built), MANIFEST_TYPE)
    store.name(name, manifest)
    return manifest


def files(store: Store) -> set[str]:
    return {path.relative_to(store.root).as_posix() for path in store.root.rglob("*") if path.is_file()}


def failing(call: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise call

    return fail


# ---- the layout


def test_an_empty_store_is_an_empty_layout(store: Store) -> None:
    """Source: OCI image specification, "Image Layout"."""
    assert json.loads((store.root / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    assert json.loads((store.root / "index.json").read_text()) == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [],
    }
    assert (store.root / "blobs/sha256").is_dir()
    assert store.images() == {}


def test_an_index_as_others_read_it(store: Store) -> None:
    manifest = image(store, "team/image:1", b"layer")
    assert json.loads((store.root / "index.json").read_text()) == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            {
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": manifest.digest,
                "size": store.path(manifest.digest).stat().st_size,
                "annotations": {"org.opencontainers.image.ref.name": "team/image:1"},
            }
        ],
    }
    for name in files(store):
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256((store.root / name).read_bytes()).hexdigest()}"


def test_preparing_again_changes_nothing(store: Store) -> None:
    image(store, "x", b"layer")
    before = {name: (store.root / name).read_bytes() for name in files(store)}
    Store(store.root).prepare()
    assert {name: (store.root / name).read_bytes() for name in files(store)} == before


def test_an_empty_folder_that_is_there_is_taken(tmp_path: Path) -> None:
    Store(tmp_path).prepare()
    assert (tmp_path / "oci-layout").exists()


def test_a_folder_that_is_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(FileError, match="is not empty and no image layout") as caught:
        Store(tmp_path).prepare()
    assert "Name an empty folder" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("call", ["pathlib.Path.mkdir", "pathlib.Path.replace", "os.fsync", "tempfile.mkstemp"])
@pytest.mark.parametrize("count", range(7))
def test_a_store_that_was_half_made_is_made_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, count: int
) -> None:
    """Killed at any point: the next run must not take what is there for something else."""
    module, _, name = call.rpartition(".")
    holder = Path if module == "pathlib.Path" else __import__(module)
    original, left = getattr(holder, name), [count]

    def killed(*arguments: Any, **options: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return original(*arguments, **options)

    (tmp_path / "parent").mkdir()
    made = Store(tmp_path / "parent/store")
    with monkeypatch.context() as patch:
        patch.setattr(call, killed)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process tidies nothing up
        try:
            made.prepare()
        except KeyboardInterrupt:
            assert left == [0]
    made.prepare()
    assert made.images() == {}
    assert json.loads((made.root / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}


# ---- blobs


def test_put_then_read(store: Store) -> None:
    blob = store.put(b"hello", CONFIG_TYPE)
    assert blob == Descriptor(media_type=CONFIG_TYPE, digest=digest_of(b"hello"), size=5)
    assert blob.as_data() == {"mediaType": CONFIG_TYPE, "digest": digest_of(b"hello"), "size": 5}
    assert store.read(blob.digest) == b"hello"
    assert store.has(blob.digest, 5)
    assert not store.has(blob.digest, 6)
    assert not store.has(digest_of(b"other"), 5)


def test_a_blob_can_be_read_by_everyone(store: Store) -> None:
    """Temporary files are for their owner alone; skopeo and a second user of the machine read blobs."""
    old = os.umask(0o077)
    try:
        blob = store.put(b"hello", CONFIG_TYPE)
    finally:
        os.umask(old)
    assert store.path(blob.digest).stat().st_mode & 0o777 == 0o644


def test_what_is_there_is_not_written_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(b"hello", CONFIG_TYPE)
    monkeypatch.setattr(store, "write", failing(AssertionError("written again")))
    store.put(b"hello", CONFIG_TYPE)


def test_a_blob_of_another_size_is_written_again(store: Store) -> None:
    blob = store.put(b"hello", CONFIG_TYPE)
    store.path(blob.digest).write_bytes(b"hell")
    assert store.read(store.put(b"hello", CONFIG_TYPE).digest) == b"hello"


def test_a_damaged_blob_is_refused_and_removed(store: Store) -> None:
    blob = store.put(b"hello", CONFIG_TYPE)
    store.path(blob.digest).write_bytes(b"HELLO")
    with pytest.raises(FileError, match="was damaged, and is removed") as caught:
        store.read(blob.digest)
    assert caught.value.hint.startswith("Run the same command again")
    assert not store.path(blob.digest).exists()


def test_large_blobs_are_checked_without_being_read_whole(store: Store) -> None:
    good, bad, gone = (store.put(data, LAYER_TYPE).digest for data in (b"good", b"bad", b"gone"))
    store.path(gone).unlink()
    store.check([good, bad, gone])
    store.path(bad).write_bytes(b"BAD")
    with pytest.raises(FileError, match="was damaged, and is removed"):
        store.check([good, bad, gone])
    assert (store.path(good).exists(), store.path(bad).exists()) == (True, False)


def test_a_blob_that_is_not_there(store: Store) -> None:
    with pytest.raises(FileError, match=f"the store has no {KEY}"):
        store.read(KEY)


def test_a_blob_that_is_written_piece_by_piece(store: Store) -> None:
    def make(out: BinaryIO) -> str:
        out.write(b"hel")
        out.write(b"lo")
        assert not store.path(digest_of(b"hello")).exists(), "seen before it is whole"
        return digest_of(b"hello")

    store.write(make)
    assert store.read(digest_of(b"hello")) == b"hello"
    assert not list((store.root / "tmp").iterdir())


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), OSError(errno.EIO, "x")], ids=repr)
def test_nothing_is_left_of_a_blob_that_failed(store: Store, error: BaseException) -> None:
    before = files(store)

    def make(out: BinaryIO) -> str:
        out.write(b"half")
        raise error

    with pytest.raises(type(error)):
        store.write(make)
    assert files(store) == before


def test_a_blob_is_on_the_disk_before_it_has_its_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut there is no blob whose bytes are missing."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def synced(handle: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")  # noqa: PTH112  a link of the system
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        done.append("name")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    store.put(b"hello", CONFIG_TYPE)
    assert done == ["file", "name", "folder"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
def test_a_full_disk(store: Store, monkeypatch: pytest.MonkeyPatch, code: int, call: str) -> None:
    before = files(store)
    monkeypatch.setattr(call, failing(OSError(code, os.strerror(code))))
    with pytest.raises(DiskError, match="the disk of the store is full") as caught:
        store.put(b"hello", CONFIG_TYPE)
    assert str(store.root) in str(caught.value)
    assert "builder gc" in caught.value.hint
    assert files(store) == before


def test_many_threads_put_the_same_blob(store: Store) -> None:
    start, failures = threading.Barrier(8), list[BaseException]()

    def put() -> None:
        try:
            start.wait(10)
            store.put(b"hello" * 1000, CONFIG_TYPE)
        except BaseException as error:  # noqa: BLE001  told below
            failures.append(error)

    threads = [threading.Thread(target=put) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert failures == []
    assert store.read(digest_of(b"hello" * 1000)) == b"hello" * 1000
    assert not list((store.root / "tmp").iterdir())


def temporary(store: Store) -> list[Path]:
    return list((store.root / "tmp").iterdir())


def test_what_a_killed_builder_was_writing_is_removed_by_the_next(store: Store) -> None:
    old, new = store.root / "tmp/old", store.root / "tmp/new"
    old.write_bytes(b"gigabytes")
    os.utime(old, (0, 0))
    new.write_bytes(b"perhaps not locked yet")
    with store.used():
        assert temporary(store) == [new]


def test_what_another_builder_is_writing_is_left(store: Store) -> None:
    """However long ago it wrote the last byte."""

    def make(out: BinaryIO) -> str:
        out.write(b"hello")
        out.flush()
        [path] = temporary(store)
        os.utime(path, (0, 0))
        with Store(store.root).used():
            assert temporary(store) == [path]
        return digest_of(b"hello")

    store.write(make)
    assert store.read(digest_of(b"hello")) == b"hello"


def test_what_is_about_to_get_its_name_is_left(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing gigabytes takes longer than a file is taken for new."""
    rename = Path.replace

    def renamed(path: Path, target: Path) -> Path:
        os.utime(path, (0, 0))
        with Store(store.root).used():
            return rename(path, target)

    monkeypatch.setattr(Path, "replace", renamed)
    store.put(b"hello", CONFIG_TYPE)
    assert store.read(digest_of(b"hello")) == b"hello"


# ---- what is remembered


def test_what_was_remembered_is_recalled_while_its_blob_is_there(store: Store) -> None:
    blob = store.put(b"layer", LAYER_TYPE)
    data = {"digest": blob.digest, "size": 5, "more": [1, "a"]}
    assert store.recall(KEY) is None
    store.remember(KEY, data)
    assert store.recall(KEY) == data
    assert Store(store.root).recall(KEY) == data
    store.path(blob.digest).unlink()
    assert store.recall(KEY) is None


def test_a_blob_that_was_cut_short_is_not_recalled(store: Store) -> None:
    blob = store.put(b"layer", LAYER_TYPE)
    store.remember(KEY, {"digest": blob.digest, "size": 5})
    store.path(blob.digest).write_bytes(b"lay")
    assert store.recall(KEY) is None


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "{}", '"x"', '{"digest": 1, "size": 1}', '{"digest": "x"}'])
def test_a_damaged_record_is_none(store: Store, text: str) -> None:
    blob = store.put(b"layer", LAYER_TYPE)
    store.remember(KEY, {"digest": blob.digest, "size": 5})
    [record] = (store.root / "layers").iterdir()
    record.write_text(text)
    assert store.recall(KEY) is None


def test_a_record_that_is_no_text_is_none(store: Store) -> None:
    (store.root / "layers" / f"{KEY[7:]}.json").write_bytes(b"\xff\xfe")
    assert store.recall(KEY) is None


def test_what_was_remembered_last_counts(store: Store) -> None:
    for data in (b"one", b"other"):
        blob = store.put(data, LAYER_TYPE)
        store.remember(KEY, {"digest": blob.digest, "size": len(data)})
    assert store.recall(KEY) == {"digest": digest_of(b"other"), "size": 5}


# ---- names


def test_a_name_is_given_to_one_image(store: Store) -> None:
    old, other = image(store, "x:1", b"old"), image(store, "y:1", b"other")
    new = image(store, "x:1", b"new")
    assert store.images() == {"x:1": new, "y:1": other}
    assert old not in store.images().values()


def test_names_are_in_order_whatever_came_first(store: Store, tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        image(store, name, b"layer")
    again = Store(tmp_path / "again")
    again.prepare()
    for name in ("a", "b", "c"):
        image(again, name, b"layer")
    assert list(store.images()) == ["a", "b", "c"]
    assert (store.root / "index.json").read_bytes() == (again.root / "index.json").read_bytes()


def test_a_name_that_an_image_has_is_not_written_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = image(store, "x", b"layer")
    monkeypatch.setattr("builder.atomic.write_text", failing(AssertionError("written again")))
    store.name("x", manifest)


def test_images_are_named_by_several_threads_and_none_is_lost(store: Store) -> None:
    manifest = image(store, "x", b"layer")
    start = threading.Barrier(6)

    def name(number: int) -> None:
        start.wait(10)
        Store(store.root).name(f"x{number}", manifest)

    threads = [threading.Thread(target=name, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(store.images()) == ["x", *(f"x{number}" for number in range(6))]


@pytest.mark.parametrize("text", ["", "{", "{}", "[]"])
def test_a_damaged_index_is_said_as_such(store: Store, text: str) -> None:
    (store.root / "index.json").write_text(text)
    with pytest.raises(FileError, match=r"index\.json cannot be read"):
        store.images()


# ---- what may be freed


def test_what_images_use(store: Store) -> None:
    one = image(store, "one", b"shared", b"of one alone")
    image(store, "two", b"shared")
    first, second = store.uses()
    own = one.size + len(b'{"name":"one"}') + len(b"of one alone")
    assert first == Use(name="one", manifest=one.digest, bytes=own + len(b"shared"), own=own)
    assert second.name == "two"
    assert second.bytes - second.own == len(b"shared")


def test_an_image_of_two_names_has_its_own_under_both(store: Store) -> None:
    """Its second name takes nothing from it."""
    store.name("other", image(store, "one", b"layer", b"shared"))
    image(store, "two", b"shared")
    one, other, _ = store.uses()
    assert (one.name, other.name) == ("one", "other")
    assert (one.bytes, one.own) == (other.bytes, other.own)
    assert one.bytes - one.own == len(b"shared")


@pytest.fixture
def crowded(store: Store) -> Store:
    """An image, one that lost its name to it, a layer kept for the next build, and what killed runs left."""
    image(store, "x", b"shared", b"old")
    image(store, "x", b"shared", b"new")
    for key, data in (("1" * 64, b"shared"), ("2" * 64, b"old"), ("3" * 64, b"kept for later")):
        blob = store.put(data, LAYER_TYPE)
        store.remember(key, {"digest": blob.digest, "size": blob.size})
    for name in ("downloads/a.whl", "downloads/b.part", "tmp/c", ".index.json.d.tmp", "layers/.e.json.f.tmp"):
        (store.root / name).write_bytes(b"1234")
    return store


LEFT = {"downloads/a.whl", "downloads/b.part", "tmp/c", ".index.json.d.tmp", "layers/.e.json.f.tmp"}


def test_garbage_is_what_no_image_uses(crowded: Store) -> None:
    before = files(crowded)
    found = crowded.garbage()
    gone = {path.name for path in found.blobs}
    assert {digest_of(data)[7:] for data in (b"old", b"kept for later")} < gone
    assert len(gone) == 3, "and the manifest of the old image; both have one configuration"
    records = {f"layers/{digit * 64}.json" for digit in "23"}
    assert {path.relative_to(crowded.root).as_posix() for path in found.leftovers} == LEFT | records
    sizes = [path.stat().st_size for path in (*found.blobs, *found.leftovers)]
    assert found.bytes == sum(sizes)
    assert files(crowded) == before, "only looked at"


def test_gc_frees_it_and_leaves_a_whole_store(crowded: Store) -> None:
    before, size = files(crowded), crowded.size()
    wanted = crowded.garbage()
    freed = crowded.gc()
    assert freed == wanted
    gone = {path.relative_to(crowded.root).as_posix() for path in (*freed.blobs, *freed.leftovers)}
    assert files(crowded) == (before - gone) | {"lock"}
    assert crowded.size() == size - freed.bytes
    manifest = json.loads(crowded.read(crowded.images()["x"].digest))
    assert all(crowded.has(one["digest"], one["size"]) for one in (manifest["config"], *manifest["layers"]))
    assert crowded.recall("1" * 64)
    assert not crowded.recall("2" * 64)
    again = crowded.gc()
    assert (again.blobs, again.leftovers) == ({}, {})


def test_a_store_that_is_used_is_not_freed(crowded: Store) -> None:
    """Another open of the lock file stands for another process: flock knows no difference."""
    before = files(crowded)
    with Store(crowded.root).used():
        with pytest.raises(BusyError, match="is in use by another builder") as caught:
            crowded.gc()
        assert files(crowded) == before | {"lock"}
    assert "--wait" in caught.value.hint
    assert crowded.gc().blobs


def test_several_may_use_a_store_at_once(store: Store) -> None:
    with store.used(), Store(store.root).used(), pytest.raises(BusyError):
        store.gc()


def test_the_lock_is_gone_when_its_holder_failed(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.used():
        raise ZeroDivisionError
    store.gc()


def test_gc_that_was_told_to_wait_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(fcntl, "flock", lambda _, how: asked.append(how))
    store.gc(wait=True)
    store.gc()
    assert asked == [fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB]


def test_a_store_is_not_freed_while_it_cannot_be_read(crowded: Store) -> None:
    """Without the index every blob would be garbage."""
    (crowded.root / "index.json").unlink()
    before = files(crowded)
    with pytest.raises(FileError):
        crowded.garbage()
    assert files(crowded) == before


def test_files_that_another_builder_removes_meanwhile_count_nothing(
    crowded: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are summed without a lock: a download becomes a wheel, a temporary file a blob, at any moment."""
    size, garbage = crowded.size(), crowded.garbage()
    iterdir, rglob = Path.iterdir, Path.rglob

    def gone(folder: Path) -> Iterator[Path]:
        if folder.name in ("store", "tmp", "downloads", "layers", "sha256"):
            yield folder / "gone"  # was there when the folder was read

    monkeypatch.setattr(Path, "iterdir", lambda path: chain(iterdir(path), gone(path)))
    monkeypatch.setattr(Path, "rglob", lambda path, pattern: chain(rglob(path, pattern), gone(path)))
    assert crowded.size() == size
    assert crowded.garbage() == garbage


# ---- room


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=count))


def test_room_that_is_there_frees_nothing(crowded: Store) -> None:
    before = files(crowded)
    Store(crowded.root, limit=crowded.size() + 100).make_room(lambda: 100)
    crowded.make_room(lambda: 100)
    assert files(crowded) == before


def test_room_is_made_of_garbage(crowded: Store) -> None:
    limited = Store(crowded.root, limit=crowded.size())
    garbage = crowded.garbage().bytes
    limited.make_room(lambda: garbage)
    assert crowded.garbage().bytes == 0
    with pytest.raises(DiskError, match=r"GB are to be written to the store .*, its limit is 0\.0 GB") as caught:
        limited.make_room(lambda: garbage + 1)
    assert "builder gc" in caught.value.hint


def test_room_of_the_disk(crowded: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1000)
    crowded.make_room(lambda: 999)
    assert crowded.garbage().blobs, "there was room"
    with pytest.raises(DiskError, match=r"^5\.0 GB are to be written .*: it holds 0\.0 GB, and the disk has 0\.0 GB"):
        crowded.make_room(lambda: 5_000_000_000)
    assert not crowded.garbage().blobs, "it was tried"


def test_what_writes_nothing_needs_no_room(crowded: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store over its limit can still be read from."""
    free(monkeypatch, 0)
    Store(crowded.root, limit=1).make_room(lambda: 0)


def test_room_is_not_made_of_what_another_builder_uses(crowded: Store) -> None:
    with crowded.used(), pytest.raises(BusyError):
        Store(crowded.root, limit=1).make_room(lambda: 1)


def test_what_is_needed_is_asked_again_when_garbage_is_gone(crowded: Store) -> None:
    """Garbage may be what an interrupted build has made already."""
    needs = iter([crowded.garbage().bytes, crowded.size() + 1])
    with pytest.raises(DiskError):
        Store(crowded.root, limit=crowded.size()).make_room(lambda: next(needs))


def test_images_are_given_up_by_pattern(store: Store) -> None:
    for name in ("org/a:1", "org/a:2", "org/b:1"):
        store.name(name, store.put(name.encode(), MANIFEST_TYPE))
    assert store.forget("org/a:*") == ["org/a:1", "org/a:2"]
    assert list(store.images()) == ["org/b:1"]
    assert store.forget("org/c:1") == []


def test_a_name_takes_the_place_of_another(store: Store) -> None:
    manifest = store.put(b"{}", MANIFEST_TYPE)
    store.name("org/a:1.untested", manifest)
    store.name("org/a:1", manifest, instead_of="org/a:1.untested")
    assert store.images() == {"org/a:1": manifest}


def test_an_image_whose_manifest_is_damaged_does_not_keep_gc_from_its_work(store: Store) -> None:
    manifest = store.put(b"{}", MANIFEST_TYPE)
    store.name("org/a:1", manifest)
    store.path(manifest.digest).write_bytes(b"[]")
    other = store.put(b"of nobody", LAYER_TYPE)
    assert store.path(other.digest) in store.gc().blobs
    assert [use.bytes for use in store.uses()] == [0]
