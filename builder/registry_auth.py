"""Who asks a registry: credentials from Docker's configuration, and the tokens that they give.

Source: distribution/distribution docs, "Token Authentication Specification" and "OAuth2 Token Authentication".
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from docker import auth as docker_auth
from docker.errors import DockerException

from builder.errors import RegistryError

SHORTEST_S = 60  # the specification: a token lives for this long at least, also where its life is not told
CLIENT = "builder"
# Makes the token request: method, address, headers, form. What is answered. Raises RegistryError.
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
    """A user and a password, or else an identity token, which Docker keeps for some registries instead."""

    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode("ascii")


@dataclass(frozen=True, kw_only=True)
class Challenge:
    """One way to authenticate that a registry offers; scheme and parameter names in lower case."""

    scheme: str
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Held:
    header: str = field(repr=False)
    until: float


def login_hint(registry: str) -> str:
    return f"Log in with `docker login {registry}`, as a user who may do this."


def credentials(registry: str) -> Credentials | None:
    """What `docker login` stored for a registry, in Docker's configuration or by a credential helper."""
    try:
        with warnings.catch_warnings(action="ignore"):  # docker-py warns of a missing helper, and then raises
            found = docker_auth.load_config().resolve_authconfig(registry)
    except (DockerException, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        # Its text is not shown: it may hold what the helper printed.
        raise RegistryError(
            f"{registry}: Docker's configuration or its credential helper gives no credentials "
            f"({type(error.__cause__ or error).__name__})",
            hint="Check $DOCKER_CONFIG/config.json or ~/.docker/config.json, and the helper that it names.",
        ) from None
    entry = {str(name).lower(): str(value) for name, value in (found or {}).items() if value}
    if identity := entry.get("identitytoken"):
        return Credentials(identity=identity)
    user, password = entry.get("username", ""), entry.get("password", "")
    if user == docker_auth.TOKEN_USERNAME:
        return Credentials(identity=password)
    return Credentials(user=user, password=password) if user else None


def parse_challenges(header: str) -> list[Challenge]:
    """A WWW-Authenticate header, which may hold several challenges (RFC 9110, 11.6.1). Nonsense gives none."""
    found: list[tuple[str, dict[str, str]]] = []
    place = 0
    while match := _CHALLENGE.match(header, place):
        place = match.end()
        if scheme := match["scheme"]:
            found.append((scheme.lower(), {}))
        elif found:
            value = match["plain"] if match["quoted"] is None else re.sub(r"\\(.)", r"\1", match["quoted"])
            found[-1][1].setdefault(match["name"].lower(), value)
    return [Challenge(scheme=scheme, parameters=parameters) for scheme, parameters in found]


class Login:
    """The Authorization header for each scope of one registry. Threads may share it."""

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._challenge: Challenge | None = None
        self._credentials: Credentials | None = None
        self._held: dict[str, _Held] = {}
        self._secrets: frozenset[str] = frozenset()

    @property
    def is_wanted(self) -> bool:
        """Whether the registry has asked for a login that we know how to give."""
        return self._challenge is not None

    def header(self, scope: str, fetch: Fetch) -> str:
        """Empty as long as the registry has asked for nothing. `scope` is a list, separated by spaces."""
        with self._lock:
            if self._challenge is None:
                return ""
            held = self._held.get(scope)
            if held is None or time.monotonic() >= held.until:
                held = self._held[scope] = self._get(self._challenge, scope, fetch)
            return held.header

    def renew(self, scope: str, refused: str, challenge: str) -> None:
        """After a 401 for a request with the header `refused`: the next one gets another."""
        offered = {one.scheme: one for one in reversed(parse_challenges(challenge))}
        with self._lock:
            held = self._held.get(scope)
            if held is not None and held.header != refused:
                return  # another thread has got a new one meanwhile
            # A helper may give passwords that live for some hours only: ask it again.
            self._credentials = credentials(self._registry)
            self._held.pop(scope, None)
            self._challenge = offered.get("bearer") or offered.get("basic") or self._challenge

    def hide(self, text: str) -> str:
        """A registry might repeat what it was sent."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def _get(self, challenge: Challenge, scope: str, fetch: Fetch) -> _Held:
        own = self._credentials
        if own is not None:
            self._secrets |= {one for one in (own.password, own.identity, own.basic.split()[1]) if one}
        if challenge.scheme == "basic":
            if own is None or not own.user:
                raise RegistryError(
                    f"{self._registry}: asks for a user and a password, and there are none for it",
                    hint=login_hint(self._registry),
                )
            return _Held(own.basic, float("inf"))
        token, lives_s = self._token(challenge, scope, own, fetch)
        self._secrets |= {token}
        return _Held(f"Bearer {token}", time.monotonic() + 0.9 * max(lives_s, SHORTEST_S))

    def _token(self, challenge: Challenge, scope: str, own: Credentials | None, fetch: Fetch) -> tuple[str, float]:
        """A new token, and for how many seconds it is good."""
        realm, service = challenge.parameters.get("realm", ""), challenge.parameters.get("service", "")
        fields = [("service", service)] if service else []
        if own and own.identity:
            form = [
                *fields, ("grant_type", "refresh_token"), ("client_id", CLIENT), ("scope", scope),
                ("refresh_token", own.identity),
            ]  # fmt: skip
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            answer = fetch("POST", realm, kind, urlencode(form).encode())
        else:
            query = urlencode([*fields, *(("scope", one) for one in scope.split())])
            headers = {"Authorization": own.basic} if own else {}
            answer = fetch("GET", f"{realm}{'&' if '?' in realm else '?'}{query}", headers, None)
        try:
            told = json.loads(answer)
            token = told.get("token") or told.get("access_token")
            lives_s = float(told.get("expires_in") or 0)
        except (ValueError, AttributeError, TypeError):
            token, lives_s = None, 0.0
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise RegistryError(f"{self._registry}: its token service gave no token", hint=login_hint(self._registry))
        return token, lives_s
