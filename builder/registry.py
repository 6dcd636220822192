"""One repository of one registry: blobs, manifests and tags.

Source: OCI distribution specification 1.1. Why no library does this: docs/decisions/0008-registry-client.md.
Plain http is for registries on this machine's own loopback; all others need https.
"""

from __future__ import annotations

import copy
import hashlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlencode

from builder import digest as digests
from builder import index
from builder.errors import RegistryError, of_file
from builder.host import Host
from builder.reference import ImageRef
from builder.registry_http import (
    PATIENT,
    SMALL,
    Answer,
    Connection,
    Patience,
    RefusedError,
    StoppedError,
    TransientError,
)
from builder.registry_upload import Upload

DOCKER_HUB = ("", "docker.io", "index.docker.io")
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest as the registry has it."""

    digest: str
    media_type: str
    content: bytes = field(repr=False)


class Registry:
    """One repository. Threads may share it."""

    def __init__(self, reference: ImageRef, *, host: Host, write: bool, patience: Patience = PATIENT) -> None:
        """Tag and digest of `reference` do not count. `write` asks for more rights than to read."""
        self.name = reference.name
        self._repository = reference.repository
        server, login = reference.registry.lower(), reference.registry
        if server in DOCKER_HUB:
            server, login = "registry-1.docker.io", "docker.io"
            if "/" not in self._repository:
                self._repository = f"library/{self._repository}"
        self._url = f"{'http' if index.is_loopback(server) else 'https'}://{server}/v2/{self._repository}"
        self._scope = f"repository:{self._repository}:{'pull,push' if write else 'pull'}"
        self._http = Connection(login, self._url, host, patience)
        self._refuses_chunks = threading.Event()

    def stoppable(self, stop: threading.Event) -> Registry:
        """The same registry, whose every method ends with StoppedError as soon as `stop` is set."""
        other = copy.copy(self)
        other._http = self._http.stoppable(stop)
        return other

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has a blob. The registry's word: it may be damaged there."""
        answer = self._http.ask(
            self._blob_words("looking for", digest), "HEAD", self._blob(digest), scope=self._scope, expect=(200, 404)
        )
        return answer.status == HTTPStatus.OK

    def mount(self, digest: str, source: str) -> bool:
        """Takes a blob over from another repository of this registry; False if that cannot be done."""
        if source == self._repository:
            return False
        what = f"{self._blob_words('taking over', digest)} from {source}"
        url = f"{self._uploads}?{urlencode({'mount': digest, 'from': source})}"
        try:
            answer = self._http.ask(
                what, "POST", url, scope=f"{self._scope} repository:{source}:pull", expect=(201, 202)
            )
        except RefusedError:
            return False  # no such repository, or not for this user: then the blob is uploaded
        if answer.status == HTTPStatus.ACCEPTED and "Location" in answer.headers:
            # It began an upload instead. That is given up, so that nothing is left on the registry.
            try:
                place = self._http.located(what, url, answer)
                self._http.once(what, "DELETE", place, scope=self._scope, expect=(200, 202, 204, 404))
            except (RefusedError, TransientError):
                pass  # the registry's own clean-up finds it
        return answer.status == HTTPStatus.CREATED

    def upload(self, digest: str, path: Path, size: int, sent: Callable[[int], None]) -> None:
        """Sends a file as a blob. `sent` hears how many bytes more got there, or fewer where some were lost."""
        try:
            with path.open("rb") as file:
                Upload(
                    self._http,
                    what=self._blob_words("uploading", digest),
                    url=self._uploads,
                    blob_url=self._blob(digest),
                    scope=self._scope,
                    refuses_chunks=self._refuses_chunks,
                    digest=digest,
                    file=file,
                    size=size,
                    sent=sent,
                ).run()
        except OSError as error:
            raise of_file(error) from error

    def read_blob(self, digest: str, *, limit: int = SMALL) -> bytes:
        """A small blob, hash-checked."""
        what = self._blob_words("reading", digest)
        answer = self._http.ask(what, "GET", self._blob(digest), scope=self._scope, expect=(200,), limit=limit)
        if digests.of_bytes(answer.body) != digest:
            raise self._damaged(what)
        return answer.body

    def fetch_blob(self, digest: str, size: int, into: BinaryIO) -> None:
        """Appends a blob to a file; raises when size or hash are not what they should be."""
        what, hasher, done, failures = self._blob_words("reading", digest), hashlib.sha256(), 0, 0
        while True:
            try:
                headers = {"Range": f"bytes={done}-"} if done else {}
                with self._http.opened(
                    what, "GET", self._blob(digest), scope=self._scope, expect=(200, 206), headers=headers
                ) as response:
                    # A registry may ignore that only the rest was asked for.
                    skip = done if response.status_code == HTTPStatus.OK else 0
                    for piece in self._http.pieces(what, response, size - done + skip):
                        fresh = piece[skip:]
                        skip -= len(piece) - len(fresh)
                        hasher.update(fresh)
                        into.write(fresh)
                        done += len(fresh)
                break
            except TransientError as error:
                if done == size:
                    break
                failures += 1
                self._http.pause(error, failures)
        if done != size or f"sha256:{hasher.hexdigest()}" != digest:
            raise self._damaged(what)

    def digest_of(self, reference: str) -> str | None:
        """The digest of the manifest that a tag (or digest) names, None if there is none."""
        return self._digest_of(reference, self._http.ask)

    def manifest(self, reference: str) -> Manifest | None:
        """The manifest that a tag (or digest) names, hash-checked, None if there is none."""
        return self._manifest(reference, self._http.ask)

    def put_manifest(self, reference: str, content: bytes, media_type: str) -> str:
        """Stores a manifest under a tag or its digest; its digest.

        The answer may be lost although it was stored, so the registry is asked before a failure is believed.
        """
        what, digest, failures = self._words("writing", reference), digests.of_bytes(content), 0
        while True:
            try:
                answer = self._http.once(
                    what, "PUT", f"{self._url}/manifests/{reference}", scope=self._scope, expect=(201,),
                    headers={"Content-Type": media_type}, body=content,
                )  # fmt: skip
            except StoppedError:
                raise
            except RegistryError as error:
                if self._has_arrived(reference, digest):
                    return digest
                if not isinstance(error, TransientError):
                    raise
                failures += 1
                self._http.pause(error, failures)
            else:
                if answer.headers.get("Docker-Content-Digest", digest) != digest:
                    raise RegistryError(
                        f"{self._http.registry}: {what}: the registry stored something else than it was sent"
                    )
                return digest

    def _has_arrived(self, reference: str, digest: str) -> bool:
        try:
            return self._digest_of(reference, self._http.once) == digest
        except StoppedError:
            raise
        except RegistryError:
            return False  # what went wrong first says more

    def _digest_of(self, reference: str, ask: Callable[..., Answer]) -> str | None:
        answer = self._read_manifest("HEAD", reference, ask)
        told = answer.headers.get("Docker-Content-Digest", "")
        if answer.status == HTTPStatus.NOT_FOUND or _DIGEST.fullmatch(told):
            return told if answer.status == HTTPStatus.OK else None
        found = self._manifest(reference, ask)  # the header is no duty of a registry
        return found.digest if found else None

    def _manifest(self, reference: str, ask: Callable[..., Answer]) -> Manifest | None:
        answer = self._read_manifest("GET", reference, ask)
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        found = digests.of_bytes(answer.body)
        named = reference if _DIGEST.fullmatch(reference) else answer.headers.get("Docker-Content-Digest", found)
        if found != named:
            raise self._damaged(self._words("reading", reference))
        media_type = answer.headers.get("Content-Type", "").split(";")[0].strip()
        return Manifest(digest=found, media_type=media_type, content=answer.body)

    def _read_manifest(self, method: str, reference: str, ask: Callable[..., Answer]) -> Answer:
        return ask(
            self._words("reading", reference), method, f"{self._url}/manifests/{reference}", scope=self._scope,
            expect=(200, 404), headers={"Accept": ", ".join(MANIFESTS)},
        )  # fmt: skip

    @property
    def _uploads(self) -> str:
        return f"{self._url}/blobs/uploads/"

    def _blob(self, digest: str) -> str:
        return f"{self._url}/blobs/{digest}"

    def _blob_words(self, verb: str, digest: str) -> str:
        return f"{verb} blob {digests.short(digest)} of {self._repository}"

    def _words(self, verb: str, reference: str) -> str:
        short = f"@{digests.short(reference)}" if _DIGEST.fullmatch(reference) else f":{reference}"
        return f"{verb} {self._repository}{short}"

    def _damaged(self, what: str) -> RegistryError:
        return RegistryError(
            f"{self._http.registry}: {what}: the registry serves other bytes than the digest says",
            hint="It is damaged there: delete it on the registry, and push again.",
        )
