"""Which images of test runs are removed: those of processes that have ended."""

from __future__ import annotations

import os

from tests.integration import leftovers


def test_images_of_runs_that_have_ended() -> None:
    mine = f"{leftovers.namespace('ab12')}/ty-cuda:1.0"
    names = [
        mine,
        "builder-test-77-ab/ty-cuda:1.0",
        "builder-test-ab12/x:1",
        "org/pt-cuda:2.9",
        "my-builder-test-7-a/x:1",
    ]
    assert leftovers.dead(names, {os.getpid()}) == ["builder-test-77-ab/ty-cuda:1.0"]
    assert leftovers.dead(names, {os.getpid(), 77}) == []
