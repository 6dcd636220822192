"""Logging in to a registry: challenges, credentials and tokens, and that credentials are sent only to the registry."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.common.errors import RegistryError
from builder.common.reference import ImageRef
from builder.index.host import Host
from builder.registry.auth import Credentials, Login, credentials, parse_challenges
from builder.registry.client import Repository
from builder.registry.failures import RejectedError
from builder.registry.http import Answer, Request
from tests.fakes.wire import HOST, Reply, Sent, Wire, errors
from tests.unit.registry.fixtures import Lay

REALM = "https://tokens.example.test/token"
BEARER = f'Bearer realm="{REALM}",service="reg",scope="repository:other:pull"'
BASIC = 'Basic realm="reg"'
DIGEST = "sha256:" + "a" * 64
PASSWORD, IDENTITY = "p4ss-word", "identity-token"
Configure = Callable[[object], None]


@pytest.fixture
def configure(docker_config: Path) -> Configure:
    """Writes Docker's configuration."""

    def write(config: object) -> None:
        docker_config.write_text(json.dumps(config), encoding="utf-8")

    return write


def login(user: str = "me", password: str = PASSWORD) -> dict[str, Any]:
    return {"auths": {HOST: {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}}}


def connect(*, write: bool = True) -> Repository:
    return Repository(ImageRef(registry=HOST, repository="a/b"), host=Host(), write=write)


@pytest.mark.parametrize(
    ("header", "challenges"),
    [
        ("", {}),
        ('Basic realm="a"', {"basic": {"realm": "a"}}),
        ("BASIC", {"basic": {}}),
        (
            'Bearer realm="https://x/t?a=b",service=reg,scope="repository:a/b:pull,push"',
            {"bearer": {"realm": "https://x/t?a=b", "service": "reg", "scope": "repository:a/b:pull,push"}},
        ),
        (
            'Basic realm="a, b", Bearer Realm="c\\"d" , service = "e"',
            {"basic": {"realm": "a, b"}, "bearer": {"realm": 'c"d', "service": "e"}},
        ),
        ("Basic realm=a, Basic realm=b", {"basic": {"realm": "a"}}),
        ('Bearer error="invalid_token",realm=x', {"bearer": {"error": "invalid_token", "realm": "x"}}),
        ("Negotiate YWJj, Basic realm=x", {"negotiate": {}, "ywjj": {}, "basic": {"realm": "x"}}),
        ('realm="no scheme"', {}),
        ('Bearer realm="not closed', {"bearer": {"realm": ""}}),
        ("\x00\x01", {}),
    ],
)
def test_challenges(header: str, challenges: dict[str, dict[str, str]]) -> None:
    assert parse_challenges(header) == challenges


@given(st.text(alphabet='Bb=",\\ \t~', max_size=40))
def test_any_header_can_be_parsed(header: str) -> None:
    assert all(scheme == scheme.lower() for scheme in parse_challenges(header))


def test_credentials_from_docker_s_configuration(configure: Configure) -> None:
    assert credentials(HOST) is None
    configure(login())
    assert credentials(HOST) == Credentials(user="me", password=PASSWORD)
    assert credentials("other.example.test") is None
    configure({"auths": {f"https://{HOST}/v1/": login()["auths"][HOST]}})
    assert credentials(HOST) == Credentials(user="me", password=PASSWORD)
    configure({"auths": {HOST: {"identitytoken": IDENTITY}}})
    assert credentials(HOST) == Credentials(identity=IDENTITY)
    configure({"auths": {HOST: {"auth": base64.b64encode(f"<token>:{IDENTITY}".encode()).decode()}}})
    assert credentials(HOST) == Credentials(identity=IDENTITY)
    configure({"auths": {HOST: {}}})
    assert credentials(HOST) is None
    configure({"auths": {"https://index.docker.io/v1/": login()["auths"][HOST]}})
    assert credentials("docker.io") == Credentials(user="me", password=PASSWORD)


@pytest.mark.parametrize("config", [{"auths": {HOST: {"auth": "%"}}}, {"auths": {HOST: "x"}}])
def test_an_invalid_configuration(configure: Configure, config: object) -> None:
    configure(config)
    with pytest.raises(RegistryError):
        credentials(HOST)


