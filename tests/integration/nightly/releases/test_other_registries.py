"""Staging and releasing with registries that answer differently from docker-registry, imitated by a proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.evidence import reports
from builder.registry import artifacts
from tests.integration.checkout import Checkout
from tests.integration.registry import Habit, Proxy
from tests.integration.releases.machines import UNTESTED_GPU, public, release, stage, tags


@pytest.mark.parametrize("habit", Habit)
def test_a_signed_release(ours: Checkout, proxy: Proxy, keys: Path, habit: Habit) -> None:
    """With GitLab, `stage` ended with "invalid index" and the hint to delete it, which would have deleted the image."""
    proxy.habits.add(habit)
    sign = ("--sign", str(keys / "ours.key"))
    stage(ours, *sign)
    release(ours, UNTESTED_GPU, *sign)
    for tag, digest in tags(ours, proxy).items():
        assert digest
        assert len(artifacts.attached(public(ours, proxy), digest, reports.TYPE)) == 1, tag
    name = f"{proxy.address}/{ours.references('-extra')[0]}"
    ours.builder("verify", name, "--key", str(keys / "ours.pub"))
