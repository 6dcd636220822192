"""Each GPU check of JAX (checks/jax.py), in the image."""

from __future__ import annotations

import pytest

from tests.gpu.checks.jax import CHECKS
from tests.gpu.conftest import Check


@pytest.mark.parametrize("name", CHECKS)
def test(check: Check, name: str) -> None:
    check(name)
