"""Fixtures for the tests of assembling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from builder.build import assemble, layer_lookup, operating_systems
from builder.layers import oci, stored_layers
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan.layer_order import PlannedLayer
from tests.fakes.mmdebstrap import FakeFetcher
from tests.unit.build.assembling import AssemblyBench, FakeRepository, WorldFetcher


@pytest.fixture
def benches(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], AssemblyBench]]:
    """Makes machines, each with a store and an engine of its own; only the last one can run."""
    machines: list[AssemblyBench] = []
    make_layer = stored_layers.store_wheels

    def splice(store: Store, layer: PlannedLayer, paths: Sequence[Path], *more: Any) -> oci.Layer:
        world = machines[-1].world
        world.spliced.append(layer.name)
        world.before_splice(layer, paths)
        return make_layer(store, layer, paths, *more)

    def bench() -> AssemblyBench:
        machines.append(AssemblyBench(tiny, tmp_path / f"store{len(machines)}"))
        return machines[-1]

    def new_fetcher(*arguments: Any, **options: Any) -> WorldFetcher:
        return WorldFetcher(machines[-1].world, *arguments, **options)

    def new_repository(*arguments: Any, **options: Any) -> FakeRepository:
        return FakeRepository(machines[-1].world, *arguments, **options)

    monkeypatch.setattr(stored_layers, "store_wheels", splice)
    monkeypatch.setattr(layer_lookup, "Repository", new_repository)
    monkeypatch.setattr(assemble, "Fetcher", new_fetcher)
    monkeypatch.setattr(operating_systems, "Fetcher", FakeFetcher)
    yield bench
    for machine in machines:
        for assembler in machine.assemblers:
            assembler.close()


@pytest.fixture
def bench(benches: Callable[[], AssemblyBench]) -> AssemblyBench:
    return benches()
