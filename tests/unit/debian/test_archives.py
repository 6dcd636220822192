"""Where locked Debian packages are looked for and downloaded from: see also nightly/test_snapshot.py."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from builder.common.errors import EngineError, FetchError
from builder.common.tasks import RetryPolicy
from builder.debian.archives import (
    CONNECTIONS,
    DEFAULT_SNAPSHOT,
    HERE,
    MOVED,
    SNAPSHOT,
    SNAPSHOT_CONNECTIONS,
    Archives,
    PackageAvailability,
)
from builder.debian.os_lock import DebianPackage, OsLock
from builder.index import host as host_settings
from builder.index.download import Fetcher
from builder.index.host import Apt, AptSource, Host, RunProgram
from builder.matrix.project import Project
from tests.fakes.locks import TIME
from tests.fakes.run import FakeApt
from tests.fakes.wire import Reply, Sent, Wire

Edit = Callable[[str, str], Project]
POLICY = RetryPolicy(retries=1, first_delay_s=0.001)
MAIN, SECURITY = "http://here.example.test/debian", "http://here.example.test/debian-security"
MOVED_TO, SNAPSHOTS = "http://moved.example.test", "http://snapshot.example.test/archive"
DEFAULT = "https://default.example.test/archive"
SOURCES = tuple(
    AptSource(kind=kind, uri=uri)
    for kind, uri in (("main", f"{MAIN}/"), ("updates", f"{MAIN}/"), ("security", SECURITY))
)
BY_APT = tuple(
    AptSource(kind=kind, uri=f"{DEFAULT}/{name}/@SNAPSHOTID@/")
    for kind, name in (("main", "debian"), ("security", "debian-security"))
)
GLIBC = '    glibc: "2.36"\n'


def package(name: str, version: str, source: str = "", architecture: str = "amd64") -> DebianPackage:
    content = content_of(name)
    return DebianPackage(
        name=name,
        version=version,
        architecture="all" if architecture == "all" else "amd64",
        source=source,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def content_of(name: str) -> bytes:
    return f"content of {name}".encode() * 100


PACKAGES = (package("libc6", "2.36-9+deb12u10", "glibc"), package("tini", "0.19.0-1"), package("zlib1g", "1:1.2.13"))
LOCK = OsLock(debian="newbird", time=TIME, requested=("tini",), packages=PACKAGES)


# ---- paths


@pytest.mark.parametrize(
    ("locked", "path"),
    [
        (package("bash", "5.2.15-2+b2"), "b/bash/bash_5.2.15-2+b2_amd64.deb"),
        (package("zlib1g", "1:1.2.13.dfsg-1", "zlib"), "z/zlib/zlib1g_1.2.13.dfsg-1_amd64.deb"),
        (package("libc6", "2.36-9+deb12u10", "glibc"), "g/glibc/libc6_2.36-9+deb12u10_amd64.deb"),
        (package("libxml2", "2.9"), "libx/libxml2/libxml2_2.9_amd64.deb"),
        (package("perl-base", "5.36.0-7", "perl (5.36.0-7)"), "p/perl/perl-base_5.36.0-7_amd64.deb"),
        (package("tzdata", "2024a-0", architecture="all"), "t/tzdata/tzdata_2024a-0_all.deb"),
        (package("lib", "1"), "lib/lib/lib_1_amd64.deb"),
    ],
)
def test_the_path_of_a_package_in_an_archive(locked: DebianPackage, path: str) -> None:
    assert locked.pool_path == path


# ---- places


class World:
    """Servers in memory. `missing` and `broken` are parts of addresses; `other` ones serve another file.

    `length` are lengths by parts of addresses.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.missing: set[str] = set()
        self.broken: dict[str, Exception] = {}
        self.other: dict[str, bytes] = {}
        self.length: dict[str, str] = {}
        self.wire = Wire.install(monkeypatch, self.answer)

    def answer(self, sent: Sent) -> Reply | Exception:
        for part, error in self.broken.items():
            if part in sent.url:
                return error
        name = sent.url.rpartition("/")[2].partition("_")[0]
        if any(part in sent.url for part in self.missing) or "/pool/main/" not in sent.url:
            return Reply(status=404)
        content = next((other for part, other in self.other.items() if part in sent.url), content_of(name))
        length = next((length for part, length in self.length.items() if part in sent.url), str(len(content)))
        return Reply(body=b"" if sent.method == "HEAD" else content, headers={"Content-Length": length})

    @property
    def hosts(self) -> list[str]:
        """The servers of all requests, each once, in order."""
        return list(dict.fromkeys(sent.url.split("/")[2].partition(".")[0] for sent in self.wire.seen))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("builder.debian.mmdebstrap.is_installed", lambda: False)
    return World(monkeypatch)


