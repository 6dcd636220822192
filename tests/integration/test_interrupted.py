"""A builder that is interrupted, terminated or killed: no tag, nothing half, nothing left that the next run keeps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.integration import stores, wheels
from tests.integration.checkout import PLAIN, Checkout
from tests.integration.engine_proxy import LOAD, SAVE, START, EngineProxy
from tests.integration.index import Fault, Index

WAITS = """\
import time
from pathlib import Path

def test_waits(host):
    assert host.check_output("id -un") == "user"
    if not Path({seen!r}).exists():
        Path({seen!r}).touch()
        time.sleep(300)
"""
SLOW = "sleep 280 && : "
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def stopped_by(*names: str) -> pytest.MarkDecorator:
    """Each step is stopped in two ways at least, and each way is tried at most steps."""
    numbers = [signal.Signals[f"SIG{name}"] for name in names]
    return pytest.mark.parametrize(("number", "code"), [(number, CODES[number]) for number in numbers], ids=names)


@pytest.fixture
def proxy() -> Iterator[EngineProxy]:
    with TemporaryDirectory(prefix="engine-") as folder, EngineProxy(Path(folder) / "socket").serving() as running:
        yield running


@pytest.fixture
def alone(checkout: Checkout, built: Checkout, proxy: EngineProxy) -> Checkout:
    """A checkout with a store of its own, that has the operating system; its engine is behind the proxy."""
    checkout.lock_and_render()
    checkout.take_store(like=built.store)
    checkout.engine = proxy.host
    return checkout


def leftovers(checkout: Checkout) -> list[str]:
    """Temporary files, containers, images that only a run needs, and processes."""
    files = [str(path) for path in (checkout.root.parent / "tmp").iterdir()]
    files += [str(path) for path in checkout.root.rglob("*.tmp")]
    files += [str(path) for path in (checkout.root / ".builder/tmp").glob("*")]
    return [*files, *checkout.containers(), *checkout.working_images(), *checkout.processes().values()]


def is_untouched(checkout: Checkout) -> None:
    """Nothing says that the image is there, and nothing in the store is half."""
    assert checkout.tags() == {}
    assert checkout.references()[0] not in stores.images(checkout.store)
    assert stores.faults(checkout.store) == []


def finishes(checkout: Checkout) -> None:
    """Running again makes the image, and nothing is left of the run before."""
    checkout.builder("images", PLAIN)
    assert set(checkout.tags()) == set(checkout.references())
    assert leftovers(checkout) == []
    assert stores.faults(checkout.store) == []
    checkout.builder("gc")
    assert stores.leftovers(checkout.store) == []
    assert "1 images up to date" in checkout.builder("images", PLAIN)


@stopped_by("INT", "TERM", "KILL")
def test_while_resolving(checkout: Checkout, index: Index, number: signal.Signals, code: int) -> None:
    index.faults["tinyframe"] = Fault.PAGE_STALLS
    with checkout.running("lock") as run:
        run.reaches(index.stalled.is_set)
        run.process.send_signal(number)
        run.ends(code)
    assert not list((checkout.root / "locks").glob("*.json"))
    index.heal()
    checkout.lock_and_render()
    assert leftovers(checkout) == []


@stopped_by("INT", "KILL")
def test_at_each_step_of_assembling(
    alone: Checkout, proxy: EngineProxy, index: Index, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """While wheels are fetched, modules compiled, the image loaded, and while it is tested."""
    index.faults["tinyframe"] = Fault.FILE_STALLS
    with alone.running("images", PLAIN) as run:
        run.reaches(index.stalled.is_set)
        run.process.send_signal(number)
        run.ends(code)
    is_untouched(alone)
    assert alone.image_ids() == set()
    index.heal()

    proxy.hold(START)
    with alone.running("images", PLAIN) as run:
        run.reaches(proxy.held.is_set)
        assert len(alone.containers()) == 1, "nothing was being compiled"
        assert len(alone.working_images()) == 1
        run.process.send_signal(number)
        run.ends(code)
    is_untouched(alone)
    proxy.let_go()

    proxy.hold(START, LOAD)
    with alone.running("images", PLAIN) as run:
        run.reaches(proxy.held.is_set)
        run.says(f"{PLAIN}: loading")
        run.process.send_signal(number)
        run.ends(code)
    is_untouched(alone)
    assert alone.image_ids() == set()
    proxy.let_go()

    seen = tmp_path / "seen"
    alone.write_tests({"tiny": WAITS.format(seen=str(seen))})
    with alone.running("images", PLAIN) as run:
        run.reaches(seen.exists)
        run.process.send_signal(number)
        run.ends(code)
    is_untouched(alone)
    images = alone.image_ids()
    assert len(images) == 1
    finishes(alone)
    assert alone.image_ids() == images, "it was built again"


@stopped_by("INT", "TERM")
def test_while_the_operating_system_is_made(
    alone: Checkout, proxy: EngineProxy, number: signal.Signals, code: int
) -> None:
    """In a step of its build, and when its layer is read from the engine."""
    template = (alone.root / "templates/os.j2").read_text(encoding="utf-8")
    for line, reached in ((f"RUN {SLOW}{alone.root}\n", None), (f"RUN : {alone.root}\n", proxy)):
        (alone.root / "templates/os.j2").write_text(template + line, encoding="utf-8")
        alone.builder("render")
        proxy.hold(SAVE)
        with alone.running("images", PLAIN) as run:
            run.reaches(proxy.held.is_set if reached else lambda: _sleeps(alone))
            assert len(alone.working_images()) == (1 if reached else 0)
            run.process.send_signal(number)
            run.ends(code)
        is_untouched(alone)
        proxy.let_go()
    finishes(alone)


def _sleeps(checkout: Checkout) -> bool:
    return any(line.startswith("/bin/sh -c sleep") for line in checkout.processes().values())


@stopped_by("KILL")
def test_while_a_layer_is_written(alone: Checkout, index: Index, number: signal.Signals, code: int) -> None:
    index.publish(wheels.framework(alone.release, padding=1_200_000_000))
    alone.builder("lock", "--upgrade")
    alone.builder("render")
    with alone.running("build", PLAIN) as run:
        run.reaches(lambda: any(path.stat().st_size > 100_000 for path in (alone.store / "tmp").iterdir()))
        run.process.send_signal(number)
        run.ends(code)
    is_untouched(alone)
    assert alone.image_ids() == set()
    index.publish(wheels.framework(alone.release))
    alone.builder("lock", "--upgrade")
    alone.builder("render")
    finishes(alone)


@stopped_by("INT", "KILL")
def test_while_a_dockerfile_is_built(checkout: Checkout, index: Index, number: signal.Signals, code: int) -> None:
    checkout.lock_and_render()
    index.faults["tinyframe"] = Fault.FILE_STALLS
    with checkout.running("images", PLAIN, "--method", "dockerfile") as run:
        run.reaches(index.stalled.is_set)
        run.process.send_signal(number)
        run.ends(code)
    index.heal()
    assert checkout.image_ids() == set()
    checkout.builder("images", PLAIN, "--method", "dockerfile")
    assert set(checkout.tags()) == set(checkout.references())
    assert leftovers(checkout) == []


def test_files_of_a_killed_writer_are_swept(checkout: Checkout) -> None:
    """What `builder.atomic` leaves if it is killed between writing and renaming."""
    checkout.lock_and_render()
    for place in ("locks/.{}.json", "images/{}/.Dockerfile", ".builder/evidence/.{}.json"):
        path = checkout.root / f"{place.format(PLAIN)}.x7k3_a1b.tmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{", encoding="utf-8")
    checkout.lock_and_render()
    assert leftovers(checkout) == []
