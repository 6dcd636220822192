"""Without an engine: what is missing is said, with what to do, and the rest still works."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.integration.checkout import BUILDER, Checkout
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
    for command in ("images", "build", "test", "engine"):
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
    for name in ("python", "docker", "store", "index"):
        assert rows[name] == "ok"
    assert "missing: engine" in output


def test_a_user_without_access_to_the_socket() -> None:
    """It said that no engine answers, and that `builder engine` installs and starts one."""
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(BUILDER), "engine"],
        cwd="/", env={**os.environ, "HOME": "/tmp"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if "Permission denied" in done.stderr and "docker.sock" not in done.stderr:
        pytest.fail(f"this checkout cannot be read by another user: {done.stderr}")
    assert done.returncode == 6, done.stderr
    assert "no permission to use Docker's socket" in done.stderr
    assert "usermod -aG docker" in done.stderr
