"""Documents attached to images in a registry: artifacts that name an image as their subject.

Registries without the referrers API list the artifacts of an image in an index under a tag. No registry can compare
and swap a tag, so a writer reads this index again after each change. Source: OCI distribution specification 1.1,
"Referrers Tag Schema"; OCI image specification 1.1, "Guidelines for Artifact Usage".
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from builder.common.errors import RegistryError, VerifyError
from builder.common.files import digest_of_bytes
from builder.layers import oci
from builder.layers.oci import (
    EMPTY,
    EMPTY_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    IndexDocument,
    Listed,
    Manifest,
    ManifestDocument,
)
from builder.registry.client import REFUSALS, Repository, fallback_tag
from builder.registry.failures import BLOB_UNKNOWN, RejectedError, TransientError

SUBJECT = "io.github.gpu-images.subject"  # the annotation with the digest of the image, in place of `subject`
CREATED = "org.opencontainers.image.created"  # the annotation with the time of an artifact
SIGNATURE = "dev.cosignproject.cosign/signature"  # the annotation of a layer with its signature
MOST_FILES = 16  # of an artifact
ATTEMPTS = 30  # to list artifacts while other writers replace a list; an attempt takes `confirm_s` of the registry
# Never "delete it": a registry may answer with the image itself, and deleting a manifest deletes all its tags.
_HINT = "Look for other tags of this manifest before you delete it: all its tags are deleted with it."


def artifact_manifest(
    kind: str, documents: Mapping[str, bytes], notes: Mapping[str, str] = {}, subject: Descriptor | None = None
) -> Manifest:
    """The manifest of an artifact of the type `kind`: documents by media type, and annotations."""
    files = [Descriptor.of(content, media_type) for media_type, content in documents.items()]
    return Manifest.of(oci.artifact(kind, files, notes, subject))


def put_artifact(repository: Repository, artifact: Manifest, contents: Iterable[bytes], source: str = "") -> None:
    """Stores an artifact, whose documents are `contents`, under its digest; `source` is as in `put_documents`."""
    put_documents(repository, contents, source)
    repository.put_manifest(artifact.digest, artifact.content, artifact.media_type)


def put_documents(repository: Repository, contents: Iterable[bytes], source: str = "") -> None:
    """Stores the blobs of an artifact. `source` is a repository of the same registry that may have them."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "document"
        for content in dict.fromkeys([EMPTY, *contents]):
            digest = digest_of_bytes(content)
            if not (digest in repository.known or (source and repository.mount(digest, source))):
                path.write_bytes(content)
                repository.upload(digest, path, len(content), lambda _: None)
            repository.known.add(digest)


@dataclass(frozen=True, kw_only=True)
class Attachments:
    """The artifacts to attach to one image. Each is stored immediately, and listed at the end of `attaching`.

    Those that were `listed` before are not stored again.
    """

    repository: Repository
    subject: Descriptor
    listed: Collection[str]
    _stored: list[Manifest] = field(default_factory=list, init=False)

    def add(self, kind: str, documents: Mapping[str, bytes], notes: Mapping[str, str] = {}) -> Manifest:
        """Adds an artifact, as in `artifact_manifest`; returns its manifest. Raises RegistryError."""
        return self._store(artifact_manifest(kind, documents, notes, self.subject), documents.values())

    def copy(self, source: Repository, artifact: str, mount: str = "") -> None:
        """Adds an artifact of the same image in another repository, `mount` if the registry can mount from there.

        Raises RegistryError, VerifyError.
        """
        stored = source.manifest(artifact)
        if stored is None:
            raise RegistryError(
                f"{source.name}: artifact {artifact} is missing",
                hint="Run this again when no other job writes to this registry.",
            )
        blobs = _parse(stored, f"{source.name}@{artifact}").layers
        self._store(stored, [source.read_blob(blob.digest) for blob in blobs], mount)

    def _store(self, artifact: Manifest, contents: Iterable[bytes], mount: str = "") -> Manifest:
        """Stores an artifact; returns its manifest, whose annotation SUBJECT names the image if there is no OCI 1.1."""
        # A clean-up of the registry may have deleted the artifact, which has no tag, and not the list, which has one.
        if artifact.digest in self.listed and self.repository.digest_of(artifact.digest):
            return artifact
        try:
            put_artifact(self.repository, artifact, contents, mount)
        except RejectedError as error:
            # Amazon ECR of 2025 answers 405 to a manifest with `subject`, other registries 400.
            data = json.loads(artifact.content)
            if error.status not in (400, 405) or error.code == BLOB_UNKNOWN or "subject" not in data:
                raise
            data["annotations"] = (data.get("annotations") or {}) | {SUBJECT: data.pop("subject")["digest"]}
            artifact = Manifest.of(json.dumps(data, separators=(",", ":"), sort_keys=True).encode())
            put_artifact(self.repository, artifact, contents, mount)
        self._stored.append(artifact)
        return artifact


