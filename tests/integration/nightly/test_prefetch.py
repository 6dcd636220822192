"""The files that a start reads: tools/prefetch.py finds them, and the layers have them first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import stores
from tests.integration.checkout import PLAIN, ROOT, TIMEOUT_S
from tests.integration.conftest import NewCheckout
from tests.unit.layers.toc import prefetched

LIST = "templates/base/prefetch.txt"


def test_what_a_start_reads_is_listed_and_comes_first(
    new_checkout: NewCheckout, seed: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkout = new_checkout(tmp_path_factory.mktemp("prefetch"), fresh=True)
    checkout.lock_and_render()
    checkout.take_store(like=seed)
    checkout.builder("build", PLAIN)
    listed = set((checkout.root / LIST).read_text().splitlines())

    command = [sys.executable, "-m", "tools.prefetch", PLAIN]
    environment = {**os.environ, **checkout.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=checkout.root, env=environment, timeout=TIMEOUT_S, check=True)
    opened = set((checkout.root / LIST).read_text().splitlines())
    assert {"usr/bin/python*", "usr/bin/tini", "usr/lib/*-linux-gnu/libc.so.*"} <= opened
    assert opened - listed == set(), "the list of this repository is out of date: run tools/prefetch.py"

    (digest,) = checkout.stored().values()
    layers = dict(stores.layers(checkout.store, digest))
    with stores.path(checkout.store, next(layers[line] for line in layers if line.startswith("os"))).open("rb") as blob:
        assert opened - prefetched(blob.read()) == set()
