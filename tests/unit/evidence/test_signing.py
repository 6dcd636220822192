"""Signatures: what cosign is given, and what is never given to it."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from requests.adapters import HTTPAdapter

from builder.common.errors import RegistryError, SigningError
from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.evidence import signing
from builder.evidence.signing import CosignError, Signer, Trust, run_cosign
from builder.index.host import Host, RegistrySettings
from builder.index.settings import IndexSettings
from builder.layers import oci
from builder.layers.oci import MANIFEST_TYPE, Descriptor
from builder.matrix.schema import Trusted
from builder.registry import artifacts, transport
from builder.registry.client import Repository
from builder.registry.failures import IMMUTABLE_HINT, RUN_AGAIN, StoppedError
from tests.fakes.engine import Programs
from tests.fakes.registry import MemoryRegistry, Registries
from tests.fakes.wire import Reply, Wire, connect

KEY = Trusted(key="keys/ci.pub")
SIGNED = "https://sigstore.dev/cosign/sign/v1"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
IDENTITY = Trusted(identity="https://example.test/workflow@main", issuer="https://issuer.example.test")


class Cosign:
    """Stands in for the program; `accepts` is a word of the commands that succeed. `registries` are reached by both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.accepts, self.help = "", ""
        self.registries = Registries()
        Wire.install(monkeypatch, self.registries)
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
IMAGE = Descriptor(media_type=MANIFEST_TYPE, digest=DIGEST, size=1)
TAG = DIGEST.replace(":", "-")
AWAY = "registry.example.test:5000"


def repository(registry: str = "127.0.0.1:5000", *, bundle: str = "", insecure: tuple[str, ...] = ()) -> Repository:
    host = Host(index=IndexSettings(ca_bundle=bundle), registries=RegistrySettings(insecure=insecure))
    there = Repository(ImageRef(registry=registry, repository="a/b"), host=host, write=True)
    there.confirm_s = 0
    return there


class Documents:
    """Stands in for cosign that signs and verifies: what it signs without a key, it also attaches.

    What is attached is read from the registry: layers as of cosign 2, or bundles as of cosign 3.
    """

    def __init__(self, cosign: Cosign, registry: str = "127.0.0.1:5000") -> None:
        cosign.programs.answer = self._answer
        self.cosign, self.registry = cosign, cosign.registries[f"{registry}/a/b"]
        self.number = 0

    @property
    def statements(self) -> list[tuple[str, str]]:
        """Kinds and predicates of the statements that are attached."""
        uris = {uri: kind for kind, uri in signing.PREDICATE_TYPES.items()}
        return [(uris[uri], document["predicate"]) for uri, document in self._attached() if uri != SIGNED]

    @property
    def signatures(self) -> list[dict[str, str]]:
        """The annotations of the signatures that are attached."""
        return [document["optional"] for uri, document in self._attached() if uri == SIGNED]

    def add_layers(self, suffix: str, *layers: tuple[str, bytes]) -> None:
        """Adds to a list of cosign 2, as another job does: each layer has a predicate type, empty for a signature."""
        entries = []
        for uri, content in layers:
            self.registry.contents[digest_of_bytes(content)] = content
            notes = {"predicateType": uri} if uri else {artifacts.SIGNATURE: f"of another job {content!r}"}
            entries.append(Descriptor.of(content, "m").as_data() | {"annotations": notes})
        listed = self.registry.manifest(f"{TAG}{suffix}")
        data = json.loads(listed.content if listed else oci.artifact("m", []))
        content = json.dumps(data | {"layers": [*data["layers"], *entries]}).encode()
        MemoryRegistry.put_manifest_once(self.registry, f"{TAG}{suffix}", content, MANIFEST_TYPE)

    def _attached(self) -> list[tuple[str, dict[str, Any]]]:
        layers: list[tuple[str, str]] = []
        for suffix in (".att", ".sig"):
            listed = self.registry.manifest(f"{TAG}{suffix}")
            for layer in json.loads(listed.content)["layers"] if listed else ():
                layers.append((layer["annotations"].get("predicateType", SIGNED), layer["digest"]))
        for bundle, notes in artifacts.attached(self.registry, DIGEST, BUNDLE).items():
            stored = self.registry.contents[bundle]
            layers.append((notes["dev.sigstore.bundle.predicateType"], json.loads(stored)["layers"][0]["digest"]))
        return [(uri, json.loads(self.registry.contents[digest])) for uri, digest in layers]

    def _answer(self, command: list[str]) -> tuple[int, str, str]:
        options = dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)
        if command[-1] == "--help":
            return 0, self.cosign.help, ""
        if command[1] in ("attest", "sign"):
            return self._sign(command, options)
        if command[1] == "verify":
            return (0, json.dumps([{"optional": notes} for notes in self.signatures]), "")
        if command[1] != "verify-attestation":
            return 0, "public key", ""
        lines = []
        for kind, predicate in self.statements:
            if kind == options["--type"]:
                statement = json.dumps({"predicate": json.loads(predicate)}).encode()
                lines.append(json.dumps({"payload": base64.b64encode(statement).decode()}))
        return (0, "\n".join(lines), "") if lines else (1, "", "Error: no matching attestations")

    def _sign(self, command: list[str], options: dict[str, str]) -> tuple[int, str, str]:
        is_statement = command[1] == "attest"
        if is_statement:
            document: dict[str, Any] = {"predicate": Path(options["--predicate"]).read_text(encoding="utf-8")}
        else:
            notes = [word.split("=", 2)[1:] for word in command if word.startswith("--annotations=")]
            document = {"optional": dict(notes)}
        self.number += 1
        if "--bundle" in options:  # it has the signature, which is another one each time
            document["number"] = self.number
        content = json.dumps(document).encode()
        if "--no-upload" not in options and "--upload" not in options:
            uri = signing.PREDICATE_TYPES[options["--type"]] if is_statement else ""
            self.add_layers(".att" if is_statement else ".sig", (uri, content))
        for name in ("--bundle", "--output-payload"):
            if name in options:
                Path(options[name]).write_bytes(content)
        if "--output-signature" in options:
            Path(options["--output-signature"]).write_text(f"signature {self.number}", encoding="utf-8")
        return 0, f"{content.decode()}\n" if is_statement and "--bundle" not in options else "", ""


