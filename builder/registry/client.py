"""One repository of one registry: blobs, manifests and tags.

Source: OCI distribution specification 1.1. docs/decisions/0008-registry-client.md has the reasons for not using a
library. `builder.registry.transport` chooses plain http or TLS.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlencode

from builder.common.errors import FileError, RegistryError, of_file
from builder.common.files import digest_of_bytes, is_digest, short_digest
from builder.common.http import PIECE, Download
from builder.common.reference import ImageRef
from builder.common.tasks import RetryPolicy
from builder.index.host import Host
from builder.layers import oci
from builder.layers.oci import Manifest
from builder.registry.failures import BLOB_UNKNOWN, RejectedError, StoppedError, TransientError
from builder.registry.http import DEFAULT_POLICY, Answer, Connection, Request
from builder.registry.transport import Transport

DOCKER_HUB = ("", "docker.io", "index.docker.io")
# Answers of registries, and of proxies in front of them, that do not have the referrers API.
NO_REFERRERS = (
    HTTPStatus.MOVED_PERMANENTLY, HTTPStatus.FOUND, HTTPStatus.SEE_OTHER, HTTPStatus.TEMPORARY_REDIRECT,
    HTTPStatus.PERMANENT_REDIRECT, HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED,
)  # fmt: skip
STORED = (HTTPStatus.CREATED, HTTPStatus.OK)  # the specification: 201
WRITE_BYTES = 64 * 1024  # of an upload, in one write to a connection, which must complete within `connect_s`
PAGES = 100  # of a list, at most: a registry may name a next page without end
PROGRAM_DELAY_S = 8.0
# docker-registry refuses some manifests while another client uploads one of their blobs again, such as the empty blob
# of all artifacts: 347 of 8,245, measured with two clients of each kind. Likewise an index, while another client
# writes one of its manifests again.
REFUSALS = 4
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
INDEXES = (MANIFESTS[1], MANIFESTS[3])  # of images for several platforms, and of attachments
_ACCEPT = {"Accept": ", ".join(MANIFESTS)}


def fallback_tag(digest: str) -> str:
    """The tag of the index that lists the artifacts of an image in a registry without the referrers API."""
    return digest.replace(":", "-")


class Repository:
    """One repository. Threads may share it.

    `confirm_s` are the seconds until a list or a tag that was just written is read again: longer than another writer
    takes between reading and replacing it. `transfers` is the number of blobs that are sent or downloaded at a time.
    `known` has the digests of the blobs that the repository is known to have: this run saw or sent them. Manifests and
    blobs that were read by digest are kept in memory, because a digest always names the same bytes.
    """

    confirm_s = 1.0
    transfers = 4

    def __init__(self, reference: ImageRef, *, host: Host, write: bool, policy: RetryPolicy = DEFAULT_POLICY) -> None:
        """Ignores tag and digest of `reference`. `write` requests permission to push."""
        self.name = reference.name
        self._repository = reference.repository
        server, login = reference.registry.lower(), reference.registry
        if server in DOCKER_HUB:
            server, login = "registry-1.docker.io", "docker.io"
            if "/" not in self._repository:
                self._repository = f"library/{self._repository}"
        self.transport = Transport.of(login, host)
        url = f"{'http' if self.transport.is_plain else 'https'}://{server}/v2/{self._repository}"
        scope = f"repository:{self._repository}:{'pull,push' if write else 'pull'}"
        self._http = Connection(url, scope, self.transport, policy)
        self.known: set[str] = set()
        self._manifests: dict[str, Manifest] = {}
        self._blobs: dict[str, bytes] = {}
        self._has_no_referrers = threading.Event()

    def stoppable(self, stop: threading.Event) -> Repository:
        """The same registry, whose methods raise StoppedError as soon as `stop` is set."""
        other = copy.copy(self)
        other._http = self._http.stoppable(stop)
        return other

    def check_stop(self) -> None:
        """Raises StoppedError if the event of `stoppable` is set."""
        self._http.check_stop()

    def retry_program(self, run: Callable[[], str], digest: str) -> str:
        """Runs a program that works on a manifest of this repository, again after each TransientError of `run`.

        A program does not print the header Retry-After. So this client sends a request before the next attempt: the
        request waits as long as the registry asks for, and the attempts end if the registry does not answer at all.
        Raises RegistryError.
        """
        # More attempts than for one request: `cosign attest` without a key sends 14 requests, and a single 429 ends it.
        patient = copy.copy(self._http)
        patient.policy = replace(patient.policy, retries=4 * patient.policy.retries, longest_delay_s=PROGRAM_DELAY_S)

        def attempt() -> str:
            try:
                return run()
            except TransientError:
                self.digest_of(digest)
                raise

        return patient.retry(attempt)

    def has_blob(self, digest: str) -> bool:
        """True if the registry reports a blob of the repository. Its content is not checked."""
        return self._http.send(self._blob_head(digest)).status == HTTPStatus.OK

    def mount(self, digest: str, source: str) -> bool:
        """Mounts a blob from another repository of this registry; False if the registry cannot."""
        if source == self._repository:
            return False
        request = Request(
            action=f"{self._blob_action('mounting', digest)} from {source}",
            method="POST",
            url=f"{self._http.url}/blobs/uploads/?{urlencode({'mount': digest, 'from': source})}",
            scope=f"{self._http.scope} repository:{source}:pull",
            expect=(201, 202),
        )
        try:  # a registry that cannot mount begins an upload without data, and removes it later
            return self._http.send(request).status == HTTPStatus.CREATED
        except RejectedError:
            return False  # no such repository, or no permission to read it: the blob is uploaded instead

    def upload(self, digest: str, path: Path, size: int, sent: Callable[[int], None]) -> None:
        """Uploads a file as a blob, in one request: all of it again after a failure.

        Calls `sent` with the number of bytes gained, negative for bytes lost.
        """
        action, reported, is_repeated = self._blob_action("uploading", digest), 0, False

        def report(position: int) -> None:
            nonlocal reported
            self.check_stop()
            sent(position - reported)
            reported = position

        def upload() -> None:
            nonlocal is_repeated
            # After a failure, look first: the blob may have arrived although the response was lost.
            if is_repeated and self._http.send_once(self._blob_head(digest)).status == HTTPStatus.OK:
                return
            is_repeated = True
            report(0)
            begin = Request(action=action, method="POST", url=f"{self._http.url}/blobs/uploads/", expect=(202,))
            url = self._http.location(self._http.send_once(begin))
            put = Request(
                action=action,
                method="PUT",
                url=f"{url}{'&' if '?' in url else '?'}{urlencode({'digest': digest})}",
                expect=(200, 201, 204),
                headers={"Content-Type": "application/octet-stream"},
                body=_FileBody(file=file, size=size, at=report) if size else None,
                read_s=self._http.policy.commit_s,
            )
            try:
                self._http.send_once(put)
            except RejectedError as error:
                if error.status in (404, 416):  # a registry that was started again does not know the upload
                    raise TransientError(str(error), hint=error.hint) from error
                raise

        try:
            with path.open("rb") as file:
                self._http.retry(upload)
        except OSError as error:
            raise of_file(error) from error
        report(size)

    def read_blob(self, digest: str) -> bytes:
        """A blob of at most 4 MiB, hash-checked."""
        if digest not in self._blobs:
            answer = self._http.send(self._blob_request("GET", "reading", digest, (200,)))
            if digest_of_bytes(answer.body) != digest:
                raise self._damaged(answer.request.action)
            self._blobs[digest] = answer.body
        return self._blobs[digest]

    def read_range(self, digest: str, start: int, end: int) -> bytes:
        """The bytes of a blob from `start` to before `end`, which are not checked.

        Raises RejectedError if the registry would send the whole blob instead.
        """
        headers = {"Range": f"bytes={start}-{end - 1}"}
        request = self._blob_request("GET", "reading a part of", digest, (200, 206), headers=headers)

        def read() -> bytes:
            with self._http.open(request) as response:
                if response.status_code == HTTPStatus.OK:
                    raise RejectedError(f"{self._http.registry}: {request.action}: range requests are not supported")
                return b"".join(self._http.pieces(request.action, response, end - start))

        return self._http.retry(read)

    def download(self, digest: str, size: int, out: BinaryIO, read: Callable[[int], None]) -> None:
        """Writes a blob to `out`. Calls `read` with the number of bytes gained, negative for bytes lost.

        Raises RegistryError for a missing blob, and for one that does not match digest and size: discard `out` then.
        """
        part = Download(out, read)

        def download() -> None:
            if part.size >= size:
                return  # the connection was lost after the last byte
            request = self._blob_request("GET", "reading", digest, (200, 206), headers=part.headers)
            with self._http.open(request) as response:
                part.receive(response.status_code, self._http.pieces(request.action, response), size)

        self._http.retry(download, progress=lambda: part.size // PIECE)
        if part.size != size or f"sha256:{part.sha256}" != digest:
            raise self._damaged(self._blob_action("reading", digest))

    def referrers(self, digest: str) -> list[bytes] | None:
        """The index, in pages, of the artifacts that refer to a manifest; None if the registry has no such API.

        Source: OCI distribution specification 1.1, "Listing Referrers".
        """
        action, path = f"listing what refers to {short_digest(digest)}", f"/referrers/{digest}"
        if self._has_no_referrers.is_set():
            return None
        pages = self._pages(action, path, (200, *NO_REFERRERS), stays=True)
        # Some registries answer every unknown address with their web page.
        if pages[0].status == HTTPStatus.OK and "html" not in pages[0].headers.get("Content-Type", ""):
            return [page.body for page in pages]
        if self.digest_of(digest):  # of an image that does not exist, the answer says nothing about the registry
            self._has_no_referrers.set()
        return None

    def list_tags(self) -> list[str]:
        """All tags; none for a repository that does not exist. Raises RegistryError for an invalid answer."""
        names: list[str] = []
        for page in self._pages(f"listing the tags of {self._repository}", "/tags/list?n=1000", (200, 404)):
            if page.status == HTTPStatus.OK:
                try:
                    names += [str(tag) for tag in json.loads(page.body)["tags"] or ()]
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise RegistryError(f"{self._http.registry}: {page.request.action}: invalid answer") from error
        return names

    def _pages(self, action: str, path: str, expect: tuple[int, ...], *, stays: bool = False) -> list[Answer]:
        """A list, as the pages that the registry answers with; `stays` is as in `Request`."""
        pages: list[Answer] = []
        url = f"{self._http.url}{path}"
        while url and len(pages) < PAGES:
            answer = self._http.send(Request(action=action, method="GET", url=url, expect=expect, stays=stays))
            pages.append(answer)
            url = self._http.next_page(answer)
        if url:
            raise RegistryError(f"{self._http.registry}: {action}: the list has more than {PAGES} pages")
        return pages

    def digest_of(self, reference: str) -> str | None:
        """The digest of the manifest of a tag (or digest); None if there is no such manifest."""
        return self._digest_of(reference, self._http.send)

    def manifest(self, reference: str) -> Manifest | None:
        """The manifest of a tag (or digest), hash-checked; None if there is no such manifest."""
        manifest = self._manifests.get(reference) or self._manifest(reference, self._http.send)
        if manifest and is_digest(reference):
            self._manifests[reference] = manifest
        return manifest

    def image_manifest(self, reference: str, arch: str) -> Manifest | None:
        """The manifest of the image for an architecture that a tag (or digest) names: of an index, its entry.

        None if there is no such manifest. One that is no index may be for another architecture. Raises VerifyError.
        """
        manifest = self.manifest(reference)
        if manifest is None or manifest.media_type not in INDEXES:
            return manifest
        entry = oci.read_platforms(manifest.content).get(arch)
        return self.manifest(entry) if entry else None

    def delete_manifest(self, digest: str) -> bool:
        """Deletes a manifest by its digest, and with it every tag that names it; False if there is none.

        Raises RegistryError: many registries do not allow it, see docs/registries.md.
        """
        self._manifests.pop(digest, None)
        scope = f"{self._http.scope},delete"
        request = self._manifest_request("DELETE", "deleting", digest, (200, 202, 404), scope=scope)
        return self._http.send(request).status != HTTPStatus.NOT_FOUND

    def put_manifest_once(self, reference: str, content: bytes, media_type: str) -> None:
        """Stores a manifest without another attempt after a failure. Raises TransientError."""
        options = {"headers": {"Content-Type": media_type}, "body": content}
        self._http.send_once(self._manifest_request("PUT", "writing", reference, STORED, **options))

    def put_manifest(self, reference: str, content: bytes, media_type: str) -> str:
        """Stores a manifest under a tag or its digest; returns its digest.

        The response may be lost although the manifest was stored, so each retry first reads the digest back.
        """
        digest = digest_of_bytes(content)
        options = {"headers": {"Content-Type": media_type}, "body": content}
        request = self._manifest_request("PUT", "writing", reference, STORED, **options)
        refusals = count(1)

        def put() -> str:
            try:
                return self._http.send_once(request).headers.get("Docker-Content-Digest", digest)
            except StoppedError:
                raise
            except RegistryError as error:
                # Not only after a lost connection: a proxy may answer with an error although the request arrived.
                with suppress(RegistryError):  # the first error is the one to report
                    if self._digest_of(reference, self._http.send_once) == digest:
                        return digest
                if isinstance(error, RejectedError) and error.code == BLOB_UNKNOWN and next(refusals) < REFUSALS:
                    raise TransientError(str(error)) from error
                raise

        if self._http.retry(put) != digest:
            raise RegistryError(f"{self._http.registry}: {request.action}: the registry stored different content")
        return digest

    def _digest_of(self, reference: str, send: Callable[[Request], Answer]) -> str | None:
        answer = send(self._manifest_request("HEAD", "reading", reference, (200, 404), headers=_ACCEPT))
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        digest = answer.headers.get("Docker-Content-Digest", "")
        if is_digest(digest):
            return digest
        manifest = self._manifest(reference, send)  # the header is optional
        return manifest.digest if manifest else None

    def _manifest(self, reference: str, send: Callable[[Request], Answer]) -> Manifest | None:
        answer = send(self._manifest_request("GET", "reading", reference, (200, 404), headers=_ACCEPT))
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        media_type = answer.headers.get("Content-Type", "").split(";")[0].strip()
        manifest = Manifest.of(answer.body, media_type)
        header = answer.headers.get("Docker-Content-Digest", manifest.digest)
        if manifest.digest != (reference if is_digest(reference) else header):
            raise self._damaged(answer.request.action)
        return manifest

    def _manifest_request(
        self, method: str, verb: str, reference: str, expect: tuple[int, ...], **options: Any
    ) -> Request:
        name = f"@{short_digest(reference)}" if is_digest(reference) else f":{reference}"
        action, url = f"{verb} {self._repository}{name}", f"{self._http.url}/manifests/{reference}"
        return Request(action=action, method=method, url=url, expect=expect, **options)

    def _blob_request(self, method: str, verb: str, digest: str, expect: tuple[int, ...], **options: Any) -> Request:
        action, url = self._blob_action(verb, digest), f"{self._http.url}/blobs/{digest}"
        return Request(action=action, method=method, url=url, expect=expect, **options)

    def _blob_head(self, digest: str) -> Request:
        return self._blob_request("HEAD", "checking", digest, (200, 404))

    def _blob_action(self, verb: str, digest: str) -> str:
        return f"{verb} blob {short_digest(digest)} of {self._repository}"

    def _damaged(self, action: str) -> RejectedError:
        return RejectedError(
            f"{self._http.registry}: {action}: content does not match its digest",
            hint="Remove it from the registry's storage, then push again: a push does not replace damaged data.",
        )


@dataclass(frozen=True, kw_only=True)
class _FileBody:
    """A file as the body of a request. `at` is called with the position reached."""

    file: BinaryIO
    size: int
    at: Callable[[int], None]

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        position = 0
        while position < self.size:
            try:
                piece = os.pread(self.file.fileno(), min(WRITE_BYTES, self.size - position), position)
            except OSError as error:
                error.filename = self.file.name
                raise of_file(error) from error
            if not piece:
                raise FileError(f"file was truncated during the upload ({self.file.name})")
            position += len(piece)
            yield piece
            self.at(position)
