"""Signatures: what cosign is given, and what is never given to it."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import pytest
from requests.adapters import HTTPAdapter

from builder.common.errors import SigningError
from builder.common.reference import ImageRef
from builder.index.host import Host, Registries
from builder.index.settings import IndexSettings
from builder.matrix.schema import Trusted
from builder.registry import signing, transport
from builder.registry.client import Registry
from builder.registry.signing import Signer, Trust
from tests.fakes.engine import Programs

SIGNATURE = "MEUCIQDnINRMbEwoViFHj9ZzJHDkbxNC+/=="
OLD = json.dumps({"base64Signature": SIGNATURE}).encode()
NEW = json.dumps({"mediaType": "x", "messageSignature": {"signature": SIGNATURE}}).encode()
KEY = Trusted(key="keys/ci.pub")
IDENTITY = Trusted(identity="https://example.test/workflow@main", issuer="https://issuer.example.test")


class Cosign:
    """Stands in for the program; `accepts` is a word of the commands that succeed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.accepts = ""
        self.programs = Programs(self._answer)
        self.root = root
        (root / "keys").mkdir()
        (root / "keys/ci.pub").write_text("public")
        monkeypatch.setattr(subprocess, "run", self.programs)
        monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/cosign")

    def _answer(self, command: list[str]) -> tuple[int, str, str]:
        is_accepted = any(self.accepts in word for word in command)
        return (0, "", "") if is_accepted else (1, "", "WARNING: insecure\nError: no matching signatures\nmore")

    def signer(self, bundle: bytes, *trusted: Trusted) -> str:
        return signing.signer_of(self.root, b"{}", bundle, trusted)


@pytest.fixture
def cosign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cosign:
    return Cosign(monkeypatch, tmp_path)


@pytest.mark.parametrize("bundle", [OLD, NEW])
def test_the_signature_of_a_key_is_checked_offline(cosign: Cosign, bundle: bytes) -> None:
    assert cosign.signer(bundle, KEY) == "keys/ci.pub"
    [command] = cosign.programs.calls
    assert command[:4] == ["cosign", "verify-blob", f"--key={cosign.root}/keys/ci.pub", "--insecure-ignore-tlog=true"]
    assert SIGNATURE in cosign.programs.files.values()


def test_an_identity_needs_its_issuer(cosign: Cosign) -> None:
    cosign.accepts = "--certificate-oidc-issuer=https://issuer.example.test"
    assert cosign.signer(NEW, KEY, IDENTITY) == IDENTITY.identity
    assert "--new-bundle-format" in cosign.programs.calls[-1]
    assert cosign.signer(OLD, IDENTITY) == IDENTITY.identity
    assert "--new-bundle-format" not in cosign.programs.calls[-1]
    assert "--insecure-ignore-tlog=true" not in cosign.programs.calls[-1]


def test_a_signature_of_nobody_who_is_trusted(cosign: Cosign) -> None:
    cosign.accepts = "nothing"
    assert cosign.signer(OLD, KEY, IDENTITY) == ""
    assert cosign.signer(OLD) == ""


@pytest.mark.parametrize(
    "bundle",
    [
        b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"base64Signature": 1}', b'{"mediaType": "x"}',
        *(
            json.dumps({"base64Signature": text}).encode()
            for text in ("", "http://127.0.0.1/latest", "AAAA\x00", "AAAA\n", "A" * 200_000, "../x")
        ),
    ],
)  # fmt: skip
def test_a_hostile_bundle_is_not_given_to_cosign(cosign: Cosign, bundle: bytes) -> None:
    """cosign reads a signature that is the name of a file or an address."""
    assert cosign.signer(bundle, KEY) == ""
    assert cosign.programs.calls == []


def test_a_signature_that_is_a_path_is_only_text(cosign: Cosign) -> None:
    cosign.signer(b'{"base64Signature": "/etc/passwd"}', KEY)
    [command] = cosign.programs.calls
    assert not [word for word in command if word.endswith("/etc/passwd")]
    assert "/etc/passwd" in cosign.programs.files.values()


def test_a_key_that_is_missing(cosign: Cosign) -> None:
    with pytest.raises(SigningError, match=r"keys/none\.pub is missing"):
        cosign.signer(OLD, Trusted(key="keys/none.pub"))


