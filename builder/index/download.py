"""Downloads locked files: several at once, resumed after interruptions, size and hash checked.

Wheels come from the index, which is used only to find a file (simple repository API, PEP 503 and PEP 691), never to
choose a version. For Debian packages, see `builder.debian.archives`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BufferedRandom
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import requests
import urllib3
from packaging.utils import canonicalize_name

from builder.common.errors import CHOOSE_AGAIN, BuilderWarning, FetchError, store_error
from builder.common.http import PIECE, TRANSIENT, Download, failure_of, failure_sentence, read_pieces
from builder.common.tasks import Retries, RetryPolicy
from builder.index.releases import Index
from builder.index.session import DOCTOR, IndexSession
from builder.index.settings import IndexSettings, origin_of
from builder.index.wheels import LockedWheel

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

CONNECTIONS = 4  # downloads at once
LARGEST_UNKNOWN = 2_000_000_000  # bytes of a file whose size is not locked
LONGEST_REASON = 200  # characters of the reason for which a file is yanked
LOCK_S = 0.2  # between two attempts to lock a wheel that another process downloads
_KEPT = "The part that was downloaded is kept: run again."
_IF_DIFFERENT = "Do not use this index until the difference is explained."


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


class FileFetcher(ABC, Generic[_File]):
    """Downloads locked files to `folder`, named by their SHA-256. Several processes may share `folder` and `parts`.

    A subclass finds the address of a file, and may have several sessions instead of `session`. `parts` holds incomplete
    files. `progress` is called with numbers of bytes. A download ends soon after `stopped` is set.
    """

    hint_if_absent = DOCTOR
    hint_if_different = _IF_DIFFERENT
    server = ""  # in messages; empty for the label of the session
    policy = RetryPolicy(connect_s=10, read_s=30, retries=4, first_delay_s=1)

    def __init__(
        self,
        folder: Path,
        parts: Path,
        session: IndexSession | None,
        *,
        progress: Callable[[int], None],
        stopped: threading.Event | None = None,
    ) -> None:
        self._folder, self._parts = folder, parts
        self._only_session = session
        self._progress = progress
        self._lock = threading.Lock()
        self._stopped = stopped or threading.Event()

    def path(self, locked: _File) -> Path:
        """The path of a downloaded file."""
        return self._folder / locked.sha256

    def _session(self, locked: _File) -> IndexSession:
        """The session that downloads a file."""
        assert self._only_session
        return self._only_session

    def _server(self, locked: _File) -> str:
        return self.server or self._session(locked).settings.label

    @abstractmethod
    def _get(self, locked: _File, file: BufferedRandom) -> None:
        """Calls `_download` with an address of the file, or with several. Raises FetchError."""

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
                                hint=f"The lock was edited. {self.hint_if_absent}",
                            )
                        self._progress(size)
                        return path
                    if is_named:
                        self._get(locked, file)
                        part_path.replace(path)
                        return path
                    # The open file has no name any more: the other process has downloaded the file, and removed it
                    # again. Try again with a new file.
        except OSError as error:
            raise store_error(error, self._parts.parent) from error

    def stop(self) -> None:
        """Ends all downloads soon and keeps the incomplete files."""
        self._stopped.set()

    def _download(self, locked: _File, file: BufferedRandom, address: str | Callable[[], str]) -> None:
        """Tries until the file is complete; a function for the address may make requests too.

        Raises AbsentError, LostError, or FetchError for another file.
        """
        part, retries = Download.resumed(file, self._progress), Retries(self.policy)
        while True:
            try:
                self._attempt(locked, part, address if isinstance(address, str) else address())
                return
            except (_RetryError, requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError) as error:
                # Fewer bytes are no progress: a server that sends single bytes would be tried for years.
                delay = retries.delay(part.size // PIECE)
                reason = str(error) if isinstance(error, _RetryError) else failure_sentence(error, self._server(locked))
                if isinstance(error, requests.HTTPError) and error.response.status_code not in TRANSIENT:
                    hint = self._session(locked).hint(error, self.hint_if_absent)
                    raise AbsentError(f"{locked.file}: {reason}", hint=hint) from error
                is_final = failure_of(error).fault.is_final
                if delay is None or is_final:
                    kind = AbsentError if isinstance(error, _RetryError) else LostError
                    otherwise = DOCTOR if is_final else f"Several attempts failed. {_KEPT}"
                    hint = self._session(locked).hint(error, otherwise)
                    raise kind(f"{locked.file}: {reason}", hint=hint) from error
                self._stopped.wait(delay)
                self._check_stopped(locked)

    def _check_stopped(self, locked: _File) -> None:
        if self._stopped.is_set():
            raise FetchError(f"{locked.file}: the download was stopped", hint=_KEPT)

    def _attempt(self, locked: _File, part: Download, url: str) -> None:
        """Resumes an earlier attempt, or starts. Discards a part if the complete file does not match its SHA-256."""
        if locked.size and part.size > locked.size:
            part.clear()
        try:
            if not locked.size or part.size < locked.size:  # an unknown size is 0
                self._receive(locked, url, part)
            part.report(part.size)
            if part.size < locked.size:
                raise _RetryError(f"incomplete: {part.size} of {locked.size} bytes")
            sha256 = part.sha256
            limit, basis = (locked.size, "in the lock") if locked.size else (LARGEST_UNKNOWN, "that are allowed")
            if part.size > limit:
                fault = f"{self._server(locked)} serves more than the {limit} bytes {basis}"
            elif sha256 != locked.sha256:
                fault = f"SHA-256 mismatch: {sha256[:12]}... was downloaded, {locked.sha256[:12]}... is locked"
            else:
                return
            is_resumed = part.is_resumed
            part.clear()
            if is_resumed:  # the bytes from before may be wrong
                raise _RetryError(fault)
            raise FetchError(f"{locked.file}: {fault}", hint=f"The download was discarded. {self.hint_if_different}")
        except Exception:
            part.report(0)
            raise

    def _receive(self, locked: _File, url: str, part: Download) -> None:
        """Requests the missing bytes; writes at most one piece more than the file has."""
        if not origin_of(url).startswith(("https://", "http://")):
            raise FetchError(
                f"{locked.file}: {self._server(locked)} lists an unsupported address",
                hint=f"Only https and http work. {DOCTOR}",
            )
        with self._session(locked).get(url, headers=part.headers, stream=True) as response:
            if response.status_code == requests.codes.range_not_satisfiable:
                part.clear()
                raise _RetryError(f"{self._server(locked)} has fewer bytes than were already downloaded")
            response.raise_for_status()
            part.receive(response.status_code, self._pieces(locked, response), locked.size or LARGEST_UNKNOWN)

    def _pieces(self, locked: _File, response: requests.Response) -> Iterator[bytes]:
        for piece in read_pieces(response):
            self._check_stopped(locked)
            yield piece


class Fetcher(FileFetcher[LockedWheel]):
    """Downloads wheels that an index lists, or copies wheels from a folder, into one folder.

    Warns of a yanked wheel. `catalogue` may have read the pages of the default index.
    """

    hint_if_absent = f"{DOCTOR} {CHOOSE_AGAIN}"

    def __init__(
        self,
        settings: IndexSettings,
        folder: Path,
        *,
        progress: Callable[[int], None] = lambda _: None,
        catalogue: Index | None = None,
    ) -> None:
        super().__init__(folder, folder, None, progress=progress)
        self._catalogue = catalogue
        self._settings = settings
        self._sessions: dict[str, IndexSession] = {}
        self._pages: dict[tuple[str, str], Mapping[str, DistributionPackage]] = {}
        self._page_locks: dict[tuple[str, str], threading.Lock] = {}

    def path(self, locked: LockedWheel) -> Path:
        return self._folder / f"{locked.sha256}.whl"

    def drop(self, locked: LockedWheel) -> None:
        """Removes a file that is no longer needed."""
        self.path(locked).unlink(missing_ok=True)

    def _session(self, locked: LockedWheel) -> IndexSession:
        """Requests to the index of a file, and to no other one. Raises FetchError, UsageError."""
        with self._lock:
            if locked.index not in self._sessions:
                try:
                    settings = self._settings.of(locked.index)
                except LookupError as error:
                    raise FetchError(
                        f"{locked.file}: matrix.yaml has no index {locked.index!r}, from which it was locked",
                        hint="Add it under indexes:, or lock again: builder lock && builder render",
                    ) from error
                self._sessions[locked.index] = IndexSession(settings, timeout=self.policy.timeouts)
            return self._sessions[locked.index]

    def _get(self, locked: LockedWheel, file: BufferedRandom) -> None:
        self._download(locked, file, lambda: self._find(locked))

    def _receive(self, locked: LockedWheel, url: str, part: Download) -> None:
        """As in the base class; the address of a wheel in a folder is a path."""
        if not self._session(locked).settings.folder:
            super()._receive(locked, url, part)
            return
        try:
            with Path(url).open("rb") as content:
                part.receive(requests.codes.ok, iter(lambda: content.read(PIECE), b""), locked.size or LARGEST_UNKNOWN)
        except OSError as error:
            server = self._server(locked)
            raise FetchError(f"{locked.file}: cannot be read from {server}: {error.strerror}") from error

    def _find(self, locked: LockedWheel) -> str:
        """The address of a file. Raises FetchError if the index lists no such file, or another one."""
        session, project = self._session(locked), canonicalize_name(locked.name)
        page, label = (locked.index, project), session.settings.label
        with self._lock:
            lock = self._page_locks.setdefault(page, threading.Lock())
        with lock:
            if page not in self._pages:
                files = (
                    session.files(project) if locked.index or not self._catalogue else self._catalogue.files(project)
                )
                self._pages[page] = {file.filename: file for file in files}
        if (file := self._pages[page].get(locked.file)) is None:
            raise FetchError(
                f"{locked.file}: not listed by {label}",
                hint="The file was withdrawn, or the locks were made with another index. " + CHOOSE_AGAIN,
            )
        if (sha256 := file.digests.get("sha256")) and sha256 != locked.sha256:
            raise FetchError(
                f"{locked.file}: SHA-256 mismatch: {sha256[:12]}... is listed by {label}, "
                f"{locked.sha256[:12]}... is locked",
                hint=f"The file was replaced, or the locks were made with another index. {_IF_DIFFERENT}",
            )
        if file.is_yanked:  # installers take a yanked file if the version is pinned, as it is here
            reason = "".join(filter(str.isprintable, file.yanked_reason or ""))[:LONGEST_REASON]
            message = f"{locked.file} is yanked on {label}{f': {reason}' if reason else ', without a reason'}"
            warnings.warn(message, BuilderWarning, stacklevel=2)
        return file.url


def _checked_size(path: Path, sha256: str) -> int | None:
    """The size of a downloaded file; None if it does not exist. Removes a damaged file (after a power failure)."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
            return file.tell()
        path.unlink(missing_ok=True)
    return None
