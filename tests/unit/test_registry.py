"""A registry's answers and failures, one by one, against a wire that leads nowhere."""

from __future__ import annotations

import io
import json
import ssl
import threading
import time
from pathlib import Path

import pytest
import requests
from urllib3.exceptions import MaxRetryError, NewConnectionError

from builder.digest import of_bytes
from builder.errors import RegistryError
from builder.host import Host
from builder.index import IndexSettings
from builder.registry_http import Patience, StoppedError, retry_after
from tests.unit.wire import CONTENT, DIGEST, HOST, Reply, Sent, Wire, broken, connect, errors

IMAGE = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def refused() -> Exception:
    """As requests says that nobody listens, in all its layers."""
    inner = NewConnectionError(None, "no")  # type: ignore[arg-type]
    inner.__cause__ = ConnectionRefusedError(111, "Connection refused")
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


def test_delays_grow_to_a_limit_and_are_never_shorter_than_asked() -> None:
    patience = Patience(first_s=1, longest_s=10)
    for failures, most in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (99, 10)):
        delays = [patience.delay(failures) for _ in range(200)]
        assert most / 2 <= min(delays) < max(delays) <= most
    assert patience.delay(1, 7) == 7


@pytest.mark.parametrize(
    ("answer", "tries"),
    [
        *[(Reply(status=status), 3) for status in (408, 425, 429, 500, 502, 503, 504, 599)],
        *[(Reply(status=status), 1) for status in (400, 403, 405, 409, 410, 416, 418, 501, 505, 507)],
        (Reply(status=302), 1),
        (Reply(status=204), 1),
        (refused(), 3),
        (broken(), 3),
        (requests.ReadTimeout("x"), 3),
        (requests.exceptions.InvalidURL("x"), 1),
    ],
    ids=lambda one: str(getattr(one, "status", type(one).__name__)),
)
def test_what_may_pass_is_tried_again_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, answer: Reply | Exception, tries: int
) -> None:
    wire = Wire.lay(monkeypatch, lambda _: answer)
    with pytest.raises(RegistryError) as caught:
        connect().read_blob(DIGEST)
    assert len(wire.seen) == tries
    assert ("tried 3 times" in str(caught.value)) == (tries == 3)
    assert str(caught.value).startswith(f"{HOST}: reading blob {DIGEST[7:19]} of a/b: ")


def test_it_works_the_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Reply | Exception] = [Reply(status=503), broken(), Reply(body=CONTENT)]
    Wire.lay(monkeypatch, lambda _: answers.pop(0))
    assert connect().read_blob(DIGEST) == CONTENT


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refused(), "connection refused: tried 3 times"),
        (broken(), "reset by peer: tried 3 times"),
        (requests.ReadTimeout("x"), "no answer in time: tried 3 times"),
        (Reply(status=400, body=errors({"code": "X", "message": "a\x1b[31m\nb\u202e"})), "(X: a [31m b )"),
        (Reply(status=400, body=errors({"code": "X", "message": "y" * 999})), f"(X: {'y' * 297})"),
        (Reply(status=400, body=errors({"code": "X", "detail": {"a": 1}}, "z", {"code": 5})), "(X)"),
        (Reply(status=400, body=errors()), "answered 400 Bad Request"),
        (Reply(status=400, body=b"<html>"), "answered 400 Bad Request"),
        (Reply(status=400, body=b"[" * 99999), "answered 400 Bad Request"),
        (Reply(status=499), "answered 499"),
    ],
)
def test_words(monkeypatch: pytest.MonkeyPatch, answer: Reply | Exception, said: str) -> None:
    Wire.lay(monkeypatch, lambda _: answer)
    with pytest.raises(RegistryError) as caught:
        connect().read_blob(DIGEST)
    assert str(caught.value).endswith(said)
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
def test_a_full_disk_is_said_as_such_and_not_tried_again(monkeypatch: pytest.MonkeyPatch, answer: Reply) -> None:
    wire = Wire.lay(monkeypatch, lambda _: answer)
    with pytest.raises(RegistryError, match="the registry's disk is full") as caught:
        connect().put_manifest("1.0", b"{}", IMAGE)
    assert "Free space" in caught.value.hint
    assert [line.split()[0] for line in wire.said] == ["PUT", "HEAD"]


