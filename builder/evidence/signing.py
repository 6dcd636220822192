"""Signatures of manifests in a registry, and signed statements about images, by the program `cosign`.

Images, indexes, test results and lists of staged images have manifests to sign. A key pair works offline:
nothing is sent to a public log. `keyless` signs with the identity of the CI job (OIDC) and needs Sigstore's public
services. Source: cosign 2.5 and 3.1, `cosign sign --help`, `cosign attest --help`, pkg/oci/remote/write.go.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

from builder.common.errors import SigningError
from builder.common.text import one_line
from builder.layers import oci
from builder.layers.oci import Descriptor, ManifestDocument
from builder.matrix.project import Project
from builder.matrix.schema import Trusted
from builder.registry import artifacts
from builder.registry.auth import credentials
from builder.registry.client import Repository, fallback_tag
from builder.registry.failures import IMMUTABLE, IMMUTABLE_HINT, RUN_AGAIN, TransientError

_BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"  # what cosign 3 attaches to manifests
_BUNDLE_KIND = "dev.sigstore.bundle.predicateType"  # the annotation of a bundle with its predicate type
_SIGN_PREDICATE = "https://sigstore.dev/cosign/sign/v1"  # the predicate type of a bundle that signs a manifest
# The predicate types that have a short name, see `cosign attest --help`.
PREDICATE_TYPES = {"cyclonedx": "https://cyclonedx.org/bom", "slsaprovenance1": "https://slsa.dev/provenance/v1"}
KEYLESS = "keyless"
# The layers of a list of cosign 2: what a signature signs, and a statement with its signature.
_PAYLOAD_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
_ENVELOPE_TYPE = "application/vnd.dsse.envelope.v1+json"
_OFFLINE = "--insecure-ignore-tlog=true"  # for keys: their signatures are in no log
TIMEOUT_S = 300
RELEASES = "https://github.com/sigstore/cosign/releases"
# Messages of cosign, its client for registries (go-containerregistry) and Go's standard library. A failed request has
# its method and URL: `GET https://...: DENIED: ...`, `Get "https://...": EOF`.
_FAILED_REQUEST = re.compile(
    r"\b(GET|HEAD|PUT|POST|PATCH|DELETE|Get|Head|Put|Post|Patch|Delete) \"?https?://"
    r"|dial tcp|no such host|connection (refused|reset)|deadline exceeded|i/o timeout|unexpected EOF|tls: "
)
# After the URL, cosign prints the registry's error code or, without one, the status.
_TRANSIENT = re.compile(
    r": (TOOMANYREQUESTS|UNAVAILABLE)\b|\bunexpected status code (408|425|429|50[02-46]|5[1-9]\d)\b"
    r"|\bEOF\b|connection reset|deadline exceeded|i/o timeout|TLS handshake timeout"
)
_DENIED = re.compile(r": (UNAUTHORIZED|DENIED)\b|: unexpected status code 40[13]\b")
_REPETITION = "\nerror during command execution: "
_SUBJECT = re.compile(r"^signing \S+: ")  # a long name
_QUERY = re.compile(r"\?[^\s\"]*[^\s\":]")  # of a URL: that of a signed URL is a credential


class CosignError(SigningError):
    """An error of cosign that is not about a server. Of `verify`: there is no such signature."""


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The trusted signers, and the folder that the names of their keys are relative to."""

    signers: Sequence[Trusted]
    root: Path

    @classmethod
    def of(cls, project: Project) -> Trust:
        """The signers that matrix.yaml lists under `evidence`."""
        return cls(signers=project.matrix.evidence, root=project.root)

    def check_keys(self) -> None:
        """Raises SigningError for a key that is missing or private.

        cosign reports the same error for such a key as for a wrong signature.
        """
        for key in [signer.key for signer in self.signers if signer.key]:
            path = self.root / key
            if not path.is_file():
                raise SigningError(f"{key} is missing", hint="`evidence` in matrix.yaml names this public key.")
            if b"PRIVATE KEY-----" in path.read_bytes():
                raise SigningError(f"{key} is a private key", hint="Name its public key, e.g. ci.pub for ci.key.")


