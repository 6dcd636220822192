"""Fixtures of the integration tests: the machine's Docker Engine, and an index of our own with tiny wheels.

Nothing here asks a public index but for uv and pip, once; see fetched.py.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.integration import wheels
from tests.integration.checkout import ROOT, SHORT, Checkout, make
from tests.integration.fetched import fetch
from tests.integration.index import Index

NewCheckout = Callable[[Path], Checkout]
OURS = ("UV_", "PIP_", "DOCKER_", "GPU_IMAGES_", "COLUMNS")
# Every checkout has a release of its own: no wheel of one test is in a cache because of another.
RELEASES = count(random.randrange(9000))


@pytest.fixture(scope="session")
def served() -> Iterator[Index]:
    """The index, with what every build needs."""
    cache = ROOT / ".builder/test-cache"
    uv = (ROOT / "locks/uv.txt").read_text(encoding="utf-8").split()[0]
    with Index().serving() as running:
        running.publish(fetch(uv, cache), fetch("pip", cache), wheels.cuda())
        yield running


@pytest.fixture
def index(served: Index) -> Iterator[Index]:
    """The index, without faults at the start and at the end."""
    served.heal()
    yield served
    served.heal()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority (PEM) that this machine trusts and no image may ever hold."""
    folder = tmp_path_factory.mktemp("authority")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-subj", "/CN=private authority of the tests",
            "-keyout", str(folder / "key.pem"), "-out", str(folder / "ca.pem"),
        ],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    return folder / "ca.pem"


@pytest.fixture(scope="session")
def environ(served: Index, authority: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `builder` sees: this machine's environment, but for the index, the authority, and uv's cache."""
    folder = tmp_path_factory.mktemp("environ")
    bundle = folder / "bundle.pem"
    system = Path(os.environ.get("SSL_CERT_FILE") or "/etc/ssl/certs/ca-certificates.crt")
    bundle.write_bytes(system.read_bytes() + b"\n" + authority.read_bytes())
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return kept | {
        "UV_DEFAULT_INDEX": served.url,
        "PIP_INDEX_URL": served.url,
        "UV_CACHE_DIR": str(folder / "uv-cache"),
        "GPU_IMAGES_STORE": str(folder / "store"),
        "SSL_CERT_FILE": str(bundle),
        "PIP_CERT": str(bundle),
    }


@pytest.fixture(scope="session")
def new_checkout(served: Index, environ: dict[str, str]) -> Iterator[NewCheckout]:
    """Makes checkouts in given folders; their images and containers are removed at the end."""
    made: list[Checkout] = []

    def new(folder: Path) -> Checkout:
        namespace = f"builder-test-{secrets.token_hex(4)}"
        release = f"1.0.{next(RELEASES)}"
        made.append(make(folder / "checkout", namespace=namespace, release=release, index=served, environ=environ))
        return made[-1]

    yield new
    for one in made:
        one.engine = ""
        one.remove()


@pytest.fixture
def checkout(new_checkout: NewCheckout, index: Index, tmp_path: Path) -> Checkout:
    """A project of its own for a test, with short image tests. Nothing is locked or rendered."""
    made = new_checkout(tmp_path)
    made.write_tests(SHORT)
    return made


@pytest.fixture(scope="session")
def built(new_checkout: NewCheckout, served: Index, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A project with both images built and tested by the real image tests; for tests that only look."""
    made = new_checkout(tmp_path_factory.mktemp("built"))
    made.lock_and_render()
    made.builder("images")
    return made


@pytest.fixture(scope="session")
def released_once(new_checkout: NewCheckout, built: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """What `released` gives; for tests that only look."""
    folder = tmp_path_factory.mktemp("released")
    made = new_checkout(folder)
    made.environ["DOCKER_CONFIG"] = str(folder / "docker")  # no login of this machine's user counts
    made.write_tests(SHORT)
    made.lock_and_render()
    made.take_store(like=built.store)
    made.builder("images")
    return made


@pytest.fixture
def released(released_once: Checkout, tmp_path: Path) -> Iterator[Checkout]:
    """A checkout with both images built, tested and tagged; what a test changes in it is undone."""
    kept, tags = [released_once.root, released_once.store], released_once.tags()
    for place in kept:
        shutil.copytree(place, tmp_path / "kept" / place.name, symlinks=True, copy_function=shutil.copy2)
    yield released_once
    for place in kept:
        shutil.rmtree(place)
        shutil.move(tmp_path / "kept" / place.name, place)
    if released_once.tags() != tags:
        released_once.builder("images")
