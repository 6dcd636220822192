"""Fixtures of the integration tests: the machine's Docker Engine, and a test index with tiny wheels.

Only uv and pip come from a public index, once; see fetched.py.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import pytest

from tests.integration import company as companies
from tests.integration import fetched, leftovers, programs, stores, wheels
from tests.integration.checkout import OURS, SHARED_RELEASE, SHORT, Checkout, make
from tests.integration.company import Company
from tests.integration.engine_proxy import EngineProxy
from tests.integration.index import Index
from tests.integration.registry import Server

# A shell starts background jobs with SIGINT ignored. Programs that tests start would inherit that, and tests that
# interrupt them would wait forever: `make test &` in a script failed five tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Of fresh checkouts. Processes that test at the same time share an engine, so each has numbers of its own.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
RELEASES = count(16 * random.randrange(1, 560) + _WORKER, 16)


LONGEST_TEST_S = 400

# The order for `pytest --dist loadfile --no-loadscope-reorder`, which gives the next file to the first free process:
# files that need no seed while one process makes it, then the longest ones, so that none of these is left at the end.
FIRST = (
    "test_readme", "test_copy_of_repository", "test_matrix_guide",
    "test_dockerfile", "test_release", "test_faults", "test_publish", "test_store", "test_interrupted",
    "test_build_failures", "test_add", "test_named_indexes", "test_architectures", "test_prune", "test_image_tests",
    "test_lock_failures",
    "test_same_bytes", "test_engine_lost", "test_copies", "test_cosign", "test_gpu_command",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


class NewCheckout(Protocol):
    def __call__(self, folder: Path, *, fresh: bool = False, fresh_extra: bool = False) -> Checkout: ...


@pytest.fixture(scope="session", autouse=True)
def _swept() -> None:
    """Removes images of earlier test runs that were killed."""
    leftovers.sweep()


@pytest.fixture(autouse=True)
def _same_day() -> None:
    """Waits shortly before midnight UTC: stamps have the day on which a command began."""
    left = 24 * 3600 - time.time() % (24 * 3600)
    if left < LONGEST_TEST_S:
        time.sleep(left + 1)


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


def _apt_config(folder: Path) -> Path:
    """Settings of apt: the archives of this machine, with empty lists of packages.

    To print the archives, apt reads the packages of all: 0.8 s of each `builder`, and apt keeps no cache of them on
    machines that were made from an image of a container.
    """
    lists = folder / "lists"
    lists.mkdir(parents=True)
    for path in Path("/var/lib/apt/lists").glob("*_*"):
        if path.name.endswith("Release"):
            # With other hashes and an old time, so that `apt-get update` downloads it and the lists of packages.
            (lists / path.name).write_bytes(re.sub(rb"(?m)^ [0-9a-f]{64} ", b" %064d " % 0, path.read_bytes()))
            os.utime(lists / path.name, (0, 0))
        elif "_Packages" in path.name:
            (lists / f"{path.name.partition('_Packages')[0]}_Packages").touch()
    (folder / "apt.conf").write_text(f'Dir::State::lists "{lists}/";\n', encoding="utf-8")
    return folder / "apt.conf"


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
        "APT_CONFIG": str(_apt_config(folder / "apt")),
        "SSL_CERT_FILE": str(bundle),
        "PIP_CERT": str(bundle),
    }


@pytest.fixture(scope="session")
def seed(
    served: Index, environ: dict[str, str], authority: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A store with both images of the shared release, which one process makes for all.

    Its images stay in the engine until that process ends: the engine would unpack the operating system again for each
    checkout. Beside the store are the authority (PEM) and the address of the index that it was made with.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "seed"
    namespace = folder / "namespace"  # the last file that is written
    with programs.locked(folder.with_suffix(".lock")):
        if is_first := not namespace.exists():
            shutil.rmtree(folder, ignore_errors=True)
            first = _make(folder, SHARED_RELEASE, SHARED_RELEASE, served, environ)
            first.environ["GPU_IMAGES_STORE"] = str(folder / "store")
            first.lock_and_render()
            first.builder("build")
            system = stores.load_system(first.store, f"{first.namespace}/")
            shutil.copy2(authority, folder / "authority.pem")
            (folder / "index").write_text(served.address, encoding="utf-8")
            namespace.write_text(first.namespace, encoding="utf-8")
        else:
            Checkout(
                root=folder / "checkout", namespace=namespace.read_text("utf-8"), release=SHARED_RELEASE, index=served,
                environ=environ,
            ).remember()  # fmt: skip
    yield folder / "store"
    if is_first:
        first.remove()
        first.docker("image", "rm", "-f", system)


def _make(folder: Path, release: str, extra: str, served: Index, environ: dict[str, str]) -> Checkout:
    namespace = leftovers.namespace(secrets.token_hex(4))
    return make(folder / "checkout", namespace=namespace, release=release, extra=extra, index=served, environ=environ)


@pytest.fixture(scope="session")
def new_checkout(served: Index, environ: dict[str, str], seed: Path) -> Iterator[NewCheckout]:
    """A function that creates a checkout in a folder; what is left of its images and containers is removed at the end.

    The wheels of a `fresh` one must be fetched, and the engine must pull its layers. With `fresh_extra`, one wheel must
    be fetched, that of the larger image, and only the layers that the larger image has alone.
    """
    shutil.copytree(seed, environ["GPU_IMAGES_STORE"])
    checkouts: list[Checkout] = []

    def new(folder: Path, *, fresh: bool = False, fresh_extra: bool = False) -> Checkout:
        other = f"1.0.{next(RELEASES)}"
        release, extra = (other if fresh else SHARED_RELEASE), (other if fresh or fresh_extra else SHARED_RELEASE)
        checkouts.append(_make(folder, release, extra, served, environ))
        return checkouts[-1]

    yield new
    for each in checkouts:
        _remove(each)


@pytest.fixture
def checkout(new_checkout: NewCheckout, index: Index, tmp_path: Path) -> Iterator[Checkout]:
    """A checkout for one test, with short image tests, without locks and rendered files."""
    new = new_checkout(tmp_path)
    new.write_tests(SHORT)
    yield new
    _remove(new)


@pytest.fixture
def fresh(new_checkout: NewCheckout, index: Index, tmp_path: Path) -> Iterator[Checkout]:
    """As `checkout`, with a framework of its own."""
    new = new_checkout(tmp_path, fresh=True)
    new.write_tests(SHORT)
    yield new
    _remove(new)


@pytest.fixture
def fresh_extra(new_checkout: NewCheckout, index: Index, tmp_path: Path) -> Iterator[Checkout]:
    """As `checkout`, with a wheel of its own in the larger image.

    Above a framework of its own, the engine would unpack the operating system again: 5 s of processor time.
    """
    new = new_checkout(tmp_path, fresh_extra=True)
    new.write_tests(SHORT)
    yield new
    _remove(new)


def _remove(checkout: Checkout) -> None:
    """Removes its images and containers; with all at the end, the last process would be busy for a minute."""
    checkout.engine = ""
    checkout.remove()


@pytest.fixture
def company(fresh_extra: Checkout) -> Iterator[Company]:
    """A checkout that needs a private index."""
    with companies.company(fresh_extra) as new:
        yield new


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """An empty registry."""
    with Server(folder=tmp_path / "registry").serving() as running:
        yield running


@pytest.fixture
def proxy() -> Iterator[EngineProxy]:
    """A proxy of the machine's engine, which can hold a request."""
    with TemporaryDirectory(prefix="engine-") as folder, EngineProxy(Path(folder) / "socket").serving() as running:
        yield running


@pytest.fixture
def alone(fresh_extra: Checkout, seed: Path, proxy: EngineProxy) -> Checkout:
    """A checkout with a fresh wheel and its own store, which has all else; its engine is behind the proxy."""
    fresh_extra.lock_and_render()
    fresh_extra.take_store(like=seed)
    fresh_extra.engine = proxy.host
    return fresh_extra


@pytest.fixture(scope="session")
def released_once(new_checkout: NewCheckout, seed: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """As `released`, for tests that change nothing: other tests may have left images without tags."""
    folder = tmp_path_factory.mktemp("released")
    new = new_checkout(folder)
    new.environ["DOCKER_CONFIG"] = str(folder / "docker")  # without logins of this machine's user
    new.write_tests(SHORT)
    new.lock_and_render()
    new.take_store(like=seed)
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