@dataclass(frozen=True, kw_only=True)
class Signer:
    """Signs manifests and statements. `key` is a private key as cosign names it, or KEYLESS.

    cosign names a key by its file or by the address of a KMS. With KEYLESS, the identity of the CI job is known only
    after it has signed: manifests that any identity of `trust` has signed are not signed again.
    """

    key: str = field(repr=False)
    trust: Trust | None = None

    @property
    def option(self) -> str:
        """The option that names the key, to repeat it in hints."""
        return f" --sign {quote(self.key)}"

    def with_trust(self, project: Project) -> Signer:
        """This signer, which does not sign again the manifests that identities of matrix.yaml have signed."""
        return replace(self, trust=Trust.of(project))

    def sign_manifest(
        self,
        repository: Repository,
        subject: Descriptor,
        annotations: Mapping[str, str] = {},
        statements: Mapping[str, bytes] = {},
    ) -> None:
        """Attaches statements, by kind, to a manifest, and signs it: only what is missing.

        With a key, cosign only signs: it would send 13 requests to attach a document, and lose what several jobs attach
        at the same time, with exit status 0. With KEYLESS, it also attaches. Raises SigningError, RegistryError.
        """
        digest, signed = subject.digest, dict[str, tuple[bytes, str]]()
        # cosign sends 5 requests to verify, so it looks only for what is listed.
        listed = self._listed_kinds(repository, digest)
        for kind, predicate in statements.items():
            uri = PREDICATE_TYPES.get(kind, kind)
            if not (uri in listed and self._has_statement(repository, digest, kind, json.loads(predicate))):
                signed[uri] = self._sign(repository, digest, f"--type={kind}", predicate=predicate)
        # Last: once a manifest has a statement of cosign 3, cosign 3 ignores the signatures of cosign 2.
        is_hidden = bool(signed) and self._makes_bundles
        outputs = self._made_before(repository, digest, "verify") if _SIGN_PREDICATE in listed and not is_hidden else []
        if not any(_signatures(printed, annotations) for printed in outputs):
            notes = [f"--annotations={name}={value}" for name, value in annotations.items()]
            signed[_SIGN_PREDICATE] = self._sign(repository, digest, *notes)
        if signed and self.key != KEYLESS:
            self._attach(repository, subject, signed)

    def _sign(self, repository: Repository, digest: str, *options: str, predicate: bytes = b"") -> tuple[bytes, str]:
        """Signs a manifest or a statement about it; returns the document, and its signature if that is not in it."""
        with TemporaryDirectory() as folder:
            path, signature, stated = (Path(folder) / name for name in ("document", "signature", "predicate.json"))
            stated.write_bytes(predicate)
            path.touch()
            signature.touch()
            if predicate:
                words, local = ["attest", f"--predicate={stated}"], ["--no-upload=true"]
            else:
                words, local = ["sign"], ["--upload=false"]
            if self.key == KEYLESS:
                local = []
            elif self._makes_bundles:
                local += [f"--bundle={path}"]
            elif not predicate:
                local += [f"--output-payload={path}", f"--output-signature={signature}"]
            printed = _cosign_manifest(repository, digest, *words, "--yes", *local, *self._options, *options)
            if self.key == KEYLESS:
                return b"", ""
            # cosign 2 prints a statement.
            content = printed.strip().encode() if predicate and not self._makes_bundles else path.read_bytes()
            text = signature.read_text(encoding="utf-8")
            with suppress(ValueError):
                json.loads(content)
                if text or predicate or self._makes_bundles:
                    return content, text
            raise SigningError(f"cosign {words[0]} made no signature", hint=f"Use another version: {RELEASES}")

    def _attach(self, repository: Repository, subject: Descriptor, signed: Mapping[str, tuple[bytes, str]]) -> None:
        """Attaches documents, by predicate type, as cosign does: bundles or, of cosign 2, layers under two tags."""
        if self._makes_bundles:
            with artifacts.attaching(repository, subject) as attachments:
                for uri, (bundle, _) in signed.items():
                    notes = {"dev.sigstore.bundle.content": "dsse-envelope", _BUNDLE_KIND: uri}
                    attachments.add(_BUNDLE_TYPE, {_BUNDLE_TYPE: bundle}, notes)
            return
        artifacts.put_documents(repository, [content for content, _ in signed.values()])
        lists = dict[str, dict[str, Any]]()
        for uri, (content, signature) in signed.items():
            is_signature = uri == _SIGN_PREDICATE
            suffix, media_type = (".sig", _PAYLOAD_TYPE) if is_signature else (".att", _ENVELOPE_TYPE)
            notes = {artifacts.SIGNATURE: signature} | ({} if is_signature else {"predicateType": uri})
            layer = Descriptor.of(content, media_type).as_data() | {"annotations": notes}
            tag = f"{fallback_tag(subject.digest)}{suffix}"
            lists.setdefault(tag, json.loads(oci.artifact(media_type, [])))["layers"].append(layer)
        artifacts.extend_lists(repository, subject.digest, lists)

    def _listed_kinds(self, repository: Repository, digest: str) -> set[str]:
        """The predicate types of the statements and signatures of a manifest, none of which is checked."""
        kinds = set[str]()
        for suffix in (".att", ".sig"):  # of cosign 2: a layer for each signature
            if stored := repository.manifest(f"{digest.replace(':', '-')}{suffix}"):
                name = f"list of {suffix} of {repository.name}@{digest}"
                layers = oci.parse_document(ManifestDocument, stored.content, name, hint="").layers
                kinds.update(layer.annotations.get("predicateType", _SIGN_PREDICATE) for layer in layers)
        if self.key == KEYLESS or self._is_cosign_3:
            bundles = artifacts.attached(repository, digest, _BUNDLE_TYPE).values()
            kinds.update(notes.get(_BUNDLE_KIND, "") for notes in bundles)
        return kinds

    def _has_statement(self, repository: Repository, digest: str, kind: str, predicate: Any) -> bool:
        """True if this signer made such a statement, for any commit."""
        outputs = self._made_before(repository, digest, "verify-attestation", f"--type={kind}")
        own = _without_commit(predicate)
        return any(_without_commit(other) == own for printed in outputs for other in _predicates(printed))

    def _made_before(self, repository: Repository, digest: str, command: str, *options: str) -> list[str]:
        """The outputs of cosign for signatures or statements of this key or, for KEYLESS, of trusted identities."""
        if self.key == KEYLESS:
            if self.trust is None:
                return []
            identities = replace(self.trust, signers=[signer for signer in self.trust.signers if signer.identity])
            return [printed for _, printed in _verified(identities, repository, digest, command, *options)]
        with TemporaryDirectory() as folder, suppress(CosignError):
            public = Path(folder) / "key.pub"
            public.write_text(self._public_key, encoding="utf-8")
            return [_cosign_manifest(repository, digest, command, f"--key={public}", _OFFLINE, *options)]
        return []

    @cached_property
    def _public_key(self) -> str:
        return run_cosign("public-key", f"--key={self.key}")

    @cached_property
    def _is_cosign_3(self) -> bool:
        # cosign 2.6 has the option, too, and signs as cosign 2.5 does.
        return "--use-signing-config=true" in run_cosign("sign", "--help")

    @property
    def _makes_bundles(self) -> bool:
        return self.key != KEYLESS and self._is_cosign_3

    @cached_property
    def _options(self) -> Sequence[str]:
        """The options that name the key. With a key, cosign uses no Sigstore service."""
        if self.key == KEYLESS:
            return []
        services = ["--use-signing-config=false"] if self._is_cosign_3 else []
        return [f"--key={self.key}", "--tlog-upload=false", *services]