def test_without_cosign(cosign: Cosign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(SigningError, match="cosign is not installed"):
        Signer(key="key").sign(b"{}")


def test_the_first_line_of_an_error(cosign: Cosign) -> None:
    cosign.accepts = "nothing"
    with pytest.raises(SigningError) as caught:
        Signer(key="secret-key").sign(b"{}")
    assert str(caught.value) == "cosign sign-blob: Error: no matching signatures"
    assert "secret-key" not in repr(Signer(key="secret-key"))


DIGEST = "sha256:" + "a" * 64
AWAY = "registry.example.test:5000"


def repository(registry: str = "127.0.0.1:5000", *, bundle: str = "", insecure: tuple[str, ...] = ()) -> Registry:
    host = Host(index=IndexSettings(ca_bundle=bundle), registries=Registries(insecure=insecure))
    return Registry(ImageRef(registry=registry, repository="a/b"), host=host, write=True)


def test_an_image_is_signed_once(cosign: Cosign) -> None:
    Signer(key="key").sign_image(repository(), DIGEST, {"cell": "c"})
    assert [command[1] for command in cosign.programs.calls] == ["public-key", "verify"]
    cosign.programs.calls.clear()
    original = cosign._answer
    cosign.programs.answer = lambda command: (1, "", "no") if command[1] == "verify" else original(command)
    Signer(key="key").sign_image(repository(), DIGEST, {"cell": "c"})
    command = cosign.programs.calls[-1]
    assert command[:2] == ["cosign", "sign"]
    assert {"--key=key", "--tlog-upload=false", "--annotations=cell=c", "--allow-http-registry"} <= set(command)
    assert command[-1] == f"127.0.0.1:5000/a/b@{DIGEST}"


def test_the_public_key_is_read_once(cosign: Cosign) -> None:
    signer = Signer(key="key")
    signer.sign_image(repository(), DIGEST, {})
    signer.attest(repository(), DIGEST, "cyclonedx", b"{}")
    assert [command[1] for command in cosign.programs.calls] == [
        "public-key", "verify", "verify-attestation", "attest",
    ]  # fmt: skip


def test_a_statement_is_attached_once_and_another_one_beside_it(cosign: Cosign) -> None:
    payload = base64.b64encode(json.dumps({"predicate": {"a": 1}}).encode()).decode()
    cosign.programs.answer = lambda _: (0, f"{json.dumps({'payload': payload})}\n", "")
    for predicate, last in ((b'{"a": 1}', "verify-attestation"), (b'{"a": 2}', "attest")):
        Signer(key="key").attest(repository(), DIGEST, "cyclonedx", predicate)
        assert cosign.programs.calls[-1][1] == last


@pytest.mark.parametrize("address", ["10.1.2.3:5000", "192.168.0.1", "registry.local", "registry.localhost:443"])
def test_cosign_never_sends_a_login_over_plain_http(
    cosign: Cosign, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """It falls back to plain http for these addresses if TLS fails."""
    monkeypatch.setattr(signing, "credentials", lambda _: object())
    with pytest.raises(SigningError, match="cosign would send the login over plain http"):
        Signer(key="key").sign_image(repository(address), DIGEST, {})
    assert [command[1] for command in cosign.programs.calls] == ["public-key"]
    Signer(key="key").sign_image(repository(address, insecure=(address,)), DIGEST, {})
    Signer(key="key").sign_image(repository(AWAY), DIGEST, {})
    monkeypatch.setattr(signing, "credentials", lambda _: None)
    Signer(key="key").sign_image(repository(address), DIGEST, {})


def test_without_a_key_the_log_is_used(cosign: Cosign) -> None:
    Signer(key="keyless").sign_image(repository(AWAY), DIGEST, {})
    [command] = cosign.programs.calls
    assert not [word for word in command if word.startswith(("--key", "--tlog", "--allow-http", "--registry"))]


def test_the_signer_of_an_image_and_its_tags(cosign: Cosign) -> None:
    printed = json.dumps([{"critical": {}, "optional": {"tag": "2.9.1"}}, {"optional": None}])
    cosign.programs.answer = lambda command: (0, printed, "") if "--key=" in command[3] else (1, "", "Error: no")
    trust = Trust(signers=[IDENTITY, KEY], root=cosign.root)
    signed = signing.signer_of_image(repository(AWAY), DIGEST, {"cell": "c"}, trust)
    assert signed == ("keys/ci.pub", [{"tag": "2.9.1"}, {}])
    command = cosign.programs.calls[-1]
    assert command[:3] == ["cosign", "verify", "--annotations=cell=c"]
    assert command[-1].endswith(f"@{DIGEST}")
    trust = Trust(signers=[IDENTITY], root=cosign.root)
    assert signing.signer_of_image(repository(AWAY), DIGEST, {"cell": "c"}, trust) == ("", [])


def test_the_statements_about_an_image(cosign: Cosign) -> None:
    payload = base64.b64encode(json.dumps({"predicate": {"a": 1}}).encode()).decode()
    cosign.programs.answer = lambda _: (0, f"{json.dumps({'payload': payload})}\n", "")
    trust = Trust(signers=[KEY], root=cosign.root)
    assert signing.statements_of_image(repository(AWAY), DIGEST, "cyclonedx", trust) == [b'{"a": 1}']
    assert cosign.programs.calls[-1][1:3] == ["verify-attestation", "--type=cyclonedx"]


@pytest.mark.parametrize("message", ["dial tcp: lookup x: no such host", "context deadline exceeded"])
def test_a_server_that_does_not_answer_is_not_a_missing_signature(cosign: Cosign, message: str) -> None:
    cosign.programs.answer = lambda _: (1, "", f"Error: {message}")
    with pytest.raises(SigningError, match="a server does not answer"):
        cosign.signer(OLD, KEY)


def test_cosign_reaches_a_registry_as_the_client_does(
    cosign: Cosign, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    signer, bundle = Signer(key="keyless"), tmp_path / "bundle.pem"
    bundle.write_text("usual")
    signer.sign_image(repository(AWAY, insecure=(AWAY,)), DIGEST, {})
    assert "--allow-http-registry" in cosign.programs.calls[-1]

    (tmp_path / AWAY).mkdir()
    for name in ("one.crt", "two.crt"):
        (tmp_path / AWAY / name).write_text(name)
    monkeypatch.setattr(transport, "FOLDER", tmp_path)
    monkeypatch.setattr(transport.Transport, "adapter", lambda _: HTTPAdapter())
    signer.sign_image(repository(AWAY, bundle=str(bundle)), DIGEST, {})
    assert list(cosign.programs.files.values()) == ["one.crt\ntwo.crt\nusual"]

    for name in ("b.cert", "b.key"):
        (tmp_path / AWAY / name).touch()
    signer.attest(repository(AWAY), DIGEST, "cyclonedx", b"{}")
    folder = tmp_path / AWAY
    assert {f"--registry-client-cert={folder}/b.cert", f"--registry-client-key={folder}/b.key"} < set(
        cosign.programs.calls[-1]
    )
