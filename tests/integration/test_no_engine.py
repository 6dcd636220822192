"""Without an engine: what is missing is said, with what to do, and the rest still works."""

from __future__ import annotations

import pytest

from tests.integration.checkout import Checkout
from tests.integration.conftest import NewCheckout


@pytest.fixture(scope="module")
def alone(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose DOCKER_HOST nobody answers; locks and images/ are written all the same."""
    folder = tmp_path_factory.mktemp("alone")
    checkout = new_checkout(folder)
    checkout.environ["DOCKER_HOST"] = f"unix://{folder}/none.sock"
    checkout.lock_and_render()
    return checkout


def test_images_and_engine_say_so(alone: Checkout) -> None:
    for command in ("images", "build", "test", "engine", "clean"):
        output = alone.builder(command, code=6)
        assert "no Docker Engine answers" in output
        assert "none.sock" in output
        assert "  -> " in output, "there is no hint"


def test_doctor_shows_the_rest(alone: Checkout) -> None:
    output = alone.builder("doctor", code=6)
    rows = {
        line[9:].split("  ")[0]: line.split()[0]
        for line in output.splitlines()
        if line[:7].strip() in ("ok", "missing")
    }
    assert rows["engine"] == "missing"
    for name in ("python", "uv", "docker", "disk: checkout", "index"):
        assert rows[name] == "ok"
    assert "missing: engine" in output
