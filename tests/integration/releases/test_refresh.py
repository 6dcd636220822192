"""`builder refresh` with a real registry: what passes is staged, although something else failed."""

from __future__ import annotations

import json

from tests.integration.checkout import EXTRA, PLAIN, Checkout, today
from tests.integration.registry import Proxy

FAILING = "def test_import(python):\n    assert python('print(1)') == '2'\n"


def test_images_that_pass_are_staged_although_another_failed(checkout: Checkout, proxy: Proxy) -> None:
    """With the lock of an earlier week: Debian has updated a package since, and the tests of one image fail."""
    checkout.lock_and_render()
    [path] = (checkout.root / "locks").glob("os-bookworm-*.json")
    current = path.read_text(encoding="utf-8")
    [line] = [line.strip(" ,") for line in current.splitlines() if '"name": "tini"' in line]
    older = json.dumps(json.loads(line) | {"version": "0.1-1", "sha256": "0" * 64})
    path.write_text(current.replace(line, older), encoding="utf-8")
    checkout.builder("render")
    checkout.write_tests({"extra": FAILING})

    checkout.use_registry(proxy.address)
    output = checkout.builder("refresh", "*", code=18)
    assert f"release {today()}: 1 image staged" in output
    assert f"incomplete: 1 image built and tested; the rest failed:\n{EXTRA}: " in output
    assert line in path.read_text(encoding="utf-8")
    assert [cell for cell in (PLAIN, EXTRA) if f"{cell}: staged" in output] == [PLAIN]