def host(**apt: object) -> Host:
    settings = Apt(**({"sources": SOURCES} | apt))  # type: ignore[arg-type]
    return Host(archives=settings)


@pytest.fixture
def everywhere(edit: Edit) -> Project:
    """A release with all places."""
    return edit(GLIBC, f"{GLIBC}    archive: {MOVED_TO}\n    snapshot: {SNAPSHOTS}\n")


def pools(known_archives: Archives) -> dict[str, list[str]]:
    """The addresses of each place, in their order."""
    result: dict[str, list[str]] = {}
    for place, pool in known_archives.pools(LOCK):
        result.setdefault(place.name, []).append(pool)
    return result


def pools_of(project: Project, host: Host) -> dict[str, list[str]]:
    return pools(Archives(project.matrix, host, FakeApt()))


def test_the_places_in_their_order(everywhere: Project) -> None:
    assert pools_of(everywhere, host(snapshots=BY_APT)) == {
        HERE: [f"{MAIN}/pool/main", f"{SECURITY}/pool/updates/main"],
        MOVED: [f"{MOVED_TO}/debian/pool/main", f"{MOVED_TO}/debian-security/pool/updates/main"],
        SNAPSHOT: [
            f"{SNAPSHOTS}/debian/{TIME}/pool/main",
            f"{SNAPSHOTS}/debian-security/{TIME}/pool/updates/main",
        ],
    }
    assert list(pools_of(everywhere, host())) == [HERE, MOVED, SNAPSHOT]


def test_without_a_snapshot_archive_that_of_apt_is_used(tiny: Project, edit: Edit) -> None:
    assert list(pools_of(tiny, host())) == [HERE], "an apt without one"
    assert pools_of(tiny, host(snapshots=BY_APT))[DEFAULT_SNAPSHOT] == [
        f"{DEFAULT}/debian/{TIME}/pool/main",
        f"{DEFAULT}/debian-security/{TIME}/pool/updates/main",
    ]
    none = edit(GLIBC, f"{GLIBC}    snapshot: none\n")
    assert list(pools_of(none, host(snapshots=BY_APT))) == [HERE]


DUMP = """\
Acquire::Snapshots "";
Acquire::Snapshots::URI "";
Acquire::Snapshots::URI::Override "";
Acquire::Snapshots::URI::Override::Label "";
Acquire::Snapshots::URI::Override::Label::Debian-Security "https://default.example.test/archive/debian-security/@SNAPSHOTID@/";
Acquire::Snapshots::URI::Origin "";
Acquire::Snapshots::URI::Origin::Debian "https://default.example.test/archive/debian/@SNAPSHOTID@/";
Acquire::Snapshots::URI::Origin::Other "https://other.example.test/@SNAPSHOTID@/";
Acquire::Snapshots::URI::Host::deb.example.test "https://other.example.test/@PATH@/@SNAPSHOTID@/";
"""


def test_the_snapshot_archives_in_the_configuration_of_apt() -> None:
    """The output is that of apt 3.0, with other addresses."""
    assert host_settings.parse_snapshots(DUMP) == BY_APT
    own = 'Acquire::Snapshots::URI::Override::Origin::Debian "http://own.example.test/@SNAPSHOTID@/";\n'
    assert host_settings.parse_snapshots(DUMP + own)[0].uri == "http://own.example.test/@SNAPSHOTID@/"
    off = 'Acquire::Snapshots::URI::Override::Label::Debian "no";\n'
    assert host_settings.parse_snapshots(DUMP + off) == BY_APT[1:]
    assert host_settings.parse_snapshots("") == ()


