"""A private index that demands a login, redirects to another host, and lies; and what must not know the password."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration import stores, wheels
from tests.integration.checkout import EXTRA, docker
from tests.integration.company import CPU, CPU_EXTRA, Company
from tests.integration.index import Fault


@dataclass
class Commands:
    """The command lines of all processes that were seen while something ran."""

    lines: set[bytes] = field(default_factory=set)

    @classmethod
    @contextmanager
    def watched(cls) -> Iterator[Commands]:
        commands, ended = cls(), threading.Event()
        thread = threading.Thread(target=commands._watch, args=(ended,))
        thread.start()
        try:
            yield commands
        finally:
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        # The kernel's threads never have a command line, and are most processes of a machine.
        kernel = {process for process in _processes() if not _command_line(process)}
        while not ended.is_set():
            self.lines |= {_command_line(process) for process in _processes() - kernel}
            time.sleep(0.05)


def _processes() -> set[Path]:
    return {*Path("/proc").glob("[0-9]*")}


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_a_build_with_a_private_index_shows_its_password_nowhere(company: Company) -> None:
    checkout = company.checkout
    leftovers = stores.leftovers(checkout.store)  # of tests that used this store before
    with Commands.watched() as commands:
        output = checkout.lock()
        output += checkout.builder("render")
        output += checkout.builder("build", CPU_EXTRA, EXTRA)
    assert any(b"pip\0compile" in line for line in commands.lines), "processes were watched"
    assert company.asked_in_public() == []

    lock = json.loads((checkout.root / f"locks/{EXTRA.removesuffix('-extra')}.json").read_text())
    locked = {wheel["name"]: (wheel["version"], wheel.get("index")) for wheel in lock["wheels"]}
    assert locked["tinyextra"] == (f"{checkout.extra}+co", "company")
    assert locked["tinyinner"] == ("1.0", "company")
    assert locked["tinyframe"] == (checkout.release, None)
    assert locked["nvidia-ml-py"] == ("13.0", None)
    cpu = json.loads((checkout.root / f"locks/{CPU}.json").read_text())
    framework = next(wheel for wheel in cpu["wheels"] if wheel["name"] == "tinyframe")
    assert (framework["version"], framework["index"]) == (f"{checkout.release}+cpu", "company")
    assert "127.0.0.1" not in json.dumps([lock, cpu])

    # The private index got the login with each request, the host that it redirects to never.
    assert company.index.authorized == company.index.answered
    assert any(path.startswith("/files/tinyextra/") for path in company.index.authorized)
    assert company.storage.authorized == []
    assert company.storage.answered
    assert company.public.authorized[company.authorized :] == []

    places = {"output": output.encode(), "commands": b"\n".join(commands.lines)}
    places |= {str(path): path.read_bytes() for path in checkout.root.rglob("*") if path.is_file()}
    for path in {
        stores.path(checkout.store, blob)
        for digest in checkout.stored().values()
        for blob in stores.blobs_of(checkout.store, digest)
    }:
        with path.open("rb") as blob_file:
            unpacked = subprocess.run(["gzip", "-dcf"], stdin=blob_file, capture_output=True, timeout=60, check=True)
        places[str(path)] = unpacked.stdout
    for image in checkout.image_ids():
        places[f"history of {image}"] = docker("history", "--no-trunc", image).encode()
    assert any(b"tinyextra" in content for place, content in places.items() if "history" in place)
    assert len(checkout.stored()) == 2
    assert f"{checkout.namespace}/ty-cpu:{checkout.release}-cpu-py311-extra" in checkout.stored()
    assert [place for place, content in places.items() if company.has_password(content)] == []
    assert set(stores.leftovers(checkout.store)) <= set(leftovers)

    # The history names the wheels, with their local versions and without their index.
    assert "verified: 1 as planned" in checkout.builder("verify", CPU_EXTRA)
    assert company.asked_in_public() == []


def test_an_index_that_lies_is_refused_without_a_request_to_another_one(company: Company) -> None:
    checkout = company.checkout
    checkout.lock_and_render(EXTRA)
    company.storage.faults["tinyextra"] = Fault.FILE_HAS_OTHER_BYTES
    with checkout.running("--debug", "build", EXTRA) as run:
        run.process.wait(600)
        assert run.process.returncode == 13, run.output
        assert "Traceback" in run.output
        assert "SHA-256 mismatch" in run.output
        assert f"tinyextra-{checkout.extra}+co-py3-none-any.whl" in run.output
        assert not company.has_password(run.output.encode())

    company.storage.heal()
    company.index.publish(wheels.wheel("tinyextra", f"{checkout.extra}+co", {"evil.py": b""}))
    output = checkout.builder("build", EXTRA, code=13)
    assert "is listed by the index company" in output
    company.index.withdraw("tinyextra", f"{checkout.extra}+co")
    output = checkout.builder("build", EXTRA, code=13)
    assert f"tinyextra-{checkout.extra}+co-py3-none-any.whl: not listed by the index company" in output
    assert company.asked_in_public() == []