def test_a_registry_that_wants_too_long_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire.lay(monkeypatch, lambda _: Reply(status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(RegistryError, match="429 Too Many Requests: asks to wait for 3600 s"):
        connect().has_blob(DIGEST)
    assert len(wire.seen) == 1


def test_a_certificate_that_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = ssl.SSLCertVerificationError(1, "x")
    cause.verify_message = "unable to get local issuer certificate"
    wire = Wire.lay(monkeypatch, lambda _: requests.exceptions.SSLError(MaxRetryError(None, "/", cause)))  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match=r"not accepted \(unable to get local issuer certificate") as caught:
        connect().has_blob(DIGEST)
    assert "SSL_CERT_FILE" in caught.value.hint
    assert len(wire.seen) == 1


def test_an_address_that_is_none() -> None:
    with pytest.raises(RegistryError, match=f"{HOST}:99999: Port out of range"):
        connect(registry=f"{HOST}:99999")


@pytest.mark.parametrize(
    ("registry", "repository", "url"),
    [
        (HOST, "a/b", f"https://{HOST}/v2/a/b/"),
        ("10.0.0.1:5000", "b", "https://10.0.0.1:5000/v2/b/"),
        ("127.0.0.1:5000", "b", "http://127.0.0.1:5000/v2/b/"),
        ("localhost", "b", "http://localhost/v2/b/"),
        ("[::1]:5000", "b", "http://[::1]:5000/v2/b/"),
        ("localhost.example.test", "b", "https://localhost.example.test/v2/b/"),
        ("", "b", "https://registry-1.docker.io/v2/library/b/"),
        ("docker.io", "a/b", "https://registry-1.docker.io/v2/a/b/"),
    ],
)
def test_only_loopback_goes_without_tls(
    monkeypatch: pytest.MonkeyPatch, registry: str, repository: str, url: str
) -> None:
    wire = Wire.lay(monkeypatch, lambda _: Reply(status=404))
    connect(registry=registry, repository=repository).has_blob(DIGEST)
    assert wire.seen[0].url == f"{url}blobs/{DIGEST}"


def test_the_machine_s_certificates_and_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire.lay(monkeypatch, lambda _: Reply(status=404))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/other.pem")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.test")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example.test")
    host = Host(index=IndexSettings(ca_bundle="/ca.pem"))
    connect(host=host, patience=Patience(connect_s=3, read_s=4)).has_blob(DIGEST)
    assert wire.seen[0].options["verify"] == "/ca.pem"
    assert wire.seen[0].options["proxies"]["https"] == "http://proxy.example.test"
    assert wire.seen[0].options["timeout"] == (3, 4)
    connect(host=host, registry="127.0.0.1:5000").has_blob(DIGEST)
    assert not wire.seen[1].options["proxies"]


def test_no_cookie_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire.lay(monkeypatch, lambda _: Reply(status=404, headers={"Set-Cookie": "sid=1; Path=/"}))
    registry = connect()
    registry.has_blob(DIGEST)
    registry.has_blob(DIGEST)
    assert ["Cookie" in one.headers for one in wire.seen] == [False, False]


def elsewhere(sent: Sent) -> Reply:
    """Blobs are on another host, as with many registries; a login is wanted."""
    if sent.url.startswith("https://blobs.example.test"):
        return Reply(body=CONTENT)
    if "Authorization" not in sent.headers:
        return Reply(status=401, headers={"WWW-Authenticate": "Basic realm=x"})
    return Reply(status=307, headers={"Location": "https://blobs.example.test/x?signature=1"})


