"""The upload of one blob, in chunks, with recovery from failures.

Source: OCI distribution specification 1.1, "Pushing a blob in chunks".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, BinaryIO
from urllib.parse import urlencode

from builder.common.errors import FileError, of_file
from builder.registry.failures import RejectedError, TransientError
from builder.registry.http import Answer, Connection, Request

PIECE = 64 * 1024  # one write to a connection, which must complete within `connect_s`
# At most this much is lost with a connection, where the registry can resume. Some proxies end at 100 MB.
CHUNK = 64 * 1024 * 1024
# How a registry rejects chunks, or chunks of this size: ghcr.io accepts 4 MiB, Google's none at all.
NO_CHUNKS = (
    HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED,
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
)  # fmt: skip
UNKNOWN = ("BLOB_UPLOAD_UNKNOWN", "BLOB_UPLOAD_INVALID")  # codes: the upload is gone
# The registry's position differs from ours, or the upload is gone. docker-registry 2.8 returns 404 after half a chunk.
LOST = (HTTPStatus.NOT_FOUND, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a file as the body of a request, read while it is sent. `at` is called with the position reached."""

    file: BinaryIO
    start: int
    size: int
    at: Callable[[int], None]

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        position, end = self.start, self.start + self.size
        while position < end:
            try:
                piece = os.pread(self.file.fileno(), min(PIECE, end - position), position)
            except OSError as error:
                error.filename = self.file.name
                raise of_file(error) from error
            if not piece:
                raise FileError(f"file was truncated during the upload ({self.file.name})")
            position += len(piece)
            yield piece
            self.at(position)


@dataclass(kw_only=True)
class Upload:
    """One upload of a file as a blob; `action` is for messages.

    `sent` is called with the number of bytes gained, negative for bytes lost.
    """

    http: Connection
    action: str
    digest: str
    file: BinaryIO
    size: int
    sent: Callable[[int], None]
    _location: str = field(default="", repr=False)  # a credential
    _position: int = 0  # confirmed by the registry
    _reported: int = 0
    _has_failed: bool = False
    _is_resumed: bool = False

    def run(self) -> None:
        """Uploads the file. Raises RegistryError after too many failures without progress."""

        def attempt() -> None:
            try:
                # After a failure, check the registry first: the blob may have arrived although the response was lost.
                if not (self._has_failed and self._is_complete()):
                    self._send_rest()
            except TransientError:
                self._has_failed = True
                raise
            self._report(self.size)

        self.http.retry(attempt, progress=lambda: self._position)

    def _is_complete(self) -> bool:
        """True if the blob arrived despite a failure. If not, sets the position to resume at."""
        blob = self._send("HEAD", f"{self.http.url}/blobs/{self.digest}", expect=(200, 404, 405))
        if blob.status == HTTPStatus.OK:
            return True
        if self._location:
            try:
                answer = self._send("GET", self._location, expect=(200, 202, 204))
                position = parse_range(answer.headers.get("Range", ""))
                self._location = self.http.location(answer)
            except RejectedError:
                position = None
            if position is None or position > self.size:
                self._location, position = "", 0
            self._position = position
            self._is_resumed = position > 0
            self._report(position)
        return False

    def _send_rest(self) -> None:
        """Sends what the registry does not have. Raises TransientError if another attempt may help."""
        if not self._location:
            self._begin()
        while True:
            rest = self.size - self._position
            # The last chunk is sent with the end of the upload: some registries reject an end without a body.
            is_last = rest <= CHUNK or (self._position == 0 and self.http.rejects_chunks.is_set())
            size, url = rest if is_last else CHUNK, self._location
            headers = {"Content-Type": "application/octet-stream"}
            if size and not (is_last and self._position == 0):  # a blob in one request has no range
                headers["Content-Range"] = f"{self._position}-{self._position + size - 1}"
            body = Part(file=self.file, start=self._position, size=size, at=self._report) if size else None
            try:
                if is_last:
                    url += f"{'&' if '?' in url else '?'}{urlencode({'digest': self.digest})}"
                    commit_s = self.http.policy.commit_s
                    self._send("PUT", url, expect=(200, 201, 204), headers=headers, body=body, read_s=commit_s)
                    return
                answer = self._send("PATCH", url, expect=(202, 204), headers=headers, body=body)
            except RejectedError as error:
                if not is_last and not self._position and error.status in NO_CHUNKS and error.code not in UNKNOWN:
                    self.http.rejects_chunks.set()
                    self._begin()
                    continue
                if error.status in LOST or (self._is_resumed and error.status == HTTPStatus.BAD_REQUEST):
                    if self._is_resumed:  # the position that the registry gave was wrong: start again
                        self._location = ""
                    raise TransientError(str(error), hint=error.hint) from error
                raise
            self._location = self.http.location(answer)
            self._position += CHUNK

    def _begin(self) -> None:
        answer = self._send("POST", f"{self.http.url}/blobs/uploads/", expect=(202,))
        self._location = self.http.location(answer)
        self._position, self._is_resumed = 0, False
        self._report(0)

    def _send(self, method: str, url: str, **options: Any) -> Answer:
        return self.http.send_once(Request(action=self.action, method=method, url=url, **options))

    def _report(self, position: int) -> None:
        self.sent(position - self._reported)
        self._reported = position


def parse_range(header: str) -> int | None:
    """Bytes received by an upload's Range header; None for an invalid one. An upload without bytes has "0-0"."""
    if not header:
        return 0
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        return None
    return int(match[1]) + 1 if int(match[1]) else 0
