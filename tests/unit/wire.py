"""What `requests` would send, answered without a network."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, cast

import pytest
import requests
from requests.adapters import BaseAdapter, HTTPAdapter
from urllib3 import HTTPResponse
from urllib3.exceptions import ProtocolError

from builder.digest import of_bytes
from builder.host import Host
from builder.reference import ImageRef
from builder.registry import Registry
from builder.registry_http import Patience

HOST = "registry.example.test"
QUICK = Patience(retries=2, first_s=0.001, longest_s=5)
CONTENT = random.Random(1).randbytes(1000)
DIGEST = of_bytes(CONTENT)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A request as it went out. `options` are requests' own: timeout, verify, proxies."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes
    options: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The address without the host."""
        return "/" + self.url.split("://")[1].partition("/")[2]


@dataclass(frozen=True)
class Reply:
    """`broken` ends the connection in the middle of the body."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    broken: bool = False


Answers = Callable[[Sent], Reply | Exception]


class Wire(BaseAdapter):
    """All requests of all sessions end here. `answers` decides; an exception from it is raised to the sender."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers
        self.seen: list[Sent] = []

    @classmethod
    def lay(cls, monkeypatch: pytest.MonkeyPatch, answers: Answers) -> Wire:
        wire = cls(answers)
        monkeypatch.setattr(requests.Session, "get_adapter", lambda *_, **__: wire)
        return wire

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:  # type: ignore[override]
        sent = Sent(
            method=request.method or "",
            url=request.url or "",
            headers=request.headers,
            body=_read(request.body),
            options=options,
        )
        self.seen.append(sent)
        reply = self.answers(sent)
        if isinstance(reply, Exception):
            raise reply
        body = b"" if sent.method == "HEAD" else reply.body
        length = {} if "Content-Length" in reply.headers else {"Content-Length": str(len(body) + reply.broken)}
        raw = HTTPResponse(
            body=io.BytesIO(body),
            headers={**length, **reply.headers},
            status=reply.status,
            preload_content=False,
            enforce_content_length=True,
            request_method=sent.method,
            original_response=cast("Any", _Head(reply.headers)),  # where requests looks for cookies
        )
        return HTTPAdapter().build_response(request, raw)

    def close(self) -> None:
        """Nothing is open."""

    @property
    def said(self) -> list[str]:
        """Method and path of all requests."""
        return [f"{one.method} {one.path}" for one in self.seen]


class _Head:
    """What is left of http.client's response in urllib3's."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.msg = Message()
        for name, value in headers.items():
            self.msg[name] = value

    def isclosed(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is open."""


def _read(body: bytes | str | Iterable[bytes] | None) -> bytes:
    if body is None:
        return b""
    if isinstance(body, str):
        return body.encode()
    return body if isinstance(body, bytes) else b"".join(body)


def connect(
    *, registry: str = HOST, repository: str = "a/b", host: Host | None = None, patience: Patience = QUICK
) -> Registry:
    reference = ImageRef(registry=registry, repository=repository)
    return Registry(reference, host=host or Host(), write=True, patience=patience)


def errors(*listed: object) -> bytes:
    return json.dumps({"errors": listed}).encode()


def broken() -> Exception:
    return requests.ConnectionError(ProtocolError("Connection aborted.", ConnectionResetError(104, "reset by peer")))