LINES = f"{MAIN} Debian newbird main\n{SECURITY} Debian newbird-security main\n"
TARGETS = {"$(REPO_URI) Debian $(RELEASE) $(COMPONENT)": LINES}


class Container:
    """apt in a container. `started` counts the containers; without `image`, there is none."""

    def __init__(self, *, image: bool = True) -> None:
        self.started = 0
        self.image = image

    @contextmanager
    def open(self) -> Iterator[RunProgram]:
        if not self.image:
            raise EngineError("base image: cannot be pulled")
        self.started += 1

        def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
            output = DUMP if command[0] == "apt-config" else TARGETS[command[4]]
            return subprocess.CompletedProcess(command, 0, output, "")

        yield run


def test_without_apt_the_addresses_are_those_of_apt_in_a_container(tiny: Project, world: World) -> None:
    """Also that of an archive which this machine lacks."""
    for sources, places in ((), [HERE, DEFAULT_SNAPSHOT]), (SOURCES[:1], [HERE]):
        container = Container()
        known_archives = Archives(tiny.matrix, host(sources=sources), FakeApt(container.open))
        for _ in range(2):
            result = pools(known_archives)
            assert list(result) == places
            assert result[HERE] == [f"{MAIN}/pool/main", f"{SECURITY}/pool/updates/main"]
        assert container.started == 1


def test_no_archive_is_known(tiny: Project, world: World, tmp_path: Path) -> None:
    runner = FakeApt(Container(image=False).open)
    known_archives = Archives(tiny.matrix, host(sources=()), runner)
    assert pools(known_archives) == {}
    assert runner.said == ["Debian's own addresses are unknown: base image: cannot be pulled"]
    assert known_archives.locate(LOCK, None).missing == list(PACKAGES)
    with pytest.raises(FetchError, match="no place that may have it is known"):
        fetcher(known_archives, tmp_path).fetch(PACKAGES[0])


# ---- looking packages up


def located(project: Project, settings: Host, blobs: Path | None = None) -> PackageAvailability:
    return Archives(project.matrix, settings, FakeApt()).locate(LOCK, blobs)


def test_each_package_is_looked_up_where_it_may_be(everywhere: Project, world: World, tmp_path: Path) -> None:
    """A file of another size in the store is incomplete."""
    for package, missing in ("libc6", 0), ("tini", 1):
        [locked] = [locked for locked in PACKAGES if locked.name == package]
        (tmp_path / locked.sha256).write_bytes(bytes(locked.size - missing))
    world.missing = {
        "here.example.test/debian/pool/main/t",
        "here.example.test/debian/pool/main/z",
        "moved.example.test/debian/pool/main/z",
    }
    result = located(everywhere, host(), tmp_path)
    assert result == PackageAvailability(missing=[], different=[])
    assert {sent.method for sent in world.wire.seen} == {"HEAD"}
    assert not any("libc6" in sent.url for sent in world.wire.seen)
    assert world.hosts == ["here", "moved", "snapshot"]


def test_packages_of_the_store_are_looked_up_nowhere(tiny: Project, world: World, tmp_path: Path) -> None:
    """No container is started to ask Debian's apt for its archives."""
    for package in PACKAGES:
        (tmp_path / package.sha256).write_bytes(bytes(package.size))
    container = Container()
    known_archives = Archives(tiny.matrix, host(sources=()), FakeApt(container.open))
    assert known_archives.locate(LOCK, tmp_path) == PackageAvailability(missing=[], different=[])
    assert (container.started, world.wire.seen) == (0, [])


def test_two_locks_with_the_same_packages_are_looked_up_once(everywhere: Project, world: World) -> None:
    known_archives = Archives(everywhere.matrix, host(), FakeApt())
    for _ in range(2):
        assert known_archives.locate(LOCK, None).missing == []
    assert len(world.wire.seen) == len(PACKAGES)
    assert world.hosts == ["here"], "what the first archive has is looked up nowhere else"