def test_a_redirect_is_followed_without_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auths": {HOST: {"auth": "bWU6eA=="}}}))
    wire = Wire.lay(monkeypatch, elsewhere)
    assert connect().read_blob(DIGEST) == CONTENT
    assert ["Authorization" in one.headers for one in wire.seen] == [False, True, False]


@pytest.mark.parametrize(
    "place", ["http://blobs.example.test/x", "http://127.0.0.1/x", "file:///etc/passwd", "http://["]
)
def test_a_redirect_away_from_tls_is_refused(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    wire = Wire.lay(monkeypatch, lambda _: Reply(status=307, headers={"Location": place}))
    with pytest.raises(RegistryError, match="not https"):
        connect().read_blob(DIGEST)
    assert len(wire.seen) == 1


def test_redirects_end(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire.lay(monkeypatch, lambda _: Reply(status=302, headers={"Location": "/again"}))
    with pytest.raises(RegistryError, match="more than 5 redirects"):
        connect().read_blob(DIGEST)
    assert len(wire.seen) == 5


def test_a_small_blob_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    Wire.lay(monkeypatch, lambda _: Reply(body=b"other"))
    with pytest.raises(RegistryError, match="serves other bytes"):
        connect().read_blob(DIGEST)
    Wire.lay(monkeypatch, lambda _: Reply(body=CONTENT))
    with pytest.raises(RegistryError, match="longer than 999 bytes"):
        connect().read_blob(DIGEST, limit=999)


def serve(sent: Sent, *, ranges: bool, content: bytes = CONTENT) -> Reply:
    """A blob whose connection ends after 400 bytes, until the last ones are wanted."""
    start = int(sent.headers.get("Range", "bytes=0-")[6:-1]) if ranges else 0
    asked = int(sent.headers.get("Range", "bytes=0-")[6:-1])
    status = 206 if start else 200
    return Reply(status=status, body=content[start : asked + 400], broken=asked + 400 < len(content))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on(monkeypatch: pytest.MonkeyPatch, ranges: bool) -> None:
    wire = Wire.lay(monkeypatch, lambda sent: serve(sent, ranges=ranges))
    into = io.BytesIO()
    connect().fetch_blob(DIGEST, len(CONTENT), into)
    assert into.getvalue() == CONTENT
    assert [one.headers.get("Range") for one in wire.seen] == [None, "bytes=400-", "bytes=800-"]


def test_a_connection_that_breaks_after_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire.lay(monkeypatch, lambda _: Reply(body=CONTENT, broken=True))
    into = io.BytesIO()
    connect().fetch_blob(DIGEST, len(CONTENT), into)
    assert into.getvalue() == CONTENT
    assert len(wire.seen) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [(CONTENT[:-1], "other bytes"), (CONTENT[:-1] + b"x", "other bytes"), (CONTENT + b"x", "longer than 1000 bytes")],
)
def test_a_download_is_checked(monkeypatch: pytest.MonkeyPatch, content: bytes, said: str) -> None:
    Wire.lay(monkeypatch, lambda _: Reply(body=content))
    with pytest.raises(RegistryError, match=said):
        connect().fetch_blob(DIGEST, len(CONTENT), io.BytesIO())


def test_nothing_is_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire.lay(monkeypatch, lambda _: Reply(body=CONTENT, headers={"Content-Encoding": "gzip"}))
    assert connect().read_blob(DIGEST) == CONTENT
    assert wire.seen[0].headers["Accept-Encoding"] == "identity"


def test_digests_and_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"1.0": CONTENT, DIGEST: CONTENT}

    def answer(sent: Sent) -> Reply:
        name = sent.path.rpartition("/")[2]
        assert IMAGE in sent.headers["Accept"]
        return Reply(body=stored[name], headers={"Content-Type": IMAGE}) if name in stored else Reply(status=404)

    Wire.lay(monkeypatch, answer)
    registry = connect()
    assert registry.digest_of("1.0") == DIGEST, "without Docker-Content-Digest the manifest itself says it"
    assert registry.digest_of("none") is None
    assert registry.manifest("none") is None
    found = registry.manifest("1.0")
    assert found is not None
    assert (found.digest, found.media_type, found.content) == (DIGEST, IMAGE, CONTENT)
    stored[DIGEST] = b"other"
    with pytest.raises(RegistryError, match="serves other bytes"):
        registry.manifest(DIGEST)


