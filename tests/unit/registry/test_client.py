"""Requests to a registry: responses, failures and retries, without a network."""

from __future__ import annotations

import io
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from builder.common import http as common_http
from builder.common.errors import RegistryError
from builder.common.files import digest_of_bytes
from builder.common.tasks import RetryPolicy
from builder.index.host import Host
from builder.index.settings import IndexSettings
from builder.layers.oci import Manifest
from builder.registry.client import REFUSALS
from builder.registry.failures import RejectedError, StoppedError, TransientError
from tests.fakes.wire import CONTENT, DIGEST, HOST, QUICK, Reply, Sent, broken, connect, errors
from tests.unit.registry.fixtures import Lay

IMAGE = "application/vnd.oci.image.manifest.v1+json"


@pytest.mark.parametrize(
    ("tries", "statuses"),
    [
        (3, (408, 425, 429, 500, 502, 503, 504, 599)),
        (1, (204, 302, 400, 403, 405, 409, 410, 416, 418, 501, 505, 507)),
    ],
)
def test_only_transient_failures_are_retried(lay: Lay, tries: int, statuses: tuple[int, ...]) -> None:
    for status in statuses:
        wire = lay(lambda _, status=status: Reply(status=status))  # type: ignore[misc]
        with pytest.raises(RegistryError):
            connect().read_blob(DIGEST)
        assert len(wire.seen) == tries, status


def test_it_works_the_third_time(lay: Lay) -> None:
    answers: list[Reply | Exception] = [Reply(status=503), broken(), Reply(body=CONTENT)]
    lay(lambda _: answers.pop(0))
    assert connect().read_blob(DIGEST) == CONTENT


