"""A package index on the loopback (PEP 503) that misbehaves where it is told to."""

from __future__ import annotations

import html
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

from tests.integration.wheels import Distribution

STALL_S = 300  # longer than any test, so that a stalled client is freed by nothing but the test


class Fault(Enum):
    """What goes wrong with a project: with its page, or with its files."""

    PAGE_404 = auto()
    PAGE_500 = auto()
    PAGE_STALLS = auto()
    FILE_404 = auto()
    FILE_500 = auto()
    FILE_STALLS = auto()
    FILE_TRUNCATED = auto()
    FILE_HAS_OTHER_BYTES = auto()


class Index:
    """Files by project; `faults` by project. Safe to change while it serves."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, Distribution]] = {}
        self._yanked: dict[str, str] = {}
        self.faults: dict[str, Fault] = {}
        self.stalled = threading.Event()
        self.released = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.index = self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.address}/simple/"

    @contextmanager
    def serving(self) -> Iterator[Index]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.heal()
            self._server.shutdown()
            self._server.server_close()
            thread.join(10)

    def publish(self, *distributions: Distribution, yanked: str = "") -> None:
        for one in distributions:
            self._files.setdefault(one.project, {})[one.file] = one
            if yanked:
                self._yanked[one.file] = yanked

    def withdraw(self, project: str, version: str) -> None:
        """As if this version had never been published."""
        files = self._files[project]
        for file in [file for file in files if f"-{version}" in file]:
            del files[file]
            self._yanked.pop(file, None)

    def heal(self) -> None:
        """No faults any more; whoever waits is sent away."""
        self.faults.clear()
        self.released.set()
        self.released, self.stalled = threading.Event(), threading.Event()

    def page(self, project: str) -> str | None:
        if project not in self._files:
            return None
        links = []
        for one in self._files[project].values():
            yanked = f' data-yanked="{html.escape(self._yanked[one.file])}"' if one.file in self._yanked else ""
            links.append(f'<a href="/files/{project}/{one.file}#sha256={one.sha256}"{yanked}>{one.file}</a><br>\n')
        return f"<!DOCTYPE html><html><body>\n{''.join(links)}</body></html>\n"

    def content(self, project: str, file: str) -> bytes | None:
        found = self._files.get(project, {}).get(file)
        return found.content if found else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    index: Index

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed in the middle is what the tests do."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        index = cast("_Server", self.server).index
        kind, _, rest = self.path.strip("/").partition("/")
        project, _, file = rest.partition("/")
        fault = index.faults.get(project)
        if fault in (Fault.PAGE_STALLS, Fault.FILE_STALLS) and fault is _STALLS.get(kind):
            index.stalled.set()
            index.released.wait(STALL_S)
            self.close_connection = True
        elif fault and fault is _STATUS_500.get(kind):
            self._answer(500, b"the index is ill", "text/plain")
        elif kind == "simple" and fault is not Fault.PAGE_404 and (page := index.page(project)) is not None:
            self._answer(200, page.encode(), "text/html")
        elif kind == "files" and fault is not Fault.FILE_404 and (content := index.content(project, file)) is not None:
            if fault is Fault.FILE_HAS_OTHER_BYTES:
                content = _with_another_time(content)
            self._answer(200, content, "application/octet-stream", cut=fault is Fault.FILE_TRUNCATED)
        else:
            self._answer(404, b"no such thing", "text/plain")

    do_HEAD = do_GET  # noqa: N815  the name is the base class's

    def _answer(self, status: int, body: bytes, kind: str, *, cut: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 20] if cut else body)
        if cut:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is the base class's
        """Nothing: pytest shows what matters."""


def _with_another_time(wheel: bytes) -> bytes:
    """The same wheel but for the time of its first file, in its own header and in the archive's list of files."""
    changed = bytearray(wheel)
    for place in (10, wheel.index(b"PK\x01\x02") + 12):
        changed[place] ^= 1
    return bytes(changed)


_STALLS = {"simple": Fault.PAGE_STALLS, "files": Fault.FILE_STALLS}
_STATUS_500 = {"simple": Fault.PAGE_500, "files": Fault.FILE_500}
