"""Signatures: what cosign is given, and what is never given to it."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from requests.adapters import HTTPAdapter

from builder.common.errors import RegistryError, SigningError
from builder.common.reference import ImageRef
from builder.evidence import signing
from builder.evidence.signing import CosignError, Signer, Trust, run_cosign
from builder.index.host import Host, RegistrySettings
from builder.index.settings import IndexSettings
from builder.matrix.schema import Trusted
from builder.registry import transport
from builder.registry.client import Repository
from builder.registry.failures import IMMUTABLE_HINT, RUN_AGAIN, StoppedError
from tests.fakes.engine import Programs
from tests.fakes.registry import MemoryRegistry
from tests.fakes.wire import Reply, Sent, Wire, connect

KEY = Trusted(key="keys/ci.pub")
SIGNED = "https://sigstore.dev/cosign/sign/v1"
IDENTITY = Trusted(identity="https://example.test/workflow@main", issuer="https://issuer.example.test")


class Cosign:
    """Stands in for the program; `accepts` is a word of the commands that succeed.

    `listed` are the predicate types of what the registry lists as attached to the manifest.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.accepts, self.help = "", ""
        self.listed: Callable[[], list[str]] = list
        self.wire = Wire.install(monkeypatch, self._list)
        self.programs = Programs(self._answer)
        self.root = root
        (root / "keys").mkdir()
        (root / "keys/ci.pub").write_text("public")
        monkeypatch.setattr(subprocess, "run", self.programs)
        monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/cosign")

    def _answer(self, command: list[str]) -> tuple[int, str, str]:
        if command[-1] == "--help":
            return 0, self.help, ""
        is_accepted = any(self.accepts in word for word in command)
        return (
            (0, '[{"optional": null}]', "")
            if is_accepted
            else (1, "", "WARNING: insecure\nError: no matching signatures\nmore")
        )

    def _list(self, sent: Sent) -> Reply:
        """The list of statements or of signatures, as cosign 2 stores it."""
        kinds = [kind for kind in self.listed() if (kind == SIGNED) == sent.url.endswith(".sig")]
        if not kinds or not sent.url.endswith((".att", ".sig")):
            return Reply(404)
        blob = {"mediaType": "m", "digest": DIGEST, "size": 1}
        layers = [blob | {"annotations": {} if kind == SIGNED else {"predicateType": kind}} for kind in kinds]
        return Reply(body=json.dumps({"config": blob, "layers": layers}).encode())

    def signer(self, *trusted: Trusted) -> str:
        """The signer of a manifest."""
        return signing.signer_of_manifest(repository(AWAY), DIGEST, {}, Trust(signers=trusted, root=self.root))[0]


@pytest.fixture
def cosign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cosign:
    return Cosign(monkeypatch, tmp_path)


def test_the_signature_of_a_key_is_checked_without_sigstore(cosign: Cosign) -> None:
    assert cosign.signer(KEY) == "keys/ci.pub"
    [command] = cosign.programs.calls
    assert command[:4] == ["cosign", "verify", f"--key={cosign.root}/keys/ci.pub", "--insecure-ignore-tlog=true"]


def test_an_identity_needs_its_issuer(cosign: Cosign) -> None:
    cosign.accepts = "--certificate-oidc-issuer=https://issuer.example.test"
    assert cosign.signer(KEY, IDENTITY) == IDENTITY.identity
    assert "--insecure-ignore-tlog=true" not in cosign.programs.calls[-1]


def test_a_signature_of_nobody_who_is_trusted(cosign: Cosign) -> None:
    cosign.accepts = "nothing"
    assert cosign.signer(KEY, IDENTITY) == ""
    assert cosign.signer() == ""


@pytest.mark.parametrize(
    ("key", "message", "hint"),
    [
        ("keys/none.pub", "keys/none.pub is missing", "`evidence` in matrix.yaml names this public key."),
        ("keys/ci.key", "keys/ci.key is a private key", "Name its public key, e.g. ci.pub for ci.key."),
    ],
)
def test_a_key_that_is_missing_or_private(cosign: Cosign, key: str, message: str, hint: str) -> None:
    """`verify --key ci.key` said that no trusted signer signed the image."""
    (cosign.root / "keys/ci.key").write_text("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n")
    with pytest.raises(SigningError) as caught:
        cosign.signer(Trusted(key=key))
    assert (str(caught.value), caught.value.hint) == (message, hint)
    assert cosign.programs.calls == []