COSIGNS = pytest.mark.parametrize("version", ["", "--use-signing-config=true"], ids=["cosign 2", "cosign 3"])


@COSIGNS
@pytest.mark.parametrize(
    ("present", "is_signed"), [([], True), ([{"tag": "c"}], True), ([{"cell": "c", "tag": "t"}], False)], ids=str
)
def test_an_image_without_this_signature_is_signed(
    cosign: Cosign, present: list[dict[str, str]], is_signed: bool, version: str
) -> None:
    """cosign 3.0.0 to 3.0.2 print all signatures, whatever their annotations."""
    documents, cosign.help = Documents(cosign), version
    for notes in present:
        Signer(key="key").sign_manifest(repository(), IMAGE, notes)
    cosign.programs.calls.clear()
    Signer(key="key").sign_manifest(repository(), IMAGE, {"cell": "c"})
    assert documents.signatures == [*present, *([{"cell": "c"}] * is_signed)]
    for command in [command for command in cosign.programs.calls if command[1:3] == ["sign", "--yes"]]:
        assert {"--key=key", "--tlog-upload=false", "--annotations=cell=c", "--allow-http-registry"} <= set(command)
        assert command[-1] == f"127.0.0.1:5000/a/b@{DIGEST}"


def test_a_new_statement_of_cosign_3_gets_a_signature_of_cosign_3(cosign: Cosign) -> None:
    """cosign 3 ignores the signature of cosign 2 then."""
    documents = Documents(cosign)
    Signer(key="key").sign_manifest(repository(), IMAGE, {"cell": "c"})
    cosign.help = "--use-signing-config=true"
    for statements in ({SBOM[0]: SBOM[1].encode()}, BOTH, BOTH):
        Signer(key="key").sign_manifest(repository(), IMAGE, {"cell": "c"}, statements)
    assert documents.signatures == [{"cell": "c"}] * 3


def drop_signature(command: list[str]) -> str:
    options = dict(word.split("=", 1) for word in command if "=" in word)
    if "--output-payload" in options:
        Path(options["--output-payload"]).write_text("{}", encoding="utf-8")
    return ""


