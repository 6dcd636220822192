"""`builder stage`, `builder release` without a signature, and `builder verify`, with a real registry."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.common.tasks import RetryPolicy
from builder.registry.client import Repository
from tests.integration import stores
from tests.integration.checkout import EXTRA, Checkout, today
from tests.integration.registry import Fault, Proxy, Server, Trouble

EVER = 10**6


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server).serving() as running:
        yield running


def publish(checkout: Checkout, proxy: Proxy, *cells: str) -> str:
    return checkout.publish(proxy.address, *cells)


def registry(checkout: Checkout, proxy: Proxy) -> Repository:
    """The repository of both images, for a reader."""
    return proxy.server.repository(f"{checkout.namespace}/ty-cuda")


def stamped(checkout: Checkout, suffix: str = "", number: int = 0) -> str:
    """The tag of today's release."""
    stamp = today() + (f".{number}" if number else "")
    return f"{checkout.references(suffix)[0].rpartition(':')[2]}-{stamp}"


def tags(checkout: Checkout, proxy: Proxy) -> dict[str, str | None]:
    """Digests in the registry, by moving tag of both images."""
    names = [reference.rpartition(":")[2] for reference in (*checkout.references(), *checkout.references("-extra"))]
    there = registry(checkout, proxy)
    return {name: digest for name in names if (digest := there.digest_of(name))}


def expected_tags(checkout: Checkout) -> dict[str, str]:
    """Digests in the store, by tag."""
    digests = checkout.stored()
    return {
        reference.rpartition(":")[2]: digests[references[0]]
        for references in (checkout.references(), checkout.references("-extra"))
        for reference in references
    }


def test_a_pulled_image_is_the_same_and_runs(released: Checkout, proxy: Proxy) -> None:
    ids = {suffix: released.tags()[released.references(suffix)[0]] for suffix in ("", "-extra")}
    output = publish(released, proxy)
    assert ": 2 images, " in output
    assert "this release is unsigned" in output
    assert tags(released, proxy) == expected_tags(released)
    released.docker("image", "rm", "-f", *ids.values())
    for suffix, image_id in ids.items():
        for reference in released.references(suffix):
            pulled = f"127.0.0.1:{proxy.server.port}/{reference}"
            released.docker("pull", "--quiet", pulled)
            assert released.docker("image", "inspect", "--format", "{{.Id}}", pulled) == image_id
        assert released.docker("run", "--rm", pulled, "tinyframe") == released.release


def test_a_release_that_is_interrupted(released: Checkout, proxy: Proxy) -> None:
    """SIGTERM takes the same way; killed at each step: releases/test_faults.py."""
    before = stores.leftovers(released.store)
    released.use_registry(proxy.address)
    released.builder("stage")
    proxy.troubles.append(Trouble(fault=Fault.STALLS, method="PUT", path="/blobs/uploads/", after=1, times=EVER))
    with released.running("release", "--allow-untested-gpu") as run:
        run.reaches(proxy.stalled.is_set)
        run.process.send_signal(signal.SIGINT)
        run.ends(130, within_s=RetryPolicy().read_s / 2)  # it does not wait for the registry
    assert tags(released, proxy) == {}
    assert stores.leftovers(released.store) == before
    proxy.heal()
    publish(released, proxy)
    assert tags(released, proxy) == expected_tags(released)


def test_verify_compares_an_image_with_the_plan(released: Checkout, proxy: Proxy, tmp_path: Path) -> None:
    publish(released, proxy, EXTRA)
    reference = f"{proxy.address}/{released.references('-extra')[0]}"
    proxy.heal()
    assert "verified: 1 as planned" in released.builder("verify", reference)
    assert proxy.count("GET", "/blobs/") == 1, "only the configuration is read"
    output = released.builder("verify", "--rebuild", reference)
    assert "verified: 1 as planned, 1 same" in output, "built again in an empty store"
    assert stores.leftovers(released.store) == []
    assert not list(released.store.parent.glob("gpu-images-verify-*"))

    elsewhere = dataclasses.replace(released, root=tmp_path)
    output = elsewhere.builder("--store", str(tmp_path / "another"), "verify", reference, code=15)
    assert "neither a signer nor a plan to check it with" in output

    # Without locks/layers.json, no layer is known: only a signature or --rebuild can replace it.
    (released.root / "locks/layers.json").unlink()
    assert "is not in locks/layers.json" in released.builder("verify", reference, code=15)
