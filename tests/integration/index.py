"""A package index on the loopback (PEP 503) with configurable faults."""

from __future__ import annotations

import base64
import html
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

from tests.integration.wheels import Distribution

STALL_S = 300  # longer than any test, so that a stalled client is freed by nothing but the test


class Fault(Enum):
    """Faults of a project's page or files."""

    PAGE_404 = auto()
    PAGE_500 = auto()
    PAGE_STALLS = auto()
    FILE_404 = auto()
    FILE_500 = auto()
    FILE_STALLS = auto()
    FILE_STALLS_HALFWAY = auto()
    FILE_TRUNCATED = auto()
    FILE_HAS_OTHER_BYTES = auto()


@dataclass(frozen=True)
class Answered:
    """A request for `path` and the part of the content in the answer: `sent` bytes from `start`."""

    path: str
    start: int
    sent: int


class Index:
    """Files by project; `faults` by project. Safe to change while it serves.

    `times` says how often the fault of a project happens, if not always; `ranges`, whether files can be had in parts.
    `login`, user and password, is demanded for pages, and for files that `storage`, another index, does not serve;
    `authorized` are the paths of requests that came with any login.
    """

    def __init__(self) -> None:
        self._files: dict[str, dict[str, Distribution]] = {}
        self._yanked: dict[str, str] = {}
        self.faults: dict[str, Fault] = {}
        self.times: dict[str, int] = {}
        self.ranges = False
        self.login: tuple[str, str] | None = None
        self.storage: Index | None = None
        self.authorized: list[str] = []
        self.answered: list[Answered] = []
        self._counting = threading.Lock()
        self.stalled = threading.Event()
        self.released = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.index = self

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

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
        for distribution in distributions:
            self._files.setdefault(distribution.project, {})[distribution.file] = distribution
            if yanked:
                self._yanked[distribution.file] = yanked

    def withdraw(self, project: str, version: str) -> None:
        """Removes a version."""
        files = self._files[project]
        for file in [file for file in files if f"-{version}" in file]:
            del files[file]
            self._yanked.pop(file, None)

    def heal(self) -> None:
        """Removes all faults; ends waiting requests."""
        self.faults.clear()
        self.times.clear()
        self.released.set()
        self.released, self.stalled = threading.Event(), threading.Event()

    def fault(self, kind: str, project: str) -> Fault | None:
        """The fault for a request, if any."""
        fault = self.faults.get(project)
        if fault is None or not fault.name.startswith(_FAULTS.get(kind, "?")):
            return None
        with self._counting:
            left = self.times.get(project, 1)
            if project in self.times:
                self.times[project] = max(0, left - 1)
        return fault if left else None

    def page(self, project: str, fault: Fault | None = None) -> str | None:
        if project not in self._files:
            return None
        links = []
        for file, distribution in self._files[project].items():
            yanked = f' data-yanked="{html.escape(self._yanked[file])}"' if file in self._yanked else ""
            links.append(f'<a href="/files/{project}/{file}#sha256={distribution.sha256}"{yanked}>{file}</a><br>\n')
        return f"<!DOCTYPE html><html><body>\n{''.join(links)}</body></html>\n"

    def content(self, project: str, file: str) -> bytes | None:
        distribution = self._files.get(project, {}).get(file)
        return distribution.content if distribution else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    index: Index

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores errors: tests kill clients on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        index = cast("_Server", self.server).index
        kind, _, rest = self.path.strip("/").partition("/")
        project, _, file = rest.partition("/")
        fault = index.fault(kind, project)
        if self.headers.get("Authorization"):
            index.authorized.append(self.path)
        if index.login and self.headers.get("Authorization") != _basic(*index.login):
            self._answer(401, b"who are you?", "text/plain")
        elif kind == "files" and index.storage:
            self._answer(302, b"", "text/plain", location=f"http://localhost:{index.storage.port}{self.path}")
        elif fault in (Fault.PAGE_STALLS, Fault.FILE_STALLS):
            self._stall()
        elif fault in (Fault.PAGE_500, Fault.FILE_500):
            self._answer(500, b"the index is ill", "text/plain")
        elif kind == "simple" and fault is not Fault.PAGE_404 and (page := index.page(project, fault)) is not None:
            self._answer(200, page.encode(), "text/html")
        elif kind == "files" and fault is not Fault.FILE_404 and (content := index.content(project, file)) is not None:
            self._file(content, fault)
        else:
            self._answer(404, b"no such thing", "text/plain")

    do_HEAD = do_GET  # noqa: N815  the name is the base class's

    def _file(self, content: bytes, fault: Fault | None) -> None:
        if fault is Fault.FILE_HAS_OTHER_BYTES:
            content = _with_another_time(content)
        kind = "application/octet-stream"
        start = 0
        requested = re.fullmatch(r"bytes=([0-9]+)-", self.headers.get("Range", ""))
        if requested and cast("_Server", self.server).index.ranges:
            start = int(requested[1])
            if start >= len(content):
                self._answer(416, b"", kind)
                return
        share = {Fault.FILE_TRUNCATED: 20, Fault.FILE_STALLS_HALFWAY: 2}.get(fault, 0) if fault else 0
        end = start + (len(content) - start) // share if share else len(content)
        self._answer(206 if start else 200, content[start:], kind, start=start, sent=end - start)
        if fault is Fault.FILE_STALLS_HALFWAY:
            self._stall()

    def _stall(self) -> None:
        """Waits until the test ends the fault."""
        index = cast("_Server", self.server).index
        released = index.released
        index.stalled.set()
        released.wait(STALL_S)
        self.close_connection = True

    def _answer(
        self, status: int, body: bytes, kind: str, *, start: int = 0, sent: int | None = None, location: str = ""
    ) -> None:
        """Sends the answer; with `sent`, only that many bytes of the body, and then closes the connection."""
        part = b"" if self.command == "HEAD" else body[:sent]
        cast("_Server", self.server).index.answered.append(Answered(self.path, start, len(part)))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if location:
            self.send_header("Location", location)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{start + len(body)}")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(part)
        if len(part) < len(body) and self.command != "HEAD":
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is the base class's
        """Logs nothing."""


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _with_another_time(wheel: bytes) -> bytes:
    """The same wheel with another time of its first file, in its header and in the central directory."""
    changed = bytearray(wheel)
    for place in (10, wheel.index(b"PK\x01\x02") + 12):
        changed[place] ^= 1
    return bytes(changed)


_FAULTS = {"simple": "PAGE", "files": "FILE"}
