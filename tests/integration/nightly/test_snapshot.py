"""Locked Debian packages that the archives of this machine no longer have: every other place gives the same bytes."""

from __future__ import annotations

import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder.index import host
from tests.fakes.loopback import Loopback, Request
from tests.integration import stores
from tests.integration.checkout import MAKES_OS, PLAIN, Checkout, without
from tests.integration.registry import Server

APT_CONFIG = """\
Dir::Etc::SourceList "{folder}/sources.list";
Dir::Etc::SourceParts "-";
Dir::State "{folder}";
Dir::State::Status "{folder}/status";
Dir::Cache "{folder}/cache";
APT::Sandbox::User "";
"""
PLACES = r"/(now|moved|archive)/(debian|debian-security)(?:/[0-9]{8}T[0-9]{6}Z)?(/.*)"


class Archives(Loopback):
    """Debian's archives on the loopback: those of now, `/now/...`, moved ones, `/moved/...`, and a snapshot,
    `/archive/...`. `has` is whether a place has a package, by the first letter of its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.real = {
            "debian-security" if source.kind == "security" else "debian": source.uri.rstrip("/")
            for source in host.read_host().apt.sources
        }
        self.has: Callable[[str, str], bool] = lambda place, letter: True
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def answer(self, request: Request) -> None:
        self.requests.append(request.path)
        match = re.fullmatch(PLACES, request.path)
        file = request.path.rpartition("/")[2]
        if not match or (file.endswith(".deb") and not self.has(match[1], file[0])):
            request.reply(404)
            return
        upstream = urllib.request.Request(self.real[match[2]] + match[3], method=request.command)
        try:
            with urllib.request.urlopen(upstream, timeout=60) as answer:
                request.reply(200, answer.read(), [("Content-Length", answer.headers["Content-Length"])])
        except urllib.error.HTTPError as error:
            request.reply(error.code)

    def served(self, place: str) -> list[str]:
        """The first letters of the packages that were requested from a place."""
        paths = [path for path in self.requests if path.startswith(f"/{place}/") and path.endswith(".deb")]
        return sorted({path.rpartition("/")[2][0] for path in paths})


@pytest.fixture
def archives() -> Iterator[Archives]:
    with Archives().serving() as running:
        yield running


@pytest.fixture
def apt_config(archives: Archives, tmp_path: Path) -> str:
    """The configuration of a machine whose apt uses these archives, and has downloaded their lists."""
    folder = tmp_path / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    lines = [
        f"deb [signed-by={host.KEYRING}] {archives.url}/now/{name} {suite} main\n"
        for name, suite in (("debian", "bookworm"), ("debian-security", "bookworm-security"))
    ]
    (folder / "sources.list").write_text("".join(lines), encoding="utf-8")
    path = folder / "apt.conf"
    path.write_text(APT_CONFIG.format(folder=folder), encoding="utf-8")
    subprocess.run(["apt-get", "update", "-q"], env={"APT_CONFIG": str(path), "PATH": "/usr/bin:/bin"}, check=True)
    return str(path)


def set_places(checkout: Checkout, **places: str) -> None:
    """Writes `archive` and `snapshot` of the Debian release."""
    path = checkout.root / "matrix.yaml"
    text = re.sub(r"\n +(archive|snapshot): .*", "", path.read_text(encoding="utf-8"))
    keys = "".join(rf"\1{name}: {address}" for name, address in places.items())
    with_places = re.sub(r"(\n +)(glibc: \"2.36\")", rf"\1\2{keys}", text)
    assert (with_places != text) is bool(places)
    path.write_text(with_places, encoding="utf-8")


def packages_of(checkout: Checkout) -> list[str]:
    """The SHA-256 of the locked packages."""
    [path] = (checkout.root / "locks").glob("os-*.json")
    return re.findall(r'"sha256": "([0-9a-f]{64})"', path.read_text(encoding="utf-8"))


def test_a_lock_is_made_from_the_snapshot_archive(checkout: Checkout, archives: Archives, apt_config: str) -> None:
    set_places(checkout, snapshot=f"{archives.url}/archive")
    checkout.builder("lock", APT_CONFIG=apt_config)
    [path] = (checkout.root / "locks").glob("os-*.json")
    time = re.search(r'"time": "([^"]+)"', path.read_text(encoding="utf-8"))
    assert time
    assert [name for name in archives.requests if name.startswith(f"/archive/debian/{time[1]}/dists/")]
    assert archives.served("archive") == []


def test_every_place_gives_the_same_bytes(
    checkout: Checkout, archives: Archives, apt_config: str, server: Server
) -> None:
    checkout.lock_and_render()
    archives.requests.clear()

    def build(*options: str) -> str:
        output = checkout.builder("build", PLAIN, *options, APT_CONFIG=apt_config)
        assert archives.address not in output
        return output

    # This machine's archives: one request for each package and one to look it up, in at most two folders; no lists.
    first = checkout.take_store()
    assert MAKES_OS.search(build())
    expected = checkout.stored()
    assert not [path for path in archives.requests if "/dists/" in path]
    packages = packages_of(checkout)
    assert len(packages) <= len(archives.requests) <= 4 * len(packages)
    assert archives.address not in checkout.os_log().read_text(encoding="utf-8")

    # They are gone, but the store has them.
    archives.has = lambda place, letter: False
    store = checkout.take_store(like=first)
    [record] = stores.os_records(store)
    stores.path(store, record["digest"]).unlink()
    archives.requests.clear()
    assert MAKES_OS.search(build("--locked"))
    assert checkout.stored() == expected
    assert archives.requests == []
    assert set(packages) <= {path.name for path in (store / "blobs/sha256").iterdir()}

    # The release has moved, and its new archive lacks some, which a snapshot has.
    set_places(checkout, archive=f"{archives.url}/moved", snapshot=f"{archives.url}/archive")
    archives.has = lambda place, letter: place == "archive" or (place == "moved" and letter < "m")
    checkout.take_store()
    assert MAKES_OS.search(build("--locked"))
    assert checkout.stored() == expected
    assert max(archives.served("moved")) >= "m"
    assert min(archives.served("archive")) >= "m"
    assert not any(path.startswith("/archive/debian/") and "/dists/" in path for path in archives.requests)

    # Nowhere, but a registry has the layer.
    set_places(checkout)
    archives.has = lambda place, letter: False
    checkout.builder("images", PLAIN, APT_CONFIG=apt_config)
    checkout.publish(server.address, PLAIN)
    checkout.builder("render")
    checkout.take_store()
    output = build("--locked")
    assert "from the registry" in output
    assert not MAKES_OS.search(output)
    assert stores.os_records(checkout.store) == [record]


def test_locks_are_made_in_a_container_where_apt_is_missing(checkout: Checkout, tmp_path: Path) -> None:
    """As on Ubuntu without root, or on a distribution without apt."""
    checkout.base_image("trixie")  # no registry has it
    locks = []
    for path in (os.environ["PATH"], without(tmp_path, "apt-get")):
        for lock in (checkout.root / "locks").glob("os-*.json"):
            lock.unlink()
        output = checkout.builder("lock", PATH=path)
        assert ("running it in a container of Debian" in output) is (path != os.environ["PATH"])
        [lock] = (checkout.root / "locks").glob("os-*.json")
        locks.append(lock.read_text(encoding="utf-8").partition('"requested"')[2])
    assert locks[0] == locks[1]
    assert "sha256" in locks[0]

    # Packages are looked up and downloaded there too; their addresses are those of apt in the container.
    checkout.builder("render")
    checkout.take_store()
    assert MAKES_OS.search(checkout.builder("build", PLAIN, "--locked", PATH=without(tmp_path, "apt-get")))
