"""Two builders in one checkout."""

from __future__ import annotations

from tests.integration.checkout import PLAIN, Checkout
from tests.integration.index import Fault, Index


def test_the_second_gives_up_or_waits(fresh: Checkout, index: Index) -> None:
    fresh.lock_and_render()
    index.faults["tinyframe"] = Fault.FILE_STALLS
    with fresh.running("build", PLAIN) as first:
        first.reaches(index.stalled.is_set)
        output = fresh.builder("render", code=9)
        assert "`builder build`" in output
        assert f"pid {first.process.pid}" in output
        assert "--wait" in output
        with fresh.running("--wait", "render") as second:
            second.says(f"waiting for another builder: `builder build` (pid {first.process.pid}")
            index.heal()
            first.ends(0)
            second.ends(0)
    assert len(fresh.image_ids()) == 1
