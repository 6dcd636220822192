"""`builder bundle`: a closed network builds from its file, and other programs read it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.integration import stores
from tests.integration.checkout import BUILDER, PLAIN, Checkout
from tests.integration.releases.machines import elsewhere

# Runs a command in a network of its own, which has only the loopback. The engine is reached by its socket.
CLOSED = ["unshare", "--net", "sh", "-euc", 'ip link set lo up; test -z "$(ip route)"; exec "$@"', "sh"]


def run_closed(checkout: Checkout, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*CLOSED, str(BUILDER), "--root", str(checkout.root), *arguments]
    return subprocess.run(
        command, env=checkout.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        check=False,
    )  # fmt: skip


def test_a_closed_network_builds_the_same_images_from_a_bundle(released: Checkout, tmp_path: Path) -> None:
    file = tmp_path / "images.tar"
    output = released.builder("bundle", "all", "-o", str(file))
    assert f"written: {file}, 2 images" in output
    released.docker("image", "rm", "-f", *released.image_ids())
    closed = elsewhere(released, tmp_path / "closed")

    done = run_closed(closed, "images", "all", "--from", str(file))
    assert done.returncode == 0, done.stdout
    assert "2 images built, tested and tagged" in done.stdout
    assert "bundle: done" in done.stdout
    assert "fetched" not in done.stdout
    assert closed.stored() == released.stored()
    assert stores.faults(closed.store) == []
    assert stores.leftovers(closed.store) == []
    # It may build again, and write the same bundle.
    again = tmp_path / "again.tar"
    done = run_closed(closed, "bundle", "all", "-o", str(again))
    assert done.returncode == 0, done.stdout
    assert again.read_bytes() == file.read_bytes()


def test_a_bundle_without_a_cell_is_refused(released: Checkout, tmp_path: Path) -> None:
    file = tmp_path / "images.tar"
    released.builder("bundle", PLAIN, "-o", str(file))
    closed = elsewhere(released, tmp_path / "closed")
    output = closed.builder("build", "all", "--from", str(file), code=12)
    assert f"{file} lacks 2 layers of {PLAIN}-extra" in output
    assert "builder bundle" in output
    assert stores.leftovers(closed.store) == []