def signer_of_manifest(
    repository: Repository, digest: str, annotations: Mapping[str, str], trust: Trust
) -> tuple[str, list[Mapping[str, str]]]:
    """The first trusted signer of a manifest with these annotations, and all annotations of each signature.

    Both are empty if there is no such signature. Raises SigningError, RegistryError.
    """
    for name, output in _verified(trust, repository, digest, "verify"):
        if signatures := _signatures(output, annotations):
            return name, signatures
    return "", []


def _verified(
    trust: Trust, repository: Repository, digest: str, command: str, *options: str
) -> Iterator[tuple[str, str]]:
    """Each trusted signer of a manifest or of its statements, with the output of cosign."""
    trust.check_keys()
    for signer in trust.signers:
        if signer.key:
            expected = [f"--key={trust.root / signer.key}", _OFFLINE]
        else:
            expected = [f"--certificate-identity={signer.identity}", f"--certificate-oidc-issuer={signer.issuer}"]
        with suppress(CosignError):
            yield signer.name, _cosign_manifest(repository, digest, command, *options, *expected)


def _signatures(output: str, annotations: Mapping[str, str]) -> list[Mapping[str, str]]:
    """The annotations of each verified signature that has these. cosign 3.0.0 to 3.0.2 do not compare them."""
    signatures = [payload.get("optional") or {} for payload in json.loads(output)]
    texts = [{str(name): str(value) for name, value in notes.items()} for notes in signatures]
    return [notes for notes in texts if annotations.items() <= notes.items()]


