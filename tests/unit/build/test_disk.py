"""How much disk images need."""

from __future__ import annotations

import pytest

from builder.build import disk
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import Plan
from tests.fakes.locks import LOCKED

GB = 1_000_000_000


@pytest.fixture
def planned(tiny: Project) -> Plan:
    return plan.make_plan(tiny, tiny.select(LOCKED))


def test_a_dockerfile_needs_room_for_shared_wheels_once(planned: Plan) -> None:
    [first, second] = [Plan(images=planned.images[:count]) for count in (1, 2)]
    needed = disk.dockerfile_bytes(first, "overlay2")
    assert needed == int(first.unique_bytes * 3.6) + disk.SPARE
    assert disk.dockerfile_bytes(second, "overlay2") < needed * 2 - disk.SPARE
    cached = disk.dockerfile_bytes(first, "overlay2", cached=first.unique_bytes)
    assert cached == int(first.unique_bytes * 2.6) + disk.SPARE
    assert disk.dockerfile_bytes(first, "overlay2", cached=GB) == disk.SPARE


def test_a_store_of_containerd_keeps_the_compressed_layers_too(planned: Plan) -> None:
    first = Plan(images=planned.images[:1])
    assert disk.dockerfile_bytes(first, "containerd") == int(first.unique_bytes * 4.6) + disk.SPARE
    assert disk.download_bytes(1000, "overlay2", is_shared=False) == 1800 + disk.SPARE
    assert disk.download_bytes(1000, "containerd", is_shared=False) == 2800 + disk.SPARE
    assert disk.download_bytes(1000, "containerd", is_shared=True) == 3800 + disk.SPARE
