"""A package index on the loopback (PEP 503) with configurable faults."""

from __future__ import annotations

import base64
import html
from enum import Enum, auto

from tests.fakes.loopback import Loopback, Request
from tests.integration.wheels import Distribution


class Fault(Enum):
    """Faults of a project's page or files."""

    PAGE_STALLS = auto()
    FILE_STALLS = auto()
    FILE_HAS_OTHER_BYTES = auto()


class Index(Loopback):
    """Files by project; `faults` by project. Safe to change while it serves.

    `answered` are the paths of all requests.
    `login`, user and password, is demanded for pages, and for files that `storage`, another index, does not serve;
    `authorized` are the paths of requests that came with any login.
    """

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[str, dict[str, Distribution]] = {}
        self._yanked: dict[str, str] = {}
        self.faults: dict[str, Fault] = {}
        self.login: tuple[str, str] | None = None
        self.storage: Index | None = None
        self.authorized: list[str] = []
        self.answered: list[str] = []

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
        super().heal()

    def fault(self, kind: str, project: str) -> Fault | None:
        """The fault for a request, if any."""
        fault = self.faults.get(project)
        return fault if fault and fault.name.startswith(_FAULTS.get(kind, "?")) else None

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
        elif kind == "simple" and (page := self.page(project)) is not None:
            self._reply(request, 200, page.encode(), kind="text/html")
        elif kind == "files" and (content := self.content(project, file)) is not None:
            if fault is Fault.FILE_HAS_OTHER_BYTES:
                content = _with_another_time(content)
            self._reply(request, 200, content, kind="application/octet-stream")
        else:
            self._reply(request, 404, b"no such thing")

    def _reply(
        self,
        request: Request,
        status: int,
        body: bytes,
        *headers: tuple[str, str],
        kind: str = "text/plain",
    ) -> None:
        self.answered.append(request.path)
        request.reply(status, body, [("Content-Type", kind), ("Cache-Control", "no-store"), *headers])


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _with_another_time(wheel: bytes) -> bytes:
    """The same wheel with another time of its first file, in its header and in the central directory."""
    changed = bytearray(wheel)
    for place in (10, wheel.index(b"PK\x01\x02") + 12):
        changed[place] ^= 1
    return bytes(changed)


_FAULTS = {"simple": "PAGE", "files": "FILE"}
