"""A package index on the loopback (PEP 503) with configurable faults."""

from __future__ import annotations

import base64
import html
import re
import threading
from dataclasses import dataclass
from enum import Enum, auto

from tests.fakes.loopback import Loopback, Request
from tests.integration.wheels import Distribution


class Fault(Enum):
    """Faults of a project's page or files."""

    PAGE_500 = auto()
    PAGE_STALLS = auto()
    FILE_404 = auto()
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


class Index(Loopback):
    """Files by project; `faults` by project. Safe to change while it serves.

    `times` says how often the fault of a project happens, if not always; `ranges`, whether files can be had in parts.
    `login`, user and password, is demanded for pages, and for files that `storage`, another index, does not serve;
    `authorized` are the paths of requests that came with any login.
    """

    def __init__(self) -> None:
        super().__init__()
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

    @property
    def url(self) -> str:
        return f"http://{self.address}/simple/"

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
        super().heal()

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

    def page(self, project: str) -> str | None:
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

    def answer(self, request: Request) -> None:
        kind, _, rest = request.path.strip("/").partition("/")
        project, _, file = rest.partition("/")
        fault = self.fault(kind, project)
        login = request.headers.get("Authorization")
        if login:
            self.authorized.append(request.path)
        if self.login and login != _basic(*self.login):
            self._reply(request, 401, b"who are you?")
        elif kind == "files" and self.storage:
            location = f"http://localhost:{self.storage.port}{request.path}"
            self._reply(request, 302, b"", ("Location", location))
        elif fault in (Fault.PAGE_STALLS, Fault.FILE_STALLS):
            self.stall(request)
        elif fault is Fault.PAGE_500:
            self._reply(request, 500, b"the index is ill")
        elif kind == "simple" and (page := self.page(project)) is not None:
            self._reply(request, 200, page.encode(), kind="text/html")
        elif kind == "files" and fault is not Fault.FILE_404 and (content := self.content(project, file)) is not None:
            self._send_file(request, content, fault)
        else:
            self._reply(request, 404, b"no such thing")

    def _send_file(self, request: Request, content: bytes, fault: Fault | None) -> None:
        if fault is Fault.FILE_HAS_OTHER_BYTES:
            content = _with_another_time(content)
        size, start, kind = len(content), 0, "application/octet-stream"
        requested = re.fullmatch(r"bytes=([0-9]+)-", request.headers.get("Range", ""))
        if requested and self.ranges:
            start = int(requested[1])
            if start >= size:
                self._reply(request, 416, b"", kind=kind)
                return
        share = {Fault.FILE_TRUNCATED: 20, Fault.FILE_STALLS_HALFWAY: 2}.get(fault, 0) if fault else 0
        sent = (size - start) // share if share else None
        ranges = [("Content-Range", f"bytes {start}-{size - 1}/{size}")] if start else []
        self._reply(request, 206 if start else 200, content[start:], *ranges, kind=kind, start=start, sent=sent)
        if fault is Fault.FILE_STALLS_HALFWAY:
            self.stall(request)

    def _reply(
        self,
        request: Request,
        status: int,
        body: bytes,
        *headers: tuple[str, str],
        kind: str = "text/plain",
        start: int = 0,
        sent: int | None = None,
    ) -> None:
        count = 0 if request.command == "HEAD" else len(body[:sent])
        self.answered.append(Answered(request.path, start, count))
        request.reply(status, body, [("Content-Type", kind), ("Cache-Control", "no-store"), *headers], sent=sent)


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _with_another_time(wheel: bytes) -> bytes:
    """The same wheel with another time of its first file, in its header and in the central directory."""
    changed = bytearray(wheel)
    for place in (10, wheel.index(b"PK\x01\x02") + 12):
        changed[place] ^= 1
    return bytes(changed)


_FAULTS = {"simple": "PAGE", "files": "FILE"}
