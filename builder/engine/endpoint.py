"""Serves one image to Docker Engine: a read-only registry on loopback that runs while the engine pulls from it.

Another user of this machine may reach the port. The name of the repository is a secret, and only the blobs of this
image are served; the engine checks their digests. Source: OCI distribution specification, "Pull".
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Self

from builder.common.errors import DamagedError

POLL_S = 0.02  # until `serve_forever` detects a shutdown; its default of 0.5 s would delay each load
SILENCE_S = 600  # the engine reads nothing while its disk is busy
_TLS = b"\x16"  # first byte of a TLS connection, which engines try before plain HTTP
_NOT_TLS = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_PATH = re.compile(r"/v2/([0-9a-f]+)/image/(manifests|blobs)/(sha256:[0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Content:
    """A manifest or blob of `size` bytes; `read` returns its bytes."""

    media_type: str
    size: int
    read: Callable[[], Iterator[bytes]]

    @classmethod
    def of(cls, data: bytes, media_type: str) -> Content:
        return cls(media_type=media_type, size=len(data), read=lambda: iter([data]))


class Endpoint:
    """Serves `contents`, by digest, while the block runs.

    `is_used`: an engine requested a blob. `is_broken`: one of the contents could not be read.
    """

    def __init__(self, contents: Mapping[str, Content]) -> None:
        self._contents = contents
        self._secret = secrets.token_hex(16)  # 128 bits: any user of this machine can open the port
        self.is_used = self.is_broken = False
        self._server = _Server(partial(_Handler, self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def reference(self, manifest: str) -> str:
        """The name by which an engine pulls the image with this manifest."""
        return f"127.0.0.1:{self.port}/{self._secret}/image@{manifest}"

    def find(self, path: str) -> tuple[str, Content] | None:
        """Digest and content of a path; None without the secret, and for what is not of this image."""
        match = _PATH.fullmatch(path)
        if not match or not secrets.compare_digest(match[1], self._secret):
            return None
        content = self._contents.get(match[3])
        self.is_used |= match[2] == "blobs" and content is not None
        return (match[3], content) if content else None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingTCPServer):
    """Not http.server's own server, which looks up this machine's name: that may take seconds."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: the engine reports what it could not read."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SILENCE_S
    disable_nagle_algorithm = True  # otherwise a body waits 40 ms until the client acknowledges its headers

    def __init__(self, endpoint: Endpoint, *connection: Any) -> None:
        self._endpoint = endpoint
        super().__init__(*connection)

    def handle_one_request(self) -> None:
        try:
            if self.rfile.peek(1)[:1] == _TLS:  # type: ignore[attr-defined]  # it is buffered
                self.wfile.write(_NOT_TLS)
                self.close_connection = True
            else:
                super().handle_one_request()
        except OSError:  # the client closed the connection, or was silent for too long
            self.close_connection = True

    def do_GET(self) -> None:
        if self.path == "/v2/":
            self._answer(HTTPStatus.OK, {"Content-Length": "0", "Docker-Distribution-Api-Version": "registry/2.0"})
            return
        found = self._endpoint.find(self.path)
        if not found:
            self._answer(HTTPStatus.NOT_FOUND, {"Content-Length": "0"})
            return
        digest, content = found
        # Without ranges: on the loopback, no connection is lost, and an engine that tries again starts over.
        headers = {"Content-Type": content.media_type, "Docker-Content-Digest": digest}
        self._answer(HTTPStatus.OK, {**headers, "Content-Length": str(content.size)})
        left = content.size if self.command == "GET" else 0  # HEAD: the headers only
        chunks = content.read()
        while left:
            try:
                chunk = next(chunks, b"")
            except (DamagedError, OSError):
                chunk = b""
            if not chunk:  # the end, or it cannot be read: the response is cut off, so that the engine detects it
                self._endpoint.is_broken = self.close_connection = True
                return
            self.wfile.write(chunk[:left])
            left -= min(left, len(chunk))

    do_HEAD = do_GET  # noqa: N815  http.server finds methods by these names

    def _answer(self, status: HTTPStatus, headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses invalid requests and other methods, without the text that http.server would send."""
        self.close_connection = True  # the body of the request is not read
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._answer(HTTPStatus.METHOD_NOT_ALLOWED, {"Content-Length": "0", "Allow": "GET, HEAD"})
        else:
            self._answer(HTTPStatus(code), {"Content-Length": "0"})

    def log_message(self, *_: object) -> None:
        """Prints nothing."""
