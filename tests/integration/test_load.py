"""Loading images into the engine: it pulls the missing layers. Archives: nightly/test_rootless.py."""

from __future__ import annotations

import json

from tests.integration import stores
from tests.integration.checkout import EXTRA, PLAIN, Checkout
from tests.integration.engine_proxy import EngineProxy

OF_A_TAR = 50_000  # more than the documents of an image take


def is_loaded(checkout: Checkout, count: int) -> None:
    """The images are in the engine, without the names that they were pulled by."""
    images = checkout.image_ids()
    assert len(images) == count
    for image in images:
        [details] = json.loads(checkout.docker("image", "inspect", image))
        assert not details["RepoDigests"], "the name of the pull is left"
        assert not details["RepoTags"]
    assert checkout.working_images() == []


def diff_ids(checkout: Checkout, suffix: str) -> list[str]:
    """Digests of the inflated layers of a stored image, lowest first: what an engine with the overlay2 store pulls."""
    manifest = stores.read(checkout.store, checkout.stored()[checkout.references(suffix)[0]])
    layers = stores.read(checkout.store, manifest["config"]["digest"])["rootfs"]["diff_ids"]
    return [layer.removeprefix("sha256:")[:12] for layer in layers]


def test_an_engine_pulls_only_missing_layers(alone: Checkout, proxy: EngineProxy) -> None:
    alone.builder("build", PLAIN)
    is_loaded(alone, 1)
    alone.builder("build", EXTRA)
    is_loaded(alone, 2)
    plain, extra = (diff_ids(alone, suffix) for suffix in ("", "-extra"))
    shared = next(number for number in range(len(plain)) if plain[number] != extra[number])
    assert shared > 1
    assert proxy.pulled[-1] == set(extra[shared:]), (
        "the engine downloaded other layers than those above the shared ones"
    )
    assert max(proxy.loaded) < OF_A_TAR, "layers were in an archive"
