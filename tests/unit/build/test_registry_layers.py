"""Known layers that a registry has are downloaded, not made again."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import replace

import pytest

from builder.common.errors import RegistryError
from builder.layers import os_layer
from builder.layers.oci import Layer
from tests.unit.build.assembling import EMBER, Bench


@pytest.fixture
def machines(benches: Callable[[], Bench]) -> tuple[Bench, Bench]:
    """One machine that made the layers of a cell, and a new one; the registry has the layers of bytecode."""
    first = benches()
    first.run(EMBER)
    second = benches()
    for layer in first.images(EMBER)[0].layers:
        record = first.store.get_record(layer.inputs)
        if layer.compiled and record:
            second.world.registry[record["digest"]] = first.store.read(record["digest"])
    assert second.world.registry
    return first, second


def test_bytecode_of_the_registry_is_not_compiled_again(machines: tuple[Bench, Bench]) -> None:
    first, second = machines
    second.run(EMBER)
    assert second.world.compiled == []
    assert second.world.downloaded == ["registry.example.test:5000/team/ember-cuda"] * len(second.world.registry)
    assert second.stored(EMBER) == first.stored(EMBER)
    assert second.world.fetched, "wheels are taken from the index"


def test_a_damaged_layer_of_the_registry_is_made_here(machines: tuple[Bench, Bench]) -> None:
    first, second = machines
    second.world.registry = dict.fromkeys(second.world.registry, b"damaged")
    second.run(EMBER)
    assert second.world.compiled
    assert second.stored(EMBER) == first.stored(EMBER)
    assert not list((second.store.root / "tmp").iterdir())


def test_a_registry_that_fails_is_asked_once(machines: tuple[Bench, Bench]) -> None:
    first, second = machines
    second.world.registry_error = RegistryError("no response")
    second.run(EMBER)
    assert second.console.text.count("the registry is not used for the rest of this run: no response") == 1
    assert second.stored(EMBER) == first.stored(EMBER)


def test_a_layer_that_is_not_known_is_not_looked_for(benches: Callable[[], Bench]) -> None:
    bench = benches()
    bench.world.registry_error = RegistryError("no response")
    bench.run(EMBER)
    assert "no response" not in bench.console.text


def test_an_operating_system_that_was_made_elsewhere(benches: Callable[[], Bench]) -> None:
    """Its record is read from its blob."""
    store, system = benches().store, io.BytesIO()
    with tarfile.open(fileobj=system, mode="w") as tar:
        for path, mode, time in (("var/tmp", 0o1777, 50), ("opt/tool", 0, 90), ("var/lib/dpkg/info/a.list", 0, 10)):
            info = tarfile.TarInfo(path)
            info.type, info.mode, info.mtime = (tarfile.DIRTYPE, mode, time) if mode else (tarfile.REGTYPE, 0o644, time)
            content = b"/opt/tool\n" if path.endswith(".list") else b""
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    source = store.root / "tmp/system.tar"
    source.write_bytes(system.getvalue())
    written = store.write(lambda out: os_layer.write([source], out))
    layer = Layer(digest=written.digest, diff_id=written.diff_id, size=written.size, unpacked=written.unpacked)
    record = os_layer.read(store, layer, "debian:test")
    assert record == replace(written, base="debian:test")
    assert (record.created, record.taken, record.folders) == ("1970-01-01T00:01:30Z", ("opt/tool",), ("var/tmp",))
