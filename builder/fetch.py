"""Downloads locked wheels from the machine's index: several at once, resumed when cut off, hash and size checked.

An index is asked where a file is (simple repository API, PEP 503 and PEP 691), never which versions exist.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import requests
from packaging.utils import canonicalize_name
from requests.adapters import HTTPAdapter

from builder.errors import FetchError
from builder.hide import Hider
from builder.index import IndexSettings
from builder.lock import Wheel

CHUNK = 1 << 20
CONNECTIONS = 4
_RETRIED = (408, 425, 429, 500, 502, 503, 504)


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
        hide: Callable[[str], str],
        got: Callable[[int], None] = lambda _: None,
        patience: Patience = Patience(),
    ) -> None:
        # Not at the top: it takes 0.1 s, which every command would pay.
        from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple  # noqa: PLC0415

        self._index = settings.url or PYPI_SIMPLE_ENDPOINT
        self._folder = folder
        self._hide = hide
        self._got = got
        self._patience = patience
        self._pages: dict[str, Mapping[str, _File]] = {}
        self._page_locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._session = _session(settings, self._index)
        self._simple = PyPISimple(self._index, session=self._session)

    def fetch(self, wheel: Wheel) -> Path:
        """The wheel's file, its size and SHA-256 checked. Raises FetchError naming it."""
        path = self.path(wheel)
        with (self._folder / f"{wheel.sha256}.part").open("ab+") as part:
            fcntl.flock(part, fcntl.LOCK_EX)  # another process may be fetching it: then it is there when we go on
            if path.exists():
                self._got(wheel.size)
                return path
            self._try(wheel, part)
            Path(part.name).replace(path)
        return path

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
                        f"{wheel.file}: {self._hide(Hider.for_urls([self._index])(_said(error)))}",
                        hint="The index did not answer as it should, several times. What came is kept: run again.",
                    ) from error
                time.sleep(self._patience.pause * 2**attempt * random.uniform(0.5, 1))  # noqa: S311  no secret

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
            with self._get(file.url, headers) as answer:
                if answer.status_code == requests.codes.range_not_satisfiable:
                    _restart(part)
                    raise _BrokenError("the index has fewer bytes of it than we already have")
                if start and answer.status_code != requests.codes.partial_content:
                    start, hashed, was_resumed = _restart(part), hashlib.sha256(), False
                self._got(start)
                come = self._receive(answer, part, hashed, start, wheel)
        else:
            come = start
            self._got(start)
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
        self, answer: requests.Response, part: BinaryIO, hashed: hashlib._Hash, start: int, wheel: Wheel
    ) -> int:
        come = start
        try:
            for chunk in answer.iter_content(CHUNK):
                part.write(chunk)
                hashed.update(chunk)
                come += len(chunk)
                self._got(len(chunk))
                if come > (wheel.size or math.inf):
                    break
        except requests.RequestException:
            part.flush()
            self._got(-come)
            raise
        part.flush()
        if come > (wheel.size or math.inf):
            _restart(part)
            self._got(-come)
            raise FetchError(
                f"{wheel.file}: the index serves more than the {wheel.size} bytes that the lock says",
                hint="Nothing of it was used. Do not use this index until that is explained.",
            )
        return come

    def _find(self, wheel: Wheel) -> _File:
        project = canonicalize_name(wheel.name)
        with self._lock:
            lock = self._page_locks.setdefault(project, threading.Lock())
        with lock:
            if project not in self._pages:
                self._pages[project] = self._page(project)
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

    def _page(self, project: str) -> Mapping[str, _File]:
        from pypi_simple import NoSuchProjectError, UnsupportedContentTypeError, UnsupportedRepoVersionError  # noqa: PLC0415

        try:
            page = self._simple.get_project_page(project, timeout=(self._patience.connect, self._patience.silence))
        except NoSuchProjectError:
            return {}
        except requests.HTTPError as error:
            raise self._refused(project, error.response) from error
        except (UnsupportedContentTypeError, UnsupportedRepoVersionError, ValueError, KeyError, TypeError) as error:
            raise _BrokenError(f"the index's page of {project} cannot be read: {error}") from error
        return {one.filename: _File(url=one.url, sha256=one.digests.get("sha256", "")) for one in page.packages}

    def _get(self, url: str, headers: Mapping[str, str]) -> requests.Response:
        if urlsplit(url).scheme not in ("https", "http"):
            raise FetchError(f"the index names an address that cannot be fetched: {self._hide(url)}")
        answer = self._session.get(
            url, headers=dict(headers), stream=True, timeout=(self._patience.connect, self._patience.silence)
        )
        status = answer.status_code
        if status < 400 or status == requests.codes.range_not_satisfiable:
            return answer
        answer.close()
        raise self._refused(unquote(urlsplit(url).path.rsplit("/", 1)[-1]), answer)

    def _refused(self, name: str, answer: requests.Response) -> Exception:
        told = f"the index answers {answer.status_code} {answer.reason or ''}".rstrip()
        if answer.status_code in _RETRIED:
            return _BrokenError(told)
        return FetchError(
            f"{name}: {told}", hint="`builder doctor` shows which index is used; `builder lock` resolves anew."
        )


def _restart(part: BinaryIO) -> int:
    part.seek(0)
    part.truncate()
    return 0


def _said(error: Exception) -> str:
    if isinstance(error, requests.exceptions.ReadTimeout):
        return "the index is silent"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off"
    return str(error)


def _session(settings: IndexSettings, index: str) -> requests.Session:
    session = requests.Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
    parts = urlsplit(index)
    if {parts.hostname, parts.netloc.rpartition("@")[2]} & set(settings.trusted_host.split()):
        session.verify = False
    elif settings.ca_bundle:
        session.verify = settings.ca_bundle
    if settings.proxy:
        session.proxies = {"http": settings.proxy, "https": settings.proxy}
    return session
