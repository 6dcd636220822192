"""Downloads locked wheels from the machine's index: several at once, resumed when cut off, hash and size checked.

An index is asked where a file is (simple repository API, PEP 503 and PEP 691), never which versions exist.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import random
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import responses
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

import requests
from packaging.utils import canonicalize_name
from requests.adapters import HTTPAdapter
from urllib3.exceptions import InsecureRequestWarning

from builder.errors import FetchError
from builder.index import IndexSettings
from builder.lock import Wheel
from builder.store import of_store

CHUNK = 1 << 20
PIECE = 1 << 18  # as much as is lost when a connection breaks
CONNECTIONS = 4
RETRIED = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for an index, and how often to ask again. Times in seconds."""

    attempts: int = 5
    connect: float = 10
    silence: float = 30
    pause: float = 0.5


@dataclass(frozen=True, kw_only=True)
class _File:
    url: str
    sha256: str


class _BrokenError(Exception):
    """Something that may be better at the next attempt."""


class Fetcher:
    """Fetches into one folder, which several processes may share. `got` is told of bytes as they come."""

    def __init__(
        self,
        settings: IndexSettings,
        folder: Path,
        *,
        got: Callable[[int], None] = lambda _: None,
        patience: Patience = Patience(),
    ) -> None:
        # Not at the top: it takes 0.1 s, which every command would pay.
        from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple  # noqa: PLC0415

        self._index = settings.url or PYPI_SIMPLE_ENDPOINT
        self._folder = folder
        self._got = got
        self._patience = patience
        self._pages: dict[str, Mapping[str, _File]] = {}
        self._page_locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._session = Session(settings)
        login = urlsplit(self._index)
        self._origin = origin_of(self._index)
        self._login = (unquote(login.username or ""), unquote(login.password or "")) if login.username else None
        self._simple = PyPISimple(self._index, session=self._session)

    def fetch(self, wheel: Wheel) -> Path:
        """The wheel's file, its size and SHA-256 checked. Raises FetchError naming it."""
        try:
            return self._fetch(wheel)
        except OSError as error:
            raise of_store(error, self._folder.parent) from error

    def _fetch(self, wheel: Wheel) -> Path:
        path, place = self.path(wheel), self._folder / f"{wheel.sha256}.part"
        while True:
            with place.open("ab+") as part:
                fcntl.flock(part, fcntl.LOCK_EX)  # another process may be fetching it: then it is there when we go on
                is_there = _is_at(part, place)
                if (size := _size_of(path, wheel.sha256)) is not None:
                    if is_there:
                        place.unlink()
                    self._got(size)
                    return path
                if not is_there:
                    continue  # the other process has had it, and has dropped it already
                self._try(wheel, part)
                place.replace(path)
                return path

    def stop(self) -> None:
        """Ends all downloads soon; what came is kept."""
        self._stopped.set()

    def path(self, wheel: Wheel) -> Path:
        """Where a wheel is when it was fetched."""
        return self._folder / f"{wheel.sha256}.whl"

    def drop(self, wheel: Wheel) -> None:
        """Removes a wheel that is not needed any more."""
        self.path(wheel).unlink(missing_ok=True)

    def _try(self, wheel: Wheel, part: BinaryIO) -> None:
        attempt = 0
        while True:
            try:
                self._once(wheel, part)
                return
            except (_BrokenError, requests.RequestException, ConnectionError) as error:
                attempt += 1
                if attempt >= self._patience.attempts:
                    raise FetchError(
                        f"{wheel.file}: {words_of(error)}",
                        hint="The index did not answer as it should, several times. What came is kept: run again.",
                    ) from error
                self._stopped.wait(self._patience.pause * 2**attempt * random.uniform(0.5, 1))  # noqa: S311  no secret
                self._go_on(wheel)

    def _go_on(self, wheel: Wheel) -> None:
        if self._stopped.is_set():
            raise FetchError(f"{wheel.file}: the download was stopped", hint="What came is kept: run again.")

    def _once(self, wheel: Wheel, part: BinaryIO) -> None:
        """One attempt, which goes on where an earlier one was cut off."""
        file = self._find(wheel)
        part.seek(0)
        hashed, start = hashlib.sha256(), 0
        while chunk := part.read(CHUNK):
            hashed.update(chunk)
            start += len(chunk)
        wanted = wheel.size or math.inf  # 0: nobody knows
        if start > wanted:
            start = _restart(part)
            hashed = hashlib.sha256()
        was_resumed = start > 0
        if start < wanted:
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
            with self._get(wheel, file.url, headers) as answer:
                if answer.status_code == requests.codes.range_not_satisfiable:
                    _restart(part)
                    raise _BrokenError("the index has fewer bytes of it than we already have")
                if start and answer.status_code != requests.codes.partial_content:
                    start, hashed, was_resumed = _restart(part), hashlib.sha256(), False
                self._got(start)
                come = self._receive(wheel, answer, part, hashed, start, wanted)
        else:
            come = start
            self._got(start)
        if come > wanted:
            _restart(part)
            self._got(-come)
            if was_resumed:  # the answer may not have been the part that was asked for
                raise _BrokenError("has more bytes than the lock says")
            raise FetchError(
                f"{wheel.file}: the index serves more than the {wheel.size} bytes that the lock says",
                hint="Nothing of it was used. Do not use this index until that is explained.",
            )
        if come < wheel.size:  # where the size is not known, the hash tells
            self._got(-come)
            raise _BrokenError(f"was cut off after {come} of {wheel.size} bytes")
        if hashed.hexdigest() != wheel.sha256:
            _restart(part)
            self._got(-come)
            if was_resumed:  # what lay there from before may have been what is wrong
                raise _BrokenError("has another SHA-256 than the lock says")
            raise FetchError(
                f"{wheel.file}: the index serves other bytes than the lock says (SHA-256 {hashed.hexdigest()[:12]}..., "
                f"locked {wheel.sha256[:12]}...)",
                hint="Nothing of it was used. Do not use this index until that is explained.",
            )

    def _receive(
        self,
        wheel: Wheel,
        answer: requests.Response,
        part: BinaryIO,
        hashed: hashlib._Hash,
        start: int,
        wanted: float,
    ) -> int:
        """Bytes in `part` in the end: at most one piece more than are wanted."""
        come = start
        try:
            for chunk in answer.iter_content(PIECE):
                self._go_on(wheel)
                part.write(chunk)
                hashed.update(chunk)
                come += len(chunk)
                self._got(len(chunk))
                if come > wanted:
                    break
        except (requests.RequestException, ConnectionError):
            self._got(-come)
            raise
        finally:
            part.flush()
        return come

    def _find(self, wheel: Wheel) -> _File:
        project = canonicalize_name(wheel.name)
        with self._lock:
            lock = self._page_locks.setdefault(project, threading.Lock())
        with lock:
            if project not in self._pages:
                self._pages[project] = self._page(project, wheel)
        file = self._pages[project].get(wheel.file)
        if file is None:
            raise FetchError(
                f"{wheel.file}: the index does not list it",
                hint="It was withdrawn, or this is another index than the one that was locked against: "
                "`builder lock` resolves anew.",
            )
        if file.sha256 and file.sha256 != wheel.sha256:
            raise FetchError(
                f"{wheel.file}: the index lists another SHA-256 ({file.sha256[:12]}...) than the lock "
                f"({wheel.sha256[:12]}...)",
                hint="A version was replaced, or this is another index. See the diff of `builder lock`.",
            )
        return file

    def _page(self, project: str, wheel: Wheel) -> Mapping[str, _File]:
        from pypi_simple import NoSuchProjectError, UnsupportedContentTypeError, UnsupportedRepoVersionError  # noqa: PLC0415

        try:
            page = self._simple.get_project_page(project, timeout=(self._patience.connect, self._patience.silence))
        except NoSuchProjectError:
            return {}
        except requests.HTTPError as error:
            raise _refused(wheel, error.response) from error
        except (UnsupportedContentTypeError, UnsupportedRepoVersionError, ValueError, KeyError, TypeError) as error:
            raise _BrokenError(f"the index's page of {project} cannot be read") from error
        return {one.filename: _File(url=one.url, sha256=one.digests.get("sha256", "")) for one in page.packages}

    def _get(self, wheel: Wheel, url: str, headers: Mapping[str, str]) -> requests.Response:
        origin = origin_of(url)
        if not origin.startswith(("https://", "http://")):
            raise FetchError(
                f"{wheel.file}: the index names an address for it that cannot be fetched",
                hint="Only https and http are known; `builder doctor` shows which index is used.",
            )
        try:
            answer = self._session.get(
                url,
                headers=dict(headers),
                stream=True,
                timeout=(self._patience.connect, self._patience.silence),
                # Links of a page may leave out the login of the index; nobody else is told it.
                auth=self._login if origin == self._origin else None,
            )
        except requests.RequestException:
            raise
        except ValueError as error:  # a redirect to what is no address
            raise requests.exceptions.InvalidURL from error
        status = answer.status_code
        if status < 400 or status == requests.codes.range_not_satisfiable:
            return answer
        answer.close()
        raise _refused(wheel, answer)