def test_without_cosign(cosign: Cosign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(SigningError, match="cosign is not installed"):
        run_cosign("sign")


# Printed by cosign 2.5, here and below, except for names and addresses.
SIGNATURE_URL = f"https://registry.example.test:5000/v2/a/b/manifests/sha256-{'a' * 64}.sig"
LOGIN = "Run `docker login` for this registry as a user with access, also to write if the command signs."
CONNECTION = "Check the connection to the registry and, without a key, to Sigstore. Then run this again."
PASSWORD = "Set COSIGN_PASSWORD to the password of the key."
SUBJECT = f"r.test/a@sha256:{'a' * 64}"
STRANGER = "https://github.com/DENIED/403/.github/workflows/x.yml@refs/heads/main"


@pytest.mark.parametrize(
    ("printed", "message", "hint"),
    [
        (f"Error: signing [{SUBJECT}]: getting signer: reading key: open secret-key: no such file",
         "getting signer: reading key: open KEY: no such file", ""),
        (f"Using payload from: x\nError: signing {SUBJECT}: reading key: decrypt: decryption failed",
         "reading key: decrypt: decryption failed", PASSWORD),
        (f"Pushing signature to: r.test/a\nError: signing [{SUBJECT}]: accessing image: not found",
         "accessing image: not found", ""),
        ("WARNING: insecure\nError: no matching signatures:\ninvalid\x1b[2J\n", "no matching signatures: invalid", ""),
        ("panic: runtime error", "panic: runtime error", ""),
        ("", "failed", ""),
        # The signer chooses the identity and the certificate: they must not end a release.
        (f"Error: none of the expected identities matched, got [{STRANGER}]",
         f"none of the expected identities matched, got [{STRANGER}]", ""),
        ("Error: cert verification failed: x509: certificate signed by unknown authority",
         "cert verification failed: x509: certificate signed by unknown authority", ""),
    ],
)  # fmt: skip
def test_an_error_of_cosign_is_shown(cosign: Cosign, printed: str, message: str, hint: str) -> None:
    """The first line was shown: `Using payload from: ...`."""
    cosign.programs.answer = lambda _: (
        1, "", f"{printed}\nerror during command execution: {printed.partition('Error: ')[2]}"
    )  # fmt: skip
    with pytest.raises(CosignError) as caught:
        run_cosign("sign", "--key=secret-key", SUBJECT)
    assert (str(caught.value), caught.value.hint) == (f"cosign sign: {message}", hint)


def test_the_key_of_a_signer_is_not_shown() -> None:
    assert "secret-key" not in repr(Signer(key="secret-key"))


DIGEST = "sha256:" + "a" * 64
AWAY = "registry.example.test:5000"


def repository(registry: str = "127.0.0.1:5000", *, bundle: str = "", insecure: tuple[str, ...] = ()) -> Repository:
    host = Host(index=IndexSettings(ca_bundle=bundle), registries=RegistrySettings(insecure=insecure))
    return Repository(ImageRef(registry=registry, repository="a/b"), host=host, write=True)


class Signatures:
    """The annotations of each signature of an image. The first signatures that are added are lost."""

    def __init__(self, cosign: Cosign, *present: dict[str, str], loses: int = 0) -> None:
        self.present, self.loses = list(present), loses
        cosign.programs.answer, cosign.listed = self._answer, lambda: [SIGNED] * len(self.present)

    def _answer(self, command: list[str]) -> tuple[int, str, str]:
        if command[1] == "verify":
            printed = json.dumps([{"optional": annotations} for annotations in self.present])
            return (0, printed, "") if self.present else (1, "", "Error: no signatures")
        if command[1:3] == ["sign", "--yes"]:
            self.loses -= 1
            if self.loses < 0:
                notes = [word.split("=", 2)[1:] for word in command if word.startswith("--annotations=")]
                self.present.append(dict(notes))
        return 0, "", ""


@pytest.mark.parametrize(
    ("present", "is_signed"), [([], True), ([{"tag": "c"}], True), ([{"cell": "c", "tag": "t"}], False)], ids=str
)
def test_an_image_without_this_signature_is_signed(
    cosign: Cosign, present: list[dict[str, str]], is_signed: bool
) -> None:
    """cosign 3.0.0 to 3.0.2 print all signatures, whatever their annotations."""
    signatures = Signatures(cosign, *present)
    Signer(key="key").sign_manifest(repository(), DIGEST, {"cell": "c"})
    assert signatures.present == [*present, *([{"cell": "c"}] * is_signed)]
    for command in [command for command in cosign.programs.calls if command[1:3] == ["sign", "--yes"]]:
        assert {"--key=key", "--tlog-upload=false", "--annotations=cell=c", "--allow-http-registry"} <= set(command)
        assert command[-1] == f"127.0.0.1:5000/a/b@{DIGEST}"


def test_a_signature_that_was_lost_is_added_again(cosign: Cosign) -> None:
    signatures = Signatures(cosign, loses=3)
    Signer(key="key").sign_manifest(repository(), DIGEST, {"cell": "c"})
    assert signatures.present == [{"cell": "c"}]
    Signatures(cosign, loses=100)
    with pytest.raises(SigningError, match=r"a statement or signature of .* is still missing after 5 attempts"):
        Signer(key="key").sign_manifest(repository(), DIGEST, {"cell": "c"})


@pytest.mark.parametrize("options", ["--tlog-upload", "--tlog-upload --use-signing-config"])
def test_with_a_key_no_service_of_sigstore_is_used(cosign: Cosign, options: str) -> None:
    """By default, cosign 3 fetches the list of services from Sigstore; cosign 2 lacks the option that prevents it."""
    cosign.help = options
    cosign.accepts = "--tlog-upload=false"
    with suppress(SigningError):  # the signature that cosign would store is missing
        Signer(key="key").sign_manifest(repository(), DIGEST)
    command = next(command for command in cosign.programs.calls if command[1:3] == ["sign", "--yes"])
    assert "--tlog-upload=false" in command
    assert ("--use-signing-config=false" in command) == ("--use-signing-config" in options)


@pytest.mark.parametrize(
    ("tag", "attached", "expected"),
    [
        (None, [], False),
        (".sig", [], True),
        (".att", [], False),
        (None, ["https://cyclonedx.org/bom"], False),
        (None, ["https://cyclonedx.org/bom", "https://sigstore.dev/cosign/sign/v1"], True),
    ],
)
def test_a_signature_of_cosign_2_or_3_is_seen(tag: str | None, attached: list[str], expected: bool) -> None:
    class SignedRepository(MemoryRegistry):
        def referrers(self, digest: str) -> list[bytes]:
            entries = [
                {
                    "mediaType": "m", "digest": DIGEST, "size": 1,
                    "artifactType": "application/vnd.dev.sigstore.bundle.v0.3+json",
                    "annotations": {"dev.sigstore.bundle.predicateType": kind},
                }
                for kind in attached
            ]  # fmt: skip
            return [json.dumps({"manifests": entries}).encode()]

    registry = SignedRepository()
    if tag:
        registry.tags[f"sha256-{'a' * 64}{tag}"] = DIGEST
    assert signing.has_signature(registry, DIGEST) is expected


class Statements:
    """What cosign has attached. At first it loses as many statements as `loses`; those of another job replace them."""

    def __init__(
        self,
        cosign: Cosign,
        attached: Sequence[tuple[str, str]] = (),
        loses: int = 0,
        others: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.attached, self.loses, self.others = list(attached), loses, others
        self.attempts = 0
        self.signed = 0
        cosign.programs.answer, cosign.listed = self._answer, self._listed

    def _listed(self) -> list[str]:
        return [*(signing.PREDICATE_TYPES[kind] for kind, _ in self.attached), *[SIGNED] * self.signed]

    def _answer(self, command: list[str]) -> tuple[int, str, str]:
        options = dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)
        if command[1] == "attest":
            self.attempts += 1
            if self.attempts > self.loses:
                self.attached.append((options["--type"], Path(options["--predicate"]).read_text()))
            else:
                self.attached += self.others
        if command[1:3] == ["sign", "--yes"]:
            self.signed += 1
        if command[1] == "verify":
            return 0, '[{"optional": null}]', ""
        if command[1] != "verify-attestation":
            return 0, "", ""
        predicates = [json.loads(predicate) for kind, predicate in self.attached if kind == options["--type"]]
        payloads = [base64.b64encode(json.dumps({"predicate": each}).encode()).decode() for each in predicates]
        return (
            (0, "".join(f"{json.dumps({'payload': each})}\n" for each in payloads), "") if payloads else (1, "", "no")
        )


SBOM, PROVENANCE = ("cyclonedx", '{"a": 1}'), ("slsaprovenance1", '{"a": 2}')
BOTH = {kind: predicate.encode() for kind, predicate in (SBOM, PROVENANCE)}


@pytest.mark.parametrize("attached", [[], [SBOM], [SBOM, ("slsaprovenance1", '{"a": 3}')], [SBOM, PROVENANCE]])
def test_statements_that_are_missing_are_attached(cosign: Cosign, attached: list[tuple[str, str]]) -> None:
    statements = Statements(cosign, attached)
    for _ in range(2):
        Signer(key="key").sign_manifest(repository(), DIGEST, {}, BOTH)
    assert statements.attached == list(dict.fromkeys([*attached, SBOM, PROVENANCE]))
    assert statements.signed == 1


def provenance(plan: str, wheel: str, *commits: str) -> tuple[str, str]:
    dependencies = [*({"digest": {"gitCommit": commit}} for commit in commits), {"uri": wheel}]
    definition = {"internalParameters": plan, "resolvedDependencies": dependencies}
    return "slsaprovenance1", json.dumps({"buildDefinition": definition})


@pytest.mark.parametrize(
    ("other", "is_enough"),
    [
        (provenance("plan", "wheel", "commit"), True),
        (provenance("plan", "wheel"), False),
        (provenance("plan", "another wheel", "commit"), False),
        (provenance("another plan", "wheel", "commit"), False),
    ],
)
def test_a_provenance_of_another_commit_is_enough(cosign: Cosign, other: tuple[str, str], is_enough: bool) -> None:
    statements = Statements(cosign, [other])
    kind, predicate = provenance("plan", "wheel", "own commit")
    Signer(key="key").sign_manifest(repository(), DIGEST, {}, {kind: predicate.encode()})
    assert len(statements.attached) == (1 if is_enough else 2)


def test_only_what_is_listed_is_verified(cosign: Cosign) -> None:
    """cosign sent 40 requests for an image to verify what could not be there."""
    Statements(cosign)
    Signer(key="key").sign_manifest(repository(), DIGEST, {}, BOTH)
    words = [command[1] for command in cosign.programs.calls if command[2] != "--help" and command[1] != "public-key"]
    assert words == ["attest", "attest", "sign", *["verify-attestation"] * 2, "verify"]


def test_a_statement_that_another_job_replaced_is_attached_again(cosign: Cosign) -> None:
    """Both jobs read the same list and add to it: the list of the last one has a statement of the same kind."""
    other = (PROVENANCE[0], '{"a": "of the other job"}')
    statements = Statements(cosign, loses=1, others=[other])
    Signer(key="key").sign_manifest(repository(), DIGEST, {}, {PROVENANCE[0]: PROVENANCE[1].encode()})
    assert statements.attached == [other, PROVENANCE]


def test_a_statement_that_was_lost_is_attached_again(cosign: Cosign) -> None:
    statements = Statements(cosign, loses=3)
    Signer(key="key").sign_manifest(repository(), DIGEST, {}, BOTH)
    assert set(statements.attached) == {SBOM, PROVENANCE}
    Statements(cosign, loses=100)
    with pytest.raises(SigningError):
        Signer(key="key").sign_manifest(repository(), DIGEST, {}, BOTH)


def test_without_a_key_nothing_is_signed_twice(cosign: Cosign) -> None:
    """Each run of a release added a signature and two statements: the identity of a job is in no file."""
    signer = Signer(key="keyless", trust=Trust(signers=[KEY, IDENTITY], root=cosign.root))
    statements = Statements(cosign)
    for _ in range(2):
        signer.sign_manifest(repository(AWAY), DIGEST, {}, BOTH)
    assert statements.attached == [SBOM, PROVENANCE]
    signatures = Signatures(cosign)
    for tag in ("2.9.1", "2.9.1", "2.9.2"):
        signer.sign_manifest(repository(AWAY), DIGEST, {"tag": tag})
    assert signatures.present == [{"tag": "2.9.1"}, {"tag": "2.9.2"}]
    checks = [command for command in cosign.programs.calls if command[1].startswith("verify")]
    assert all(f"--certificate-identity={IDENTITY.identity}" in command for command in checks), "no key signs as a job"


@pytest.mark.parametrize("address", ["10.1.2.3:5000", "192.168.0.1", "registry.local", "registry.localhost:443"])
def test_cosign_never_sends_a_login_over_plain_http(
    cosign: Cosign, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """It falls back to plain http for these addresses if TLS fails."""
    monkeypatch.setattr(signing, "credentials", lambda _: object())
    with pytest.raises(SigningError, match="cosign would send the login over plain http"):
        Signer(key="key").sign_manifest(repository(address), DIGEST, {})
    assert {tuple(command[1:]) for command in cosign.programs.calls} == {("sign", "--help")}
    Signatures(cosign)
    Signer(key="key").sign_manifest(repository(address, insecure=(address,)), DIGEST, {})
    Signer(key="key").sign_manifest(repository(AWAY), DIGEST, {})
    monkeypatch.setattr(signing, "credentials", lambda _: None)
    Signer(key="key").sign_manifest(repository(address), DIGEST, {})


def test_without_a_key_the_log_is_used(cosign: Cosign) -> None:
    statements = Statements(cosign)
    Signer(key="keyless").sign_manifest(repository(AWAY), DIGEST, {}, BOTH)
    assert statements.attached == [SBOM, PROVENANCE]
    assert [command[1] for command in cosign.programs.calls] == ["attest", "attest", "sign"], "sign last"
    words = [word for command in cosign.programs.calls for word in command]
    assert not [word for word in words if word.startswith(("--key", "--tlog", "--allow-http", "--registry"))]


def test_the_signer_of_an_image_and_its_tags(cosign: Cosign) -> None:
    printed = json.dumps([{"critical": {}, "optional": {"cell": "c", "tag": "2.9.1"}}, {"optional": None}])
    cosign.programs.answer = lambda command: (0, printed, "") if "--key=" in command[2] else (1, "", "Error: no")
    trust = Trust(signers=[IDENTITY, KEY], root=cosign.root)
    signed = signing.signer_of_manifest(repository(AWAY), DIGEST, {"cell": "c"}, trust)
    assert signed == ("keys/ci.pub", [{"cell": "c", "tag": "2.9.1"}])
    assert cosign.programs.calls[-1][-1].endswith(f"@{DIGEST}")


def test_the_statements_about_an_image(cosign: Cosign) -> None:
    Statements(cosign, [SBOM, PROVENANCE])
    trust = Trust(signers=[KEY], root=cosign.root)
    assert signing.statements_of_image(repository(AWAY), DIGEST, "cyclonedx", trust) == [SBOM[1].encode()]


def test_cosign_is_not_started_after_a_stop(cosign: Cosign) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        Signer(key="keyless").sign_manifest(repository(AWAY).stoppable(stop), DIGEST, {})
    assert cosign.programs.calls == []


@pytest.mark.parametrize(
    ("status", "printed", "message", "hint"),
    [
        (1, f"GET {SIGNATURE_URL}: DENIED: requested access to the resource is denied", "", LOGIN),
        (1, f"GET {SIGNATURE_URL}: UNAUTHORIZED: authentication required", "", LOGIN),
        (1, f"GET {SIGNATURE_URL}: unexpected status code 403 Forbidden: <html>no</html>", "", LOGIN),
        (1, f"GET {SIGNATURE_URL}: unexpected status code 505 HTTP Version Not Supported", "", CONNECTION),
        (1, "dial tcp: lookup x: no such host", "", CONNECTION),
        (1, f"PUT {SIGNATURE_URL}: PRECONDITION: x is configured as immutable", "", IMMUTABLE_HINT),
        (1, f"PUT {SIGNATURE_URL}: unexpected status code 412 Precondition Failed", "", IMMUTABLE_HINT),
        (-2, "", "was ended by signal 2", ""),
    ],
)
def test_a_request_that_fails_is_not_a_missing_signature(
    cosign: Cosign, status: int, printed: str, message: str, hint: str
) -> None:
    """A denied one was shown as "a server does not answer"; one that ended with EOF or 503 as a missing signature.

    The query of a signed URL is a credential.
    """
    cosign.programs.answer = lambda _: (status, "", f"Error: {printed}")
    with pytest.raises(SigningError) as caught:
        cosign.signer(KEY)
    assert str(caught.value).removeprefix("cosign verify").removeprefix(":").strip() == (message or printed)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (f"GET {SIGNATURE_URL}: unexpected status code 503 Service Unavailable", ""),
        (f"GET {SIGNATURE_URL}: unexpected status code 429 Too Many Requests: <html>no</html>", ""),
        (f"no matching signatures: GET {SIGNATURE_URL}: TOOMANYREQUESTS: slow down", ""),
        (f'Get "{SIGNATURE_URL}?X-Signature=abc": EOF', f'Get "{SIGNATURE_URL}": EOF'),
        ("context deadline exceeded", ""),
    ],
)
def test_cosign_runs_again_after_a_request_that_may_succeed_later(
    cosign: Cosign, monkeypatch: pytest.MonkeyPatch, failure: str, message: str
) -> None:
    """One 429 ended a release. cosign prints no Retry-After header: a request of the client waits for it."""
    answers = iter([Reply(429, headers={"Retry-After": "0"}), *[Reply(404)] * 99])
    wire = Wire.install(monkeypatch, lambda _: next(answers))
    failures = iter([failure] * 3)
    succeed = Statements(cosign, [SBOM])._answer

    def answer(command: list[str]) -> tuple[int, str, str]:
        return (1, "", f"Error: {printed}") if (printed := next(failures, "")) else succeed(command)

    cosign.programs.answer = answer
    trust = Trust(signers=[KEY], root=cosign.root)
    assert signing.statements_of_image(connect(), DIGEST, "cyclonedx", trust) == [SBOM[1].encode()]
    assert wire.methods == ["HEAD"] * 4

    cosign.programs.answer = lambda _: (1, "", f"Error: {failure}")
    with pytest.raises(RegistryError) as caught:
        signing.statements_of_image(connect(), DIGEST, "cyclonedx", trust)
    assert str(caught.value) == f"cosign verify-attestation: {message or failure}: tried 9 times"
    assert caught.value.hint == RUN_AGAIN


def test_cosign_reaches_a_registry_as_the_client_does(
    cosign: Cosign, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    signer, bundle = Signer(key="keyless"), tmp_path / "bundle.pem"
    bundle.write_text("usual")
    signer.sign_manifest(repository(AWAY, insecure=(AWAY,)), DIGEST, {})
    assert "--allow-http-registry" in cosign.programs.calls[-1]

    (tmp_path / AWAY).mkdir()
    for name in ("one.crt", "two.crt"):
        (tmp_path / AWAY / name).write_text(name)
    monkeypatch.setattr(transport, "FOLDER", tmp_path)
    monkeypatch.setattr(transport.Transport, "adapter", lambda _: HTTPAdapter())
    signer.sign_manifest(repository(AWAY, bundle=str(bundle)), DIGEST, {})
    assert list(cosign.programs.files.values()) == ["one.crt\ntwo.crt\nusual"]
