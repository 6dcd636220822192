"""Logging in to a registry: credentials from Docker's configuration, and tokens.

Source: distribution/distribution docs, "Token Authentication Specification" and "OAuth2 Token Authentication".
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from docker import auth as docker_auth
from docker.errors import DockerException
from docker.utils.config import find_config_file

from builder.common.errors import RegistryError

SHORTEST_S = 60  # the specification: a token is valid for at least this long, and this long by default
CLIENT = "builder"
# Sends a token request (method, URL, headers, form), and returns the body of the response. Raises RegistryError.
Fetch = Callable[[str, str, Mapping[str, str], bytes | None], bytes]

_CHALLENGE = re.compile(
    r"""\s*,?\s*(?:
        (?P<name>[A-Za-z0-9_.~+-]+)\s*=\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[^\s,"]*))
        |(?P<scheme>[A-Za-z0-9_.~+-]+)(?=\s|,|$)
    )""",
    re.VERBOSE | re.ASCII,
)
_TOKEN = re.compile(r"[\x21-\x7e]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A user and a password, or an identity token, which Docker stores instead for some registries."""

    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode("ascii")


def login_hint(registry: str) -> str:
    return f"Run `docker login {registry}` as a user with access."


def credentials(registry: str) -> Credentials | None:
    """The credentials that `docker login` stored, in Docker's configuration or a credential helper; None without.

    Raises RegistryError for a configuration or a helper that cannot be used.
    """
    try:
        config = docker_auth.load_config().resolve_authconfig(registry)
    except (DockerException, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        # The error's text is not shown: it may hold output of the helper.
        kind = type(error.__cause__ or error).__name__
        raise RegistryError(
            f"{registry}: cannot read credentials from Docker's configuration or its credential helper ({kind})",
            hint=f"Correct {find_config_file()!s}, or install the helper that it names.",
        ) from None
    entry = {str(name).lower(): str(value) for name, value in (config or {}).items() if value}
    if identity := entry.get("identitytoken"):
        return Credentials(identity=identity)
    user, password = entry.get("username", ""), entry.get("password", "")
    if user == docker_auth.TOKEN_USERNAME:
        return Credentials(identity=password)
    return Credentials(user=user, password=password) if user else None


def parse_challenges(header: str) -> dict[str, dict[str, str]]:
    """Parameters by scheme of a WWW-Authenticate header (RFC 9110, 11.6.1), names in lower case.

    Has the first of several challenges with one scheme; empty for an invalid header.
    """
    challenges: dict[str, dict[str, str]] = {}
    parameters: dict[str, str] = {}
    position = 0
    while match := _CHALLENGE.match(header, position):
        position = match.end()
        if scheme := match["scheme"]:
            parameters = {}
            challenges.setdefault(scheme.lower(), parameters)
        else:
            value = match["plain"] if match["quoted"] is None else re.sub(r"\\(.)", r"\1", match["quoted"])
            parameters.setdefault(match["name"].lower(), value)
    return challenges


class Login:
    """The Authorization header for each scope of one registry. Threads may share it."""

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._scheme = ""
        self._parameters: Mapping[str, str] = {}
        self._credentials: Credentials | None = None
        self._headers: dict[str, tuple[str, float]] = {}  # by scope: the header and its end (monotonic)
        self._secrets: frozenset[str] = frozenset()

    def header(self, scope: str, fetch: Fetch) -> str:
        """The Authorization header for a scope; empty until the registry requires a login.

        `scope` is a list, separated by spaces.
        """
        with self._lock:
            if not self._scheme:
                return ""
            header, until = self._headers.get(scope, ("", 0.0))
            if not header or time.monotonic() >= until:
                header, until = self._headers[scope] = self._authorize(scope, fetch)
            return header

    def renew(self, scope: str, rejected: str, challenge: str) -> bool:
        """After a 401 for the header `rejected`: makes the next request get a new one.

        Returns True if the registry has required a login of a supported kind.
        """
        challenges = parse_challenges(challenge)
        with self._lock:
            if scope in self._headers and self._headers[scope][0] != rejected:
                return True  # another thread has already renewed it
            # Credential helpers of clouds issue passwords that are valid for some hours only: read them again.
            self._credentials = credentials(self._registry)
            self._headers.pop(scope, None)
            # Bearer first: an identity token is no user and password, which Basic needs.
            if scheme := next((scheme for scheme in ("bearer", "basic") if scheme in challenges), ""):
                self._scheme, self._parameters = scheme, challenges[scheme]
            return bool(self._scheme)

    def hide(self, text: str) -> str:
        """Text from the registry without secrets, which it may repeat."""
        # The longest first: a password may be the start of a token, whose rest would be left.
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def _authorize(self, scope: str, fetch: Fetch) -> tuple[str, float]:
        """A new header, and the time by the monotonic clock until which it is valid. Raises RegistryError."""
        own = self._credentials
        if own is not None:
            self._secrets |= {secret for secret in (own.password, own.identity, own.basic.split()[1]) if secret}
        if self._scheme == "basic":
            if own is None or not own.user:
                raise RegistryError(
                    f"{self._registry}: login required, and no user and password are configured",
                    hint=login_hint(self._registry),
                )
            return own.basic, float("inf")

        realm, service = self._parameters.get("realm", ""), self._parameters.get("service", "")
        fields = [("service", service)] if service else []
        if own and own.identity:
            form = [
                *fields, ("grant_type", "refresh_token"), ("client_id", CLIENT), ("scope", scope),
                ("refresh_token", own.identity),
            ]  # fmt: skip
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            answer = fetch("POST", realm, headers, urlencode(form).encode())
        else:
            # Without a login too: a public registry issues tokens to everyone.
            query = urlencode([*fields, *(("scope", part) for part in scope.split())])
            headers = {"Authorization": own.basic} if own else {}
            answer = fetch("GET", f"{realm}{'&' if '?' in realm else '?'}{query}", headers, None)
        try:
            data = json.loads(answer)
            token = data.get("token") or data.get("access_token")
            valid_s = float(data.get("expires_in") or 0)
        except (ValueError, AttributeError, TypeError):
            token, valid_s = None, 0.0
        # The token becomes part of a header: a line break in it could add another header.
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise RegistryError(
                f"{self._registry}: invalid response from its token service", hint=login_hint(self._registry)
            )
        self._secrets |= {token}
        # Renewed before it expires: the 401 of an expired token would come after the body of an upload was sent.
        return f"Bearer {token}", time.monotonic() + 0.9 * max(valid_s, SHORTEST_S)
