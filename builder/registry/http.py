"""Requests to one registry: logins, redirects, timeouts and retries."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.cookiejar import DefaultCookiePolicy
from math import inf
from typing import TypeVar
from urllib.parse import urljoin

import requests
from urllib3.exceptions import HTTPError

from builder.common.errors import BuilderWarning, NoRegistryError, RegistryError
from builder.common.http import UNCOMPRESSED, read_pieces
from builder.common.tasks import Retries, RetryPolicy
from builder.common.text import counted
from builder.index.settings import origin_of
from builder.registry import failures
from builder.registry.auth import Login, login_hint
from builder.registry.failures import RejectedError, StoppedError, TransientError
from builder.registry.transport import Transport

SMALL = 4 * 1024 * 1024  # bytes of a response; the specification: manifests up to this size have to be accepted
REDIRECTS = 5
DEFAULT_POLICY = RetryPolicy()
Body = bytes | Iterable[bytes] | None
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request. `action` describes it in messages; a status that is not in `expect` is an error.

    `scope` is the access that its token must allow, `read_s` its read timeout; empty and 0 for the connection's own.
    With `stays`, a redirect to another host is not followed: it is the answer.
    """

    action: str
    method: str
    url: str = field(repr=False)  # the address of an upload is a credential
    expect: tuple[int, ...]
    scope: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: Body = field(default=None, repr=False)
    read_s: float = 0
    stays: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A response with an expected status, and its body."""

    request: Request
    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


class _Session(requests.Session):
    """Follows no redirect: requests would read the target even with `allow_redirects=False`."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        return None


