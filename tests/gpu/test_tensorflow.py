"""Each GPU check of TensorFlow, in the image and on the GPUs that were lent; what they are: checks/tensorflow.py."""

from __future__ import annotations

import pytest

from tests.gpu.checks.tensorflow import CHECKS
from tests.gpu.conftest import Check


@pytest.mark.parametrize("name", CHECKS)
def test(check: Check, name: str) -> None:
    check("tensorflow", name)
