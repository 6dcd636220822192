"""An engine that dies or has no room: said as such, nothing lost, and a rerun finishes. On an engine of our own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration import stores, wheels
from tests.integration.checkout import OS_SCRIPT, PLAIN, Checkout, without
from tests.integration.conftest import NewCheckout
from tests.integration.daemon import ENOUGH, Daemon, engine
from tests.integration.engine_proxy import PULL, START, EngineProxy
from tests.integration.index import Fault, Index

ROOM = 150_000_000


@pytest.fixture(scope="module")
def daemon(new_checkout: NewCheckout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The engine, with the base images of the machine's own."""
    checkout = new_checkout(tmp_path_factory.mktemp("base"))
    with engine(*(checkout.base_image(release) for release in ("bookworm", "trixie"))) as daemon:
        yield daemon


@pytest.fixture
def proxy(daemon: Daemon) -> Iterator[EngineProxy]:
    with EngineProxy(daemon.folder / "proxy.sock", daemon.host).serving() as running:
        yield running
    (daemon.folder / "proxy.sock").unlink()


@pytest.fixture
def there(fresh: Checkout, daemon: Daemon, seed: Path) -> Checkout:
    """A checkout that builds on that engine, with a store that has the operating system."""
    daemon.resize(ENOUGH)
    daemon.start()
    fresh.lock_and_render()
    fresh.take_store(like=seed)
    fresh.engine = daemon.host
    return fresh


@pytest.mark.parametrize("step", ["a wheel is installed", "the operating system is made", "the image is loaded"])
def test_killed_while(
    there: Checkout, daemon: Daemon, index: Index, proxy: EngineProxy, tmp_path: Path, step: str
) -> None:
    method = "dockerfile" if step == "a wheel is installed" else "assemble"
    there.engine = proxy.host
    script = (there.root / OS_SCRIPT).read_text(encoding="utf-8")
    reached: Callable[[], bool] = proxy.held.is_set
    if step == "a wheel is installed":
        index.faults["tinyframe"] = Fault.FILE_STALLS
        reached = index.stalled.is_set
    elif step == "the operating system is made":
        (there.root / OS_SCRIPT).write_text(f"{script}/bin/sh -c 'sleep 280 && : {there.root}'\n", encoding="utf-8")
        reached = lambda: any(line.startswith("/bin/sh -c sleep") for line in there.processes().values())  # noqa: E731
    else:
        proxy.hold(START, PULL)
        reached = proxy.held.is_set
    # Without `unshare`, the builder runs mmdebstrap in a container.
    path = without(tmp_path, "unshare") if step == "the operating system is made" else os.environ["PATH"]
    with there.running("images", PLAIN, "--method", method, PATH=path) as run:
        run.reaches(reached, seconds=180)
        daemon.kill()
        proxy.let_go()
        output = run.ends(6)
    assert PLAIN in output
    assert "Docker Engine" in output
    assert "  -> " in output, "there is no hint"
    assert stores.faults(there.store) == []
    index.heal()
    daemon.start()
    assert there.image_ids() == set()
    (there.root / OS_SCRIPT).write_text(script, encoding="utf-8")
    assert "1 tested, 1 tagged" in there.builder("images", PLAIN, "--method", method)
    assert set(there.tags()) == set(there.references())
    assert there.working_images() == []


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


@pytest.mark.parametrize(("method", "words"), [("assemble", "is full"), ("dockerfile", "filled up")])
def test_a_disk_that_fills_up_is_said_to_be_full(
    there: Checkout, daemon: Daemon, index: Index, method: str, words: str
) -> None:
    """The engine is reached by TCP: how much room it has cannot be foreseen."""
    there.engine = ""
    index.publish(wheels.framework(there.release, padding=3 * ROOM))
    there.builder("lock", "--upgrade")
    there.builder("render")
    there.engine = daemon.tcp
    _leave(daemon, ROOM)
    output = there.builder("images", PLAIN, "--method", method, code=10)
    assert f"{PLAIN}: failed" in output
    assert words in output
    assert "docker builder prune" in output
    assert there.image_ids() == set()
    assert stores.faults(there.store) == []

    daemon.resize(ENOUGH)
    there.builder("images", PLAIN, "--method", method)
    assert set(there.tags()) == set(there.references())