class Connection:
    """Sends requests to one repository of a registry. Threads may share it."""

    def __init__(self, url: str, scope: str, transport: Transport, policy: RetryPolicy) -> None:
        """`url` is the address of the repository, `scope` the access to it that tokens are requested for."""
        self.registry = transport.registry  # the name that people use and log in to
        self.url = url
        self._origin = origin_of(url)
        self.scope = scope
        self.policy = policy
        self._stop = threading.Event()
        self._login = Login(self.registry)
        self._transport = transport
        self._session = _Session()
        # Some registries (Harbor) treat clients that send cookies as browsers.
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        adapter = transport.adapter()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, adapter)
        if transport.is_plain:
            self._session.trust_env = False  # proxies lead neither to the loopback nor to a private network

    def stoppable(self, stop: threading.Event) -> Connection:
        """The same connection, which raises StoppedError as soon as `stop` is set."""
        other = copy.copy(self)
        other._stop = stop
        return other

    def retry(self, attempt: Callable[[], _Result], progress: Callable[[], int] = lambda: 0) -> _Result:
        """Calls `attempt` until it raises no TransientError.

        Raises RegistryError after too many failures in a row, which `progress` ends: see `Retries`.
        """
        retries = Retries(self.policy)
        while True:
            try:
                return attempt()
            except TransientError as error:
                delay = retries.delay(progress(), error.wait)
                if error.wait > self.policy.longest_delay_s:
                    message = f"{error}: asks to retry after {error.wait:.0f} s"
                    raise RegistryError(message, hint="Try again then.") from error
                if delay is None:
                    tries = f"tried {retries.failures} times" if retries.failures > 1 else "tried once"
                    # Without a connection, no other request to this registry would succeed either.
                    kind = RegistryError if error.is_connected else NoRegistryError
                    raise kind(f"{error}: {tries}", hint=error.hint) from error
                if retries.failures == 1:  # the rest may take two minutes
                    message = f"{error}: trying again, up to {counted(self.policy.retries, 'time')}"
                    warnings.warn(message, BuilderWarning, stacklevel=2)
                self._stop.wait(delay)
                self.check_stop()

    def send(self, request: Request) -> Answer:
        """Sends a request, again after transient failures."""
        return self.retry(lambda: self.send_once(request))

    def send_once(self, request: Request, *, with_login: bool = True) -> Answer:
        """Sends a request once. Raises TransientError after a failure that may not happen again."""
        with self.open(request, with_login=with_login) as response:
            body = b"".join(self.pieces(request.action, response, SMALL))
            return Answer(request=request, status=response.status_code, headers=response.headers, body=body)

    @contextmanager
    def open(self, request: Request, *, with_login: bool = True) -> Iterator[requests.Response]:
        """A response whose body is not read yet. Raises RegistryError for an unexpected status."""
        with self._authorized(request) if with_login else self._send(request) as response:
            if response.status_code not in request.expect:
                raise failures.error_of_response(self.registry, request.action, response, self._login.hide)
            yield response

    def pieces(self, action: str, response: requests.Response, limit: float = inf) -> Iterator[bytes]:
        """The body as it is, never decompressed. Raises RejectedError after more than `limit` bytes."""
        length = 0
        try:
            for piece in read_pieces(response):
                length += len(piece)
                if length > limit:
                    raise RejectedError(f"{self.registry}: {action}: the response is longer than {limit} bytes")
                yield piece
                self.check_stop()
        except HTTPError as error:
            raise failures.error_of_exception(self.registry, action, error) from None

    def location(self, answer: Answer) -> str:
        """The URL of an answer's Location header; the request's own if it has no such header."""
        url = _joined(answer.request.url, answer.headers.get("Location", ""))
        return self._safe_url(answer.request.action, url)

    def next_page(self, answer: Answer) -> str:
        """The URL of the next page of a list; empty for the last one. Source: RFC 5988."""
        links = requests.utils.parse_header_links(answer.headers.get("Link", ""))
        target = next((link["url"] for link in links if link.get("rel") == "next"), "")
        return self._safe_url(answer.request.action, _joined(answer.request.url, target)) if target else ""

    def check_stop(self) -> None:
        if self._stop.is_set():
            raise StoppedError(f"{self.registry}: stopped")

    def _authorized(self, request: Request) -> requests.Response:
        """The response to a request with the header that the registry requires, if it requires one."""
        # A token may expire at any request: the first 401 means a new token, the second is final.
        scope, rejected = request.scope or self.scope, 0
        while rejected < 2:
            authorization = self._login.header(scope, self._fetch_token)
            response = self._follow(request, authorization)
            if response.status_code != HTTPStatus.UNAUTHORIZED or origin_of(response.url) != self._origin:
                return response
            challenge = response.headers.get("WWW-Authenticate", "")
            response.close()
            # Without a login, the 401 only named the kind of login that is required.
            rejected += not self._login.renew(scope, authorization, challenge) or bool(authorization)
        raise RejectedError(
            f"{self.registry}: {request.action}: answered 401 twice: login not accepted",
            hint=login_hint(self.registry),
            status=HTTPStatus.UNAUTHORIZED,
        )

    def _follow(self, request: Request, authorization: str) -> requests.Response:
        """Follows redirects of reads. Credentials go to the registry itself, never to another host."""
        for _ in range(REDIRECTS):
            response = self._send(request, authorization if origin_of(request.url) == self._origin else "")
            if request.method not in ("GET", "HEAD") or not response.is_redirect:
                return response
            url = _joined(request.url, response.headers["Location"])
            if request.stays and origin_of(url) != self._origin:
                return response
            response.close()
            request = replace(request, url=self._safe_url(request.action, url))
        raise RejectedError(f"{self.registry}: {request.action}: more than {REDIRECTS} redirects")

    def _send(self, request: Request, authorization: str = "") -> requests.Response:
        self.check_stop()
        headers = {**UNCOMPRESSED, "User-Agent": "builder", **request.headers}
        if authorization:
            headers["Authorization"] = authorization
        try:
            return self._session.request(
                request.method,
                request.url,
                headers=headers,
                data=request.body,
                auth=lambda prepared: prepared,  # else requests reads ~/.netrc
                timeout=(self.policy.connect_s, request.read_s or self.policy.read_s),
                verify=self._transport.bundle or True,
                allow_redirects=False,
                stream=True,
            )
        except (requests.RequestException, ValueError) as error:
            raise failures.error_of_exception(self.registry, request.action, error) from None

    def _fetch_token(self, method: str, url: str, headers: Mapping[str, str], form: bytes | None) -> bytes:
        """Sends a token request, whose URL the registry chose; returns the body of the response."""
        action = "requesting a token"
        url = self._safe_url(action, _joined(url, ""))
        request = Request(action=action, method=method, url=url, expect=(200,), headers=headers, body=form)
        return self.retry(lambda: self.send_once(request, with_login=False)).body

    def _safe_url(self, action: str, url: str) -> str:
        """A URL from a registry's response. Raises RejectedError unless it is valid and the transport allows it."""
        if not (origin_of(url) and self._transport.allows(url)):
            raise RejectedError(
                f"{self.registry}: {action}: the response contains a URL that is not https",
                hint="Configure the proxy of the registry to send X-Forwarded-Proto: https, or add the server to "
                "`insecure` in matrix.yaml.",
            )
        return url


def _joined(base: str, target: str) -> str:
    """The address of a target in a response to a request for `base`; empty for an invalid one.

    As requests prepares it: of `https://a\\@b/`, requests connects to a, but urlsplit takes b for the host.
    """
    try:
        return requests.Request("GET", urljoin(base, target)).prepare().url or ""
    except (requests.RequestException, ValueError):
        return ""