@pytest.fixture
def helper(programs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes a credential helper `test` with the lines of a shell script."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()

    def write(lines: str) -> None:
        path = tmp_path / "bin/docker-credential-test"
        path.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
        path.chmod(0o755)

    return write


def test_a_credential_helper(configure: Configure, helper: Callable[[str], None]) -> None:
    helper(f"""test "$1 $(cat)" = "get {HOST}" && echo '{{"Username": "<token>", "Secret": "{IDENTITY}"}}'""")
    configure({"credHelpers": {HOST: "test"}})
    assert credentials(HOST) == Credentials(identity=IDENTITY)


def test_the_output_of_a_helper_that_fails_is_not_shown(configure: Configure, helper: Callable[[str], None]) -> None:
    helper(f"echo {PASSWORD}; exit 1")
    configure({"credsStore": "test"})
    with pytest.raises(RegistryError) as caught:
        credentials(HOST)
    assert PASSWORD not in f"{caught.value} {caught.value.hint}"


@dataclass(kw_only=True)
class TokenService:
    """A registry that requires tokens, and its token service, which issues numbered ones.

    `good` is the number of the first token that the registry accepts, `rejection` the answer of the token service.
    """

    good: int = 1
    challenge: str = BEARER
    valid_s: object = 300
    rejection: Reply | None = None
    issued: int = 0

    def __call__(self, sent: Sent) -> Reply:
        if sent.url.startswith(REALM):
            if self.rejection:
                return self.rejection
            self.issued += 1
            return Reply(body=json.dumps({"token": f"token-{self.issued}", "expires_in": self.valid_s}).encode())
        kind, _, value = sent.headers.get("Authorization", "").partition(" ")
        if kind == "Bearer" and int(value.rpartition("-")[2]) >= self.good:
            return Reply(headers={"Docker-Content-Digest": DIGEST})
        if kind == "Basic" and base64.b64decode(value) == f"me:{PASSWORD}".encode():
            return Reply(headers={"Docker-Content-Digest": DIGEST})
        return Reply(status=401, headers={"WWW-Authenticate": self.challenge})


def authorization(wire: Wire) -> list[str]:
    return [sent.headers.get("Authorization", "") for sent in wire.seen]


def test_a_token_is_requested_once(lay: Lay, configure: Configure) -> None:
    configure(login())
    wire = lay(TokenService())
    registry = connect()
    for _ in range(3):
        assert registry.digest_of("1.0") == DIGEST
    basic = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    assert authorization(wire) == ["", basic, "Bearer token-1", "Bearer token-1", "Bearer token-1"]
    query = parse_qs(urlsplit(wire.seen[1].url).query)
    assert query == {"service": ["reg"], "scope": ["repository:a/b:pull,push"]}


def test_reading_requests_no_right_to_push(lay: Lay) -> None:
    wire = lay(TokenService())
    assert connect(write=False).digest_of("1.0") == DIGEST
    assert "scope=repository%3Aa%2Fb%3Apull" in wire.seen[1].url
    assert "push" not in wire.seen[1].url
    assert authorization(wire) == ["", "", "Bearer token-1"], "nobody is logged in"


def test_an_identity_token_is_posted(lay: Lay, configure: Configure) -> None:
    configure({"auths": {HOST: {"identitytoken": IDENTITY}}})
    wire = lay(TokenService())
    assert connect().digest_of("1.0") == DIGEST
    request = wire.seen[1]
    assert (request.method, request.url, request.headers.get("Authorization")) == ("POST", REALM, None)
    assert parse_qs(request.body.decode()) == {
        "grant_type": ["refresh_token"],
        "refresh_token": [IDENTITY],
        "client_id": ["builder"],
        "service": ["reg"],
        "scope": ["repository:a/b:pull,push"],
    }


def test_an_expired_token_is_renewed(lay: Lay) -> None:
    service = TokenService()
    wire = lay(service)
    registry = connect()
    assert registry.digest_of("1.0") == DIGEST
    service.good = 2
    assert registry.digest_of("1.0") == DIGEST
    assert authorization(wire)[3:] == ["Bearer token-1", "", "Bearer token-2"]


def test_a_token_that_another_thread_renewed_is_kept() -> None:
    answers = [b'{"token": "first"}', b'{"token": "second"}']
    login = Login(HOST)
    login.renew("pull", "", BEARER)
    for expected in ("Bearer first", "Bearer second", "Bearer second"):
        assert login.header("pull", lambda *_: answers.pop(0)) == expected
        login.renew("pull", "Bearer first", BEARER)


def test_a_token_is_renewed_before_it_expires(lay: Lay, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    wire = lay(TokenService(valid_s=300))
    registry = connect()
    for later in (0, 269, 2):
        clock[0] += later
        assert registry.digest_of("1.0") == DIGEST
    assert authorization(wire) == ["", "", "Bearer token-1", "Bearer token-1", "", "Bearer token-2"]


def test_a_second_401_is_final(lay: Lay, configure: Configure) -> None:
    configure(login())
    wire = lay(TokenService(good=99))
    with pytest.raises(RejectedError):
        connect().digest_of("1.0")
    assert [line for line in authorization(wire) if "Bearer" in line] == ["Bearer token-1", "Bearer token-2"]


def test_basic(lay: Lay, configure: Configure) -> None:
    configure(login())
    wire = lay(TokenService(challenge=BASIC))
    registry = connect()
    for _ in range(2):
        assert registry.digest_of("1.0") == DIGEST
    assert [line[:6] for line in authorization(wire)] == ["", "Basic ", "Basic "]
    configure(login(password="wrong"))
    with pytest.raises(RejectedError):
        connect().digest_of("1.0")
    configure({})
    with pytest.raises(RegistryError):
        connect().digest_of("1.0")


def test_a_password_that_changed_is_read_again(lay: Lay, configure: Configure) -> None:
    """Credential helpers of clouds issue passwords that are valid for some hours."""
    configure(login(password="yesterday"))
    wire = lay(TokenService(challenge=BASIC))
    registry = connect()
    with pytest.raises(RejectedError):
        registry.digest_of("1.0")
    wire.seen.clear()
    configure(login())
    assert registry.digest_of("1.0") == DIGEST
    assert len(wire.seen) == 2


def test_bearer_before_basic(lay: Lay, configure: Configure) -> None:
    configure(login())
    wire = lay(TokenService(challenge=f"{BASIC}, {BEARER}"))
    assert connect().digest_of("1.0") == DIGEST
    assert authorization(wire)[-1] == "Bearer token-1"


def test_credentials_go_nowhere_without_tls(lay: Lay, configure: Configure) -> None:
    configure(login())
    wire = lay(TokenService(challenge='Bearer realm="http://tokens.example.test/t"'))
    with pytest.raises(RejectedError):
        connect().digest_of("1.0")
    assert authorization(wire) == [""]


@pytest.mark.parametrize("password", [PASSWORD, "token"], ids=["another", "the start of the token"])
def test_secrets_in_a_response_are_hidden(lay: Lay, configure: Configure, password: str) -> None:
    configure(login(password=password))

    def echo(sent: Sent) -> Reply:
        if sent.headers.get("Authorization", "").startswith("Bearer"):
            basic = base64.b64encode(f"me:{password}".encode()).decode()
            message = f"{sent.headers['Authorization']} {password} {basic}"
            return Reply(status=400, body=errors({"code": "X", "message": message}))
        return TokenService()(sent)

    lay(echo)
    with pytest.raises(RegistryError) as caught:
        connect().manifest("1.0")
    assert "(X: Bearer *** *** ***)" in str(caught.value)


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"token": 1}', b'{"token": "x", "expires_in": "y"}', b'{"token": "a\\r\\nb: c"}']
)
def test_an_invalid_token(lay: Lay, answer: bytes) -> None:
    lay(TokenService(rejection=Reply(body=answer)))
    with pytest.raises(RegistryError):
        connect().digest_of("1.0")


def test_a_token_service_that_denies_access(lay: Lay) -> None:
    wire = lay(TokenService(rejection=Reply(status=403)))
    with pytest.raises(RejectedError):
        connect().digest_of("1.0")
    assert len(wire.seen) == 2


def test_netrc_is_not_read(lay: Lay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(f"machine {HOST} login me password {PASSWORD}\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wire = lay(lambda _: Reply(status=404))
    assert connect().digest_of("1.0") is None
    assert authorization(wire) == [""]


def test_a_repr_shows_no_secret() -> None:
    assert PASSWORD not in repr(Credentials(user="me", password=PASSWORD, identity=PASSWORD))
    secret = {"Authorization": PASSWORD, "Location": PASSWORD}
    url, body = f"https://{HOST}/?signature={PASSWORD}", PASSWORD.encode()
    request = Request(action="reading", method="GET", url=url, expect=(200,), headers=secret, body=body)
    assert PASSWORD not in repr(Answer(request=request, status=200, headers=secret, body=body))