@contextmanager
def attaching(repository: Repository, subject: Descriptor) -> Iterator[Attachments]:
    """Attaches the artifacts that the `with` block adds to the image, when the block exits.

    Re-attaching an artifact is a no-op. Lists all of them in one change: without the referrers API, each change needs a
    wait. Raises RegistryError if other writers keep replacing the list.
    """
    attachments = Attachments(
        repository=repository, subject=subject, listed=_all_entries(repository, subject.digest).keys()
    )
    yield attachments
    if attachments._stored:
        listed = _entries(repository, repository.referrers(subject.digest) or [])
        if unlisted := [artifact for artifact in attachments._stored if artifact.digest not in listed]:
            index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": list(map(_entry, unlisted))}
            extend_lists(repository, subject.digest, {fallback_tag(subject.digest): index})


def attached(
    repository: Repository, subject: str, artifact_type: str = "", annotations: Mapping[str, str] = {}
) -> dict[str, Mapping[str, str]]:
    """The annotations of the artifacts that are attached to an image, by digest, in the order of their list.

    Those of one type or of all, and with all of these annotations. Raises RegistryError, VerifyError.
    """
    matching: dict[str, Mapping[str, str]] = {}
    for entry in _all_entries(repository, subject).values():
        listed: Listed | ManifestDocument | None = entry
        # Some registries and clients list the configuration's type instead of the artifact's, or list no annotations.
        is_known = entry.artifact_type not in ("", EMPTY_TYPE)
        if artifact_type and not (is_known and (entry.annotations or entry.artifact_type != artifact_type)):
            listed = entry if is_known and not annotations else None
            with suppress(VerifyError, RejectedError):  # an attachment of another program
                listed = _manifest(repository, entry.digest) or listed
        if listed is None or artifact_type not in ("", listed.artifact_type):
            continue
        if annotations.items() <= (listed.annotations or {}).items():
            matching[entry.digest] = listed.annotations or {}
    return matching


def _all_entries(repository: Repository, subject: str) -> dict[str, Listed]:
    """The entries of both lists of artifacts: some registries answer every request for referrers with an empty one."""
    by_tag = json.dumps({"manifests": _listed_by_tag(repository, subject, fallback_tag(subject)) or []}).encode()
    return _entries(repository, [*(repository.referrers(subject) or []), by_tag])


def _entries(repository: Repository, pages: Iterable[bytes]) -> dict[str, Listed]:
    """The entries of a list of artifacts, in pages, by digest. Raises VerifyError."""
    name = f"list of artifacts in {repository.name}"
    documents = (oci.parse_document(IndexDocument, page, name, hint=_HINT) for page in pages)
    return {entry.digest: entry for document in documents for entry in document.manifests}


def entries(index: bytes, name: str) -> list[str]:
    """The digests that an index lists; `name` is for messages. Raises VerifyError."""
    return [entry.digest for entry in oci.parse_document(IndexDocument, index, f"index {name}", hint=_HINT).manifests]