class Tag:
    """A registry with one tag. `answer` is what a PUT is told, after `stored` of it."""

    def __init__(self, answers: list[Reply | Exception], *, stores: bool, before: str = "") -> None:
        self.answers = answers
        self.stores = stores
        self.digest = before

    def __call__(self, sent: Sent) -> Reply | Exception:
        if sent.method == "PUT":
            if self.stores:
                self.digest = of_bytes(sent.body)
            return self.answers.pop(0)
        return Reply(headers={"Docker-Content-Digest": self.digest}) if self.digest else Reply(status=404)


@pytest.mark.parametrize("answer", [broken(), requests.ReadTimeout("x"), Reply(status=502), Reply(status=400)])
def test_a_lost_acknowledgement_is_no_failure(monkeypatch: pytest.MonkeyPatch, answer: Reply | Exception) -> None:
    wire = Wire.lay(monkeypatch, Tag([answer], stores=True))
    assert connect().put_manifest("1.0", CONTENT, IMAGE) == DIGEST
    assert [line.split()[0] for line in wire.said] == ["PUT", "HEAD"]


@pytest.mark.parametrize("before", ["", of_bytes(b"other")])
def test_a_manifest_that_did_not_arrive_is_sent_again(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    wire = Wire.lay(monkeypatch, Tag([broken(), Reply(status=201)], stores=False, before=before))
    assert connect().put_manifest("1.0", CONTENT, IMAGE) == DIGEST
    assert [line.split()[0] for line in wire.said] == ["PUT", "HEAD", "PUT"]
    wire = Wire.lay(monkeypatch, Tag([Reply(status=400, body=errors({"code": "MANIFEST_INVALID"}))], stores=False))
    with pytest.raises(RegistryError, match=r"400 Bad Request \(MANIFEST_INVALID\)"):
        connect().put_manifest("1.0", CONTENT, IMAGE)
    assert [line.split()[0] for line in wire.said] == ["PUT", "HEAD"]


def test_a_manifest_that_is_changed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    Wire.lay(monkeypatch, lambda _: Reply(status=201, headers={"Docker-Content-Digest": of_bytes(b"other")}))
    with pytest.raises(RegistryError, match="stored something else"):
        connect().put_manifest("1.0", CONTENT, IMAGE)


def test_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        Reply(status=201),
        Reply(status=202, headers={"Location": "/v2/a/b/blobs/uploads/1"}),
        Reply(status=404),
        Reply(status=403),
    ]
    wire = Wire.lay(monkeypatch, lambda _: answers.pop(0))
    registry = connect()
    assert registry.mount(DIGEST, "c/d")
    assert not registry.mount(DIGEST, "c/d"), "an upload was begun instead, and is given up"
    assert not registry.mount(DIGEST, "c/d")
    assert not registry.mount(DIGEST, "a/b"), "it is this repository"
    assert wire.said[0] == f"POST /v2/a/b/blobs/uploads/?mount={DIGEST.replace(':', '%3A')}&from=c%2Fd"
    assert wire.said[2] == "DELETE /v2/a/b/blobs/uploads/1"


def test_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next request, and during a pause."""
    stop = threading.Event()
    stop.set()
    wire = Wire.lay(monkeypatch, lambda _: Reply(status=503))
    registry = connect(patience=Patience(first_s=60))
    with pytest.raises(StoppedError):
        registry.stoppable(stop).has_blob(DIGEST)
    assert wire.seen == []
    stop.clear()
    threading.Timer(0.05, stop.set).start()
    start = time.monotonic()
    with pytest.raises(StoppedError):
        registry.stoppable(stop).has_blob(DIGEST)
    assert time.monotonic() - start < 10
    assert len(wire.seen) == 1
