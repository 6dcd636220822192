"""The store: an image layout for other tools too, with complete blobs, records and names."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import DamagedError, DiskError, FileError
from builder.layers import oci
from builder.layers.oci import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, Descriptor, Layer
from builder.layers.store import Store

KEY = "sha256:" + "a" * 64


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


HELLO = Descriptor(media_type=CONFIG_TYPE, digest=digest_of(b"hello"), size=5)


def image(store: Store, name: str, *layers: bytes) -> Descriptor:
    """Stores an image with these layers and this name."""
    blobs = [store.put(layer, LAYER_TYPE) for layer in layers]
    image_layers = [Layer(digest=blob.digest, diff_id="sha256:x", size=blob.size) for blob in blobs]
    config = store.put(b'{"name":"' + name.encode() + b'"}', CONFIG_TYPE)
    manifest = store.put(oci.manifest(config, image_layers), MANIFEST_TYPE)
    store.name(name, manifest)
    return manifest


def files(store: Store) -> set[str]:
    return {path.relative_to(store.root).as_posix() for path in store.root.rglob("*") if path.is_file()}


def failing(call: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise call

    return fail


# ---- the layout


def test_a_store_is_an_image_layout(tmp_path: Path) -> None:
    """Source: OCI image specification, "Image Layout"."""
    store = Store(tmp_path / "new")
    with store.used():  # the first use creates it
        assert store.images() == {}
    assert json.loads((store.root / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    empty = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}
    assert json.loads((store.root / "index.json").read_text()) == empty
    manifest = image(store, "team/image:1", b"layer")
    assert json.loads(store.index.read_text())["manifests"] == [
        {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": manifest.digest,
            "size": store.path(manifest.digest).stat().st_size,
            "annotations": {"org.opencontainers.image.ref.name": "team/image:1"},
        }
    ]
    blobs = list((store.root / "blobs/sha256").iterdir())
    assert [path.name for path in blobs] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in blobs]


def test_prepare_changes_nothing_in_a_store(store: Store) -> None:
    image(store, "x", b"layer")
    before = {name: (store.root / name).read_bytes() for name in files(store)}
    Store(store.root).prepare()
    assert {name: (store.root / name).read_bytes() for name in files(store)} == before


def test_another_folder_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(FileError):
        Store(tmp_path).prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_without_a_layout_file_is_no_store(store: Store) -> None:
    (store.root / "oci-layout").unlink()
    for use in (store.prepare, store.require):
        with pytest.raises(FileError):
            use()


@pytest.mark.parametrize("call", ["pathlib.Path.mkdir", "pathlib.Path.replace", "os.fsync", "tempfile.mkstemp"])
@pytest.mark.parametrize("count", range(7))
def test_an_interrupted_prepare_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, count: int
) -> None:
    """Killed at any point: the next run must recognize the incomplete store."""
    module, _, name = call.rpartition(".")
    holder = Path if module == "pathlib.Path" else __import__(module)
    original, left = getattr(holder, name), [count]

    def killed(*arguments: Any, **options: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return original(*arguments, **options)

    (tmp_path / "parent").mkdir()
    store = Store(tmp_path / "parent/store")
    with monkeypatch.context() as patch:
        patch.setattr(call, killed)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process cleans nothing up
        try:
            store.prepare()
        except KeyboardInterrupt:
            assert left == [0]
    store.prepare()
    assert store.images() == {}
    assert json.loads((store.root / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}


# ---- blobs


def test_what_is_put_can_be_read(store: Store) -> None:
    blob = store.put(b"hello", CONFIG_TYPE)
    assert blob == Descriptor(media_type=CONFIG_TYPE, digest=digest_of(b"hello"), size=5)
    assert blob.as_data() == {"mediaType": CONFIG_TYPE, "digest": digest_of(b"hello"), "size": 5}
    assert store.read(blob.digest) == b"hello"
    assert store.has(blob.digest, 5)
    assert not store.has(blob.digest, 6)
    assert not store.has(digest_of(b"other"), 5)


def test_every_user_can_read_a_blob(store: Store) -> None:
    """Temporary files are private to their owner, but blobs are for skopeo and other users of the machine."""
    old = os.umask(0o077)
    try:
        blob = store.put(b"hello", CONFIG_TYPE)
    finally:
        os.umask(old)
    assert store.path(blob.digest).stat().st_mode & 0o777 == 0o644


def test_a_damaged_blob_is_refused_and_kept(store: Store) -> None:
    """Reading must not change the store."""
    blob = store.put(b"hello", CONFIG_TYPE)
    store.path(blob.digest).write_bytes(b"HELLO")
    for _ in range(2):
        with pytest.raises(DamagedError) as caught:
            store.read(blob.digest)
        assert caught.value.blob == blob.digest


def test_a_build_removes_damaged_blobs(store: Store) -> None:
    good, bad, missing = (store.put(data, LAYER_TYPE).digest for data in (b"good", b"bad", b"gone"))
    store.path(missing).unlink()
    store.remove_damaged([good, bad, missing])
    store.path(bad).write_bytes(b"BAD")
    with pytest.raises(DamagedError):
        store.remove_damaged([good, bad, missing])
    assert (store.path(good).exists(), store.path(bad).exists()) == (True, False)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), OSError(errno.EIO, "x")], ids=repr)
def test_a_failed_write_leaves_nothing(store: Store, error: BaseException) -> None:
    before = files(store)
    with pytest.raises(type(error)), store.new_blob() as blob:  # noqa: PT012  the block is what fails
        blob.file.write(b"half")
        assert not list((store.root / "blobs/sha256").iterdir()), "visible before it is complete"
        raise error
    assert files(store) == before


def test_a_blob_is_synced_before_it_is_renamed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no blob is incomplete after a power failure."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def synced(handle: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")  # noqa: PTH112  a link of the system
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        done.append("name")
        assert path.read_bytes() == b"hello", "not flushed"
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    store.put(b"hello", CONFIG_TYPE)
    assert done == ["file", "name", "folder"]


def test_a_failed_sync_during_a_write_is_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reports lost data once: the sync at the end succeeds."""
    failed = threading.Event()

    def fdatasync(_: int) -> None:
        failed.set()
        raise OSError(errno.EIO, "x")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(OSError), store.new_blob() as blob:  # noqa: PT011, PT012  the end of the block fails
        blob.file.write(b"hello")
        assert failed.wait(10)
        blob.stored_as = HELLO.digest
    assert not store.path(HELLO.digest).exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
