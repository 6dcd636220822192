"""Requests to one registry: where to, for how long, how often, logged in as whom; and failures in words."""

from __future__ import annotations

import copy
import email.utils
import json
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookiejar import DefaultCookiePolicy
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from builder import index
from builder.errors import RegistryError
from builder.host import Host
from builder.registry_auth import Login, login_hint

READ = 1024 * 1024
SMALL = 4 * 1024 * 1024  # the specification: manifests up to this size have to be accepted
REDIRECTS = 5
CONNECTIONS = 16  # kept open; more are made when needed
TRY_LATER = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
NEVER = (HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, HTTPStatus.INSUFFICIENT_STORAGE)
AGAIN = "Run this again: what the registry has by then is not sent twice."
# In words, or as the error number in docker-registry's JSON: ENOSPC, EDQUOT.
_DISK_FULL = re.compile(r'no space left on device|disk quota exceeded|"Err":\s*(?:28|122)\b', re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a registry may be silent, and how often what failed is tried again, ever later."""

    connect_s: float = 20
    read_s: float = 60
    commit_s: float = 180  # at the end of an upload: some registries copy gigabytes before they answer
    retries: int = 5
    first_s: float = 0.5
    longest_s: float = 60

    def delay(self, failures: int, asked: float = 0) -> float:
        """Seconds to wait after so many failures in a row; jitter keeps many builders from coming back at once."""
        grown: float = min(self.first_s * 2 ** (failures - 1), self.longest_s)
        return max(grown * random.uniform(0.5, 1), asked)  # noqa: S311  no secret depends on it


PATIENT = Patience()


class RefusedError(RegistryError):
    """The registry said no, and would again. `code` is the registry's own word for it, if it gave one."""

    def __init__(self, message: str, *, hint: str = "", status: int = 0, code: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code


class TransientError(RegistryError):
    """No answer, or one that is worth another try, after `wait` seconds at the earliest."""

    def __init__(self, message: str, *, hint: str = "", wait: float = 0) -> None:
        super().__init__(message, hint=hint)
        self.wait = wait


class StoppedError(RegistryError):
    """Nothing failed here: whoever asked wants no more of it."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A status that was expected, with its body."""

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


Body = bytes | Iterable[bytes] | None
_Got = TypeVar("_Got")


class _Session(requests.Session):
    """Follows nothing by itself: requests would, even when told not to, read what a redirect leads to."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        return None


class Connection:
    """Sends requests for one registry. Threads may share it."""

    def __init__(self, registry: str, url: str, host: Host, patience: Patience) -> None:
        """`registry` is the name that people use and log in to; `url` is where it is."""
        self.registry = registry
        self._url = url
        try:
            _origin(url)
        except ValueError as error:
            raise RegistryError(f"{registry}: {error}") from error
        self.patience = patience
        self._stop = threading.Event()
        self._login = Login(registry)
        self._verify = host.index.ca_bundle or True
        self._session = _Session()
        # Cookies make some registries (Harbor) take us for a browser.
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self._session.mount(url, HTTPAdapter(pool_maxsize=CONNECTIONS))
        if index.is_loopback(url):
            self._session.trust_env = False  # nobody's proxy leads to this machine's own loopback

    def stoppable(self, stop: threading.Event) -> Connection:
        """The same connection, which gives up as soon as `stop` is set."""
        other = copy.copy(self)
        other._stop = stop
        return other

    def ask(self, what: str, method: str, url: str, **options: Any) -> Answer:
        """As `once`, tried again after what may pass."""
        return self._again(lambda: self.once(what, method, url, **options))

    def once(self, what: str, method: str, url: str, *, limit: int = SMALL, **options: Any) -> Answer:
        """One request; `what` says in messages what it was for. See `opened` for the options."""
        with self.opened(what, method, url, **options) as response:
            body = b"".join(self.pieces(what, response, limit))
            return Answer(status=response.status_code, headers=response.headers, body=body)

    @contextmanager
    def opened(
        self,
        what: str,
        method: str,
        url: str,
        *,
        scope: str,
        expect: tuple[int, ...],
        headers: Mapping[str, str] | None = None,
        body: Body = None,
        silence_s: float = 0,
    ) -> Iterator[requests.Response]:
        """The answer with its body still to be read. A status that is not in `expect` is an error."""
        response = self._logged_in(what, method, url, scope, dict(headers or {}), body, silence_s)
        try:
            if response.status_code not in expect:
                raise self._failure(what, response)
            yield response
        finally:
            response.close()

    def pieces(self, what: str, response: requests.Response, limit: int) -> Iterator[bytes]:
        """The body as it is, never decompressed; more than `limit` bytes are an error."""
        so_far = 0
        while True:
            self._check()
            try:
                piece = response.raw.read(READ, decode_content=False)
            except (HTTPError, OSError) as error:
                raise self._no_answer(what, error) from None
            if not piece:
                return
            so_far += len(piece)
            if so_far > limit:
                raise RefusedError(f"{self.registry}: {what}: the answer is longer than {limit} bytes")
            yield piece

    def pause(self, error: TransientError, failures: int) -> None:
        """Waits before the next try. After too many failures in a row: raises."""
        if error.wait > self.patience.longest_s:
            raise RegistryError(f"{error}: asks to wait for {error.wait:.0f} s", hint="Try again then.") from error
        if failures > self.patience.retries:
            tries = f"tried {failures} times" if failures > 1 else "tried once"
            raise RegistryError(f"{error}: {tries}", hint=error.hint) from error
        self._stop.wait(self.patience.delay(failures, error.wait))
        self._check()

    def located(self, what: str, base: str, answer: Answer) -> str:
        """Where the answer's Location leads; `base` where it names none."""
        return self._safe(what, base, answer.headers.get("Location", ""))

    def _check(self) -> None:
        if self._stop.is_set():
            raise StoppedError(f"{self.registry}: stopped")

    def _logged_in(
        self, what: str, method: str, url: str, scope: str, headers: dict[str, str], body: Body, silence_s: float
    ) -> requests.Response:
        """A token may run out at any request: the first 401 means a new one, the second is final."""
        refused = 0
        while refused < 2:
            sent = self._login.header(scope, self._fetch_token)
            response = self._follow(what, method, url, {**headers, "Authorization": sent}, body, silence_s)
            if response.status_code != HTTPStatus.UNAUTHORIZED or not self._is_ours(response.url):
                return response
            challenge = response.headers.get("WWW-Authenticate", "")
            response.close()
            self._login.renew(scope, sent, challenge)
            # Without a login, a 401 only said which one is wanted.
            refused += bool(sent) or not self._login.is_wanted
        raise RefusedError(
            f"{self.registry}: {what}: answered 401 twice: the login for it is not accepted",
            hint=login_hint(self.registry),
            status=HTTPStatus.UNAUTHORIZED,
        )

    def _follow(
        self, what: str, method: str, url: str, headers: dict[str, str], body: Body, silence_s: float
    ) -> requests.Response:
        """Follows redirects of reads. Credentials go to the registry itself, never to another host."""
        for _ in range(REDIRECTS):
            own = {name: value for name, value in headers.items() if value}
            if not self._is_ours(url):
                own.pop("Authorization", None)
            response = self._send(what, method, url, own, body, silence_s)
            if method not in ("GET", "HEAD") or not response.is_redirect:
                return response
            response.close()
            url = self._safe(what, url, response.headers["Location"])
        raise RefusedError(f"{self.registry}: {what}: more than {REDIRECTS} redirects")

    def _send(
        self, what: str, method: str, url: str, headers: Mapping[str, str], body: Body, silence_s: float
    ) -> requests.Response:
        self._check()
        try:
            return self._session.request(
                method,
                url,
                headers={"Accept-Encoding": "identity", "User-Agent": "builder", **headers},
                data=body,
                auth=lambda request: request,  # else requests would look into ~/.netrc
                timeout=(self.patience.connect_s, silence_s or self.patience.read_s),
                verify=self._verify,
                allow_redirects=False,
                stream=True,
            )
        except (requests.ConnectionError, requests.Timeout) as error:
            raise self._no_answer(what, error) from None
        except (requests.RequestException, ValueError) as error:
            raise RefusedError(f"{self.registry}: {what}: not a request that can be made ({_kind(error)})") from None

    def _fetch_token(self, method: str, url: str, headers: Mapping[str, str], form: bytes | None) -> bytes:
        what = "asking for a token"

        def fetch() -> bytes:
            response = self._send(what, method, self._safe(what, url, ""), headers, form, 0)
            try:
                if response.status_code != HTTPStatus.OK:
                    raise self._failure(what, response)
                return b"".join(self.pieces(what, response, SMALL))
            finally:
                response.close()

        return self._again(fetch)

    def _again(self, call: Callable[[], _Got]) -> _Got:
        failures = 0
        while True:
            try:
                return call()
            except TransientError as error:
                failures += 1
                self.pause(error, failures)

    def _is_ours(self, url: str) -> bool:
        return _origin(url) == _origin(self._url)

    def _safe(self, what: str, base: str, named: str) -> str:
        """An address that a registry named: over TLS, or plainly on loopback if the registry itself is there."""
        try:
            url = urljoin(base, named)
            scheme = _origin(url)[0]
        except ValueError:
            url = scheme = ""
        if scheme != "https" and not (scheme == "http" and index.is_loopback(url) and index.is_loopback(self._url)):
            raise RefusedError(
                f"{self.registry}: {what}: it names an address that is not https",
                hint="A registry behind a proxy must be told that it is reached over https (X-Forwarded-Proto).",
            )
        return url

    def _failure(self, what: str, response: requests.Response) -> RegistryError:
        """An answer that was not expected, in words."""
        body = b""
        with suppress(HTTPError, OSError):  # the status says enough
            body = response.raw.read(READ, decode_content=False) or b""
        status, text = response.status_code, self._login.hide(body.decode("utf-8", "replace"))
        code, said = _said(text)
        message = f"{self.registry}: {what}: answered {_named(status)}{said}"
        if status == HTTPStatus.INSUFFICIENT_STORAGE or (status >= 500 and _DISK_FULL.search(text)):
            message = f"{self.registry}: {what}: the registry's disk is full: answered {_named(status)}{said}"
            return RefusedError(message, hint="Free space on the registry, then run this again.", status=status)
        if status in TRY_LATER or (status >= 500 and status not in NEVER):
            wait = retry_after(response.headers.get("Retry-After", ""), time.time())
            return TransientError(message, hint=AGAIN, wait=wait)
        hint = ""
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            hint = login_hint(self.registry)
        elif status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            hint = "A proxy in front of the registry limits the size of a request: raise the limit."
        elif status == HTTPStatus.NOT_FOUND and code in ("NAME_UNKNOWN", "NAME_INVALID"):
            hint = "Some registries want a repository to be made before the first push."
        return RefusedError(message, hint=hint, status=status, code=code)

    def _no_answer(self, what: str, error: Exception) -> RegistryError:
        """No address in it: one that a registry redirected to may be signed, and so a credential."""
        for cause in _causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                return RefusedError(
                    f"{self.registry}: {what}: its certificate is not accepted ({cause.verify_message})",
                    hint="Name the bundle with the authority that signed it in SSL_CERT_FILE.",
                )
            if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
                return RefusedError(
                    f"{self.registry}: {what}: it does not speak https there",
                    hint="Only a registry on this machine's own loopback may do without.",
                )
        return TransientError(f"{self.registry}: {what}: {_reason(error)}", hint=AGAIN)


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def retry_after(header: str, now: float) -> float:
    """Seconds from a Retry-After header: a number, or a date."""
    if re.fullmatch(r"[0-9]{1,9}", header.strip(), re.ASCII):
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _said(text: str) -> tuple[str, str]:
    """The code of the first error in a registry's answer, and what it says, in brackets, of one line."""
    try:
        listed = [one for one in json.loads(text)["errors"] if isinstance(one, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", ""
    words = []
    for one in listed[:3]:
        parts = (one.get("code"), one.get("message"), one.get("detail"))
        words.append(": ".join(part for part in parts if isinstance(part, str) and part))
    line = "".join(letter if letter.isprintable() else " " for letter in "; ".join(filter(None, words)))
    return (str(listed[0].get("code", "")) if listed else ""), (f" ({line[:300]})" if line else "")


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        named = [one for one in (getattr(error, "reason", None), *error.args) if isinstance(one, BaseException)]
        error = named[-1] if named else error.__cause__ or error.__context__


def _reason(error: Exception) -> str:
    for cause in _causes(error):
        if isinstance(cause, (requests.Timeout, TimeoutError)) or "Timeout" in _kind(cause):
            return "no answer in time"
        if isinstance(cause, OSError) and not isinstance(cause, requests.RequestException) and cause.strerror:
            return cause.strerror.lower()
    return "the connection broke"


def _kind(error: BaseException) -> str:
    return type(error).__name__