LOOKED_UP: dict[str, tuple[str, dict[str, Any], list[str], str, list[str]]] = {
    "no place has it": ("everywhere", {"missing": {"tini"}}, ["tini"], "", []),
    "a place that cannot be read may have it": (
        "everywhere",
        {"missing": {"tini"}, "broken": {"snapshot": requests.ConnectTimeout()}},
        ["tini"],
        f"{SNAPSHOT}: the connection to {SNAPSHOT} timed out",
        [],
    ),
    # The archive has another layout, or the release has moved. All locks were made again, with the same result, and
    # then the build failed.
    "an archive without any package": (
        "tiny",
        {"missing": {"here.example.test"}},
        ["libc6", "tini", "zlib1g"],
        f"{HERE}: none of the locked packages was found",
        [],
    ),
    # That this machine's archives have nothing of the release says nothing about its new archive.
    "a release that has moved": ("everywhere", {"missing": {"here.example.test", "tini"}}, ["tini"], "", []),
    "a file of another size is another file": ("tiny", {"other": {"tini": b"other"}}, ["tini"], "", ["tini"]),
    "a length of thousands of digits": ("tiny", {"length": {"tini": "9" * 5000}}, ["tini"], "", []),
    "a negative length": ("tiny", {"length": {"tini": "-1"}}, ["tini"], "", []),
    "a length that is no number": ("tiny", {"length": {"tini": "x"}}, ["tini"], "", []),
    "an empty length": ("tiny", {"length": {"tini": ""}}, ["tini"], "", []),
    # Some servers send it in the response to HEAD.
    "a length of zero is unknown": ("tiny", {"length": {"": "0"}}, [], "", []),
}


@pytest.mark.parametrize(
    ("name", "changes", "missing", "doubts", "different"), LOOKED_UP.values(), ids=LOOKED_UP.keys()
)
def test_packages_that_are_gone(
    request: pytest.FixtureRequest, world: World, name: str, changes: dict[str, Any], missing: list[str],
    doubts: str, different: list[str],
) -> None:  # fmt: skip
    vars(world).update(changes)
    result = located(request.getfixturevalue(name), host())
    assert [package.name for package in result.missing] == missing
    assert result.doubts == doubts
    assert [package.name for package in result.different] == different


def test_the_default_snapshot_archive_need_not_answer(tiny: Project, world: World) -> None:
    """Many networks do not let it through; their builds lock current packages, as they did without it."""
    world.missing, world.broken = {"tini"}, {"default": requests.ConnectionError()}
    result = located(tiny, host(snapshots=BY_APT))
    assert (result.missing, result.doubts) == ([PACKAGES[1]], "")


@pytest.mark.parametrize("status", [500, 503, 429, 401, 407])
def test_an_error_of_the_server_is_no_missing_package(tiny: Project, world: World, status: int) -> None:
    world.wire.answers = lambda _: Reply(status=status)
    result = located(tiny, host())
    assert result.doubts.startswith(f"{HERE}: {HERE} returned {status}")


# ---- downloads


def fetcher(known_archives: Archives, folder: Path) -> Fetcher[DebianPackage]:
    for name in ("blobs", "parts"):
        (folder / name).mkdir(exist_ok=True)
    downloads = Fetcher(known_archives.packages(LOCK, "a-cell"), folder / "blobs", folder / "parts")
    downloads.policy = POLICY
    return downloads


def test_the_packages_are_named_by_their_hash(tiny: Project, world: World, tmp_path: Path) -> None:
    paths = fetcher(Archives(tiny.matrix, host(), FakeApt()), tmp_path).fetch_all(PACKAGES, CONNECTIONS)
    assert paths == {each.sha256: tmp_path / "blobs" / each.sha256 for each in PACKAGES}
    assert {each.name: paths[each.sha256].read_bytes() for each in PACKAGES} == {
        each.name: content_of(each.name) for each in PACKAGES
    }
    assert list((tmp_path / "parts").iterdir()) == []
    world.wire.seen.clear()
    assert fetcher(Archives(tiny.matrix, host(), FakeApt()), tmp_path).fetch_all(PACKAGES, CONNECTIONS) == paths
    assert world.wire.seen == [], "the store has them"


