"""The fixtures of the image tests, with every GPU handed to the container."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from docker.models.containers import Container

from tests.images.conftest import (  # noqa: F401  pytest finds fixtures and hooks by name
    engine,
    host,
    pytest_configure,
    pytest_runtest_logreport,
    python,
    start,
    subject,
)


@pytest.fixture(scope="session")
def container(start: Callable[..., Container]) -> Container:  # noqa: F811
    return start(["sleep", "infinity"], gpus=True)
