"""An engine that dies or has no room: said as such, nothing lost, and a rerun finishes. On an engine of our own."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.integration import wheels
from tests.integration.checkout import PLAIN, Checkout
from tests.integration.conftest import NewCheckout
from tests.integration.daemon import Daemon
from tests.integration.index import Fault, Index

ENOUGH = 8 << 30  # a limit, not memory taken
ROOM = 150_000_000


@pytest.fixture(scope="module")
def daemon(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The engine, with the base image of the machine's own."""
    assert os.geteuid() == 0, "these tests start an engine of their own, which needs root"
    base = new_checkout(tmp_path_factory.mktemp("base")).builder("base", "bookworm").splitlines()[-1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory(prefix="dockerd-") as folder:
        made = Daemon(folder=Path(folder), port=port)
        with made.disk(ENOUGH):
            made.start()
            if "@" not in base:  # one that was pulled is pulled again: saved, it would lose its digest
                made.take_image(base)
            yield made


@pytest.fixture
def there(checkout: Checkout, daemon: Daemon) -> Checkout:
    """A checkout that builds on that engine."""
    daemon.resize(ENOUGH)
    daemon.start()
    checkout.lock_and_render()
    checkout.engine = daemon.host
    return checkout


def test_killed_during_a_build(there: Checkout, daemon: Daemon, index: Index) -> None:
    index.faults["tinyframe"] = Fault.FILE_STALLS
    with there.running("images", PLAIN) as run:
        run.reaches(index.stalled.is_set, seconds=180)
        daemon.kill()
        told = run.ends(6)
    assert PLAIN in told
    assert "Docker Engine" in told
    assert "  -> " in told, "there is no hint"
    index.heal()
    daemon.start()
    assert there.image_ids() == set()
    assert "1 images built, tested and tagged" in there.builder("images", PLAIN)
    assert set(there.tags()) == set(there.references())


def test_killed_during_the_tests(there: Checkout, daemon: Daemon, tmp_path: Path) -> None:
    started = tmp_path / "started"
    waits = f"from pathlib import Path\n\ndef test_waits(host):\n    Path({str(started)!r}).touch()\n"
    there.write_tests({"tiny": f"{waits}    assert host.run('sleep 300').rc == 0\n"})
    with there.running("images", PLAIN) as run:
        run.reaches(started.exists)
        daemon.kill()
        run.ends(6)
    daemon.start()
    assert there.tags() == {}
    there.write_tests({"tiny": "def test_passes():\n    pass\n"})
    there.builder("images", PLAIN)
    assert set(there.tags()) == set(there.references())
    assert there.containers() == []


def _leave(daemon: Daemon, room: int) -> None:
    """Makes the engine's disk so small that `room` bytes are free."""
    daemon.resize(shutil.disk_usage(daemon.root).used + room)


def test_too_little_room_is_seen_before_the_build(there: Checkout, daemon: Daemon) -> None:
    _leave(daemon, ROOM)
    told = there.builder("images", PLAIN, code=10)
    assert "takes about" in told
    assert "docker builder prune" in told
    assert f"{PLAIN}: building" not in told
    assert there.image_ids() == set()


def test_a_disk_that_fills_up_is_said_to_be_full(there: Checkout, daemon: Daemon, index: Index) -> None:
    """The engine is reached by TCP: how much room it has cannot be foreseen."""
    there.engine = ""
    index.publish(wheels.framework(there.release, padding=3 * ROOM))
    there.builder("lock", "--upgrade")
    there.builder("render")
    there.engine = daemon.tcp
    _leave(daemon, ROOM)
    told = there.builder("images", PLAIN, code=10)
    assert PLAIN in told
    assert "filled up" in told
    assert "docker builder prune" in told
    assert there.image_ids() == set()

    daemon.resize(ENOUGH)
    there.builder("images", PLAIN)
    assert set(there.tags()) == set(there.references())
