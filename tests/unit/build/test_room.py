"""Room for the layers that the store lacks."""

from __future__ import annotations

import shutil

import pytest

from builder.common.errors import DiskError
from builder.layers import garbage
from builder.layers.oci import LAYER_TYPE
from builder.layers.store import Store
from tests.unit.build.assembling import EMBER, JUPYTER, AssemblyBench


def test_missing_layers_count_once(bench: AssemblyBench) -> None:
    images = bench.images(EMBER, JUPYTER)
    wheels = {wheel.sha256: wheel.size for image in images for wheel in image.wheels}
    packages = {package.sha256: package.size for image in images for package in image.os_lock.packages}
    assert garbage.missing_bytes(bench.store, images) == sum(wheels.values()) + sum(packages.values())
    bench.run(EMBER)
    own = [wheel.size for wheel in images[1].wheels if wheel not in images[0].wheels]
    assert own
    assert garbage.missing_bytes(bench.store, images) == sum(own)
    bench.run(JUPYTER)
    assert garbage.missing_bytes(bench.store, images) == 0


def test_garbage_is_removed_only_to_keep_the_limit(bench: AssemblyBench) -> None:
    bench.store.prepare()
    unused = bench.store.path(bench.store.put(bytes(1_000_000), LAYER_TYPE).digest)
    images = bench.images(EMBER)
    garbage.make_room(bench.store, images)
    assert unused.exists()
    limit = garbage.missing_bytes(bench.store, images) + 1000
    garbage.make_room(Store(bench.store.root, limit=limit), images)
    assert not unused.exists()
    with pytest.raises(DiskError, match=r"must be written to the store .*, and its limit is ") as caught:
        garbage.make_room(Store(bench.store.root, limit=limit - 1001), images)
    assert "builder gc" in caught.value.hint


def test_a_disk_without_room_is_an_error_before_anything_is_downloaded(
    bench: AssemblyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store.prepare()
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DiskError, match=r"must be written to the store .*: its disk has 1 kB free"):
        garbage.make_room(bench.store, bench.images(EMBER))


def test_a_build_that_writes_nothing_needs_no_room(bench: AssemblyBench) -> None:
    """A store over its limit can still be read."""
    bench.run(EMBER)
    garbage.make_room(Store(bench.store.root, limit=1), bench.images(EMBER))
