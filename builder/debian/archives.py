"""The places of locked Debian packages: this machine's archives, `archive` of matrix.yaml, snapshot archives.

The path of a package in an archive is computed from the lock. The size and SHA-256 of a file from any place must be
those of the lock, which apt took from lists that Debian signs. So a place needs no signature. No version is chosen
here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedRandom
from pathlib import Path

import requests

from builder.common.errors import EngineError, FetchError
from builder.common.http import UNCOMPRESSED, failure_sentence
from builder.common.tasks import RetryPolicy, thread_pool
from builder.debian.apt import AptRunner
from builder.debian.os_lock import DebianPackage, OsLock
from builder.index.download import AbsentError, FileFetcher, LostError
from builder.index.host import SNAPSHOT_ID, SYSTEM_BUNDLE, Apt, AptSource, Host, apt_of_debian
from builder.index.session import IndexSession
from builder.index.settings import IndexSettings
from builder.matrix.schema import NO_SNAPSHOT, Matrix

CONNECTIONS = 8  # requests at once to an archive
SNAPSHOT_CONNECTIONS = 2  # snapshot services limit the rate
_NO_ANSWER = (401, 407, 408, 425, 429)  # of a server that may have the file
_MOVED = "none of the locked packages was found"  # the release has moved, or it is not such an archive
LONGEST_SIZE = 20  # digits; Python refuses numbers of thousands of digits with an exception
STORE, HERE, MOVED = "the store", "this machine's archives", "`archive` of matrix.yaml"
SNAPSHOT, DEFAULT_SNAPSHOT = "`snapshot` of matrix.yaml", "apt's snapshot archive"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Archives that may have a package. `pools` are the addresses of their folders of packages, in order."""

    name: str
    pools: tuple[str, ...]

    @classmethod
    def of(cls, name: str, sources: Sequence[AptSource]) -> Place:
        # The security archive has another name of its component, observed in Debian 11 to 13.
        pools = (f"{source.uri.rstrip('/')}/pool/{'updates/' * (source.kind == 'security')}main" for source in sources)
        return cls(name=name, pools=tuple(dict.fromkeys(pools)))


@dataclass(frozen=True, kw_only=True)
class PackageLocations:
    """The locations of the packages of a lock. `at` is the name of the first place that has a package, by SHA-256.

    `others` are packages of which a place has another file. `faults` are the reasons that places could not be read, by
    name.
    """

    packages: tuple[DebianPackage, ...]
    at: Mapping[str, str]
    others: tuple[DebianPackage, ...]
    faults: Mapping[str, str]

    @property
    def missing(self) -> list[DebianPackage]:
        """Packages that no place has, as far as places could be read."""
        return [package for package in self.packages if package.sha256 not in self.at]

    @property
    def uncertain(self) -> str:
        """The reasons that a package in `missing` may be in a place, or an empty string.

        Ignores faults of apt's snapshot archive.
        """
        faults = (
            {name: fault for name, fault in self.faults.items() if name != DEFAULT_SNAPSHOT} if self.missing else {}
        )
        return "; ".join(f"{name}: {fault}" for name, fault in faults.items())


