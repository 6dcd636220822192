"""Fixtures for the tests of assembling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from builder.layers import oci, wheel_layers
from builder.layers.oci import KnownLayer
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan.layer_order import PlannedLayer
from tests.unit.build.assembling import Bench


@pytest.fixture
def benches(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Bench]]:
    """Makes machines, each with a store and an engine of its own; only the last one can run."""
    machines: list[Bench] = []
    make_layer = wheel_layers.make

    def splice(store: Store, layer: PlannedLayer, paths: Sequence[Path], known: KnownLayer | None = None) -> oci.Layer:
        world = machines[-1].world
        world.spliced.append(layer.name)
        world.before_splice(layer, paths)
        return make_layer(store, layer, paths, known)

    def bench() -> Bench:
        machines.append(Bench(tiny, tmp_path / f"store{len(machines)}", monkeypatch))
        return machines[-1]

    monkeypatch.setattr(wheel_layers, "make", splice)
    yield bench
    for machine in machines:
        for assembler in machine.assemblers:
            assembler.close()


@pytest.fixture
def bench(benches: Callable[[], Bench]) -> Bench:
    return benches()
