"""Downloads locked files: several at once, resumed after interruptions, size and hash checked.

A `FileSource` finds the addresses of files: here, those of wheels. No version is chosen here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import requests
import urllib3
from packaging.utils import canonicalize_name

from builder.common.errors import CHOOSE_AGAIN, BuilderWarning, FetchError, store_error
from builder.common.http import PIECE, TRANSIENT, Download, failure_of, failure_sentence, read_pieces
from builder.common.tasks import Retries, RetryPolicy, thread_pool
from builder.index.releases import Index
from builder.index.session import DOCTOR, IndexSession
from builder.index.settings import origin_of
from builder.index.wheels import LockedWheel

CONNECTIONS = 4  # downloads at once
LARGEST_UNKNOWN = 2_000_000_000  # bytes of a file whose size is not locked
LONGEST_REASON = 200  # characters of the reason for which a file is yanked
LOCK_S = 0.2  # between two attempts to lock a file that another process downloads
_KEPT = "The part that was downloaded is kept: run again."
_DIFFERENT_HINT = "Do not use this index until the difference is explained."


class LockedFile(Protocol):
    """A file as a lock has it: its name, its size in bytes (0: unknown) and its SHA-256."""

    @property
    def file(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> str: ...


_File = TypeVar("_File", bound=LockedFile)


class AbsentError(FetchError):
    """The server has no such file, or does not send all of it."""


class LostError(FetchError):
    """Several attempts failed: other requests to this server would fail too."""


class _RetryError(Exception):
    """A fault that the next attempt may not have."""


class Place:
    """A place that may have files. Allows `connections` requests at once, and none after a LostError."""

    def __init__(self, name: str = "", connections: int = CONNECTIONS) -> None:
        self.name = name
        self.fault = ""  # the reason that it is not used any more
        self._slots = threading.Semaphore(connections)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Waits for a free slot; make the request in the block.

        A LostError of the block disables the place: later calls raise LostError at once.
        """
        with self._slots:
            if self.fault:  # perhaps since this thread began to wait
                raise LostError(self.fault)
            try:
                yield
            except LostError as error:
                self.fault = str(error)
                raise


@dataclass(frozen=True, kw_only=True)
class Address:
    """An address of a file, the session that requests it, and its place."""

    url: str  # a path, if the index of the session is a folder
    session: IndexSession
    place: Place = field(default_factory=Place)


@dataclass(frozen=True, kw_only=True)
class FileSource(Generic[_File]):
    """Where locked files can be downloaded: their addresses, in the order in which they are tried, and two hints.

    One is for a missing file, one for a file that is not as locked. `addresses` raises FetchError.
    """

    addresses: Callable[[_File], Iterable[Address]]
    absent_hint: str
    different_hint: str = _DIFFERENT_HINT


