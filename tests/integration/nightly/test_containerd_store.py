"""An engine with the containerd image store, where an image's id is the digest of its manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.index import host
from tests.integration import daemon as daemons
from tests.integration import newer_docker, stores
from tests.integration.checkout import EXTRA, PLAIN, ROOT, SHORT, Checkout, docker
from tests.integration.conftest import NewCheckout
from tests.integration.engine_proxy import EngineProxy
from tests.integration.registry import Server

pytestmark = pytest.mark.skipif(
    not host.is_debian(), reason="only on Debian, whose archive has the newer engine that is unpacked here"
)
OF_A_TAR = 50_000  # more than the headers of an archive take


@pytest.fixture(scope="module")
def engine(released_once: Checkout) -> Iterator[EngineProxy]:
    """The engine, with the base image of the machine's own."""
    programs = newer_docker.unpack(ROOT / ".builder/test-cache/newer-docker")
    base = released_once.base_image("trixie")
    with daemons.engine(base, programs=programs, features=("containerd-snapshotter",)) as daemon:
        output = docker("info", "--format", "{{.DriverStatus}}", host=daemon.host)
        assert "io.containerd.snapshotter" in output, "this engine has another store"
        with EngineProxy(daemon.folder / "proxy.sock", daemon.host).serving() as proxy:
            yield proxy


@pytest.fixture(scope="module")
def there(
    new_checkout: NewCheckout, seed: Path, engine: EngineProxy, tmp_path_factory: pytest.TempPathFactory
) -> Checkout:
    """A checkout of that engine, with the operating system in its store."""
    checkout = new_checkout(tmp_path_factory.mktemp("there"), fresh=True)
    checkout.write_tests(SHORT)
    checkout.lock_and_render()
    checkout.take_store(like=seed)
    checkout.engine = engine.host
    checkout.builder("build", PLAIN)
    return checkout


def test_the_second_image_is_loaded_without_what_both_have(there: Checkout, engine: EngineProxy) -> None:
    engine.loaded.clear()
    pulls = len(engine.pulled)
    there.builder("build", EXTRA)
    plain, extra = (
        {layer for _, layer in stores.layers(there.store, there.stored()[there.references(suffix)[0]])}
        for suffix in ("", "-extra")
    )
    own = {layer.removeprefix("sha256:")[:12] for layer in extra - plain}
    bare, image = engine.pulled[pulls:]  # the operating system alone, to compile the second one's modules
    assert bare & {layer.removeprefix("sha256:")[:12] for layer in plain} == set()
    assert own
    assert image & {layer.removeprefix("sha256:")[:12] for layer in extra} == own
    assert max(engine.loaded) < OF_A_TAR, "layers were in an archive"
    assert "127.0.0.1" not in there.docker("image", "ls", "--all", "--digests"), "the name of a pull is left"


def test_ids_are_digests_of_manifests_and_the_tests_pass(there: Checkout, server: Server) -> None:
    output = there.builder("images")
    assert "2 images: 2 tested, 2 tagged" in output
    stored = there.stored()
    assert there.tags() == {
        reference: stored[references[0]]
        for references in (there.references(), there.references("-extra"))
        for reference in references
    }
    for reference in stored:
        assert there.docker("run", "--rm", reference, "tinyframe") == there.release
    assert "2 images: 2 up to date" in there.builder("images")
    assert there.working_images() == []

    assert ": 2 images, " in there.publish(server.address)