def has_signature(repository: Repository, digest: str) -> bool:
    """True if a manifest has a signature of cosign 2 or 3, which is not checked. Raises RegistryError, VerifyError."""
    return repository.digest_of(f"{digest.replace(':', '-')}.sig") is not None or bool(
        artifacts.attached(repository, digest, _BUNDLE_TYPE, {_BUNDLE_KIND: _SIGN_PREDICATE})
    )


def statements_of_image(repository: Repository, digest: str, kind: str, trust: Trust) -> list[bytes]:
    """The statements of one kind about an image that the first trusted signer made.

    Raises SigningError, RegistryError.
    """
    outputs = _verified(trust, repository, digest, "verify-attestation", f"--type={kind}")
    _, output = next(outputs, ("", ""))
    return [json.dumps(predicate).encode() for predicate in _predicates(output)]


def _predicates(output: str) -> list[Any]:
    """The predicates of the statements that cosign prints."""
    return [json.loads(base64.b64decode(json.loads(line)["payload"]))["predicate"] for line in output.splitlines()]


def _without_commit(predicate: Any) -> Any:
    """A predicate to compare: most commits do not change an image, so it needs no new statement for each of them."""
    try:
        definition = predicate["buildDefinition"]
        dependencies = definition["resolvedDependencies"]
        rest = [dependency for dependency in dependencies if "gitCommit" not in dependency.get("digest", {})]
        return definition["internalParameters"], rest, len(rest) == len(dependencies)
    except (KeyError, TypeError, AttributeError):
        return predicate


def _cosign_manifest(repository: Repository, digest: str, command: str, *options: str) -> str:
    """Runs cosign for a manifest in a registry, which it reaches as `registry` does; returns its output.

    Raises SigningError, RegistryError.
    """
    repository.check_stop()
    transport = repository.transport
    if transport.may_lose_tls and credentials(transport.registry):
        raise SigningError(
            f"{transport.registry}: cosign would send the login over plain http if TLS fails",
            hint="Use a name of the registry that is not a private address and does not end with .local or .localhost. "
            "Or log out, or allow plain http with `insecure` in matrix.yaml.",
        )
    with TemporaryDirectory() as folder:
        connection_options = ["--allow-http-registry"] if transport.is_plain else []
        if pem := transport.pem:
            path = Path(folder) / "ca.pem"
            path.write_bytes(pem)
            connection_options.append(f"--registry-cacert={path}")
        words = (command, *options, *connection_options, f"{repository.name}@{digest}")
        return repository.retry_program(lambda: run_cosign(*words), digest)


def run_cosign(*arguments: str) -> str:
    """Runs cosign; returns its output. Raises SigningError with its error, in which KEY stands for the key.

    It is a CosignError unless a request to a server, such as the registry, failed. Raises TransientError if the request
    may succeed at a later attempt.
    """
    if not shutil.which("cosign"):
        raise SigningError(
            "the program cosign is not installed", hint=f"Install it from {RELEASES}. See docs/publish.md."
        )
    environment = {"COSIGN_PASSWORD": "", **os.environ}  # without it, cosign would prompt for the password of a key
    try:
        result = subprocess.run(
            ["cosign", *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            encoding="utf-8", errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SigningError(f"cosign {arguments[0]}: {type(error).__name__}") from error
    if result.returncode < 0:
        raise SigningError(f"cosign {arguments[0]} was ended by signal {-result.returncode}")
    if result.returncode:
        # Without progress, warnings, and the repetition of the error.
        _, _, error_text = f"\n{result.stderr.partition(_REPETITION)[0]}".rpartition("\nError: ")
        reason = _QUERY.sub("", _SUBJECT.sub("", error_text.strip())) or "failed"
        for key in (word.removeprefix("--key=") for word in arguments if word.startswith("--key=")):
            reason = reason.replace(key, "KEY")
        message = f"cosign {arguments[0]}: {one_line(reason)}"
        if not _FAILED_REQUEST.search(reason):
            hint = "Set COSIGN_PASSWORD to the password of the key." if "decryption failed" in reason else ""
            raise CosignError(message, hint=hint)
        if _TRANSIENT.search(reason):
            raise TransientError(message, hint=RUN_AGAIN)
        if _DENIED.search(reason):
            hint = "Run `docker login` for this registry as a user with access, also to write if the command signs."
        elif IMMUTABLE.search(reason):
            hint = IMMUTABLE_HINT
        else:
            hint = "Check the connection to the registry and, without a key, to Sigstore. Then run this again."
        raise SigningError(message, hint=hint)
    return result.stdout
