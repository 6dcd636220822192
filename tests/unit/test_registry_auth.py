"""Logging in to a registry: what it asks for, where credentials come from, and that they stay where they belong."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.errors import RegistryError
from builder.host import Host
from builder.reference import ImageRef
from builder.registry import Registry
from builder.registry_auth import Challenge, Credentials, credentials, parse_challenges
from tests.unit.wire import Reply, Sent, Wire

HOST = "registry.example.test"
REALM = "https://tokens.example.test/token"
BEARER = {"WWW-Authenticate": f'Bearer realm="{REALM}",service="reg",scope="repository:other:pull"'}
BASIC = {"WWW-Authenticate": 'Basic realm="reg"'}
DIGEST = "sha256:" + "a" * 64
PASSWORD, IDENTITY = "p4ss-word", "identity-token"


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Writes Docker's configuration."""

    def write(config: object) -> None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text, encoding="utf-8")

    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return write


def login(user: str = "me", password: str = PASSWORD) -> dict[str, Any]:
    return {"auths": {HOST: {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}}}


def connect(*, write: bool = True) -> Registry:
    return Registry(ImageRef(registry=HOST, repository="a/b"), host=Host(), write=write)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("", []),
        ('Basic realm="a"', [("basic", {"realm": "a"})]),
        ("BASIC", [("basic", {})]),
        (
            'Bearer realm="https://x/t?a=b",service=reg,scope="repository:a/b:pull,push"',
            [("bearer", {"realm": "https://x/t?a=b", "service": "reg", "scope": "repository:a/b:pull,push"})],
        ),
        (
            'Basic realm="a, b", Bearer Realm="c\\"d" , service = "e"',
            [("basic", {"realm": "a, b"}), ("bearer", {"realm": 'c"d', "service": "e"})],
        ),
        ('Bearer error="invalid_token",realm=x', [("bearer", {"error": "invalid_token", "realm": "x"})]),
        ("Negotiate YWJj, Basic realm=x", [("negotiate", {}), ("ywjj", {}), ("basic", {"realm": "x"})]),
        ('realm="no scheme"', []),
        ('Bearer realm="not closed', [("bearer", {"realm": ""})]),
        ("\x00\x01", []),
    ],
)
def test_challenges(header: str, found: list[tuple[str, dict[str, str]]]) -> None:
    assert parse_challenges(header) == [Challenge(scheme=one, parameters=two) for one, two in found]


@given(st.text(alphabet='Bb=",\\ \t~', max_size=40))
def test_no_challenge_is_a_crash(header: str) -> None:
    assert all(one.scheme == one.scheme.lower() for one in parse_challenges(header))


def test_credentials_of_docker(configure: Callable[[object], None]) -> None:
    assert credentials(HOST) is None
    configure(login())
    assert credentials(HOST) == Credentials(user="me", password=PASSWORD)
    assert credentials("other.example.test") is None
    configure({"auths": {f"https://{HOST}/v1/": login()["auths"][HOST]}})
    assert credentials(HOST) == Credentials(user="me", password=PASSWORD)
    configure({"auths": {HOST: {"identitytoken": IDENTITY}}})
    assert credentials(HOST) == Credentials(identity=IDENTITY)
    configure({"auths": {HOST: {}}})
    assert credentials(HOST) is None
    configure({"auths": {"https://index.docker.io/v1/": login()["auths"][HOST]}})
    assert credentials("docker.io") == Credentials(user="me", password=PASSWORD)


@pytest.mark.parametrize("config", [{"auths": {HOST: {"auth": "%"}}}, {"auths": {HOST: "x"}}, {"auths": [1]}])
def test_a_configuration_that_cannot_be_read(configure: Callable[[object], None], config: object) -> None:
    configure(config)
    with pytest.raises(RegistryError, match="gives no credentials") as caught:
        credentials(HOST)
    assert "config.json" in caught.value.hint