class Archives:
    """The places of one run, and their known files and faults. Every method may be called from several threads."""

    look_up_policy = RetryPolicy(connect_s=10, read_s=15, retries=2)

    def __init__(self, matrix: Matrix, host: Host, runner: AptRunner) -> None:
        self._matrix = matrix
        self.host = host
        self.runner = runner
        self._lock = threading.Lock()
        self._in_container: Apt | None = None  # the archives that apt in a container of Debian uses
        self._slots: dict[str, threading.Semaphore] = {}
        self.faults: dict[str, str] = {}  # by name of a place, the reason that it is not used any more
        self._sizes: dict[str, int | None] = {}  # by address; 0: unknown, None: no such file

    def places(self, lock: OsLock) -> Iterator[Place]:
        """The places that may have a package of this lock, in the order in which they are tried."""
        debian = self._matrix.debian[lock.debian]
        if pools := Place.of(HERE, self._sources()).pools:
            yield Place(name=HERE, pools=pools)
        if debian.archive:
            yield Place.of(MOVED, self.host.for_release(debian).apt.sources)
        if debian.snapshot == NO_SNAPSHOT:
            return
        if debian.snapshot:
            yield Place.of(SNAPSHOT, self.host.with_snapshot(debian.snapshot, lock.time).apt.sources)
            return
        # The snapshot archives that apt has by default: from version 2.7.1 on, which is in Debian 13.
        own = self.host.apt
        if sources := own.snapshots if own.sources else self._container().snapshots:
            dated = [replace(source, uri=source.uri.replace(SNAPSHOT_ID, lock.time)) for source in sources]
            yield Place.of(DEFAULT_SNAPSHOT, dated)

    def _sources(self) -> tuple[AptSource, ...]:
        """The archives that this machine's apt uses. A missing archive comes from apt in a Debian container."""
        sources = self.host.apt.sources
        kinds = {source.kind for source in sources}
        if {"main", "security"} <= kinds:
            return sources
        return (*sources, *(source for source in self._container().sources if source.kind not in kinds))

    def _container(self) -> Apt:
        with self._lock:
            if self._in_container is None:
                self._in_container = Apt()
                try:
                    with self.runner.container() as run:
                        self._in_container = apt_of_debian(run)
                except EngineError as error:
                    self.runner.view.say_once(f"Debian's own addresses are unknown: {error}")
            return self._in_container

    def session(self, policy: RetryPolicy, *, retries: int = 0) -> IndexSession:
        """Requests to archives: with apt's proxy, and the certificates that apt accepts."""
        proxy = self.host.apt.proxy
        bundle = self.host.index.ca_bundle or (str(SYSTEM_BUNDLE) if SYSTEM_BUNDLE.exists() else "")
        settings = IndexSettings(ca_bundle=bundle, proxy=proxy)
        session = IndexSession(settings, timeout=policy.timeouts, retries=retries)
        session.trust_env = not proxy  # requests prefers the proxies of the environment, apt its own
        return session

    def slot(self, place: Place) -> threading.Semaphore:
        """Limits the requests to a place."""
        connections = SNAPSHOT_CONNECTIONS if place.name in (SNAPSHOT, DEFAULT_SNAPSHOT) else CONNECTIONS
        with self._lock:
            return self._slots.setdefault(place.name, threading.Semaphore(connections))

    def try_places(
        self, lock: OsLock, package: DebianPackage, attempt: Callable[[Place, str], None]
    ) -> tuple[str, dict[str, str]]:
        """Calls `attempt` with each place that may have a package, and the address there, until it succeeds.

        Returns the name of that place, empty if there is none, and by name the reasons that earlier places failed.
        `attempt` raises AbsentError, or LostError for a place that is then not used any more.
        """
        reasons: dict[str, str] = {}
        for place in self.places(lock):
            for pool in place.pools:
                try:
                    with self.slot(place):
                        if place.name in self.faults:  # perhaps since this thread began to wait
                            reasons[place.name] = self.faults[place.name]
                            break
                        attempt(place, f"{pool}/{package.pool_path}")
                    return place.name, reasons
                except (AbsentError, LostError) as error:
                    reasons[place.name] = str(error).removeprefix(f"{package.file}: ")
                    if isinstance(error, LostError):
                        self.faults[place.name] = reasons[place.name]
        return "", reasons

    def locate(self, lock: OsLock, blobs: Path | None) -> PackageLocations:
        """Looks for all packages of a lock: in the places in their order, with HEAD requests.

        First looks in `blobs`, the folder of the store's blobs, if there is one.
        """
        session = self.session(self.look_up_policy, retries=self.look_up_policy.retries)
        at: dict[str, str] = {}
        others: set[DebianPackage] = set()
        failed: dict[str, str] = {}  # by place, the reason that it lacks a package

        def find(package: DebianPackage) -> None:
            def look_up(place: Place, address: str) -> None:
                if address not in self._sizes:
                    self._sizes[address] = _size(session, place, address)
                if (size := self._sizes[address]) not in (0, package.size):
                    if size is not None:
                        others.add(package)
                    raise AbsentError("no such file")

            blob = blobs / package.sha256 if blobs else None
            if blob and blob.exists() and blob.stat().st_size == package.size:
                at[package.sha256] = STORE
                return
            name, reasons = self.try_places(lock, package, look_up)
            failed.update(reasons)
            if name:
                at[package.sha256] = name

        with thread_pool(CONNECTIONS, "look-up") as pool:
            list(pool.map(find, lock.packages))
        is_moved = not (at or others)
        return PackageLocations(
            packages=lock.packages,
            at=at,
            others=tuple(package for package in lock.packages if package in others),
            faults={name: self.faults.get(name, _MOVED) for name in failed if is_moved or name in self.faults},
        )


def _size(session: IndexSession, place: Place, address: str) -> int | None:
    """The size of the file at an address, 0 if the server sends none; None without a file. Raises LostError."""
    try:
        response = session.head(address, allow_redirects=True, headers=UNCOMPRESSED)
        if response.status_code >= requests.codes.server_error or response.status_code in _NO_ANSWER:
            response.raise_for_status()
    except (requests.RequestException, OSError) as error:
        raise LostError(failure_sentence(error, place.name)) from error
    # Some servers send no length, or 0, in the response to HEAD.
    length = response.headers.get("Content-Length", "0")
    return int(length) if response.ok and length.isdecimal() and len(length) < LONGEST_SIZE else None


class DebianFetcher(FileFetcher[DebianPackage]):
    """Downloads the packages of one lock to `blobs`, the folder of the store's blobs, by their SHA-256.

    `cell` is one that needs them, for a hint.
    """

    server = "the archive"

    def __init__(
        self,
        archives: Archives,
        lock: OsLock,
        cell: str,
        blobs: Path,
        parts: Path,
        *,
        progress: Callable[[int], None] = lambda _: None,
        stopped: threading.Event | None = None,
    ) -> None:
        super().__init__(blobs, parts, archives.session(self.policy), progress=progress, stopped=stopped)
        self._archives = archives
        self._os_lock = lock
        self.hint_if_absent = f"Lock the current versions: builder refresh {cell}"
        self.hint_if_different = (
            "Debian never changes a package without a new version: do not use these archives, or this lock, until the "
            "difference is explained."
        )

    def fetch_all(self) -> dict[str, Path]:
        """The files of all packages, by SHA-256; the largest are downloaded first. Raises FetchError, DiskError."""
        packages = sorted(self._os_lock.packages, key=lambda package: -package.size)
        with thread_pool(CONNECTIONS, "packages") as pool:
            return dict(zip((package.sha256 for package in packages), pool.map(self.fetch, packages), strict=True))

    def _get(self, package: DebianPackage, file: BufferedRandom) -> None:
        def attempt(_: Place, address: str) -> None:
            self._download(package, file, address)

        name, reasons = self._archives.try_places(self._os_lock, package, attempt)
        if name:
            return
        lines = [f"  {name}: {reason}" for name, reason in reasons.items()] or ["  no archive of Debian is known here"]
        raise FetchError(
            "\n".join([f"{package.file} of Debian {self._os_lock.debian} was not found", *lines]),
            hint=f"{self.hint_if_absent}   Or name a place that has it, `archive` or `snapshot` in matrix.yaml: "
            "docs/matrix.md",
        )
