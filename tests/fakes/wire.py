"""Answers HTTP requests without a network."""

from __future__ import annotations

import io
import json
import random
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, cast

import pytest
import requests
from requests.adapters import BaseAdapter, HTTPAdapter
from urllib3 import HTTPResponse
from urllib3.exceptions import MaxRetryError, ProtocolError
from urllib3.exceptions import SSLError as UrllibSSLError

from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.common.tasks import RetryPolicy
from builder.index.host import Host
from builder.registry.client import Repository

HOST = "registry.example.test"
QUICK = RetryPolicy(retries=2, first_delay_s=0.001, longest_delay_s=5)
CONTENT = random.Random(1).randbytes(1000)
DIGEST = digest_of_bytes(CONTENT)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A request as sent. `options` are those of the requests library: timeout, verify, proxies."""

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
    """An answer. `broken` closes the connection before the body is complete."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    broken: bool = False


Answers = Callable[[Sent], Reply | Exception]


class Wire(BaseAdapter):
    """Answers the requests of all sessions by `answers`; raises an exception that it returns."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers
        self.seen: list[Sent] = []

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch, answers: Answers) -> Wire:
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
    def lines(self) -> list[str]:
        """Method and path of all requests."""
        return [f"{sent.method} {sent.path}" for sent in self.seen]

    @property
    def methods(self) -> list[str]:
        return [sent.method for sent in self.seen]


class _Head:
    """The part of http.client's response that requests reads."""

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
    *, registry: str = HOST, repository: str = "a/b", host: Host | None = None, policy: RetryPolicy = QUICK
) -> Repository:
    reference = ImageRef(registry=registry, repository=repository)
    return Repository(reference, host=host or Host(), write=True, policy=policy)


def errors(*listed: object) -> bytes:
    return json.dumps({"errors": listed}).encode()


def part(content: bytes, sent: Sent) -> Reply:
    """The part of a file that the Range header of a request names."""
    first, _, last = sent.headers["Range"].removeprefix("bytes=").partition("-")
    start = int(first) if first else max(0, len(content) - int(last))
    end = min(int(last) if first and last else len(content) - 1, len(content) - 1)
    headers = {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
    return Reply(status=206, body=content[start : end + 1], headers=headers)


def untrusted(message: str = "unable to get local issuer certificate", code: int = 20) -> Exception:
    """A certificate that OpenSSL does not accept, as requests reports it."""
    cause = ssl.SSLCertVerificationError(1, "certificate verify failed")
    cause.verify_message, cause.verify_code = message, code
    return requests.exceptions.SSLError(MaxRetryError(cast("Any", None), "/", UrllibSSLError(cause)))


def broken() -> Exception:
    return requests.ConnectionError(ProtocolError("Connection aborted.", ConnectionResetError(104, "reset by peer")))
