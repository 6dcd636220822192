"""What `gc` frees of a store, and what it never frees."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from builder.common.errors import BusyError, DamagedError
from builder.layers import garbage
from builder.layers.garbage import Use
from builder.layers.oci import LAYER_TYPE
from builder.layers.store import PACKAGES, Store
from tests.unit.layers.test_store import digest_of, files, image

# ---- what may be freed


def test_bytes_that_images_use(store: Store) -> None:
    first_image = image(store, "one", b"shared", b"of one alone")
    image(store, "two", b"shared")
    first, second = garbage.image_uses(store)
    own = first_image.size + len(b'{"name":"one"}') + len(b"of one alone")
    assert first == Use(name="one", manifest=first_image.digest, bytes=own + len(b"shared"), own=own)
    assert second.name == "two"
    assert second.bytes - second.own == len(b"shared")


@pytest.fixture
def crowded(store: Store) -> Store:
    """An image, one whose name it took, a layer kept for the next build, and leftovers of killed runs."""
    image(store, "x", b"shared", b"old")
    image(store, "x", b"shared", b"new")
    for key, data in (("1" * 64, b"shared"), ("2" * 64, b"old"), ("3" * 64, b"kept for later")):
        blob = store.put(data, LAYER_TYPE)
        store.put_record(key, {"digest": blob.digest, "size": blob.size})
    for name in ("downloads/a.whl", "downloads/b.part", "tmp/c", ".index.json.d.tmp", "layers/.e.json.f.tmp"):
        (store.root / name).write_bytes(b"1234")
    return store


LEFT = {"downloads/a.whl", "downloads/b.part", "tmp/c", ".index.json.d.tmp", "layers/.e.json.f.tmp"}


def test_garbage_is_what_no_image_uses(crowded: Store) -> None:
    before = files(crowded)
    unused = garbage.find_garbage(crowded)
    gone = {path.name for path in unused.blobs}
    assert {digest_of(data)[7:] for data in (b"old", b"kept for later")} < gone
    assert len(gone) == 3, "and the manifest of the old image; both have one configuration"
    records = {f"layers/{digit * 64}.json" for digit in "23"}
    assert {path.relative_to(crowded.root).as_posix() for path in unused.leftovers} == LEFT | records
    sizes = [path.stat().st_size for path in (*unused.blobs, *unused.leftovers)]
    assert unused.bytes == sum(sizes)
    assert files(crowded) == before, "nothing is removed"


def test_the_packages_of_a_kept_operating_system_are_kept(crowded: Store) -> None:
    """With them it can be made again after the archives have moved on. Those of an unused system are garbage."""
    for layer, names in ((b"shared", (b"libc6", b"both")), (b"old", (b"tini", b"both"))):
        blobs = [crowded.put(name, "deb").digest for name in names]
        record = {"digest": digest_of(layer), "size": len(layer), PACKAGES: [*blobs, "sha256:" + "0" * 64]}
        crowded.put_record(str(len(layer)) * 64, record)
    unused = garbage.find_garbage(crowded)
    assert unused.packages == {digest_of(b"libc6"): 5, digest_of(b"both"): 4}
    gone = {f"sha256:{path.name}" for path in unused.blobs}
    assert digest_of(b"tini") in gone
    assert gone.isdisjoint(unused.packages)


def test_gc_frees_it_and_leaves_a_whole_store(crowded: Store) -> None:
    before, size = files(crowded), crowded.size()
    expected = garbage.find_garbage(crowded)
    freed = garbage.remove_garbage(crowded)
    assert freed == expected
    gone = {path.relative_to(crowded.root).as_posix() for path in (*freed.blobs, *freed.leftovers)}
    assert files(crowded) == (before - gone) | {"lock"}
    assert crowded.size() == size - freed.bytes
    manifest = json.loads(crowded.read(crowded.images()["x"].digest))
    assert all(crowded.has(blob["digest"], blob["size"]) for blob in (manifest["config"], *manifest["layers"]))
    assert crowded.get_record("1" * 64)
    assert not crowded.get_record("2" * 64)
    again = garbage.remove_garbage(crowded)
    assert (again.blobs, again.leftovers) == ({}, {})


def test_a_store_in_use_is_not_freed(crowded: Store) -> None:
    """A second open of the lock file represents another process: flock treats both alike."""
    before = files(crowded)
    with Store(crowded.root).used():
        with pytest.raises(BusyError):
            garbage.remove_garbage(crowded)
        assert files(crowded) == before | {"lock"}
    assert garbage.remove_garbage(crowded).blobs


def test_files_that_another_builder_removes_meanwhile_are_ignored(
    crowded: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are added without a lock: at any moment, a download becomes a wheel, or a temporary file a blob."""
    size, before = crowded.size(), garbage.find_garbage(crowded)
    iterdir, rglob = Path.iterdir, Path.rglob

    def removed(folder: Path) -> Iterator[Path]:
        if folder.name in ("store", "tmp", "downloads", "layers", "sha256"):
            yield folder / "removed"  # existed when the folder was read

    monkeypatch.setattr(Path, "iterdir", lambda path: chain(iterdir(path), removed(path)))
    monkeypatch.setattr(Path, "rglob", lambda path, pattern: chain(rglob(path, pattern), removed(path)))
    assert crowded.size() == size
    assert garbage.find_garbage(crowded) == before


# ---- damage


def damage(store: Store, blob: str) -> None:
    content = store.path(blob).read_bytes()
    store.path(blob).write_bytes(bytes([content[0] ^ 1]) + content[1:])


@pytest.mark.parametrize("what", ["manifest", "layer", "index"])
@pytest.mark.parametrize("free_it", [garbage.find_garbage, garbage.remove_garbage], ids=["find", "collect"])
def test_nothing_is_freed_while_a_named_image_is_incomplete(
    crowded: Store, what: str, free_it: Callable[[Store], object]
) -> None:
    """With one changed byte in each manifest, everything was garbage: 24 blobs were lost."""
    manifest = crowded.images()["x"].digest
    if what == "manifest":
        damage(crowded, manifest)
    elif what == "layer":
        crowded.path(digest_of(b"new")).unlink()
    else:
        crowded.index.unlink()
    before = files(crowded)
    with pytest.raises(DamagedError):
        free_it(crowded)
    assert files(crowded) - before <= {"lock"}
    assert files(crowded) >= before


def test_a_damaged_image_can_be_removed(crowded: Store) -> None:
    image(crowded, "y", b"of y")
    damage(crowded, crowded.images()["y"].digest)
    assert list(garbage.incomplete_images(crowded)) == ["y"]
    garbage.remove_garbage(crowded, without=["y"])
    assert list(crowded.images()) == ["x"]
    assert not crowded.path(digest_of(b"of y")).exists()


def test_a_changed_byte_of_the_index_frees_nothing(crowded: Store) -> None:
    """A damaged annotation or digest removed an image from the index, and `gc` freed its blobs."""
    content = crowded.index.read_bytes()
    manifest = crowded.images()["x"]
    for place in range(len(content)):
        crowded.index.write_bytes(content[:place] + b"%" + content[place + 1 :])
        try:
            kept = {image.digest for image in crowded.images().values()}
        except DamagedError:
            continue
        assert kept == {manifest.digest}, place