@pytest.mark.parametrize("version", ["--tlog-upload", "--tlog-upload --use-signing-config=true"])
@pytest.mark.parametrize(
    "answer",
    [lambda _: "", lambda _: 'Warning: a line\n{"payload": ""}', drop_signature],
    ids=["none", "junk", "payload"],
)
def test_what_cosign_did_not_sign_is_not_attached(
    cosign: Cosign, answer: Callable[[list[str]], str], version: str
) -> None:
    cosign.help = version
    cosign.programs.answer = lambda command: (0, version if "--help" in command else answer(command), "")
    for statements in ({}, {SBOM[0]: SBOM[1].encode()}):
        with pytest.raises(SigningError, match=r"cosign (sign|attest) made no signature"):
            Signer(key="key").sign_manifest(repository(), IMAGE, {}, statements)
    assert not cosign.registries["127.0.0.1:5000/a/b"].contents


def test_what_another_job_replaces_is_attached_again(cosign: Cosign) -> None:
    """Both jobs read the same lists and add to them; the lists of the other one come last."""
    documents = Documents(cosign)
    documents.add_layers(".att", (SBOM_URI, b'{"predicate": "1"}'))
    stale, crossed = documents.registry.tags[f"{TAG}.att"], list[str]()

    def cross(reference: str) -> None:
        if reference.endswith((".att", ".sig")) and reference not in crossed:
            crossed.append(reference)
            if reference.endswith(".att"):
                documents.registry.tags[reference] = stale
                documents.add_layers(".att", (SBOM_URI, b'{"predicate": "2"}'))
            else:
                del documents.registry.tags[reference]
                documents.add_layers(".sig", ("", b'{"optional": {"cell": "c"}}'))

    documents.registry.on_put = cross
    Signer(key="key").sign_manifest(repository(), IMAGE, {"cell": "c"}, {SBOM[0]: SBOM[1].encode()})
    assert documents.statements == [("cyclonedx", "1"), ("cyclonedx", "2"), SBOM]
    assert documents.signatures == [{"cell": "c"}] * 2, "the same document, signed by two keys"
    assert len(crossed) == 2


@pytest.mark.parametrize("options", ["--tlog-upload", "--tlog-upload --use-signing-config=true"])
def test_with_a_key_no_service_of_sigstore_is_used(cosign: Cosign, options: str) -> None:
    """By default, cosign 3 fetches the list of services from Sigstore; cosign 2 lacks the option that prevents it."""
    Documents(cosign)
    cosign.help = options
    Signer(key="key").sign_manifest(repository(), IMAGE)
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
                    "artifactType": BUNDLE,
                    "annotations": {"dev.sigstore.bundle.predicateType": kind},
                }
                for kind in attached
            ]  # fmt: skip
            return [json.dumps({"manifests": entries}).encode()]

    registry = SignedRepository()
    if tag:
        registry.tags[f"sha256-{'a' * 64}{tag}"] = DIGEST
    assert signing.has_signature(registry, DIGEST) is expected


SBOM_URI, PROVENANCE_URI = signing.PREDICATE_TYPES["cyclonedx"], signing.PREDICATE_TYPES["slsaprovenance1"]
SBOM, PROVENANCE = ("cyclonedx", '{"a": 1}'), ("slsaprovenance1", '{"a": 2}')
BOTH = {kind: predicate.encode() for kind, predicate in (SBOM, PROVENANCE)}


@COSIGNS
@pytest.mark.parametrize("attached", [[], [SBOM], [SBOM, ("slsaprovenance1", '{"a": 3}')], [SBOM, PROVENANCE]])
def test_statements_that_are_missing_are_attached(
    cosign: Cosign, attached: list[tuple[str, str]], version: str
) -> None:
    documents, cosign.help = Documents(cosign), version
    for kind, predicate in attached:
        Signer(key="key").sign_manifest(repository(), IMAGE, {}, {kind: predicate.encode()})
    for _ in range(2):
        Signer(key="key").sign_manifest(repository(), IMAGE, {}, BOTH)
    assert documents.statements == list(dict.fromkeys([*attached, SBOM, PROVENANCE]))
    runs = len(attached) + (not {SBOM, PROVENANCE} <= {*attached})
    assert documents.signatures == [{}] * (runs if version else 1)


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
    documents = Documents(cosign)
    for kind, predicate in (other, provenance("plan", "wheel", "own commit")):
        Signer(key="key").sign_manifest(repository(), IMAGE, {}, {kind: predicate.encode()})
    assert len(documents.statements) == (1 if is_enough else 2)


