"""The upload of one blob, in chunks, through whatever happens to it.

Source: OCI distribution specification 1.1, "Pushing a blob in chunks".
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, BinaryIO
from urllib.parse import urlencode

from builder.errors import FileError, of_file
from builder.registry_http import Answer, Connection, RefusedError, TransientError

PIECE = 64 * 1024  # one write to a connection; it has `connect_s` to get away
# So much is lost at most when a connection breaks, where the registry can resume. Some proxies end at 100 MB.
CHUNK = 64 * 1024 * 1024
# How a registry says that it takes no chunks, or none so large: ghcr.io takes 4 MiB, Google's none at all.
NO_CHUNKS = (HTTPStatus.BAD_REQUEST, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
# The upload is not where we think it is, or is gone. docker-registry 2.8 says 404 where it has half a chunk.
LOST = (HTTPStatus.NOT_FOUND, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a file as the body of a request; read while it is sent. `at` hears how far into the file it got."""

    file: BinaryIO
    start: int
    size: int
    at: Callable[[int], None]

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        place, end = self.start, self.start + self.size
        while place < end:
            try:
                piece = os.pread(self.file.fileno(), min(PIECE, end - place), place)
            except OSError as error:
                error.filename = self.file.name
                raise of_file(error) from error
            if not piece:
                raise FileError(f"it became shorter while it was sent ({self.file.name})")
            place += len(piece)
            yield piece
            self.at(place)


class Upload:
    """`url` is where uploads begin, `blob_url` where the blob will be. `sent` hears of bytes gained, or lost."""

    def __init__(
        self,
        http: Connection,
        *,
        what: str,
        url: str,
        blob_url: str,
        scope: str,
        refuses_chunks: threading.Event,
        digest: str,
        file: BinaryIO,
        size: int,
        sent: Callable[[int], None],
    ) -> None:
        self._http = http
        self._what = what
        self._url = url
        self._blob_url = blob_url
        self._scope = scope
        self._refuses_chunks = refuses_chunks
        self._digest = digest
        self._file = file
        self._size = size
        self._sent = sent
        self._location = ""
        self._position = 0  # what the registry has confirmed
        self._told = 0
        self._resumed = False

    def run(self) -> None:
        """Gives up after too many failures without a byte more confirmed than ever before."""
        failures = best = 0
        while True:
            try:
                if not (failures and self._is_there()):
                    self._go_on()
                self._at(self._size)
                return
            except TransientError as error:
                if self._position > best:
                    best, failures = self._position, 0
                failures += 1
                self._http.pause(error, failures)

    def _is_there(self) -> bool:
        """After a failure: whether the blob arrived all the same; if not, from where to go on."""
        found = self._ask("HEAD", self._blob_url, expect=(200, 404))
        if found.status == HTTPStatus.OK:
            return True
        if self._location:
            try:
                answer = self._ask("GET", self._location, expect=(200, 202, 204))
                position = parse_range(answer.headers.get("Range", ""))
                self._location = self._http.located(self._what, self._location, answer)
            except RefusedError:
                position = None
            if position is None or position > self._size:
                self._location, position = "", 0
            self._position = position
            self._resumed = position > 0
            self._at(position)
        return False

    def _go_on(self) -> None:
        if not self._location:
            self._begin()
        while self._size - self._position > CHUNK and (self._position or not self._refuses_chunks.is_set()):
            try:
                answer = self._send("PATCH", self._location, CHUNK, expect=(202, 204))
            except RefusedError as error:
                if self._position or error.status not in NO_CHUNKS:
                    raise self._judged(error) from error
                self._refuses_chunks.set()
                self._begin()
            else:
                self._location = self._http.located(self._what, self._location, answer)
                self._position += CHUNK
        # The last piece, or all there is, comes with the end: not every registry takes an end without a body.
        mark = "&" if "?" in self._location else "?"
        end = f"{self._location}{mark}{urlencode({'digest': self._digest})}"
        try:
            self._send("PUT", end, self._size - self._position, expect=(201, 204))
        except RefusedError as error:
            raise self._judged(error) from error

    def _begin(self) -> None:
        answer = self._ask("POST", self._url, expect=(202,))
        self._location = self._http.located(self._what, self._url, answer)
        self._position, self._resumed = 0, False
        self._at(0)

    def _judged(self, error: RefusedError) -> Exception:
        """What a refusal means for the whole upload: try again from the start, or the end."""
        if error.status in LOST or (self._resumed and error.status == HTTPStatus.BAD_REQUEST):
            if self._resumed:  # the registry's word of what it had is not good
                self._location = ""
            return TransientError(str(error), hint=error.hint)
        return error

    def _send(self, method: str, url: str, size: int, *, expect: tuple[int, ...]) -> Answer:
        headers = {"Content-Type": "application/octet-stream"}
        if method == "PATCH" or self._position:
            headers["Content-Range"] = f"{self._position}-{self._position + size - 1}"
        part = Part(file=self._file, start=self._position, size=size, at=self._at)
        silence_s = self._http.patience.commit_s if method == "PUT" else 0
        return self._ask(method, url, expect=expect, headers=headers, body=part if size else None, silence_s=silence_s)

    def _ask(self, method: str, url: str, **options: Any) -> Answer:
        return self._http.once(self._what, method, url, scope=self._scope, **options)

    def _at(self, position: int) -> None:
        self._sent(position - self._told)
        self._told = position


def parse_range(header: str) -> int | None:
    """How many bytes an upload has by its Range header; None if that makes no sense. An empty one says "0-0"."""
    if not header:
        return 0
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        return None
    return int(match[1]) + 1 if int(match[1]) else 0
