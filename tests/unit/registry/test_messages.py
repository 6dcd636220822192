"""What a person reads after a failure, whether it was tried again, and the kind of the error.

Other tests of this room check only that kind. The tables for certificates and for artifacts are in test_transport.py
and test_artifacts.py.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import requests
from urllib3.exceptions import ConnectTimeoutError, MaxRetryError, NewConnectionError, ProtocolError

from builder.common.errors import BuilderError, BuilderWarning, NoRegistryError, RegistryError
from builder.common.files import digest_of_bytes
from builder.layers.oci import LAYER_TYPE, Descriptor
from builder.registry import transfer
from builder.registry.auth import credentials
from builder.registry.client import Repository
from builder.registry.failures import IMMUTABLE_HINT, RejectedError
from tests.fakes.wire import CONTENT, DIGEST, HOST, Answers, Reply, Sent, broken, connect, errors, untrusted
from tests.unit.registry.fixtures import Lay

IMAGE = "application/vnd.oci.image.manifest.v1+json"
SHORT = DIGEST[7:19]
AGAIN, LOGIN, DISK = "Run this again: data already", f"Run `docker login {HOST}`", "Free space on the registry"
UNREACHABLE = "Check the registry's name and port and the network, and that the registry is running."


def of_urllib3(cause: BaseException) -> Exception:
    """An error with all causes that requests wraps around it, and an address that may be a credential."""
    return requests.ConnectionError(MaxRetryError(cast("Any", None), "/secret?signature=1", cast("Any", cause)))


def without_connection(number: int) -> Exception:
    inner = NewConnectionError(cast("Any", None), "no")
    inner.__cause__ = OSError(number, os.strerror(number))
    return of_urllib3(inner)


def of_tls(reason: str) -> Exception:
    cause = ssl.SSLError(1, "x")
    cause.reason = reason
    return requests.exceptions.SSLError(MaxRetryError(cast("Any", None), "/", cast("Any", cause)))


def refused(*listed: object, status: int = 400) -> Reply:
    return Reply(status=status, body=errors(*listed))


Row = tuple[Reply | Exception, type[RegistryError], int, str, str]
# The answer to all requests for a blob; the error, the number of tries, the end of the message, the start of the hint.
ANSWERS: dict[str, Row] = {
    "cut": (broken(), RegistryError, 3, "reset by peer): tried 3 times", AGAIN),
    "slow": (requests.ReadTimeout("x"), RegistryError, 3, "the registry timed out: tried 3 times", AGAIN),
    "no route any more": (
        requests.ConnectionError(ProtocolError("aborted", OSError(errno.EHOSTUNREACH, "No route"))),
        RegistryError, 3, "(no route): tried 3 times", AGAIN,
    ),
    "no connection": (
        requests.ConnectionError(ConnectTimeoutError("x")),
        NoRegistryError, 3, "the connection to the registry timed out: tried 3 times", AGAIN,
    ),
    "connection refused": (
        without_connection(errno.ECONNREFUSED), NoRegistryError, 1, "(connection refused)", UNREACHABLE,
    ),
    "no route": (without_connection(errno.EHOSTUNREACH), NoRegistryError, 1, "(no route to host)", UNREACHABLE),
    "no network": (without_connection(errno.ENETUNREACH), NoRegistryError, 1, "(network is unreachable)", UNREACHABLE),
    "no name": (of_urllib3(socket.gaierror(socket.EAI_NONAME, "x")), NoRegistryError, 1, "(unknown host)", UNREACHABLE),
    "no data": (of_urllib3(socket.gaierror(socket.EAI_NODATA, "x")), NoRegistryError, 1, "(unknown host)", UNREACHABLE),
    "busy DNS": (of_urllib3(socket.gaierror(socket.EAI_AGAIN, "x")), NoRegistryError, 3, "(x): tried 3 times", AGAIN),
    "unknown authority": (
        untrusted(), RejectedError, 1, "is not trusted (unable to get local issuer certificate)",
        f"Save the certificate of its authority as /etc/docker/certs.d/{HOST}/ca.crt, or set SSL_CERT_FILE.",
    ),
    "http": (
        of_tls("WRONG_VERSION_NUMBER"), RejectedError, 1, "the registry does not use https",
        f"To allow plain http, add {HOST} to `insecure`",
    ),
    **{
        reason: (
            of_tls(reason), RejectedError, 1, "the registry requires a client certificate",
            "Client certificates are not supported: use a proxy",
        )
        for reason in (
            "SSLV3_ALERT_BAD_CERTIFICATE", "TLSV13_ALERT_CERTIFICATE_REQUIRED", "TLSV1_ALERT_UNKNOWN_CA",
        )
    },
    "TLS": (of_tls("DECRYPTION_FAILED_OR_BAD_RECORD_MAC"), RegistryError, 3, "(x): tried 3 times", AGAIN),
    "invalid": (requests.exceptions.InvalidURL("x"), RejectedError, 1, "the registry failed (InvalidURL)", ""),
    "code": (refused({"code": "X"}), RejectedError, 1, "answered 400 Bad Request (X)", ""),
    "control characters": (
        refused({"code": "X", "message": "a\x1b[31m\nb\u202e"}), RejectedError, 1, "(X: a b\ufffd)", "",
    ),
    "long": (refused({"code": "X", "message": "y" * 999}), RejectedError, 1, f"(X: {'y' * 297})", ""),
    "other types": (refused({"code": "X", "detail": {"a": 1}}, "z", {"code": 5}), RejectedError, 1, "(X)", ""),
    "compressed": (
        Reply(status=400, body=errors({"code": "X"}), headers={"Content-Encoding": "gzip"}),
        RejectedError, 1, "(X)", "",
    ),
    "no errors": (refused(), RejectedError, 1, "answered 400 Bad Request", ""),
    "HTML": (Reply(status=400, body=b"<html>"), RejectedError, 1, "answered 400 Bad Request", ""),
    "deep": (Reply(status=400, body=b"[" * 99999), RejectedError, 1, "answered 400 Bad Request", ""),
    "no name of a status": (Reply(status=499), RejectedError, 1, "answered 499", ""),
    "forbidden": (refused({"code": "DENIED"}, status=403), RejectedError, 1, "403 Forbidden (DENIED)", LOGIN),
    "hidden": (
        refused({"code": "NAME_UNKNOWN"}, status=404), RejectedError, 1, "404 Not Found (NAME_UNKNOWN)",
        "Create the repository on the registry first. If it exists: "
        f"{LOGIN} as",
    ),
    "invalid name": (refused({"code": "NAME_INVALID"}), RejectedError, 1, "400 Bad Request (NAME_INVALID)", ""),
    "immutable": (Reply(status=412), RejectedError, 1, "412 Precondition Failed", IMMUTABLE_HINT),
    "immutable of ECR": (
        refused({"code": "TAG_INVALID", "message": "cannot be overwritten because the repository is immutable."}),
        RejectedError, 1, "(TAG_INVALID: cannot be overwritten because the repository is immutable.)", IMMUTABLE_HINT,
    ),
    "too large": (Reply(status=413), RejectedError, 1, "413 Request Entity Too Large", "Raise the request size"),
    "disk": (
        Reply(status=507), RejectedError, 1, "the registry's disk is full: answered 507 Insufficient Storage", DISK,
    ),
    "disk in words": (
        refused({"code": "UNKNOWN", "detail": "write /d: no space left on device"}, status=500),
        RejectedError, 1, "(UNKNOWN: write /d: no space left on device)", DISK,
    ),
    "disk as a number": (
        refused({"code": "UNKNOWN", "detail": {"Enclosed": {"Op": "mkdir", "Err": 28}}}, status=500),
        RejectedError, 1, "the registry's disk is full: answered 500 Internal Server Error (UNKNOWN)", DISK,
    ),
    "quota": (
        Reply(status=503, body=b"Disk quota exceeded"), RejectedError, 1, "answered 503 Service Unavailable", DISK,
    ),
    "busy": (Reply(status=503), RegistryError, 3, "answered 503 Service Unavailable: tried 3 times", AGAIN),
    "a long wait": (
        Reply(status=429, headers={"Retry-After": "3600"}),
        RegistryError, 1, "answered 429 Too Many Requests: asks to retry after 3600 s", "Try again then.",
    ),
    "other bytes": (
        Reply(body=b"other"), RejectedError, 1, "content does not match its digest", "Remove it from the registry's",
    ),
    "too many bytes": (
        Reply(body=bytes((4 << 20) + 1)), RejectedError, 1, "the response is longer than 4194304 bytes", "",
    ),
    "redirects": (
        Reply(status=302, headers={"Location": "/again"}), RejectedError, 5, "more than 5 redirects", "",
    ),
    "a redirect to http": (
        Reply(status=302, headers={"Location": "http://other.example.test/"}),
        RejectedError, 1, "the response contains a URL that is not https", "Configure the proxy of the registry",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "kind", "tries", "message", "hint"), ANSWERS.values(), ids=ANSWERS)
def test_a_blob_that_cannot_be_read(
    lay: Lay, answer: Reply | Exception, kind: type[RegistryError], tries: int, message: str, hint: str
) -> None:
    wire = lay(lambda _: answer)
    with pytest.raises(RegistryError) as caught:
        connect().read_blob(DIGEST)
    assert type(caught.value) is kind
    assert len(wire.seen) == tries
    assert str(caught.value).startswith(f"{HOST}: reading blob {SHORT} of a/b: ")
    assert str(caught.value).endswith(message)
    assert caught.value.hint.startswith(hint)
    assert bool(caught.value.hint) == bool(hint)
    assert "signature" not in str(caught.value)


Act = Callable[[Repository], object]
TOKENS = {"WWW-Authenticate": f'Bearer realm="https://{HOST}/token"'}


def tokens(reply: Reply) -> Answers:
    """The answers of a registry that requires a token; `reply` is that of its token service."""
    return lambda sent: reply if "token" in sent.path else Reply(status=401, headers=TOKENS)


def put(registry: Repository) -> object:
    return registry.put_manifest("1.0", CONTENT, IMAGE)


# What is done, and the answers; the message without the name of the registry, and the start of the hint.
ACTS: dict[str, tuple[Act, Answers, str, str]] = {
    "another manifest": (
        put, lambda _: Reply(status=201, headers={"Docker-Content-Digest": digest_of_bytes(b"other")}),
        "writing a/b:1.0: the registry stored different content", "",
    ),
    "a lost blob": (
        put, lambda sent: refused({"code": "MANIFEST_BLOB_UNKNOWN"}) if sent.method == "PUT" else Reply(status=404),
        "writing a/b:1.0: answered 400 Bad Request (MANIFEST_BLOB_UNKNOWN): tried 3 times",
        "",
    ),
    "the whole blob": (
        lambda registry: registry.read_range(DIGEST, 10, 20), lambda _: Reply(body=CONTENT),
        f"reading a part of blob {SHORT} of a/b: range requests are not supported", "",
    ),
    "invalid tags": (
        Repository.list_tags, lambda _: Reply(body=b"[]"), "listing the tags of a/b: invalid answer", "",
    ),
    "pages without end": (
        Repository.list_tags,
        lambda _: Reply(body=b'{"tags": []}', headers={"Link": '</v2/a/b/tags/list?again>; rel="next"'}),
        "listing the tags of a/b: the list has more than 100 pages", "",
    ),
    "no deletion": (
        lambda registry: registry.delete_manifest(DIGEST), lambda _: Reply(status=405),
        f"deleting a/b@{SHORT}: answered 405 Method Not Allowed", "The registry does not allow this",
    ),
    "no registry to mount from": (
        lambda registry: registry.mount(DIGEST, "a/other"), lambda _: without_connection(errno.ECONNREFUSED),
        f"mounting blob {SHORT} of a/b from a/other: cannot connect to the registry, or the connection was lost "
        "(connection refused)", UNREACHABLE,
    ),
    "no token": (
        put, tokens(refused({"code": "DENIED", "message": "no"}, status=403)),
        "requesting a token: answered 403 Forbidden (DENIED: no)", LOGIN,
    ),
    "an invalid token": (put, tokens(Reply(body=b"{}")), "invalid response from its token service", LOGIN),
    "no login": (
        put, lambda _: Reply(status=401, headers={"WWW-Authenticate": "Basic"}),
        "login required, and no user and password are configured", LOGIN,
    ),
    "no kind of login": (
        put, lambda _: Reply(status=401), "writing a/b:1.0: answered 401 twice: login not accepted", LOGIN,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("act", "answers", "message", "hint"), ACTS.values(), ids=ACTS)
def test_other_failures(lay: Lay, act: Act, answers: Answers, message: str, hint: str) -> None:
    lay(answers)
    with pytest.raises(RegistryError) as caught:
        act(connect())
    assert str(caught.value) == f"{HOST}: {message}"
    assert caught.value.hint.startswith(hint)
    assert bool(caught.value.hint) == bool(hint)


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b"short", "damaged: its size is not 1000 bytes ({})", "Delete the damaged blobs"),
        (CONTENT[::-1], f"damaged: its SHA-256 is not {DIGEST} ({{}})", "Delete the damaged blobs"),
        (None, f"a/b: blob {DIGEST} is missing in the registry and in the store", "Build the image again."),
    ],
    ids=["short", "other bytes", "missing"],
)
def test_a_blob_that_cannot_be_sent(lay: Lay, tmp_path: Path, content: bytes | None, message: str, hint: str) -> None:
    def answer(sent: Sent) -> Reply:
        started = Reply(status=202, headers={"Location": "/v2/a/b/blobs/uploads/1"})
        return {"HEAD": Reply(status=404), "POST": started}.get(sent.method, refused({"code": "DIGEST_INVALID"}))

    lay(answer)
    path = tmp_path / "blob"
    blob = Descriptor(media_type=LAYER_TYPE, digest=DIGEST, size=len(CONTENT))
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BuilderError) as caught:
        transfer.send_blobs(connect(), {blob: path if content is not None else None})
    assert str(caught.value).endswith(message.format(path))
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(("config", "kind"), [('{"auths": [1]}', ""), ('{"credsStore": "test"}', "StoreError")])
def test_a_login_that_cannot_be_read(docker_config: Path, config: str, kind: str) -> None:
    docker_config.write_text(config, encoding="utf-8")
    with pytest.raises(RegistryError) as caught:
        credentials(HOST)
    message = f"{HOST}: cannot read credentials from Docker's configuration or its credential helper ({kind}"
    assert str(caught.value).startswith(message)
    assert caught.value.hint == f"Correct {docker_config}, or install the helper that it names."


def test_a_request_that_is_tried_again_is_reported_once(lay: Lay) -> None:
    """The retries take up to two minutes."""
    lay(lambda _: Reply(status=503))
    with pytest.warns(BuilderWarning) as warned, pytest.raises(RegistryError):
        connect().has_blob(DIGEST)
    message = f"{HOST}: checking blob {SHORT} of a/b: answered 503 Service Unavailable: trying again, up to 2 times"
    assert [str(each.message) for each in warned] == [message]
