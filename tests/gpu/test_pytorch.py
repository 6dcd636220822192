"""Each GPU check of PyTorch, in the image and on the GPUs that were lent; what they are is in checks/pytorch.py."""

from __future__ import annotations

import pytest

from tests.gpu.checks.pytorch import CHECKS
from tests.gpu.conftest import Check


@pytest.mark.parametrize("name", CHECKS)
def test(check: Check, name: str) -> None:
    check("pytorch", name)