def helper(monkeypatch: pytest.MonkeyPatch, answer: Callable[[list[str], bytes], bytes]) -> None:
    """A credential helper that is not really run."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "check_output", lambda command, **options: answer(command, options["input"]))


def test_credential_helpers(configure: Callable[[object], None], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(command: list[str], told: bytes) -> bytes:
        asked.append((command, told))
        return json.dumps({"Username": "<token>", "Secret": IDENTITY}).encode()

    helper(monkeypatch, answer)
    configure({"credHelpers": {HOST: "test"}})
    assert credentials(HOST) == Credentials(identity=IDENTITY)
    assert asked == [(["/bin/docker-credential-test", "get"], HOST.encode())]


def test_a_helper_that_fails(configure: Callable[[object], None], monkeypatch: pytest.MonkeyPatch) -> None:
    configure({"credsStore": "test"})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(RegistryError, match="StoreError"):
        credentials(HOST)

    def broken(command: list[str], _: bytes) -> bytes:
        raise subprocess.CalledProcessError(1, command, output=PASSWORD.encode())

    helper(monkeypatch, broken)
    with pytest.raises(RegistryError) as caught:
        credentials(HOST)
    assert PASSWORD not in f"{caught.value} {caught.value.hint}"
    helper(monkeypatch, lambda *_: b"not JSON")
    with pytest.raises(RegistryError, match="gives no credentials"):
        credentials(HOST)


class Service:
    """A registry that wants a token, and its token service, which gives numbered ones."""

    def __init__(self, *, good: int = 1, challenge: dict[str, str] | None = None, lives_s: object = 300) -> None:
        self.good = good  # the number of the first token that the registry takes
        self.given = 0
        self.challenge = BEARER if challenge is None else challenge
        self.lives_s = lives_s
        self.refused: Reply | None = None

    def __call__(self, sent: Sent) -> Reply:
        if sent.url.startswith(REALM):
            if self.refused:
                return self.refused
            self.given += 1
            return Reply(body=json.dumps({"token": f"token-{self.given}", "expires_in": self.lives_s}).encode())
        kind, _, value = sent.headers.get("Authorization", "").partition(" ")
        if kind == "Bearer" and int(value.rpartition("-")[2]) >= self.good:
            return Reply(headers={"Docker-Content-Digest": DIGEST})
        if kind == "Basic" and base64.b64decode(value) == f"me:{PASSWORD}".encode():
            return Reply(headers={"Docker-Content-Digest": DIGEST})
        return Reply(status=401, headers=self.challenge)


def authorization(wire: Wire) -> list[str]:
    return [one.headers.get("Authorization", "") for one in wire.seen]


def test_a_token_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, configure: Callable[[object], None]) -> None:
    configure(login())
    wire = Wire.lay(monkeypatch, Service())
    registry = connect()
    for _ in range(3):
        assert registry.digest_of("1.0") == DIGEST
    basic = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    assert authorization(wire) == ["", basic, "Bearer token-1", "Bearer token-1", "Bearer token-1"]
    query = parse_qs(urlsplit(wire.seen[1].url).query)
    assert query == {"service": ["reg"], "scope": ["repository:a/b:pull,push"]}


def test_reading_asks_for_no_right_to_write(monkeypatch: pytest.MonkeyPatch, configure: object) -> None:
    wire = Wire.lay(monkeypatch, Service())
    assert connect(write=False).digest_of("1.0") == DIGEST
    assert "scope=repository%3Aa%2Fb%3Apull" in wire.seen[1].url
    assert "push" not in wire.seen[1].url
    assert authorization(wire) == ["", "", "Bearer token-1"], "nobody is logged in"


def test_an_identity_token_is_posted(monkeypatch: pytest.MonkeyPatch, configure: Callable[[object], None]) -> None:
    configure({"auths": {HOST: {"identitytoken": IDENTITY}}})
    wire = Wire.lay(monkeypatch, Service())
    assert connect().digest_of("1.0") == DIGEST
    asked = wire.seen[1]
    assert (asked.method, asked.url, asked.headers.get("Authorization")) == ("POST", REALM, None)
    assert parse_qs(asked.body.decode()) == {
        "grant_type": ["refresh_token"],
        "refresh_token": [IDENTITY],
        "client_id": ["builder"],
        "service": ["reg"],
        "scope": ["repository:a/b:pull,push"],
    }


def test_a_token_that_ran_out_is_renewed(monkeypatch: pytest.MonkeyPatch, configure: object) -> None:
    service = Service()
    wire = Wire.lay(monkeypatch, service)
    registry = connect()
    assert registry.digest_of("1.0") == DIGEST
    service.good = 2
    assert registry.digest_of("1.0") == DIGEST
    assert authorization(wire)[3:] == ["Bearer token-1", "", "Bearer token-2"]


def test_a_token_is_renewed_before_it_runs_out(monkeypatch: pytest.MonkeyPatch, configure: object) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    wire = Wire.lay(monkeypatch, Service(lives_s=300))
    registry = connect()
    for later in (0, 269, 2):
        clock[0] += later
        assert registry.digest_of("1.0") == DIGEST
    assert authorization(wire) == ["", "", "Bearer token-1", "Bearer token-1", "", "Bearer token-2"]


def test_a_second_401_is_final(monkeypatch: pytest.MonkeyPatch, configure: Callable[[object], None]) -> None:
    configure(login())
    service = Service(good=99)
    wire = Wire.lay(monkeypatch, service)
    with pytest.raises(RegistryError, match=r"reading a/b:1\.0: answered 401 twice") as caught:
        connect().digest_of("1.0")
    assert HOST in str(caught.value)
    assert f"docker login {HOST}" in caught.value.hint
    assert [line for line in authorization(wire) if "Bearer" in line] == ["Bearer token-1", "Bearer token-2"]


def test_basic(monkeypatch: pytest.MonkeyPatch, configure: Callable[[object], None]) -> None:
    configure(login())
    wire = Wire.lay(monkeypatch, Service(challenge=BASIC))
    registry = connect()
    for _ in range(2):
        assert registry.digest_of("1.0") == DIGEST
    assert [line[:6] for line in authorization(wire)] == ["", "Basic ", "Basic "]
    configure(login(password="wrong"))
    with pytest.raises(RegistryError, match="401 twice"):
        connect().digest_of("1.0")
    configure({})
    with pytest.raises(RegistryError, match="asks for a user and a password"):
        connect().digest_of("1.0")


def test_a_password_that_changed_is_read_again(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[object], None]
) -> None:
    """As a credential helper gives them for clouds: good for some hours."""
    configure(login(password="yesterday"))
    service = Service(challenge=BASIC)
    wire = Wire.lay(monkeypatch, service)
    registry = connect()
    with pytest.raises(RegistryError, match="401 twice"):
        registry.digest_of("1.0")
    wire.seen.clear()
    configure(login())
    assert registry.digest_of("1.0") == DIGEST
    assert len(wire.seen) == 2


def test_bearer_before_basic(monkeypatch: pytest.MonkeyPatch, configure: Callable[[object], None]) -> None:
    configure(login())
    both = {"WWW-Authenticate": f"{BASIC['WWW-Authenticate']}, {BEARER['WWW-Authenticate']}"}
    wire = Wire.lay(monkeypatch, Service(challenge=both))
    assert connect().digest_of("1.0") == DIGEST
    assert authorization(wire)[-1] == "Bearer token-1"


@pytest.mark.parametrize("realm", ["http://tokens.example.test/t", "ftp://x/t", "", "http://127.0.0.1/t", "http://["])
def test_credentials_go_nowhere_without_tls(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[object], None], realm: str
) -> None:
    configure(login())
    wire = Wire.lay(monkeypatch, Service(challenge={"WWW-Authenticate": f'Bearer realm="{realm}"'}))
    with pytest.raises(RegistryError, match="not https"):
        connect().digest_of("1.0")
    assert authorization(wire) == [""]


def test_a_registry_may_not_repeat_secrets(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[object], None]
) -> None:
    configure(login())

    def echo(sent: Sent) -> Reply:
        if sent.headers.get("Authorization", "").startswith("Bearer"):
            basic = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
            words = f"{sent.headers['Authorization']} {PASSWORD} {basic}"
            return Reply(status=400, body=json.dumps({"errors": [{"code": "X", "message": words}]}).encode())
        return Service()(sent)

    Wire.lay(monkeypatch, echo)
    with pytest.raises(RegistryError) as caught:
        connect().manifest("1.0")
    assert "(X: Bearer *** *** ***)" in str(caught.value)


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"token": 1}', b'{"token": "x", "expires_in": "y"}', b'{"token": "a\\r\\nb: c"}']
)
def test_no_token(monkeypatch: pytest.MonkeyPatch, configure: object, answer: bytes) -> None:
    service = Service()
    service.refused = Reply(body=answer)
    Wire.lay(monkeypatch, service)
    with pytest.raises(RegistryError, match="gave no token"):
        connect().digest_of("1.0")


def test_a_token_service_that_refuses(monkeypatch: pytest.MonkeyPatch, configure: object) -> None:
    service = Service()
    service.refused = Reply(status=403, body=b'{"errors": [{"code": "DENIED", "message": "no"}]}')
    wire = Wire.lay(monkeypatch, service)
    with pytest.raises(RegistryError, match=r"asking for a token: answered 403 Forbidden \(DENIED: no\)") as caught:
        connect().digest_of("1.0")
    assert "docker login" in caught.value.hint
    assert len(wire.seen) == 2


def test_netrc_is_not_read(monkeypatch: pytest.MonkeyPatch, configure: object, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(f"machine {HOST} login me password {PASSWORD}\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wire = Wire.lay(monkeypatch, lambda _: Reply(status=404))
    assert connect().digest_of("1.0") is None
    assert authorization(wire) == [""]


def test_nothing_secret_in_a_repr() -> None:
    assert PASSWORD not in repr(Credentials(user="me", password=PASSWORD, identity=PASSWORD))
