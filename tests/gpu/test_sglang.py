"""Each GPU check of SGLang (checks/sglang.py), in the image."""

from __future__ import annotations

import pytest

from tests.gpu.checks.sglang import CHECKS
from tests.gpu.conftest import Check


@pytest.mark.parametrize("name", CHECKS)
def test(check: Check, name: str) -> None:
    check(name)
