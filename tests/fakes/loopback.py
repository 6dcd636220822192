"""An HTTP server on the loopback, for the fakes of indexes, archives and registries."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

STALL_S = 300  # longer than any test, so that a stalled client is freed by nothing but the test


class Loopback:
    """Subclasses answer requests. `stalled` is set as soon as a request waits for `heal`."""

    def __init__(self) -> None:
        self._server = _Server(("127.0.0.1", 0), partial(Request, self))
        self.stalled, self._released = threading.Event(), threading.Event()

    def answer(self, request: Request) -> None:
        """Called for each request, in a thread of its connection."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @contextmanager
    def serving(self) -> Iterator[Self]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.heal()
            self._server.shutdown()
            self._server.server_close()
            thread.join(10)

    def heal(self) -> None:
        """Ends waiting requests. Subclasses remove their faults."""
        self._released.set()
        self.stalled, self._released = threading.Event(), threading.Event()

    def stall(self, request: Request) -> None:
        """Waits for `heal`, then closes the connection."""
        released = self._released
        self.stalled.set()
        released.wait(STALL_S)
        request.close_connection = True


class Request(BaseHTTPRequestHandler):
    """A request, whose method is `command`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body may wait 40 ms for the acknowledgement of the headers

    def __init__(self, loopback: Loopback, *connection: Any) -> None:
        self._loopback = loopback
        super().__init__(*connection)

    def do_GET(self) -> None:
        self._loopback.answer(self)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815  the names are the base class's

    def reply(self, status: int, body: bytes = b"", headers: Iterable[tuple[str, str]] = ()) -> None:
        """Sends the response."""
        self.send_response_only(status)
        names = set()
        for name, value in headers:
            self.send_header(name, value)
            names.add(name.lower())
        if "content-length" not in names and status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignores errors: tests kill clients on purpose."""
