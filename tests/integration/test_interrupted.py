"""A builder that is interrupted, terminated or killed: no tag, and nothing left that the next run does not sweep."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.checkout import PLAIN, Checkout
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


def leftovers(checkout: Checkout) -> list[str]:
    """Temporary files, containers and processes."""
    files = [str(path) for path in (checkout.root.parent / "tmp").iterdir()]
    files += [str(path) for path in checkout.root.rglob("*.tmp")]
    return [*files, *checkout.containers(), *checkout.processes().values()]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["INT", "TERM", "KILL"],
)
def test_stopped_at_each_step(
    checkout: Checkout, index: Index, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    index.faults["tinyframe"] = Fault.PAGE_STALLS
    with checkout.running("lock") as run:
        run.reaches(index.stalled.is_set)
        run.process.send_signal(number)
        run.ends(code)
    assert not list((checkout.root / "locks").glob("*.json"))
    index.heal()
    checkout.lock_and_render()
    after_lock = leftovers(checkout)

    index.faults["tinyframe"] = Fault.FILE_STALLS
    with checkout.running("images", PLAIN) as run:
        run.reaches(index.stalled.is_set)
        run.process.send_signal(number)
        run.ends(code)
    assert checkout.image_ids() == set()
    index.heal()

    seen = tmp_path / "seen"
    checkout.write_tests({"tiny": WAITS.format(seen=str(seen))})
    with checkout.running("images", PLAIN) as run:
        run.reaches(seen.exists)
        run.process.send_signal(number)
        run.ends(code)
    assert checkout.tags() == {}
    images = checkout.image_ids()
    assert len(images) == 1

    checkout.builder("images", PLAIN)
    assert set(checkout.tags()) == set(checkout.references())
    assert checkout.image_ids() == images
    assert (after_lock, leftovers(checkout)) == ([], [])


def test_files_of_a_killed_writer_are_swept(checkout: Checkout) -> None:
    """What `builder.atomic` leaves if it is killed between writing and renaming."""
    checkout.lock_and_render()
    for place in ("locks/.{}.json", "images/{}/.Dockerfile", ".builder/evidence/.{}.json"):
        path = checkout.root / f"{place.format(PLAIN)}.x7k3_a1b.tmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{", encoding="utf-8")
    checkout.lock_and_render()
    checkout.builder("images", PLAIN)
    assert leftovers(checkout) == []