def _refused(wheel: Wheel, answer: requests.Response) -> Exception:
    # Not in the words of the index, which may hold anything.
    told = f"the index answers {answer.status_code} {responses.get(answer.status_code, '')}".rstrip()
    if answer.status_code in RETRIED:
        return _BrokenError(told)
    return FetchError(
        f"{wheel.file}: {told}", hint="`builder doctor` shows which index is used; `builder lock` resolves anew."
    )


def _size_of(path: Path, sha256: str) -> int | None:
    """The size of a wheel that is there. A damaged one (the machine may have lost its power) is removed: then None."""
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                return file.tell()
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return None


def origin_of(url: str) -> str:
    """Scheme, host and port of an address; empty for one that is none."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.hostname}:{parts.port or ''}"
    except ValueError:
        return ""


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file still has the name that it was opened by."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _restart(part: BinaryIO) -> int:
    part.seek(0)
    part.truncate()
    return 0


def words_of(error: Exception) -> str:
    """In words of ours: those of a library have addresses in them, and what is secret in an address."""
    for kind, words in _WORDS.items():
        if isinstance(error, kind):
            return words
    return str(error) if isinstance(error, _BrokenError) else f"the index cannot be asked ({type(error).__name__})"


# The first that fits counts: some are kinds of others.
_WORDS: dict[type[Exception], str] = {
    requests.exceptions.ReadTimeout: "the index is silent",
    requests.exceptions.ConnectTimeout: "the index does not answer",
    requests.exceptions.SSLError: "the certificate of the index is not trusted",
    requests.exceptions.ProxyError: "the proxy to the index does not answer",
    requests.exceptions.ChunkedEncodingError: "the connection broke off",
    requests.exceptions.ConnectionError: "the index cannot be reached, or the connection broke off",
    requests.exceptions.TooManyRedirects: "the index sends from one address to the next",
    ConnectionError: "the connection broke off",
}


class Session(requests.Session):
    """Checks certificates as the machine's settings say, proxies as those or the environment say."""

    def __init__(self, settings: IndexSettings) -> None:
        super().__init__()
        for scheme in ("https://", "http://"):
            self.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
        self.verify = settings.ca_bundle or True
        if settings.proxy:
            self.proxies = {"http": settings.proxy, "https": settings.proxy}
        self._trusted = set(settings.trusted_host.split())

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        """As in requests, where $REQUESTS_CA_BUNDLE would count more than what the session has."""
        parts = urlsplit(str(url))
        if {parts.hostname, parts.netloc.rpartition("@")[2]} & self._trusted:
            warnings.simplefilter("ignore", InsecureRequestWarning)  # which would say the host's name
            return super().merge_environment_settings(url, proxies, stream, False, cert)
        return super().merge_environment_settings(url, proxies, stream, self.verify, cert)
