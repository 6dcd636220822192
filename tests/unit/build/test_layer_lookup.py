"""Known layers that a registry has are downloaded, not made again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from builder.common.errors import RegistryError
from builder.layers import stored_layers
from tests.unit.build.assembling import EMBER, AssemblyBench


@pytest.fixture
def machines(benches: Callable[[], AssemblyBench]) -> tuple[AssemblyBench, AssemblyBench]:
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


def test_bytecode_of_the_registry_is_not_compiled_again(machines: tuple[AssemblyBench, AssemblyBench]) -> None:
    first, second = machines
    second.run(EMBER)
    assert second.world.compiled == []
    staged = "registry.example.test:5000/team/staging-ember-cuda"
    assert second.world.downloaded == [staged] * len(second.world.registry)
    assert second.stored(EMBER) == first.stored(EMBER)
    assert second.world.fetched, "wheels are taken from the index"


def test_a_damaged_layer_of_the_registry_is_made_here(machines: tuple[AssemblyBench, AssemblyBench]) -> None:
    first, second = machines
    second.world.registry = dict.fromkeys(second.world.registry, b"damaged")
    second.run(EMBER)
    assert second.world.compiled
    assert second.stored(EMBER) == first.stored(EMBER)
    assert not list((second.store.root / "tmp").iterdir())


def test_a_registry_that_fails_is_asked_once(machines: tuple[AssemblyBench, AssemblyBench]) -> None:
    first, second = machines
    second.world.registry_error = RegistryError("no response")
    second.run(EMBER)
    assert second.console.text.count("the registry is not used for the rest of this run: no response") == 1
    assert second.stored(EMBER) == first.stored(EMBER)


def test_a_layer_that_is_not_known_is_not_looked_for(benches: Callable[[], AssemblyBench]) -> None:
    bench = benches()
    bench.world.registry_error = RegistryError("no response")
    bench.run(EMBER)
    assert "no response" not in bench.console.text


def test_an_operating_system_of_the_registry_is_not_made_again(benches: Callable[[], AssemblyBench]) -> None:
    first = benches()
    first.run(EMBER)
    second = benches()
    [image] = first.images(EMBER)
    system = stored_layers.stored_layer(first.store, image.os_inputs)
    assert system
    second.world.registry[system.digest] = first.store.read(system.digest)
    second.run(EMBER)
    assert second.world.systems == []
    assert stored_layers.stored_layer(second.store, image.os_inputs) == system
    assert second.stored(EMBER) == first.stored(EMBER)