class Stop(threading.Event):
    """Records the seconds of each wait, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return False


@pytest.mark.parametrize(
    ("header", "waits"), [("3", True), ("-7", False), ("soon", False), ("Thu, 01 Jan 1970 00:00:01 GMT", False)]
)
def test_the_next_try_waits_as_long_as_the_registry_asks(lay: Lay, header: str, waits: bool) -> None:
    stop = Stop()
    lay(lambda _: Reply(status=429, headers={"Retry-After": header}))
    with pytest.raises(RegistryError):
        connect().stoppable(stop).has_blob(DIGEST)
    assert (stop.waits == [3, 3]) == waits


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


@pytest.mark.parametrize(
    ("place", "host"),
    [
        ("blobs.example.test/x?signature=1", "blobs.example.test"),
        # requests takes the host before the backslash, urlsplit the one after it.
        (f"elsewhere.test\\@{HOST}/x", "elsewhere.test"),
        (f"elsewhere.test/@{HOST}/x", "elsewhere.test"),
    ],
)
def test_a_redirect_is_followed_without_credentials(lay: Lay, docker_config: Path, place: str, host: str) -> None:
    """Blobs are on another host, as with many registries; a login is required."""
    docker_config.write_text(json.dumps({"auths": {HOST: {"auth": "bWU6eA=="}}}))

    def answer(sent: Sent) -> Reply:
        if sent.url.startswith(f"https://{host}/"):
            return Reply(body=CONTENT)
        if "Authorization" not in sent.headers:
            return Reply(status=401, headers={"WWW-Authenticate": "Basic realm=x"})
        return Reply(status=307, headers={"Location": f"https://{place}"})

    wire = lay(answer)
    assert connect().read_blob(DIGEST) == CONTENT
    assert ["Authorization" in sent.headers for sent in wire.seen] == [False, True, False]


def serve(sent: Sent, *, ranges: bool, content: bytes = CONTENT) -> Reply:
    """A blob whose connection ends 400 bytes after the start of the range, except for the last bytes."""
    start = int(sent.headers.get("Range", "bytes=0-")[6:-1]) if ranges else 0
    end = int(sent.headers.get("Range", "bytes=0-")[6:-1]) + 400
    return Reply(status=206 if start else 200, body=content[start:end], broken=end < len(content))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_is_resumed(lay: Lay, ranges: bool) -> None:
    """Also if the registry sends the whole blob again."""
    wire = lay(lambda sent: serve(sent, ranges=ranges))
    out, read = io.BytesIO(), list[int]()
    connect().download(DIGEST, len(CONTENT), out, read.append)
    assert out.getvalue() == CONTENT
    assert sum(read) == len(CONTENT)
    assert [sent.headers.get("Range") for sent in wire.seen] == [None, "bytes=400-", "bytes=800-"]


def test_a_download_without_progress_is_given_up(lay: Lay) -> None:
    """A registry that sends single bytes would be tried for years."""
    wire = lay(lambda sent: Reply(status=206 if "Range" in sent.headers else 200, body=b"x", broken=True))
    with pytest.raises(RegistryError):
        connect().download(DIGEST, len(CONTENT), io.BytesIO(), lambda _: None)
    assert [sent.headers.get("Range") for sent in wire.seen] == [None, "bytes=1-", "bytes=2-"]


def test_a_connection_that_breaks_after_the_last_byte(lay: Lay) -> None:
    wire = lay(lambda _: Reply(body=CONTENT, broken=True))
    connect().download(DIGEST, len(CONTENT), io.BytesIO(), lambda _: None)
    assert len(wire.seen) == 1


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"x", CONTENT + b"x"], ids=["short", "other", "long"])
def test_a_download_is_checked(lay: Lay, content: bytes) -> None:
    lay(lambda sent: Reply(status=416) if "Range" in sent.headers else Reply(body=content))
    with pytest.raises(RejectedError):
        connect().download(DIGEST, len(CONTENT), io.BytesIO(), lambda _: None)


def test_a_part_of_a_blob_is_read(lay: Lay) -> None:
    replies = iter([Reply(status=206, body=CONTENT[10:15], broken=True), Reply(status=206, body=CONTENT[10:20])])
    wire = lay(lambda _: next(replies))
    assert connect().read_range(DIGEST, 10, 20) == CONTENT[10:20]
    assert [sent.headers["Range"] for sent in wire.seen] == ["bytes=10-19"] * 2


@pytest.mark.parametrize(
    "reply",
    [Reply(body=CONTENT), Reply(status=206, body=CONTENT), Reply(status=416)],
    ids=["the whole blob", "longer", "not satisfiable"],
)
def test_an_answer_that_is_not_the_requested_part_is_refused(lay: Lay, reply: Reply) -> None:
    lay(lambda _: reply)
    with pytest.raises(RejectedError):
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
    with pytest.raises(RejectedError):
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


BLOB_UNKNOWN = Reply(status=400, body=errors({"code": "DIGEST_INVALID"}, {"code": "MANIFEST_BLOB_UNKNOWN"}))
REFUSED = Reply(status=400, body=errors({"code": "MANIFEST_INVALID"}))


@pytest.mark.parametrize("answer", [broken(), requests.ReadTimeout("x"), Reply(status=502), Reply(status=400)])
def test_a_lost_response_is_no_failure(lay: Lay, answer: Reply | Exception) -> None:
    wire = lay(Tag([answer], stores=True))
    assert connect().put_manifest("1.0", CONTENT, IMAGE) == DIGEST
    assert wire.methods == ["PUT", "HEAD"]


@pytest.mark.parametrize(
    ("answer", "before"),
    [(broken(), ""), (broken(), digest_of_bytes(b"other")), (BLOB_UNKNOWN, "")],
    ids=["cut", "cut, with another manifest before", "a blob that another client uploads again"],
)
def test_a_manifest_that_did_not_arrive_is_sent_again(lay: Lay, answer: Reply | Exception, before: str) -> None:
    wire = lay(Tag([answer, Reply(status=201)], stores=False, before=before))
    assert connect().put_manifest("1.0", CONTENT, IMAGE) == DIGEST
    assert wire.methods == ["PUT", "HEAD", "PUT"]


@pytest.mark.parametrize(("answer", "tries"), [(REFUSED, 1), (BLOB_UNKNOWN, REFUSALS)], ids=["invalid", "a lost blob"])
def test_a_manifest_that_is_refused(lay: Lay, answer: Reply, tries: int) -> None:
    wire = lay(Tag([answer] * 9, stores=False))
    with pytest.raises(RejectedError) as caught:
        connect(policy=replace(QUICK, retries=9)).put_manifest("1.0", CONTENT, IMAGE)
    assert caught.value.code
    assert wire.methods == ["PUT", "HEAD"] * tries


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
    assert not registry.mount(DIGEST, "c/d"), "an upload was begun instead"
    assert not registry.mount(DIGEST, "c/d")
    assert not registry.mount(DIGEST, "a/b"), "the same repository"
    assert wire.lines[0] == f"POST /v2/a/b/blobs/uploads/?mount={DIGEST.replace(':', '%3A')}&from=c%2Fd"
    assert wire.methods == ["POST"] * 3


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


def test_referrers_and_tags_are_read_page_by_page(lay: Lay) -> None:
    def answer(sent: Sent) -> Reply:
        if sent.path.endswith("last=2"):
            return Reply(body=b'{"tags": ["c"]}')
        return Reply(body=b'{"tags": ["a", "b"]}', headers={"Link": '</v2/a/b/tags/list?last=2>; rel="next"'})

    wire = lay(answer)
    assert connect().list_tags() == ["a", "b", "c"]
    assert wire.lines == ["GET /v2/a/b/tags/list?n=1000", "GET /v2/a/b/tags/list?last=2"]
    assert connect().referrers(DIGEST) == [b'{"tags": ["a", "b"]}', b'{"tags": ["c"]}']


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
    images = set[str]()

    def answer(sent: Sent) -> Reply:
        if sent.method == "HEAD":
            return Reply(headers={"Docker-Content-Digest": DIGEST}) if images else Reply(status=404)
        return reply

    wire, repository = lay(answer), connect()
    asked = f"GET /v2/a/b/referrers/{DIGEST}"
    # Of an image that does not exist, the answer says nothing about the registry.
    assert [repository.referrers(DIGEST) for _ in range(2)] == [None, None]
    images.add(DIGEST)
    assert [repository.referrers(DIGEST) for _ in range(2)] == [None, None]
    assert [line for line in wire.lines if line.startswith("GET")] == [asked] * 3, "no redirect is followed"


def test_a_redirect_within_the_registry_is_followed(lay: Lay) -> None:
    def answer(sent: Sent) -> Reply:
        return Reply(body=b"{}") if sent.path.endswith("/") else Reply(status=301, headers={"Location": f"{sent.url}/"})

    lay(answer)
    assert connect().referrers(DIGEST) == [b"{}"]


@pytest.mark.parametrize("reply", [Reply(status=500), Reply(status=429), broken()], ids=["500", "429", "cut"])
def test_a_failure_of_the_referrers_api_is_no_reason_for_another_list(lay: Lay, reply: Reply | Exception) -> None:
    """That list may be old: results that say that tests failed would be missing."""
    lay(lambda sent: reply if "/referrers/" in sent.path else Reply(headers={"Docker-Content-Digest": DIGEST}))
    with pytest.raises(RegistryError):
        connect().referrers(digest_of_bytes(b"image"))


def test_a_manifest_that_was_stored_with_status_200(lay: Lay) -> None:
    """Not 201, as the specification has it."""
    wire = lay(lambda _: Reply(status=200))
    assert connect().put_manifest("tag", CONTENT, IMAGE) == DIGEST
    connect().put_manifest_once("tag", CONTENT, IMAGE)
    assert wire.lines == ["PUT /v2/a/b/manifests/tag"] * 2


@pytest.mark.parametrize("body", [b"", b"[]", b'{"tags": 1}', b"{}", b"[" * 100_000])
def test_a_list_of_tags_that_cannot_be_read(lay: Lay, body: bytes) -> None:
    lay(lambda _: Reply(body=body))
    with pytest.raises(RegistryError):
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


@pytest.mark.parametrize(("status", "existed"), [(202, True), (200, True), (404, False)])
def test_a_manifest_is_deleted(lay: Lay, status: int, existed: bool) -> None:
    wire = lay(lambda _: Reply(status=status))
    assert connect().delete_manifest(DIGEST) is existed
    assert wire.lines == [f"DELETE /v2/a/b/manifests/{DIGEST}"]
