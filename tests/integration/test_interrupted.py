"""A builder that is interrupted, terminated or killed sets no tag, and the next run removes what it left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration import stores, wheels
from tests.integration.checkout import OS_SCRIPT, PLAIN, Checkout, without
from tests.integration.engine_proxy import LOAD, PULL, START, EngineProxy
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
    """Parameters: the ways to stop a step. INT and TERM have the same handler; KILL has none."""
    numbers = [signal.Signals[f"SIG{name}"] for name in names]
    return pytest.mark.parametrize(("number", "code"), [(number, CODES[number]) for number in numbers], ids=names)


def leftovers(checkout: Checkout) -> list[str]:
    """Temporary files, containers, temporary images, and processes."""
    files = [str(path) for path in (checkout.root.parent / "tmp").iterdir()]
    files += [str(path) for path in checkout.root.rglob("*.tmp")]
    files += [str(path) for path in (checkout.root / ".builder/tmp").glob("*")]
    return [*files, *checkout.containers(), *checkout.working_images(), *checkout.processes().values()]


def is_untouched(checkout: Checkout) -> None:
    """The image has no tag, and the store has no incomplete file."""
    assert checkout.tags() == {}
    assert checkout.references()[0] not in stores.images(checkout.store)
    assert stores.faults(checkout.store) == []


def finishes(checkout: Checkout) -> None:
    """The next run builds the image, and nothing of the previous run is left."""
    checkout.builder("images", PLAIN)
    assert set(checkout.tags()) == set(checkout.references())
    assert leftovers(checkout) == []
    assert stores.faults(checkout.store) == []
    checkout.builder("gc")
    assert stores.leftovers(checkout.store) == []
    assert "1 image up to date" in checkout.builder("images", PLAIN)


@stopped_by("INT", "TERM", "KILL")
def test_during_resolution(fresh: Checkout, index: Index, number: signal.Signals, code: int) -> None:
    index.faults["tinyframe"] = Fault.PAGE_STALLS
    with fresh.running("lock") as run:
        run.reaches(index.stalled.is_set)
        run.process.send_signal(number)
        run.ends(code)
    assert not [path for path in (fresh.root / "locks").glob("*.json") if not path.name.startswith("os-")]
    index.heal()
    fresh.lock_and_render()
    assert leftovers(fresh) == []


@stopped_by("INT", "KILL")
def test_at_each_step_of_assembling(
    alone: Checkout, proxy: EngineProxy, index: Index, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """During the download of wheels, the compilation, the load into the engine, and the tests."""
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

    for steps in ((START, PULL), (LOAD,)):  # before the layers are pulled, and after that
        proxy.hold(*steps)
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


@stopped_by("INT", "KILL")
def test_during_the_build_of_the_operating_system(
    alone: Checkout, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """In os.sh: killed on this machine, interrupted in a container."""
    script = (alone.root / OS_SCRIPT).read_text(encoding="utf-8")
    alone.base_image("trixie")
    path = os.environ["PATH"] if number == signal.SIGKILL else without(tmp_path, "unshare")
    (alone.root / OS_SCRIPT).write_text(f"{script}/bin/sh -c '{SLOW}{alone.root}'\n", encoding="utf-8")
    with alone.running("images", PLAIN, PATH=path) as run:
        run.reaches(lambda: _sleeps(alone), seconds=240)  # a container first installs mmdebstrap
        run.process.send_signal(number)
        run.ends(code)
    is_untouched(alone)
    assert alone.containers() == []
    (alone.root / OS_SCRIPT).write_text(script, encoding="utf-8")
    finishes(alone)


def _sleeps(checkout: Checkout) -> bool:
    return any(line.startswith("/bin/sh -c sleep") for line in checkout.processes().values())


@stopped_by("KILL")
def test_during_the_writing_of_a_layer(alone: Checkout, index: Index, number: signal.Signals, code: int) -> None:
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
def test_during_the_build_of_a_dockerfile(fresh: Checkout, index: Index, number: signal.Signals, code: int) -> None:
    fresh.lock_and_render()
    index.faults["tinyframe"] = Fault.FILE_STALLS
    with fresh.running("images", PLAIN, "--method", "dockerfile") as run:
        run.reaches(index.stalled.is_set, seconds=180)
        run.process.send_signal(number)
        run.ends(code)
    index.heal()
    assert fresh.image_ids() == set()
    fresh.builder("images", PLAIN, "--method", "dockerfile")
    assert set(fresh.tags()) == set(fresh.references())
    assert leftovers(fresh) == []


def test_temporary_files_of_a_killed_process_are_removed(checkout: Checkout) -> None:
    """Those of `builder.common.files`, killed between writing and renaming."""
    checkout.lock_and_render()
    for place in ("locks/.{}.json", "images/{}/.plain.Dockerfile", ".builder/evidence/.{}.json"):
        path = checkout.root / f"{place.format(PLAIN)}.x7k3_a1b.tmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{", encoding="utf-8")
    checkout.builder("lock")
    checkout.builder("render")
    assert leftovers(checkout) == []