def test_a_full_disk_is_reported_with_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    before = files(store)
    monkeypatch.setattr(call, failing(OSError(code, os.strerror(code))))
    with pytest.raises(DiskError):
        store.put(b"hello", CONFIG_TYPE)
    assert files(store) == before


def temporary(store: Store) -> list[Path]:
    return list((store.root / "tmp").iterdir())


def test_only_temporary_files_of_killed_builders_are_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """However old the last write of another builder is: syncing gigabytes takes longer than a file counts as new."""
    old, new = store.root / "tmp/old", store.root / "tmp/new"
    for path in (old, new):
        path.write_bytes(b"gigabytes")
    os.utime(old, (0, 0))  # the new one may not be locked yet
    rename, seen = Path.replace, list[Path]()

    def renamed(path: Path, target: Path) -> Path:
        os.utime(path, (0, 0))
        with Store(store.root).used():
            seen.extend(temporary(store))
            return rename(path, target)

    monkeypatch.setattr(Path, "replace", renamed)
    store.put(b"hello", CONFIG_TYPE)
    assert store.read(HELLO.digest) == b"hello"
    assert len(seen) == 2
    assert temporary(store) == [new]


# ---- records


def test_a_record_is_found_while_its_blob_is_complete(store: Store) -> None:
    blob = store.put(b"layer", LAYER_TYPE)
    data = {"digest": blob.digest, "size": 5, "more": [1, "a"]}
    assert store.get_record(KEY) is None
    store.put_record(KEY, {"digest": HELLO.digest, "size": 5})
    store.put_record(KEY, data)
    assert Store(store.root).get_record(KEY) == data
    store.path(blob.digest).write_bytes(b"lay")
    assert store.get_record(KEY) is None
    store.path(blob.digest).unlink()
    assert store.get_record(KEY) is None


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "{}", '"x"', '{"digest": 1, "size": 1}', '{"digest": "x"}'])
def test_a_damaged_record_is_none(store: Store, text: str) -> None:
    blob = store.put(b"layer", LAYER_TYPE)
    store.put_record(KEY, {"digest": blob.digest, "size": 5})
    [record] = (store.root / "layers").iterdir()
    record.write_text(text)
    assert store.get_record(KEY) is None


# ---- names


def test_a_name_belongs_to_one_image_and_names_are_sorted(store: Store) -> None:
    old, other = image(store, "y:1", b"old"), image(store, "z:1", b"other")
    new = image(store, "y:1", b"new")
    assert store.images() == {"y:1": new, "z:1": other}
    assert old not in store.images().values()
    before = store.index.stat().st_ino
    store.name("y:1", new)
    assert store.index.stat().st_ino == before, "written without a change"
    store.name("x:1", new, instead_of="y:1")
    names = [entry["annotations"].popitem()[1] for entry in json.loads(store.index.read_text())["manifests"]]
    assert names == list(store.images()) == ["x:1", "z:1"]
    store.remove_names(["x:1", "absent"])
    assert store.images() == {"z:1": other}


def test_several_threads_name_images(store: Store) -> None:
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
def test_a_damaged_index_is_reported(store: Store, text: str) -> None:
    (store.root / "index.json").write_text(text)
    with pytest.raises(DamagedError):
        store.images()


def test_an_index_that_cannot_be_read_is_not_a_lost_one(store: Store) -> None:
    store.index.unlink()
    store.index.mkdir()
    with pytest.raises(FileError) as caught:
        store.images()
    assert not isinstance(caught.value, DamagedError)


# ---- damage


def test_a_lost_index_is_not_an_empty_store(store: Store) -> None:
    image(store, "x", b"layer")
    store.index.unlink()
    with pytest.raises(DamagedError):
        store.prepare()
    assert not store.index.exists()


def test_a_blob_of_many_members_is_inflated(store: Store) -> None:
    content = bytes(2_000_000) + b"middle" + bytes(1_999_994)
    members = gzip.compress(content[:7], mtime=0) + gzip.compress(b"") + gzip.compress(content[7:], mtime=0)
    packed = store.put(members, LAYER_TYPE)
    assert b"".join(store.chunks(packed.digest)) == members
    assert b"".join(store.inflated(packed.digest)) == content


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-5], lambda data: b"x" + data[1:], lambda data: data[:-8] + b"\0" * 8]
)
def test_a_blob_that_is_not_valid_gzip(store: Store, damage: Callable[[bytes], bytes]) -> None:
    blob = store.put(damage(gzip.compress(b"content" * 1000)), LAYER_TYPE)
    with pytest.raises(DamagedError) as caught:
        list(store.inflated(blob.digest))
    assert caught.value.blob == blob.digest
