"""Fixtures of the integration tests: the machine's Docker Engine, and a test index with tiny wheels.

Only uv and pip come from a public index, once; see fetched.py.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import pytest

from tests.integration import fetched, leftovers, programs, wheels
from tests.integration.checkout import OURS, SHORT, Checkout, make
from tests.integration.engine_proxy import EngineProxy
from tests.integration.index import Index

# Every checkout has its own release, so that no cache has a wheel of another test.
RELEASES = count(random.randrange(1, 9000))
# Those that tests find built share the oldest one: the engine unpacks an operating system again for each framework
# below it.
BUILT_RELEASE = "1.0.0"


class NewCheckout(Protocol):
    def __call__(self, folder: Path, release: str = "") -> Checkout: ...


@pytest.fixture(scope="session", autouse=True)
def _swept() -> None:
    """Removes images of earlier test runs that were killed."""
    leftovers.sweep()


@pytest.fixture(scope="session")
def served() -> Iterator[Index]:
    """The index, with the wheels that every build needs."""
    with Index().serving() as running:
        running.publish(*fetched.common(), wheels.cuda(), wheels.driver_library())
        yield running


@pytest.fixture
def index(served: Index) -> Iterator[Index]:
    """The index, without faults at the start and at the end of a test."""
    served.heal()
    yield served
    served.heal()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority (PEM) that this machine trusts and that no image may contain."""
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
    """The environment of `builder`: this machine's, with another index, authority and cache of uv."""
    folder = tmp_path_factory.mktemp("environ")
    bundle = folder / "bundle.pem"
    system = Path(os.environ.get("SSL_CERT_FILE") or "/etc/ssl/certs/ca-certificates.crt")
    bundle.write_bytes(system.read_bytes() + b"\n" + authority.read_bytes())
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return inherited | {
        "UV_DEFAULT_INDEX": served.url,
        "PIP_INDEX_URL": served.url,
        "UV_CACHE_DIR": str(folder / "uv-cache"),
        "GPU_IMAGES_STORE": str(folder / "store"),
        "SSL_CERT_FILE": str(bundle),
        "PIP_CERT": str(bundle),
    }


@pytest.fixture(scope="session")
def new_checkout(served: Index, environ: dict[str, str]) -> Iterator[NewCheckout]:
    """A function that creates a checkout in a folder; images and containers are removed at the end."""
    checkouts: list[Checkout] = []

    def new(folder: Path, release: str = "") -> Checkout:
        namespace, release = leftovers.namespace(secrets.token_hex(4)), release or f"1.0.{next(RELEASES)}"
        checkouts.append(make(folder / "checkout", namespace=namespace, release=release, index=served, environ=environ))
        return checkouts[-1]

    yield new
    for each in checkouts:
        each.engine = ""
        each.remove()


@pytest.fixture
def checkout(new_checkout: NewCheckout, index: Index, tmp_path: Path) -> Checkout:
    """A checkout for one test, with short image tests, without locks and rendered files."""
    new = new_checkout(tmp_path)
    new.write_tests(SHORT)
    return new


@pytest.fixture(scope="session")
def built(new_checkout: NewCheckout, served: Index, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with both images, built and tested with short image tests; for tests that change nothing."""
    new = new_checkout(tmp_path_factory.mktemp("built"), BUILT_RELEASE)
    new.write_tests(SHORT)
    new.lock_and_render()
    new.builder("images")
    return new


@pytest.fixture
def proxy() -> Iterator[EngineProxy]:
    """A proxy of the machine's engine, which can hold a request."""
    with TemporaryDirectory(prefix="engine-") as folder, EngineProxy(Path(folder) / "socket").serving() as running:
        yield running


@pytest.fixture
def alone(checkout: Checkout, built: Checkout, proxy: EngineProxy) -> Checkout:
    """A checkout with its own store, which has the operating system; its engine is behind the proxy."""
    checkout.lock_and_render()
    checkout.take_store(like=built.store)
    checkout.engine = proxy.host
    return checkout


@pytest.fixture(scope="session")
def released_once(new_checkout: NewCheckout, built: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """As `released`, for tests that change nothing."""
    folder = tmp_path_factory.mktemp("released")
    new = new_checkout(folder, BUILT_RELEASE)
    new.environ["DOCKER_CONFIG"] = str(folder / "docker")  # without logins of this machine's user
    new.write_tests(SHORT)
    new.lock_and_render()
    new.take_store(like=built.store)
    new.builder("images")
    return new


@pytest.fixture
def released(released_once: Checkout, tmp_path: Path) -> Iterator[Checkout]:
    """A checkout with both images built, tested and tagged; the changes of a test are undone."""
    folders, tags = [released_once.root, released_once.store], released_once.tags()
    for folder in folders:
        shutil.copytree(folder, tmp_path / "saved" / folder.name, symlinks=True, copy_function=shutil.copy2)
    yield released_once
    for folder in folders:
        shutil.rmtree(folder)
        shutil.move(tmp_path / "saved" / folder.name, folder)
    if released_once.tags() != tags:
        released_once.builder("images")


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two key pairs of cosign, `ours` and `theirs`."""
    programs.install_from("trixie", "cosign")
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        subprocess.run(
            ["cosign", "generate-key-pair", f"--output-key-prefix={name}"],
            cwd=folder, env={"COSIGN_PASSWORD": "", "PATH": "/usr/bin:/usr/local/bin", "HOME": str(folder)},
            capture_output=True, timeout=60, check=True,
        )  # fmt: skip
    return folder
