"""A registry behind a proxy, and the machine that built the images."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.checkout import Checkout
from tests.integration.registry import Proxy, Server


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """An empty registry, behind a proxy."""
    with Proxy(server).serving() as running:
        yield running


@pytest.fixture
def ours(released: Checkout, proxy: Proxy, keys: Path) -> Checkout:
    """The machine that built the images; its matrix.yaml names staging, and trusts our key."""
    (released.root / "keys").mkdir()
    shutil.copy2(keys / "ours.pub", released.root / "keys/ours.pub")
    released.edit("matrix.yaml", 'registry: ""', 'registry: ""\nevidence: [{key: keys/ours.pub}]')
    released.use_registry(proxy.address)
    return released
