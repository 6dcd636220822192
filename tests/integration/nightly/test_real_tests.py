"""The tests of real images pass for a tiny one: those of the components base and python."""

from __future__ import annotations

from pathlib import Path

from tests.integration.checkout import PLAIN
from tests.integration.conftest import NewCheckout


def test_the_tests_of_real_images_pass(new_checkout: NewCheckout, tmp_path: Path) -> None:
    """With the packages that they test: pip in new environments, and certificates."""
    real = new_checkout(tmp_path)
    real.edit("matrix.yaml", "{debian: bookworm, apt: [python3]}", "{debian: bookworm}")
    real.edit("matrix.yaml", "[libnss-extrausers, tini]", "[ca-certificates, libnss-extrausers, tini]")
    real.lock_and_render()
    assert "1 image: 1 built, 1 tested, 1 tagged" in real.builder("images", PLAIN)
