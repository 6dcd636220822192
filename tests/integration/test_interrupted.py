"""A builder that is interrupted, terminated or killed sets no tag, and the next run removes what it left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.integration import stores
from tests.integration.checkout import EXTRA, OS_SCRIPT, Checkout
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
# mmdebstrap unpacks what a shell needs, then runs os.sh: to install all packages before takes 15 s of processor time.
UNPACKS_A_SHELL = (
    ("--variant=essential", "--variant=extract"),
    ('"--include=$(sh steps/packages.sh names packages.json | paste -sd ,)"', "--include=coreutils,dash"),
    ("--customize-hook", "--extract-hook"),
)


def leftovers(checkout: Checkout) -> list[str]:
    """Temporary files, containers, temporary images, and processes."""
    files = [str(path) for path in (checkout.root.parent / "tmp").iterdir()]
    files += [str(path) for path in checkout.root.rglob("*.tmp")]
    files += [str(path) for path in (checkout.root / ".builder/tmp").glob("*")]
    return [*files, *checkout.containers(), *checkout.working_images(), *checkout.processes().values()]


def is_untouched(checkout: Checkout) -> None:
    """The image has no tag, and the store has no incomplete file."""
    assert checkout.tags() == {}
    assert checkout.references("-extra")[0] not in stores.images(checkout.store)
    assert stores.faults(checkout.store) == []


def finishes(checkout: Checkout) -> None:
    """The next run builds the image, and nothing of the previous run is left."""
    checkout.builder("images", EXTRA)
    assert set(checkout.tags()) == set(checkout.references("-extra"))
    assert leftovers(checkout) == []
    assert stores.faults(checkout.store) == []
    checkout.builder("gc")
    assert stores.leftovers(checkout.store) == []
    assert "1 image: 1 up to date" in checkout.builder("images", EXTRA)


def test_during_resolution(fresh: Checkout, index: Index) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        index.faults["tinyframe"] = Fault.PAGE_STALLS
        with fresh.running("lock") as run:
            run.reaches(index.stalled.is_set)
            run.stops(number)
        assert not [path for path in (fresh.root / "locks").glob("*.json") if not path.name.startswith("os-")]
        index.heal()
    fresh.lock_and_render()
    assert leftovers(fresh) == []


def test_at_each_step_of_assembling(alone: Checkout, proxy: EngineProxy, index: Index, tmp_path: Path) -> None:
    """During the download of wheels, the compilation, the load into the engine, and the tests.

    Killed at each of them. INT and TERM, which have one handler, at a step with a container.
    """
    index.faults["tinyextra"] = Fault.FILE_STALLS
    with alone.running("images", EXTRA) as run:
        run.reaches(index.stalled.is_set)
        run.stops(signal.SIGKILL)
    is_untouched(alone)
    assert alone.image_ids() == set()
    index.heal()

    for number in (signal.SIGINT, signal.SIGKILL):
        proxy.hold(START)
        with alone.running("images", EXTRA) as run:
            run.reaches(proxy.held.is_set)
            assert len(alone.containers()) == 1, "nothing was being compiled"
            assert len(alone.working_images()) == 1
            run.stops(number)
        is_untouched(alone)
        proxy.let_go()

    for steps in ((START, PULL), (LOAD,)):  # before the layers are pulled, and after that
        proxy.hold(*steps)
        with alone.running("images", EXTRA) as run:
            run.reaches(proxy.held.is_set)
            run.says(f"{EXTRA}: loading")
            run.stops(signal.SIGKILL)
        is_untouched(alone)
        assert alone.image_ids() == set()
        proxy.let_go()

    seen = tmp_path / "seen"
    alone.write_tests({"tiny": WAITS.format(seen=str(seen))})
    for number in (signal.SIGTERM, signal.SIGKILL):
        seen.unlink(missing_ok=True)
        with alone.running("images", EXTRA) as run:
            run.reaches(seen.exists)
            run.stops(number)
        is_untouched(alone)
    images = alone.image_ids()
    assert len(images) == 1
    finishes(alone)
    assert alone.image_ids() == images, "it was built again"


def test_during_the_build_of_the_operating_system(alone: Checkout) -> None:
    """In os.sh on this machine. In a container: nightly/test_same_bytes.py."""
    path = alone.root / "templates/steps/mmdebstrap.sh"
    script = changed = path.read_text(encoding="utf-8")
    for old, new in UNPACKS_A_SHELL:
        assert old in script
        changed = changed.replace(old, new)
    path.write_text(changed, encoding="utf-8")
    is_stopped_in_os_script(alone, signal.SIGKILL, os.environ["PATH"])
    path.write_text(script, encoding="utf-8")
    finishes(alone)


def is_stopped_in_os_script(checkout: Checkout, number: signal.Signals, path: str) -> None:
    script = (checkout.root / OS_SCRIPT).read_text(encoding="utf-8")
    (checkout.root / OS_SCRIPT).write_text(f"/bin/sh -c '{SLOW}{checkout.root}'\n{script}", encoding="utf-8")
    with checkout.running("images", EXTRA, PATH=path) as run:
        # A container first installs mmdebstrap. Reading all command lines until then took 4 s of processor time.
        run.reaches(lambda: _runs_os_script(checkout) and _sleeps(checkout), seconds=240)
        run.stops(number)
    is_untouched(checkout)
    assert checkout.containers() == []
    (checkout.root / OS_SCRIPT).write_text(script, encoding="utf-8")


def _runs_os_script(checkout: Checkout) -> bool:
    logs = (checkout.root / ".builder/logs").glob("os-*.log")
    return any("os.sh" in log.read_text(encoding="utf-8") for log in logs)


def _sleeps(checkout: Checkout) -> bool:
    return any(line.startswith("/bin/sh -c sleep") for line in checkout.processes().values())
