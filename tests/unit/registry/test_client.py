"""Requests to a registry: responses, failures and retries, without a network."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import ssl
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import requests
from urllib3.exceptions import ConnectTimeoutError, MaxRetryError, NewConnectionError, ProtocolError

from builder.common import http as common_http
from builder.common.errors import BuilderWarning, NoRegistryError, RegistryError
from builder.common.files import digest_of_bytes
from builder.common.tasks import RetryPolicy
from builder.host import Host
from builder.index.settings import IndexSettings
from builder.layers.oci import Manifest
from builder.registry import http
from builder.registry.client import REFUSALS
from builder.registry.failures import RejectedError, StoppedError, TransientError, retry_after
from tests.fakes.wire import CONTENT, DIGEST, HOST, QUICK, Reply, Sent, broken, connect, errors, untrusted
from tests.unit.registry.fixtures import Lay

IMAGE = "application/vnd.oci.image.manifest.v1+json"


def without_connection(number: int) -> Exception:
    """An error number of `connect`, with all causes that requests wraps around it."""
    inner = NewConnectionError(None, "no")  # type: ignore[arg-type]
    inner.__cause__ = OSError(number, os.strerror(number))
    return requests.ConnectionError(MaxRetryError(None, "/secret?signature=1", inner))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("", 0), ("7", 7), (" 7 ", 7), ("-7", 0), ("soon", 0), ("9" * 12, 0), ("\u0667", 0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 60), ("Thu, 01 Jan 1970 00:00:01 GMT", 0), ("Thu, 99 Jan 1970", 0),
    ],
)  # fmt: skip
def test_retry_after(header: str, seconds: float) -> None:
    assert retry_after(header, now=40) == seconds


def test_delays_grow_to_a_limit_and_are_never_shorter_than_retry_after() -> None:
    policy = RetryPolicy(first_delay_s=1, longest_delay_s=10)
    for failed, most in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (99, 10)):
        delays = [policy.delay(failed) for _ in range(200)]
        assert most / 2 <= min(delays) < max(delays) <= most
    assert policy.delay(1, 7) == 7


@pytest.mark.parametrize(
    ("answer", "tries"),
    [
        *[(Reply(status=status), 3) for status in (408, 425, 429, 500, 502, 503, 504, 599)],
        *[(Reply(status=status), 1) for status in (400, 403, 405, 409, 410, 416, 418, 501, 505, 507)],
        (Reply(status=302), 1),
        (Reply(status=204), 1),
        (broken(), 3),
        (requests.ReadTimeout("x"), 3),
        (requests.exceptions.InvalidURL("x"), 1),
    ],
    ids=lambda answer: str(getattr(answer, "status", type(answer).__name__)),
)
def test_only_transient_failures_are_retried(lay: Lay, answer: Reply | Exception, tries: int) -> None:
    wire = lay(lambda _: answer)
    with pytest.raises(RegistryError) as caught:
        connect().read_blob(DIGEST)
    assert len(wire.seen) == tries
    assert ("tried 3 times" in str(caught.value)) == (tries == 3)
    assert str(caught.value).startswith(f"{HOST}: reading blob {DIGEST[7:19]} of a/b: ")


def test_it_works_the_third_time(lay: Lay) -> None:
    answers: list[Reply | Exception] = [Reply(status=503), broken(), Reply(body=CONTENT)]
    lay(lambda _: answers.pop(0))
    assert connect().read_blob(DIGEST) == CONTENT


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (broken(), "reset by peer: tried 3 times"),
        (requests.ReadTimeout("x"), "request timed out: tried 3 times"),
        (requests.ConnectionError(ConnectTimeoutError("x")), "request timed out: tried 3 times"),
        (Reply(status=400, body=errors({"code": "X"}), headers={"Content-Encoding": "gzip"}), "(X)"),
        (Reply(status=400, body=errors({"code": "X", "message": "a\x1b[31m\nb\u202e"})), "(X: a b\ufffd)"),
        (Reply(status=400, body=errors({"code": "X", "message": "y" * 999})), f"(X: {'y' * 297})"),
        (Reply(status=400, body=errors({"code": "X", "detail": {"a": 1}}, "z", {"code": 5})), "(X)"),
        (Reply(status=400, body=errors()), "answered 400 Bad Request"),
        (Reply(status=400, body=b"<html>"), "answered 400 Bad Request"),
        (Reply(status=400, body=b"[" * 99999), "answered 400 Bad Request"),
        (Reply(status=499), "answered 499"),
    ],
)
def test_messages(lay: Lay, answer: Reply | Exception, message: str) -> None:
    lay(lambda _: answer)
    with pytest.raises(RegistryError) as caught:
        connect().read_blob(DIGEST)
    assert str(caught.value).endswith(message)
    assert "signature" not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        Reply(status=507),
        Reply(status=500, body=errors({"code": "UNKNOWN", "detail": "write /d: no space left on device"})),
        Reply(status=500, body=errors({"code": "UNKNOWN", "detail": {"Enclosed": {"Op": "mkdir", "Err": 28}}})),
        Reply(status=503, body=b"Disk quota exceeded"),
    ],
)
def test_a_full_disk_is_reported_and_not_retried(lay: Lay, answer: Reply) -> None:
    wire = lay(lambda _: answer)
    with pytest.raises(RegistryError, match="the registry's disk is full") as caught:
        connect().put_manifest("1.0", b"{}", IMAGE)
    assert "Free space" in caught.value.hint
    assert [line.split()[0] for line in wire.lines] == ["PUT", "HEAD"]


def test_the_next_try_waits_as_long_as_the_registry_asks(lay: Lay, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda _, seconds: waits.append(seconds))
    lay(lambda _: Reply(status=429, headers={"Retry-After": "3"}))
    with pytest.raises(RegistryError, match="429 Too Many Requests: tried 3 times"):
        connect().has_blob(DIGEST)
    assert waits == [3, 3]


def test_retry_after_longer_than_the_limit(lay: Lay) -> None:
    wire = lay(lambda _: Reply(status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(RegistryError, match="429 Too Many Requests: asks to retry after 3600 s"):
        connect().has_blob(DIGEST)
    assert len(wire.seen) == 1


def test_an_untrusted_certificate(lay: Lay) -> None:
    wire = lay(lambda _: untrusted())
    with pytest.raises(RegistryError, match=r"not trusted \(unable to get local issuer certificate") as caught:
        connect().has_blob(DIGEST)
    assert "SSL_CERT_FILE" in caught.value.hint
    assert len(wire.seen) == 1


@pytest.mark.parametrize(
    ("reason", "message", "tries"),
    [
        ("WRONG_VERSION_NUMBER", "the server does not use https", 1),
        ("SSLV3_ALERT_BAD_CERTIFICATE", "client certificate required, or not accepted", 1),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "client certificate required, or not accepted", 1),
        ("TLSV1_ALERT_UNKNOWN_CA", "client certificate required, or not accepted", 1),
        ("DECRYPTION_FAILED_OR_BAD_RECORD_MAC", "tried 3 times", 3),
    ],
)
def test_failures_of_tls(lay: Lay, reason: str, message: str, tries: int) -> None:
    """Others may be transient."""
    cause = ssl.SSLError(1, "x")
    cause.reason = reason
    wire = lay(lambda _: requests.exceptions.SSLError(MaxRetryError(None, "/", cause)))  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match=message):
        connect().has_blob(DIGEST)
    assert len(wire.seen) == tries


@pytest.mark.parametrize(("code", "tries"), [(socket.EAI_NONAME, 1), (socket.EAI_NODATA, 1), (socket.EAI_AGAIN, 3)])
def test_an_unknown_host_is_final(lay: Lay, code: int, tries: int) -> None:
    """A DNS server that is busy is not."""
    cause = MaxRetryError(None, "/secret?signature=1", socket.gaierror(code, "x"))  # type: ignore[arg-type]
    wire = lay(lambda _: requests.ConnectionError(cause))
    with pytest.raises(RegistryError) as caught:
        connect().has_blob(DIGEST)
    assert isinstance(caught.value, NoRegistryError), "no other request would succeed"
    assert ("unknown host" in str(caught.value)) == (tries == 1)
    assert "signature" not in str(caught.value)
    assert len(wire.seen) == tries


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ECONNREFUSED, "connection refused"),
        (errno.EHOSTUNREACH, "no route to host"),
        (errno.ENETUNREACH, "network is unreachable"),
    ],
)
def test_a_registry_that_cannot_be_reached_is_tried_once(lay: Lay, number: int, message: str) -> None:
    """It was tried six times, in 12 to 27 seconds without a message, for each image."""
    wire = lay(lambda _: without_connection(number))
    with pytest.raises(NoRegistryError) as caught:
        connect().mount(DIGEST, "a/other")
    assert str(caught.value) == f"{HOST}: mounting blob {DIGEST[7:19]} of a/b from a/other: {message}"
    assert "that the registry is running" in caught.value.hint
    assert len(wire.seen) == 1


def test_a_registry_that_never_answers_a_connection_cannot_be_reached(lay: Lay) -> None:
    """Unlike one that answers slowly: a request for the next image may succeed."""
    wire = lay(lambda _: requests.ConnectionError(ConnectTimeoutError("x")))
    with pytest.raises(NoRegistryError, match="request timed out: tried 3 times"):
        connect().has_blob(DIGEST)
    assert len(wire.seen) == 3
    lay(lambda _: requests.ReadTimeout("x"))
    with pytest.raises(RegistryError) as caught:
        connect().has_blob(DIGEST)
    assert not isinstance(caught.value, NoRegistryError)


def test_a_connection_that_is_lost_later_is_retried(lay: Lay) -> None:
    """A route may vanish for a moment."""
    wire = lay(lambda _: requests.ConnectionError(ProtocolError("aborted", OSError(errno.EHOSTUNREACH, "No route"))))
    with pytest.raises(RegistryError, match="no route: tried 3 times"):
        connect().has_blob(DIGEST)
    assert len(wire.seen) == 3


def test_a_request_that_is_tried_again_is_reported_once(lay: Lay) -> None:
    """The retries take up to two minutes."""
    lay(lambda _: Reply(status=503))
    with pytest.warns(BuilderWarning) as warned, pytest.raises(RegistryError):
        connect().has_blob(DIGEST)
    action = f"checking blob {DIGEST[7:19]} of a/b"
    message = f"{HOST}: {action}: answered 503 Service Unavailable: trying again, up to 2 times"
    assert [str(each.message) for each in warned] == [message]


def test_the_machine_s_certificates_and_proxy(lay: Lay, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = lay(lambda _: Reply(status=404))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/other.pem")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.test")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example.test")
    host = Host(index=IndexSettings(ca_bundle="/ca.pem"))
    connect(host=host, policy=RetryPolicy(connect_s=3, read_s=4)).has_blob(DIGEST)
    assert wire.seen[0].options["verify"] == "/ca.pem"
    assert wire.seen[0].options["proxies"]["https"] == "http://proxy.example.test"
    assert wire.seen[0].options["timeout"] == (3, 4)
    connect(host=host, registry="127.0.0.1:5000").has_blob(DIGEST)
    assert not wire.seen[1].options["proxies"]


def test_no_cookie_is_sent_back(lay: Lay) -> None:
    wire = lay(lambda _: Reply(status=404, headers={"Set-Cookie": "sid=1; Path=/"}))
    registry = connect()
    registry.has_blob(DIGEST)
    registry.has_blob(DIGEST)
    assert ["Cookie" in sent.headers for sent in wire.seen] == [False, False]


def elsewhere(sent: Sent) -> Reply:
    """Blobs are on another host, as with many registries; a login is required."""
    if sent.url.startswith("https://blobs.example.test"):
        return Reply(body=CONTENT)
    if "Authorization" not in sent.headers:
        return Reply(status=401, headers={"WWW-Authenticate": "Basic realm=x"})
    return Reply(status=307, headers={"Location": "https://blobs.example.test/x?signature=1"})


def test_a_redirect_is_followed_without_credentials(lay: Lay, docker_config: Path) -> None:
    docker_config.write_text(json.dumps({"auths": {HOST: {"auth": "bWU6eA=="}}}))
    wire = lay(elsewhere)
    assert connect().read_blob(DIGEST) == CONTENT
    assert ["Authorization" in sent.headers for sent in wire.seen] == [False, True, False]


@pytest.mark.parametrize("place", ["elsewhere.test", f"elsewhere.test\\@{HOST}", f"elsewhere.test/@{HOST}"])
def test_a_redirect_that_hides_its_host_gets_no_credentials(lay: Lay, docker_config: Path, place: str) -> None:
    """requests takes the host before the backslash, urlsplit the one after it."""
    docker_config.write_text(json.dumps({"auths": {HOST: {"auth": "bWU6eA=="}}}))

    def answer(sent: Sent) -> Reply:
        if sent.url.startswith("https://elsewhere.test/"):
            return Reply(body=CONTENT)
        if "Authorization" not in sent.headers:
            return Reply(status=401, headers={"WWW-Authenticate": "Basic realm=x"})
        return Reply(status=307, headers={"Location": f"https://{place}/x"})

    wire = lay(answer)
    assert connect().read_blob(DIGEST) == CONTENT
    assert ["Authorization" in sent.headers for sent in wire.seen] == [False, True, False]


def test_redirects_end(lay: Lay) -> None:
    wire = lay(lambda _: Reply(status=302, headers={"Location": "/again"}))
    with pytest.raises(RegistryError, match="more than 5 redirects"):
        connect().read_blob(DIGEST)
    assert len(wire.seen) == 5


def test_a_small_blob_is_checked(lay: Lay, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(lambda _: Reply(body=b"other"))
    with pytest.raises(RegistryError, match="content does not match its digest"):
        connect().read_blob(DIGEST)
    monkeypatch.setattr(http, "SMALL", 999)
    lay(lambda _: Reply(body=CONTENT))
    with pytest.raises(RegistryError, match="longer than 999 bytes"):
        connect().read_blob(DIGEST)


def serve(sent: Sent, *, ranges: bool, content: bytes = CONTENT) -> Reply:
    """A blob whose connection ends 400 bytes after the start of the range, except for the last bytes."""
    start = int(sent.headers.get("Range", "bytes=0-")[6:-1]) if ranges else 0
    end = int(sent.headers.get("Range", "bytes=0-")[6:-1]) + 400
    return Reply(status=206 if start else 200, body=content[start:end], broken=end < len(content))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_is_resumed(lay: Lay, ranges: bool) -> None:
    wire = lay(lambda sent: serve(sent, ranges=ranges))
    read: list[int] = []
    connect().download(DIGEST, len(CONTENT), io.BytesIO(), read.append)
    assert sum(read) == len(CONTENT)
    assert [sent.headers.get("Range") for sent in wire.seen] == [None, "bytes=400-", "bytes=800-"]


def test_a_download_without_progress_is_given_up(lay: Lay) -> None:
    """A registry that sends single bytes would be tried for years."""
    wire = lay(lambda sent: Reply(status=206 if "Range" in sent.headers else 200, body=b"x", broken=True))
    with pytest.raises(RegistryError, match="tried 3 times"):
        connect().download(DIGEST, len(CONTENT), io.BytesIO(), lambda _: None)
    assert [sent.headers.get("Range") for sent in wire.seen] == [None, "bytes=1-", "bytes=2-"]


def test_a_connection_that_breaks_after_the_last_byte(lay: Lay) -> None:
    wire = lay(lambda _: Reply(body=CONTENT, broken=True))
    connect().download(DIGEST, len(CONTENT), io.BytesIO(), lambda _: None)
    assert len(wire.seen) == 1


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"x", CONTENT + b"x"], ids=["short", "other", "long"])
def test_a_download_is_checked(lay: Lay, content: bytes) -> None:
    lay(lambda _: Reply(body=content))
    with pytest.raises(RejectedError, match="content does not match its digest"):
        connect().download(DIGEST, len(CONTENT), io.BytesIO(), lambda _: None)


def test_a_part_of_a_blob_is_read(lay: Lay) -> None:
    replies = iter([Reply(status=206, body=CONTENT[10:15], broken=True), Reply(status=206, body=CONTENT[10:20])])
    wire = lay(lambda _: next(replies))
    assert connect().read_range(DIGEST, 10, 20) == CONTENT[10:20]
    assert [sent.headers["Range"] for sent in wire.seen] == ["bytes=10-19"] * 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(body=CONTENT), "reading a part of blob .* range requests are not supported"),
        (Reply(status=206, body=CONTENT), "longer than 10 bytes"),
        (Reply(status=416), "answered 416"),
    ],
    ids=["the whole blob", "longer", "not satisfiable"],
)
def test_an_answer_that_is_not_the_requested_part_is_refused(lay: Lay, reply: Reply, message: str) -> None:
    lay(lambda _: reply)
    with pytest.raises(RejectedError, match=message):
        connect().read_range(DIGEST, 10, 20)


def test_nothing_is_decompressed(lay: Lay) -> None:
    wire = lay(lambda _: Reply(body=CONTENT, headers={"Content-Encoding": "gzip"}))
    assert connect().read_blob(DIGEST) == CONTENT
    assert wire.seen[0].headers["Accept-Encoding"] == "identity"


def test_digests_and_manifests(lay: Lay) -> None:
    stored = {"1.0": CONTENT, DIGEST: CONTENT}

    def answer(sent: Sent) -> Reply:
        name = sent.path.rpartition("/")[2]
        assert IMAGE in sent.headers["Accept"]
        return Reply(body=stored[name], headers={"Content-Type": IMAGE}) if name in stored else Reply(status=404)

    lay(answer)
    registry = connect()
    assert registry.digest_of("1.0") == DIGEST, "without Docker-Content-Digest, the digest of the manifest itself"
    assert registry.digest_of("none") is None
    assert registry.manifest("none") is None
    assert registry.manifest("1.0") == Manifest.of(CONTENT, IMAGE)
    stored[DIGEST] = b"other"
    with pytest.raises(RegistryError, match="content does not match its digest"):
        registry.manifest(DIGEST)


class Tag:
    """A registry with one tag. `answers` are those to each PUT; `stores` is whether it stores their manifests."""

    def __init__(self, answers: list[Reply | Exception], *, stores: bool, before: str = "") -> None:
        self.answers = answers
        self.stores = stores
        self.digest = before

    def __call__(self, sent: Sent) -> Reply | Exception:
        if sent.method == "PUT":
            if self.stores:
                self.digest = digest_of_bytes(sent.body)
            return self.answers.pop(0)
        return Reply(headers={"Docker-Content-Digest": self.digest}) if self.digest else Reply(status=404)


@pytest.mark.parametrize("answer", [broken(), requests.ReadTimeout("x"), Reply(status=502), Reply(status=400)])
def test_a_lost_response_is_no_failure(lay: Lay, answer: Reply | Exception) -> None:
    wire = lay(Tag([answer], stores=True))
    assert connect().put_manifest("1.0", CONTENT, IMAGE) == DIGEST
    assert [line.split()[0] for line in wire.lines] == ["PUT", "HEAD"]


@pytest.mark.parametrize("before", ["", digest_of_bytes(b"other")])
def test_a_manifest_that_did_not_arrive_is_sent_again(lay: Lay, before: str) -> None:
    wire = lay(Tag([broken(), Reply(status=201)], stores=False, before=before))
    assert connect().put_manifest("1.0", CONTENT, IMAGE) == DIGEST
    assert [line.split()[0] for line in wire.lines] == ["PUT", "HEAD", "PUT"]
    wire = lay(Tag([Reply(status=400, body=errors({"code": "MANIFEST_INVALID"}))], stores=False))
    with pytest.raises(RegistryError, match=r"400 Bad Request \(MANIFEST_INVALID\)"):
        connect().put_manifest("1.0", CONTENT, IMAGE)
    assert [line.split()[0] for line in wire.lines] == ["PUT", "HEAD"]


BLOB_UNKNOWN = Reply(status=400, body=errors({"code": "DIGEST_INVALID"}, {"code": "MANIFEST_BLOB_UNKNOWN"}))


def test_a_blob_that_another_client_uploads_again_is_waited_for(lay: Lay) -> None:
    wire = lay(Tag([BLOB_UNKNOWN, Reply(status=201)], stores=False))
    assert connect().put_manifest("1.0", CONTENT, IMAGE) == DIGEST
    assert [line.split()[0] for line in wire.lines] == ["PUT", "HEAD", "PUT"]


def test_a_blob_that_the_registry_lost_is_an_error(lay: Lay) -> None:
    wire = lay(Tag([BLOB_UNKNOWN] * 9, stores=False))
    with pytest.raises(RejectedError, match="MANIFEST_BLOB_UNKNOWN") as caught:
        connect(policy=replace(QUICK, retries=9)).put_manifest("1.0", CONTENT, IMAGE)
    assert [line.split()[0] for line in wire.lines] == ["PUT", "HEAD"] * REFUSALS
    assert "crane validate" in caught.value.hint


def test_a_manifest_that_the_registry_changes(lay: Lay) -> None:
    lay(lambda _: Reply(status=201, headers={"Docker-Content-Digest": digest_of_bytes(b"other")}))
    with pytest.raises(RegistryError, match="stored different content"):
        connect().put_manifest("1.0", CONTENT, IMAGE)


def test_mount(lay: Lay) -> None:
    answers = [
        Reply(status=201, headers={"Location": f"/v2/a/b/blobs/{DIGEST}"}),
        Reply(status=202, headers={"Location": "/v2/a/b/blobs/uploads/1"}),
        Reply(status=404),
        Reply(status=403),
    ]
    wire = lay(lambda _: answers.pop(0))
    registry = connect()
    assert registry.mount(DIGEST, "c/d")
    assert not registry.mount(DIGEST, "c/d"), "an upload was begun instead, and is canceled"
    assert not registry.mount(DIGEST, "c/d")
    assert not registry.mount(DIGEST, "a/b"), "the same repository"
    assert wire.lines[0] == f"POST /v2/a/b/blobs/uploads/?mount={DIGEST.replace(':', '%3A')}&from=c%2Fd"
    assert wire.lines[2] == "DELETE /v2/a/b/blobs/uploads/1"
    assert [line.split()[0] for line in wire.lines] == ["POST", "POST", "DELETE", "POST"], "a mounted blob is kept"


def test_stopped(lay: Lay) -> None:
    """At the next request, and during a pause."""
    stop = threading.Event()
    stop.set()
    wire = lay(lambda _: Reply(status=503))
    registry = connect(policy=RetryPolicy(first_delay_s=60))
    with pytest.raises(StoppedError):
        registry.stoppable(stop).has_blob(DIGEST)
    assert wire.seen == []
    stop.clear()

    def answer(_: object) -> Reply:
        threading.Timer(0.05, stop.set).start()
        return Reply(status=503)

    wire = lay(answer)
    start = time.monotonic()
    with pytest.raises(StoppedError):
        registry.stoppable(stop).has_blob(DIGEST)
    assert time.monotonic() - start < 10
    assert len(wire.seen) == 1


def test_stopped_during_a_download(lay: Lay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_http, "PIECE", 100)
    lay(lambda _: Reply(body=CONTENT))
    stop, read = threading.Event(), list[int]()

    def count(size: int) -> None:
        read.append(size)
        stop.set()

    with pytest.raises(StoppedError):
        connect().stoppable(stop).download(DIGEST, len(CONTENT), io.BytesIO(), count)
    assert read == [100]


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("Sun, 22 Nov 2026 13:00:01 GMT", datetime(2026, 11, 22, 13, 0, 1, tzinfo=UTC)),
        ("Sun, 22 Nov 2026 13:00:01 -0000", datetime(2026, 11, 22, 13, 0, 1, tzinfo=UTC)),
        ("", None),
        ("yesterday", None),
    ],
)
def test_the_clock_of_a_registry(lay: Lay, status: int, header: str, expected: datetime | None) -> None:
    lay(lambda _: Reply(status=status, headers={"Date": header} if header else {}))
    assert connect().clock() == expected


@pytest.mark.parametrize(("status", "headers"), [(403, {}), (401, {}), (400, {}), (200, {"Age": "86400"})])
def test_a_registry_may_have_no_clock(lay: Lay, status: int, headers: dict[str, str]) -> None:
    """It may hide a repository that does not exist yet, and a cache repeats old answers."""
    lay(lambda _: Reply(status=status, headers={"Date": "Sun, 22 Nov 2026 13:00:01 GMT", **headers}))
    assert connect().clock() is None


def test_referrers_and_tags_are_read_page_by_page(lay: Lay) -> None:
    def answer(sent: Sent) -> Reply:
        if sent.path.endswith("last=2"):
            return Reply(body=b'{"tags": ["c"]}')
        return Reply(body=b'{"tags": ["a", "b"]}', headers={"Link": '</v2/a/b/tags/list?last=2>; rel="next"'})

    wire = lay(answer)
    assert connect().list_tags() == ["a", "b", "c"]
    assert wire.lines == ["GET /v2/a/b/tags/list", "GET /v2/a/b/tags/list?last=2"]
    assert connect().referrers(DIGEST) == [b'{"tags": ["a", "b"]}', b'{"tags": ["c"]}']


def test_a_list_without_an_end(lay: Lay) -> None:
    lay(lambda _: Reply(body=b'{"tags": []}', headers={"Link": '</v2/a/b/tags/list?again>; rel="next"'}))
    with pytest.raises(RegistryError, match="more than 100 pages"):
        connect().list_tags()


@pytest.mark.parametrize(
    "reply",
    [
        *(Reply(status=status) for status in (400, 403, 404, 405)),
        *(
            Reply(status=302, headers={"Location": url})
            for url in ("https://pages.example.test/", "http://[x/", "https://other.example.test:port/")
        ),
        # ghcr.io: a page of GitHub, which soon answers 429: https://github.com/artifacthub/hub/issues/4785
        Reply(status=303, headers={"Location": "https://pages.example.test/-/v2/packages/container/package/a%2Fb"}),
        Reply(body=b"<html>", headers={"Content-Type": "text/html; charset=utf-8"}),
    ],
    ids=lambda reply: str(reply.status),
)
def test_a_registry_without_the_referrers_api(lay: Lay, reply: Reply) -> None:
    wire = lay(lambda _: reply)
    assert connect().referrers(DIGEST) is None
    assert wire.lines == [f"GET /v2/a/b/referrers/{DIGEST}"], "a redirect to another host is not followed"


def test_a_redirect_within_the_registry_is_followed(lay: Lay) -> None:
    def answer(sent: Sent) -> Reply:
        return Reply(body=b"{}") if sent.path.endswith("/") else Reply(status=301, headers={"Location": f"{sent.url}/"})

    lay(answer)
    assert connect().referrers(DIGEST) == [b"{}"]


@pytest.mark.parametrize("reply", [Reply(status=500), broken()], ids=["500", "cut"])
def test_a_failure_of_the_referrers_api_is_no_reason_for_another_list(lay: Lay, reply: Reply | Exception) -> None:
    """That list may be old: results that say that tests failed would be missing."""
    lay(lambda sent: reply if "/referrers/" in sent.path else Reply(headers={"Docker-Content-Digest": DIGEST}))
    with pytest.raises(RegistryError, match="tried 3 times"):
        connect().referrers(digest_of_bytes(b"image"))


@pytest.mark.parametrize(
    ("headers", "reason"),
    [({}, "answered 429 Too Many Requests: tried 3 times"), ({"Retry-After": "3600"}, "asks to retry after 3600 s")],
    ids=["retries", "a long wait"],
)
@pytest.mark.parametrize("has_list", [True, False])
def test_a_limit_of_requests_for_the_referrers_api(
    lay: Lay, has_list: bool, headers: dict[str, str], reason: str
) -> None:
    """The list under the fallback tag is used if there is one; else an image would look as if nothing were attached."""

    def answer(sent: Sent) -> Reply:
        if "/referrers/" in sent.path:
            return Reply(status=429, headers=headers)
        assert sent.path.endswith(DIGEST.replace(":", "-"))
        return Reply(headers={"Docker-Content-Digest": digest_of_bytes(b"list")}) if has_list else Reply(status=404)

    lay(answer)
    if has_list:
        assert connect().referrers(DIGEST) is None
    else:
        with pytest.raises(RegistryError, match=f"listing what refers to {DIGEST[7:19]}: .*{reason}"):
            connect().referrers(DIGEST)


def test_a_registry_without_head_requests(lay: Lay) -> None:
    """Some proxies answer 405."""

    def answer(sent: Sent) -> Reply:
        if sent.method == "HEAD":
            return Reply(status=405)
        return Reply(body=CONTENT, headers={"Content-Type": IMAGE}) if sent.path.endswith(DIGEST) else Reply(status=404)

    wire = lay(answer)
    other = digest_of_bytes(b"other")
    assert [connect().has_blob(DIGEST), connect().has_blob(other)] == [True, False]
    assert {sent.headers["Range"] for sent in wire.seen if sent.method == "GET"} == {"bytes=0-0"}
    assert [connect().digest_of(DIGEST), connect().digest_of(other)] == [DIGEST, None]


def test_a_manifest_that_was_stored_with_status_200(lay: Lay) -> None:
    """Not 201, as the specification has it."""
    wire = lay(lambda _: Reply(status=200))
    assert connect().put_manifest("tag", CONTENT, IMAGE) == DIGEST
    connect().put_manifest_once("tag", CONTENT, IMAGE)
    assert wire.lines == ["PUT /v2/a/b/manifests/tag"] * 2


def test_a_repository_that_a_registry_hides_may_need_a_login(lay: Lay) -> None:
    lay(lambda _: Reply(status=404, body=b'{"errors": [{"code": "NAME_UNKNOWN"}]}'))
    with pytest.raises(RegistryError) as caught:
        connect().put_manifest("tag", CONTENT, IMAGE)
    assert "`create_repository`" in caught.value.hint
    assert f"docker login {HOST}" in caught.value.hint


@pytest.mark.parametrize("body", [b"", b"[]", b'{"tags": 1}', b"{}", b"[" * 100_000])
def test_a_list_of_tags_that_cannot_be_read(lay: Lay, body: bytes) -> None:
    lay(lambda _: Reply(body=body))
    with pytest.raises(RegistryError, match="invalid answer"):
        connect().list_tags()


def test_a_repository_without_tags(lay: Lay) -> None:
    lay(lambda _: Reply(body=b'{"tags": null}'))
    assert connect().list_tags() == []
    lay(lambda _: Reply(status=404))
    assert connect().list_tags() == []


def test_a_manifest_is_stored_once_without_a_retry(lay: Lay) -> None:
    wire = lay(lambda _: Reply(status=500))
    with pytest.raises(TransientError):
        connect().put_manifest_once("tag", b"{}", IMAGE)
    assert wire.lines == ["PUT /v2/a/b/manifests/tag"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_was_cut_is_written_once(lay: Lay, ranges: bool) -> None:
    """Also if the registry sends the whole blob again."""
    lay(lambda sent: serve(sent, ranges=ranges))
    out = io.BytesIO()
    counts: list[int] = []
    connect().download(DIGEST, len(CONTENT), out, counts.append)
    assert out.getvalue() == CONTENT
    assert sum(counts) == len(CONTENT)


@pytest.mark.parametrize("content", [b"other", CONTENT + b"more", CONTENT[:-1]], ids=["other", "longer", "shorter"])
def test_a_download_of_other_bytes(lay: Lay, content: bytes) -> None:
    lay(lambda sent: Reply(status=416) if "Range" in sent.headers else Reply(body=content))
    with pytest.raises(RejectedError):
        connect().download(DIGEST, len(CONTENT), io.BytesIO(), lambda _: None)


@pytest.mark.parametrize(("status", "existed"), [(202, True), (200, True), (404, False)])
def test_a_manifest_is_deleted(lay: Lay, status: int, existed: bool) -> None:
    wire = lay(lambda _: Reply(status=status))
    assert connect().delete_manifest(DIGEST) is existed
    assert wire.lines == [f"DELETE /v2/a/b/manifests/{DIGEST}"]


@pytest.mark.parametrize(
    ("status", "code", "refused"),
    [(405, "", True), (400, "UNSUPPORTED", True), (403, "DENIED", True), (403, "OTHER", False), (400, "", False)],
)
def test_a_registry_that_does_not_delete(lay: Lay, status: int, code: str, refused: bool) -> None:
    lay(lambda _: Reply(status=status, body=errors({"code": code}) if code else b""))
    with pytest.raises(RegistryError) as caught:
        connect().delete_manifest(DIGEST)
    assert ("the registry does not allow deletion" in str(caught.value)) is refused
    assert ("docs/registries.md" in caught.value.hint) is refused