def test_only_what_is_listed_is_verified(cosign: Cosign) -> None:
    """cosign sent 40 requests for an image to verify what could not be there."""
    Documents(cosign)
    Signer(key="key").sign_manifest(repository(), IMAGE, {}, BOTH)
    words = [command[1] for command in cosign.programs.calls if command[2] != "--help" and command[1] != "public-key"]
    assert words == ["attest", "attest", "sign"]


def test_without_a_key_nothing_is_signed_twice(cosign: Cosign) -> None:
    """Each run of a release added a signature and two statements: the identity of a job is in no file."""
    signer = Signer(key="keyless", trust=Trust(signers=[KEY, IDENTITY], root=cosign.root))
    documents = Documents(cosign, AWAY)
    for _ in range(2):
        signer.sign_manifest(repository(AWAY), IMAGE, {}, BOTH)
    assert documents.statements == [SBOM, PROVENANCE]
    for tag in ("2.9.1", "2.9.1", "2.9.2"):
        signer.sign_manifest(repository(AWAY), IMAGE, {"tag": tag})
    assert documents.signatures == [{}, {"tag": "2.9.1"}, {"tag": "2.9.2"}]
    checks = [command for command in cosign.programs.calls if command[1].startswith("verify")]
    assert all(f"--certificate-identity={IDENTITY.identity}" in command for command in checks), "no key signs as a job"


@pytest.mark.parametrize("address", ["10.1.2.3:5000", "192.168.0.1", "registry.local", "registry.localhost:443"])
def test_cosign_never_sends_a_login_over_plain_http(
    cosign: Cosign, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """It falls back to plain http for these addresses if TLS fails."""
    monkeypatch.setattr(signing, "credentials", lambda _: object())
    with pytest.raises(SigningError, match="cosign would send the login over plain http"):
        Signer(key="key").sign_manifest(repository(address), IMAGE, {})
    assert {tuple(command[1:]) for command in cosign.programs.calls} == {("sign", "--help")}
    Documents(cosign)
    Signer(key="key").sign_manifest(repository(address, insecure=(address,)), IMAGE, {})
    Signer(key="key").sign_manifest(repository(AWAY), IMAGE, {})
    monkeypatch.setattr(signing, "credentials", lambda _: None)
    Signer(key="key").sign_manifest(repository(address), IMAGE, {})


def test_without_a_key_the_log_is_used(cosign: Cosign) -> None:
    documents = Documents(cosign, AWAY)
    Signer(key="keyless").sign_manifest(repository(AWAY), IMAGE, {}, BOTH)
    assert documents.statements == [SBOM, PROVENANCE]
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
    documents = Documents(cosign, AWAY)
    documents.add_layers(
        ".att",
        *(
            (uri, json.dumps({"predicate": text}).encode())
            for uri, text in ((SBOM_URI, SBOM[1]), (PROVENANCE_URI, PROVENANCE[1]))
        ),
    )
    trust = Trust(signers=[KEY], root=cosign.root)
    assert signing.statements_of_image(repository(AWAY), DIGEST, "cyclonedx", trust) == [SBOM[1].encode()]


def test_cosign_is_not_started_after_a_stop(cosign: Cosign) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        Signer(key="keyless").sign_manifest(repository(AWAY).stoppable(stop), IMAGE, {})
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
    documents = Documents(cosign)
    documents.add_layers(".att", (SBOM_URI, json.dumps({"predicate": SBOM[1]}).encode()))
    succeed = documents._answer

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
    signer.sign_manifest(repository(AWAY, insecure=(AWAY,)), IMAGE, {})
    assert "--allow-http-registry" in cosign.programs.calls[-1]

    (tmp_path / AWAY).mkdir()
    for name in ("one.crt", "two.crt"):
        (tmp_path / AWAY / name).write_text(name)
    monkeypatch.setattr(transport, "FOLDER", tmp_path)
    monkeypatch.setattr(transport.Transport, "adapter", lambda _: HTTPAdapter())
    signer.sign_manifest(repository(AWAY, bundle=str(bundle)), IMAGE, {})
    assert list(cosign.programs.files.values()) == ["one.crt\ntwo.crt\nusual"]
