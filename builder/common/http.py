"""Shared by the clients of indexes, archives and registries: the faults of requests, which to repeat, and downloads.

It opens no connection.
"""

from __future__ import annotations

import errno
import hashlib
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from http.client import responses
from io import BufferedRandom
from typing import BinaryIO

import requests
import urllib3
from requests.exceptions import ChunkedEncodingError
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError, ProtocolError

from builder.common.errors import causes

PIECE = 1 << 18  # bytes read at once; as many are lost at most when a connection breaks
UNCOMPRESSED = {"Accept-Encoding": "identity"}  # sizes, ranges and hashes are for the file itself
TRANSIENT = {408, 425, 429, *range(500, 600)} - {501, 505, 507}  # the same request may get another status later
_UNREACHABLE = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
_UNKNOWN_HOST = (socket.EAI_NONAME, socket.EAI_NODATA)
# X509_V_ERR_* of OpenSSL for a chain without an authority that this machine trusts, not for a wrong name or time.
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)
_REFUSED_CLIENT = re.compile(r"ALERT_.*(CERTIFICATE|UNKNOWN_CA)")  # by the server


class Fault(Enum):
    """A kind of failed request: a sentence about a server, and exceptions. The first kind that matches counts."""

    CERTIFICATE = "the certificate of {} is not trusted", ssl.SSLCertVerificationError
    CLIENT_CERTIFICATE = ("{} requires a client certificate",)
    NO_TLS = ("{} does not use https",)
    TLS = "the TLS connection to {} failed", ssl.SSLError, requests.exceptions.SSLError, urllib3.exceptions.SSLError
    PROXY = "cannot connect to {} through the proxy", requests.exceptions.ProxyError
    CONNECT_TIMEOUT = "the connection to {} timed out", requests.ConnectTimeout, ConnectTimeoutError
    TIMEOUT = "{} timed out", requests.Timeout, TimeoutError, urllib3.exceptions.TimeoutError
    NO_CONNECTION = "cannot connect to {}, or the connection was lost", requests.ConnectionError
    LOST = "the connection was lost", ChunkedEncodingError, ConnectionError, ProtocolError
    REDIRECTS = "too many redirects", requests.TooManyRedirects
    INVALID = "{} sent an invalid response", requests.exceptions.InvalidJSONError
    OTHER = "the request to {} failed", BaseException

    def __init__(self, sentence: str, *exceptions: type[BaseException]) -> None:
        self.sentence = sentence
        self.exceptions = exceptions

    @property
    def is_final(self) -> bool:
        """True if every other attempt would fail too, until the server or this machine is set up otherwise."""
        return self in (Fault.CERTIFICATE, Fault.CLIENT_CERTIFICATE, Fault.NO_TLS)


@dataclass(frozen=True)
class Failure:
    """A request without a usable response.

    `detail` has the words of OpenSSL or of the operating system, maybe none, and maybe with the name of the host.
    Without `is_connected`, there was no connection; with `is_unreachable`, there will be none at the next attempt.
    `has_unknown_authority`: this machine does not trust the authority of the server's certificate.
    """

    fault: Fault
    detail: str
    is_connected: bool
    is_unreachable: bool
    has_unknown_authority: bool


def failure_of(error: BaseException) -> Failure:
    """The failure of a request, from an exception of requests, urllib3 or Python."""
    chain = causes(error)
    system = [
        cause for cause in chain if isinstance(cause, OSError) and not isinstance(cause, requests.RequestException)
    ]
    is_connected = not any(isinstance(cause, (ConnectTimeoutError, socket.gaierror)) for cause in chain)
    is_unknown = any(isinstance(cause, socket.gaierror) and cause.errno in _UNKNOWN_HOST for cause in chain)
    is_unreachable = is_unknown or (not is_connected and any(cause.errno in _UNREACHABLE for cause in system))
    detail = "unknown host" if is_unknown else next((cause.strerror.lower() for cause in system if cause.strerror), "")
    certificate = next((cause for cause in chain if isinstance(cause, ssl.SSLCertVerificationError)), None)
    openssl = next((getattr(cause, "reason", "") for cause in chain if isinstance(cause, ssl.SSLError)), "") or ""
    if openssl == "WRONG_VERSION_NUMBER":
        fault = Fault.NO_TLS
    elif _REFUSED_CLIENT.search(openssl):
        fault = Fault.CLIENT_CERTIFICATE
    else:
        # NewConnectionError is no timeout, although it is a ConnectTimeoutError.
        kinds = [cause for cause in chain if not isinstance(cause, NewConnectionError)]
        fault = next(fault for fault in Fault if any(isinstance(cause, fault.exceptions) for cause in kinds))
    return Failure(
        fault,
        certificate.verify_message if certificate else detail,
        is_connected,
        is_unreachable,
        certificate is not None and certificate.verify_code in _UNKNOWN_AUTHORITY,
    )


def failure_sentence(error: BaseException, server: str = "the index") -> str:
    """A message for a failed request: a library's own may contain addresses, and secrets in addresses."""
    if isinstance(error, requests.HTTPError):
        return f"{server} returned {status_text(error.response.status_code)}"
    failure = failure_of(error)
    sentence = failure.fault.sentence.format(server)
    if failure.fault is Fault.CERTIFICATE:
        return f"{sentence} ({failure.detail.partition(',')[0]})"  # the rest may have the name of the host
    return f"{sentence} ({type(error).__name__})" if failure.fault is Fault.OTHER else sentence


def status_text(status: int) -> str:
    """A status with its standard name. The server's own reason may contain anything."""
    return f"{status} {responses.get(status, '')}".rstrip()


def read_pieces(response: requests.Response) -> Iterator[bytes]:
    """The body as it is, never decompressed. Raises urllib3.exceptions.HTTPError."""
    while piece := response.raw.read(PIECE, decode_content=False):
        yield piece


class Download:
    """The bytes of a download: counted, hashed, and written to `file`.

    `progress` is called with the number of bytes gained, negative for bytes lost. `is_resumed`: some are of an earlier
    response.
    """

    def __init__(self, file: BinaryIO, progress: Callable[[int], None]) -> None:
        self._file, self._progress, self._reported = file, progress, 0
        self._hash, self.size, self.is_resumed = hashlib.sha256(), 0, False

    @classmethod
    def resumed(cls, file: BufferedRandom, progress: Callable[[int], None]) -> Download:
        """Continues a download with the bytes that an earlier run wrote to `file`."""
        part = cls(file, progress)
        file.seek(0)
        part._hash = hashlib.file_digest(file, "sha256")
        part.size = file.tell()
        part.is_resumed = part.size > 0
        return part

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of a request for the missing bytes."""
        return UNCOMPRESSED | ({"Range": f"bytes={self.size}-"} if self.size else {})

    def receive(self, status: int, body: Iterable[bytes], limit: int) -> None:
        """Adds the body of a response with this status, which may be the whole file again.

        Reads at most one piece more than `limit` bytes of the file.
        """
        if status == HTTPStatus.PARTIAL_CONTENT:
            self.is_resumed = self.size > 0
        else:
            self.clear()
        self.report(self.size)
        try:
            for piece in body:
                self._file.write(piece)
                self._hash.update(piece)
                self.size += len(piece)
                self.report(self.size)
                if self.size > limit:
                    return
        finally:
            self._file.flush()

    def clear(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hash, self.size, self.is_resumed = hashlib.sha256(), 0, False

    def report(self, size: int) -> None:
        """Reports the bytes up to `size` that were not reported yet; 0 takes back all, after a failure."""
        if new := size - self._reported:
            self._reported = size
            self._progress(new)