def read_artifact(
    repository: Repository, reference: str, artifact_type: str, subject: str = ""
) -> dict[str, bytes] | None:
    """The documents of an artifact (a tag or a digest) by media type; None if there is no such artifact.

    Raises VerifyError for a manifest that is invalid, or has another type or subject; RegistryError.
    """
    artifact = _manifest(repository, reference)
    if artifact is None:
        return None
    if artifact.artifact_type != artifact_type:
        raise VerifyError(f"{repository.name}: artifact {reference} does not have the type {artifact_type}", hint=_HINT)
    actual = artifact.subject.digest if artifact.subject else (artifact.annotations or {}).get(SUBJECT, "")
    if subject != actual:
        raise VerifyError(
            f"{repository.name}: artifact {reference} is attached to {actual or 'nothing'}, "
            f"expected {subject or 'nothing'}",
            hint=_HINT,
        )
    return {blob.media_type: repository.read_blob(blob.digest) for blob in artifact.layers}


def _manifest(repository: Repository, reference: str) -> ManifestDocument | None:
    stored = repository.manifest(reference)
    return _parse(stored, f"{repository.name}:{reference}") if stored else None


def _parse(artifact: Manifest, name: str) -> ManifestDocument:
    """The document of an artifact's manifest; `name` is for messages. Raises VerifyError."""
    document = oci.parse_document(ManifestDocument, artifact.content, f"artifact {name}", hint=_HINT)
    if len(document.layers) > MOST_FILES:
        raise VerifyError(f"invalid artifact {name}: more than {MOST_FILES} files", hint=_HINT)
    return document


def _entry(artifact: Manifest) -> dict[str, Any]:
    """The entry of an artifact in a list."""
    data = _parse(artifact, artifact.digest)
    typed = {"artifactType": data.artifact_type, "annotations": data.annotations or {}}
    return Descriptor.of(artifact.content, MANIFEST_TYPE).as_data() | typed


def _listed_by_tag(
    repository: Repository, subject: str, tag: str, name: str = "manifests"
) -> list[dict[str, Any]] | None:
    """The entries of a list under a tag of the image, as they are: other programs' fields are kept.

    None if the registry answers with the image: GitLab takes `sha256-<hex>` for the digest, see
    oras-project/oras-go#1396.
    """
    stored = repository.manifest(tag)
    if stored is None:
        return []
    if stored.digest == subject:
        return None
    model = IndexDocument if name == "manifests" else ManifestDocument
    oci.parse_document(model, stored.content, f"list {repository.name}:{tag}", hint=_HINT)
    return list(json.loads(stored.content)[name])


def extend_lists(repository: Repository, subject: str, lists: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds the entries of `lists` to the lists under these tags of an image, until they stay there.

    A list is an index of artifacts or, as cosign 2 stores signatures, a manifest whose layers are the entries.
    """
    refusals, written = Counter[str](), set[str]()
    for _ in range(ATTEMPTS):
        # Registries have no locks: another writer may replace a list between our read and our write. Each attempt
        # adds the entries that the list lacks, to the list as it is then.
        is_complete = True
        for tag, added in lists.items():
            name = "manifests" if "manifests" in added else "layers"
            listed = _listed_by_tag(repository, subject, tag, name)
            if listed is None and tag in written:
                raise RegistryError(
                    f"{repository.name}: the registry has no referrers API, and returns the image itself for the tag "
                    f"{tag}: nothing can be attached to images",
                    hint="Use another registry for staging and releases, or a newer version of this one.",
                )
            present = set(map(_key, listed or ()))
            missing = [entry for entry in added[name] if _key(entry) not in present]
            if not missing:
                continue
            is_complete = False
            content = json.dumps({**added, name: [*(listed or ()), *missing]}, separators=(",", ":")).encode()
            try:
                repository.put_manifest_once(tag, content, added["mediaType"])
                written.add(tag)
            except TransientError:
                pass  # a repeated request would send the same list, which may be out of date by then: read it again
            except RejectedError as error:
                refusals[tag] += 1
                if error.code != BLOB_UNKNOWN or refusals[tag] == REFUSALS:
                    raise
        if is_complete:
            return
        time.sleep(repository.confirm_s * random.uniform(1, 1.25))  # noqa: S311  no secret depends on it
    raise RegistryError(
        f"{repository.name}: other writers keep replacing the list of artifacts attached to {subject}",
        hint="Run this again when no other job writes to this registry.",
    )


def _key(entry: Mapping[str, Any]) -> tuple[str, str]:
    """The digest of an entry and, as several keys may sign one document, its signature."""
    return entry["digest"], (entry.get("annotations") or {}).get(SIGNATURE, "")