class Fetcher(Generic[_File]):
    """Downloads locked files to `folder`, named by their SHA-256. Several processes may share `folder` and `parts`.

    `parts` holds incomplete files; without it, `folder` does. `progress` is called with numbers of bytes. A download
    ends soon after `stopped` is set.
    """

    policy = RetryPolicy(connect_s=10, read_s=30, retries=4, first_delay_s=1)

    def __init__(
        self,
        source: FileSource[_File],
        folder: Path,
        parts: Path | None = None,
        *,
        progress: Callable[[int], None] = lambda _: None,
        stopped: threading.Event | None = None,
    ) -> None:
        self._source, self._folder, self._parts = source, folder, parts or folder
        self._progress = progress
        self._stopped = stopped or threading.Event()

    def path(self, locked: _File) -> Path:
        """The path of a downloaded file."""
        return self._folder / f"{locked.sha256}{'.whl' if locked.file.endswith('.whl') else ''}"

    def drop(self, locked: _File) -> None:
        """Removes a file that is no longer needed."""
        self.path(locked).unlink(missing_ok=True)

    def fetch(self, locked: _File) -> Path:
        """The path of a file, whose size and SHA-256 were checked. Raises FetchError."""
        path, part_path = self.path(locked), self._parts / f"{locked.sha256}.part"
        try:
            while True:
                with part_path.open("ab+") as file:
                    # Another process may be downloading this file: wait for its lock, and check `stopped` meanwhile.
                    while True:
                        try:
                            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            break
                        except BlockingIOError:
                            self._stopped.wait(LOCK_S)
                            self._check_stopped(locked)
                    try:  # the file may have been renamed or removed since it was opened
                        is_named = os.path.samestat(os.fstat(file.fileno()), part_path.stat())
                    except FileNotFoundError:
                        is_named = False
                    if (size := _checked_size(path, locked.sha256)) is not None:
                        if is_named:
                            part_path.unlink()
                        if locked.size and size != locked.size:
                            raise FetchError(
                                f"{locked.file}: size is {size} bytes, but the lock has {locked.size}",
                                hint=f"The lock was edited. {self._source.absent_hint}",
                            )
                        self._progress(size)
                        return path
                    if is_named:
                        self._download(locked, file)
                        part_path.replace(path)
                        return path
                    # The open file has no name any more: the other process has downloaded the file, and removed it
                    # again. Try again with a new file.
        except OSError as error:
            raise store_error(error, self._parts.parent) from error

    def fetch_all(self, files: Iterable[_File], connections: int) -> dict[str, Path]:
        """The paths of files, by SHA-256; the largest are downloaded first. Raises FetchError, DiskError."""
        ordered = sorted(files, key=lambda locked: -locked.size)
        with thread_pool(connections, "downloads") as pool:
            return dict(zip((locked.sha256 for locked in ordered), pool.map(self.fetch, ordered), strict=True))

    def stop(self) -> None:
        """Ends all downloads soon and keeps the incomplete files."""
        self._stopped.set()

    def _download(self, locked: _File, file: BufferedRandom) -> None:
        """Downloads a file from the first address that has it. Raises FetchError."""
        failures: dict[str, FetchError] = {}
        for address in self._source.addresses(locked):
            try:
                with address.place.request():
                    self._try_address(locked, file, address)
                return
            except (AbsentError, LostError) as error:
                failures[address.place.name] = error
        if failure := failures.get(""):  # an index: the only place that may have a wheel
            raise FetchError(f"{locked.file}: {failure}", hint=failure.hint or self._source.absent_hint) from failure
        lines = [f"  {name}: {reason}" for name, reason in failures.items()] or ["  no place that may have it is known"]
        raise FetchError("\n".join([f"{locked.file} was not found", *lines]), hint=self._source.absent_hint)

    def _try_address(self, locked: _File, file: BufferedRandom, address: Address) -> None:
        """Tries until the file is complete. Raises AbsentError, LostError, or FetchError for another file."""
        part, retries, session = Download.resumed(file, self._progress), Retries(self.policy), address.session
        while True:
            try:
                self._attempt(locked, part, address)
                return
            except (_RetryError, requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError) as error:
                # Fewer bytes are no progress: a server that sends single bytes would be tried for years.
                delay = retries.delay(part.size // PIECE)
                reason = str(error) if isinstance(error, _RetryError) else failure_sentence(error, session.server)
                if isinstance(error, requests.HTTPError) and error.response.status_code not in TRANSIENT:
                    raise AbsentError(reason, hint=session.hint(error, self._source.absent_hint)) from error
                is_final = failure_of(error).fault.is_final
                if delay is None or is_final:
                    kind = AbsentError if isinstance(error, _RetryError) else LostError
                    otherwise = DOCTOR if is_final else f"Several attempts failed. {_KEPT}"
                    raise kind(reason, hint=session.hint(error, otherwise)) from error
                self._stopped.wait(delay)
                self._check_stopped(locked)

    def _check_stopped(self, locked: _File) -> None:
        if self._stopped.is_set():
            raise FetchError(f"{locked.file}: the download was stopped", hint=_KEPT)

    def _attempt(self, locked: _File, part: Download, address: Address) -> None:
        """Resumes an earlier attempt, or starts. Discards a part if the complete file does not match its SHA-256."""
        if locked.size and part.size > locked.size:
            part.clear()
        try:
            if not locked.size or part.size < locked.size:  # an unknown size is 0
                self._receive(locked, part, address)
            part.report(part.size)
            if part.size < locked.size:
                raise _RetryError(f"incomplete: {part.size} of {locked.size} bytes")
            sha256 = part.sha256
            limit, basis = (locked.size, "in the lock") if locked.size else (LARGEST_UNKNOWN, "that are allowed")
            if part.size > limit:
                fault = f"{address.session.server} serves more than the {limit} bytes {basis}"
            elif sha256 != locked.sha256:
                fault = f"SHA-256 mismatch: {sha256[:12]}... was downloaded, {locked.sha256[:12]}... is locked"
            else:
                return
            is_resumed = part.is_resumed
            part.clear()
            if is_resumed:  # the bytes from before may be wrong
                raise _RetryError(fault)
            raise FetchError(
                f"{locked.file}: {fault}", hint=f"The download was discarded. {self._source.different_hint}"
            )
        except Exception:
            part.report(0)
            raise

    def _receive(self, locked: _File, part: Download, address: Address) -> None:
        """Requests the missing bytes; writes at most one piece more than the file has."""
        session, limit = address.session, locked.size or LARGEST_UNKNOWN
        if session.settings.folder:
            try:
                with Path(address.url).open("rb") as content:
                    part.receive(requests.codes.ok, iter(lambda: content.read(PIECE), b""), limit)
            except OSError as error:
                raise FetchError(f"{locked.file}: cannot be read from {session.server}: {error.strerror}") from error
            return
        if not origin_of(address.url).startswith(("https://", "http://")):
            raise FetchError(
                f"{locked.file}: {session.server} lists an unsupported address",
                hint=f"Only https and http work. {DOCTOR}",
            )
        with session.get(address.url, headers=part.headers, stream=True, timeout=self.policy.timeouts) as response:
            if response.status_code == requests.codes.range_not_satisfiable:
                part.clear()
                raise _RetryError(f"{session.server} has fewer bytes than were already downloaded")
            response.raise_for_status()
            part.receive(response.status_code, self._pieces(locked, response), limit)

    def _pieces(self, locked: _File, response: requests.Response) -> Iterator[bytes]:
        for piece in read_pieces(response):
            self._check_stopped(locked)
            yield piece


def wheels_of_index(catalogue: Index) -> FileSource[LockedWheel]:
    """The wheels that indexes list. Warns of a yanked wheel."""
    return FileSource(
        addresses=lambda locked: [_wheel_address(catalogue, locked)], absent_hint=f"{DOCTOR} {CHOOSE_AGAIN}"
    )


def _wheel_address(catalogue: Index, locked: LockedWheel) -> Address:
    """The address of a wheel. Raises FetchError if its index lists no such file, or another one; UsageError."""
    try:
        session = catalogue.session(locked.index, retries=0)
    except LookupError as error:
        raise FetchError(
            f"{locked.file}: matrix.yaml has no index {locked.index!r}, from which it was locked",
            hint="Add it under indexes:, or lock again: builder lock && builder render",
        ) from error
    files = {file.filename: file for file in catalogue.files(canonicalize_name(locked.name), locked.index)}
    if (file := files.get(locked.file)) is None:
        raise FetchError(
            f"{locked.file}: not listed by {session.server}",
            hint="The file was withdrawn, or the locks were made with another index. " + CHOOSE_AGAIN,
        )
    if (sha256 := file.digests.get("sha256")) and sha256 != locked.sha256:
        raise FetchError(
            f"{locked.file}: SHA-256 mismatch: {sha256[:12]}... is listed by {session.server}, "
            f"{locked.sha256[:12]}... is locked",
            hint=f"The file was replaced, or the locks were made with another index. {_DIFFERENT_HINT}",
        )
    if file.is_yanked:  # installers take a yanked file if the version is pinned, as it is here
        reason = "".join(filter(str.isprintable, file.yanked_reason or ""))[:LONGEST_REASON]
        message = f"{locked.file} is yanked on {session.server}{f': {reason}' if reason else ', without a reason'}"
        warnings.warn(message, BuilderWarning, stacklevel=2)
    return Address(url=file.url, session=session)


def _checked_size(path: Path, sha256: str) -> int | None:
    """The size of a downloaded file; None if it does not exist. Removes a damaged file (after a power failure)."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
            return file.tell()
        path.unlink(missing_ok=True)
    return None
