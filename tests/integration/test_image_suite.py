"""The tests of real images, on an image without a framework of its own."""

from __future__ import annotations

from pathlib import Path

from tests.integration.checkout import PLAIN, Checkout
from tests.integration.conftest import NewCheckout


def test_the_image_tests_pass(new_checkout: NewCheckout, built: Checkout, tmp_path: Path) -> None:
    real = new_checkout(tmp_path)
    real.lock_and_render()
    real.take_store(like=built.store)
    assert "1 image built, tested and tagged" in real.builder("images", PLAIN)
