"""The places of locked Debian packages: this machine's archives, `archive` of matrix.yaml, snapshot archives.

The path of a package in an archive is computed from the lock. The size and SHA-256 of a file from any place must be
those of the lock, which apt took from lists that Debian signs. So a place needs no signature. No version is chosen
here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import requests

from builder.common.errors import EngineError
from builder.common.http import UNCOMPRESSED, failure_sentence
from builder.common.tasks import thread_pool
from builder.debian.apt import AptRunner
from builder.debian.os_lock import DebianPackage, OsLock
from builder.index.download import Address, FileSource, LostError, Place
from builder.index.host import SNAPSHOT_ID, SYSTEM_BUNDLE, Apt, AptSource, Host, apt_of_debian
from builder.index.session import TIMEOUT_S, IndexSession
from builder.index.settings import IndexSettings
from builder.matrix.schema import NO_SNAPSHOT, Matrix

CONNECTIONS = 8  # requests at once to an archive
SNAPSHOT_CONNECTIONS = 2  # snapshot services limit the rate
LOOK_UP_TIMEOUT_S, LOOK_UP_RETRIES = (10.0, 15.0), 2
_NO_ANSWER = (401, 407, 408, 425, 429)  # of a server that may have the file
_MOVED = "none of the locked packages was found"  # the release has moved, or it is not such an archive
LONGEST_SIZE = 20  # digits; Python refuses numbers of thousands of digits with an exception
HERE, MOVED = "this machine's archives", "`archive` of matrix.yaml"
SNAPSHOT, DEFAULT_SNAPSHOT = "`snapshot` of matrix.yaml", "apt's snapshot archive"


@dataclass(frozen=True, kw_only=True)
class PackageAvailability:
    """Which packages of a lock are missing from all places, or differ there.

    `missing` are packages that no place has, as far as places could be read, and `different` those of which a place has
    another file. `doubts` has the reasons that a missing package may be in a place, or is empty.
    """

    missing: list[DebianPackage]
    different: list[DebianPackage]
    doubts: str = ""


class Archives:
    """The places of one run, and their known files and faults. Every method may be called from several threads."""

    def __init__(self, matrix: Matrix, host: Host, runner: AptRunner) -> None:
        self._matrix = matrix
        self.host = host
        self.runner = runner
        self._lock = threading.Lock()
        self._container_apt: Apt | None = None  # the archives that apt in a container of Debian uses
        self._places = {name: Place(name, CONNECTIONS) for name in (HERE, MOVED)}
        self._places |= {name: Place(name, SNAPSHOT_CONNECTIONS) for name in (SNAPSHOT, DEFAULT_SNAPSHOT)}
        self._sizes: dict[str, int | None] = {}  # by address; 0: unknown, None: no such file

    def pools(self, lock: OsLock) -> Iterator[tuple[Place, str]]:
        """The places that may have a package of this lock, in the order in which they are tried.

        With the address of a folder of packages; a place may have several.
        """
        debian = self._matrix.debian[lock.debian]
        places: dict[str, Sequence[AptSource]] = {HERE: self._sources()}
        if debian.archive:
            places[MOVED] = self.host.for_release(debian).apt.sources
        if not debian.snapshot:
            # The snapshot archives that apt has by default: from version 2.7.1 on, which is in Debian 13.
            snapshots = self.host.apt.snapshots if self.host.apt.sources else self._apt_in_container().snapshots
            places[DEFAULT_SNAPSHOT] = [
                replace(source, uri=source.uri.replace(SNAPSHOT_ID, lock.time)) for source in snapshots
            ]
        elif debian.snapshot != NO_SNAPSHOT:
            places[SNAPSHOT] = self.host.with_snapshot(debian.snapshot, lock.time).apt.sources
        for name, sources in places.items():
            # The security archive has another name of its component, observed in Debian 11 to 13.
            pools = (
                f"{source.uri.rstrip('/')}/pool/{'updates/' * (source.kind == 'security')}main" for source in sources
            )
            for pool in dict.fromkeys(pools):
                yield self._places[name], pool

    def packages(self, lock: OsLock, cell: str) -> FileSource[DebianPackage]:
        """The places of the packages of a lock. `cell` is one that needs them, for a hint."""
        session = self._session()
        return FileSource(
            addresses=lambda package: [
                Address(url=f"{pool}/{package.pool_path}", session=session, place=place)
                for place, pool in self.pools(lock)
            ],
            absent_hint=f"Lock the current versions: builder refresh {cell}   Or name a place that has it, `archive` "
            "or `snapshot` in matrix.yaml: docs/matrix.md",
            different_hint="Debian never changes a package without a new version: do not use these archives, or this "
            "lock, until the difference is explained.",
        )

    def _sources(self) -> tuple[AptSource, ...]:
        """The archives that this machine's apt uses. A missing archive comes from apt in a Debian container."""
        sources = self.host.apt.sources
        kinds = {source.kind for source in sources}
        if {"main", "security"} <= kinds:
            return sources
        return (*sources, *(source for source in self._apt_in_container().sources if source.kind not in kinds))

    def _apt_in_container(self) -> Apt:
        with self._lock:
            if self._container_apt is None:
                self._container_apt = Apt()
                try:
                    with self.runner.container() as run:
                        self._container_apt = apt_of_debian(run)
                except EngineError as error:
                    self.runner.view.say_once(f"Debian's own addresses are unknown: {error}")
            return self._container_apt

    def _session(self, timeout: tuple[float, float] = TIMEOUT_S, retries: int = 0) -> IndexSession:
        """Requests to archives: with apt's proxy, and the certificates that apt accepts."""
        proxy = self.host.apt.proxy
        bundle = self.host.index.ca_bundle or (str(SYSTEM_BUNDLE) if SYSTEM_BUNDLE.exists() else "")
        settings = IndexSettings(ca_bundle=bundle, proxy=proxy)
        session = IndexSession(settings, timeout=timeout, retries=retries, server="the archive")
        session.trust_env = not proxy  # requests prefers the proxies of the environment, apt its own
        return session

    def locate(self, lock: OsLock, blobs: Path | None) -> PackageAvailability:
        """Looks for all packages of a lock: in the places in their order, with HEAD requests.

        First looks in `blobs`, the folder of the store's blobs, if there is one.
        """

        def is_stored(package: DebianPackage) -> bool:
            blob = blobs / package.sha256 if blobs else None
            return blob is not None and blob.exists() and blob.stat().st_size == package.size

        packages = [package for package in lock.packages if not is_stored(package)]
        session = self._session(LOOK_UP_TIMEOUT_S, LOOK_UP_RETRIES)
        pools = list(self.pools(lock)) if packages else []  # may start a container
        with thread_pool(CONNECTIONS, "look-up") as pool:
            results = list(pool.map(lambda package: self._look_up(package, pools, session), packages))
        missing = [package for package, result in zip(packages, results, strict=True) if not result.is_present]
        different = [package for package, result in zip(packages, results, strict=True) if result.is_different]
        has_none = len(missing) == len(lock.packages) and not different
        moved = _MOVED if has_none else ""
        faults = {place.name: place.fault or moved for result in results for place in result.without}
        reasons = [f"{name}: {fault}" for name, fault in faults.items() if fault and name != DEFAULT_SNAPSHOT]
        return PackageAvailability(missing=missing, different=different, doubts="; ".join(reasons) if missing else "")

    def _look_up(self, package: DebianPackage, pools: Sequence[tuple[Place, str]], session: IndexSession) -> _LookUp:
        """Looks for a package until a place has it. Requests each address once in a run."""
        without, is_different = [], False
        for place, pool in pools:
            address = f"{pool}/{package.pool_path}"
            try:
                with place.request():
                    if address not in self._sizes:
                        self._sizes[address] = _size(session, place, address)
            except LostError:
                without.append(place)
                continue
            size = self._sizes[address]
            if size in (0, package.size):
                return _LookUp(is_present=True, is_different=is_different, without=without)
            is_different |= size is not None
            without.append(place)
        return _LookUp(is_present=False, is_different=is_different, without=without)


@dataclass(frozen=True, kw_only=True)
class _LookUp:
    """`without` are the places that lack a package, or that failed; with `is_different`, one has another file."""

    is_present: bool
    is_different: bool
    without: list[Place]


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