def test_a_package_is_taken_from_the_first_place_that_has_it(everywhere: Project, world: World, tmp_path: Path) -> None:
    for missing, expected in (({"nothing"}, "here"), ({"here"}, "moved"), ({"here", "moved"}, "snapshot")):
        world.missing = missing
        world.wire.seen.clear()
        downloads = fetcher(Archives(everywhere.matrix, host(), FakeApt()), tmp_path)
        assert downloads.fetch(PACKAGES[1]).read_bytes() == content_of("tini")
        assert world.hosts[-1] == expected
        downloads.path(PACKAGES[1]).unlink()


def test_packages_of_the_security_archive(tiny: Project, world: World, tmp_path: Path) -> None:
    pool = f"{SECURITY}/pool/updates/main/t/tini/"
    world.wire.answers = lambda sent: Reply(body=content_of("tini")) if sent.url.startswith(pool) else Reply(404)
    fetcher(Archives(tiny.matrix, host(), FakeApt()), tmp_path).fetch(PACKAGES[1])


def test_another_file_of_the_same_version_is_an_error(everywhere: Project, world: World, tmp_path: Path) -> None:
    """No other place is tried: somebody must look at this."""
    world.other = {"here.example.test": content_of("tino")}
    with pytest.raises(FetchError, match="SHA-256 mismatch") as caught:
        fetcher(Archives(everywhere.matrix, host(), FakeApt()), tmp_path).fetch(PACKAGES[1])
    assert "Debian never changes a package without a new version" in caught.value.hint
    assert world.hosts == ["here"]
    assert not list(tmp_path.glob("blobs/*"))


def test_a_place_that_stalls_is_given_up_for_all_packages(everywhere: Project, world: World, tmp_path: Path) -> None:
    world.broken = {"here": requests.ReadTimeout()}
    known_archives = Archives(everywhere.matrix, host(), FakeApt())
    for each in PACKAGES:
        fetcher(known_archives, tmp_path).fetch(each)
    assert sum("here" in sent.url for sent in world.wire.seen) == 1 + POLICY.retries
    assert {place.fault for place, _ in known_archives.pools(LOCK) if place.name == HERE} == {"the archive timed out"}


def test_the_message_names_every_place_and_what_to_do(everywhere: Project, world: World, tmp_path: Path) -> None:
    world.missing, world.broken = {"tini"}, {"moved": requests.ConnectionError()}
    with pytest.raises(FetchError) as caught:
        fetcher(Archives(everywhere.matrix, host(), FakeApt()), tmp_path).fetch(PACKAGES[1])
    assert str(caught.value).splitlines() == [
        "tini_0.19.0-1_amd64.deb was not found",
        f"  {HERE}: the archive returned 404 Not Found",
        f"  {MOVED}: cannot connect to the archive, or the connection was lost",
        f"  {SNAPSHOT}: the archive returned 404 Not Found",
    ]
    assert "Lock the current versions: builder refresh a-cell" in caught.value.hint
    assert "`archive` or `snapshot` in matrix.yaml" in caught.value.hint


def test_few_connections_to_a_snapshot_archive(everywhere: Project) -> None:
    known_archives = Archives(everywhere.matrix, host(), FakeApt())
    [snapshot] = {place for place, _ in known_archives.pools(LOCK) if place.name == SNAPSHOT}
    with ExitStack() as requests_of_all_systems:
        for _ in range(SNAPSHOT_CONNECTIONS):
            requests_of_all_systems.enter_context(snapshot.request())
        assert not snapshot._slots.acquire(blocking=False)


def test_apts_proxy_comes_before_that_of_the_environment(
    tiny: Project, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://environment.example.test")
    for proxy, expected in (
        ("", "http://environment.example.test"),
        ("http://apt.example.test", "http://apt.example.test"),
    ):
        world.wire.seen.clear()
        Archives(tiny.matrix, host(proxy=proxy), FakeApt()).locate(LOCK, None)
        assert {sent.options["proxies"]["http"] for sent in world.wire.seen} == {expected}
