"""What is asked of an index, how often, and what is said when it does not do as it should.

See also the integration test of the same name.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from builder import fetch
from builder.errors import DiskError, FetchError
from builder.fetch import Fetcher, Patience
from builder.index import IndexSettings
from builder.lock import Wheel
from tests.unit.wire import Reply, Sent, Wire, broken

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
FILE = "tiny_wheel-1.0-py3-none-any.whl"
HOST = "index.example.test"
INDEX = f"https://{HOST}/simple/"
PATIENCE = Patience()
WHEEL = Wheel(component="tiny", name="Tiny_Wheel", version="1.0", file=FILE, size=len(CONTENT), sha256=SHA256)
UNKNOWN = Wheel(component="tiny", name="Tiny_Wheel", version="1.0", file=FILE, size=0, sha256=SHA256)


def html(url: str = f"../../files/{FILE}", sha256: str = SHA256) -> Reply:
    link = f'<a href="{url}{"#sha256=" + sha256 if sha256 else ""}">{FILE}</a>'
    return Reply(
        body=f"<!DOCTYPE html><html><body>{link}</body></html>".encode(), headers={"Content-Type": "text/html"}
    )


def as_json(data: object) -> Reply:
    return Reply(body=json.dumps(data).encode(), headers={"Content-Type": "application/vnd.pypi.simple.v1+json"})


def file(sent: Sent) -> Reply:
    """The wheel, or the part of it that is asked for."""
    if asked := sent.headers.get("Range"):
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        return Reply(status=206, body=CONTENT[start:]) if start < len(CONTENT) else Reply(status=416)
    return Reply(body=CONTENT)


Answer = Callable[[Sent], Reply | Exception]


class Stop(threading.Event):
    """Does not wait, but notes how long it should have."""

    def __init__(self, waited: list[float]) -> None:
        super().__init__()
        self._waited = waited

    def wait(self, timeout: float | None = None) -> bool:
        self._waited.append(timeout or 0)
        return self.is_set()


class Setting:
    """An index in memory: `page` and `file` answer. `got` is what was told of progress, `waited` how long it waited."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.page: Answer = lambda _: html()
        self.file: Answer = file
        self.got: list[int] = []
        self.waited: list[float] = []
        self.wire = Wire.lay(monkeypatch, lambda sent: (self.page if "/simple/" in sent.url else self.file)(sent))
        self.whl, self.part = folder / f"{SHA256}.whl", folder / f"{SHA256}.part"

    def fetcher(self, patience: Patience = PATIENCE, **settings: str) -> Fetcher:
        made = Fetcher(
            IndexSettings(**({"url": INDEX} | settings)),
            self.folder,
            got=self.got.append,
            patience=patience,
        )
        made._stopped = Stop(self.waited)
        return made

    def fetches(self, wheel: Wheel = WHEEL, **settings: str) -> None:
        assert self.fetcher(PATIENCE, **settings).fetch(wheel) == self.whl
        assert self.whl.read_bytes() == CONTENT
        assert list(self.folder.iterdir()) == [self.whl]
        assert sum(self.got) == len(CONTENT)

    def fails(self, patience: Patience = PATIENCE, **settings: str) -> str:
        with pytest.raises(FetchError) as raised:
            self.fetcher(patience, **settings).fetch(WHEEL)
        told = str(raised.value)
        assert told.startswith(f"{FILE}: ")
        assert HOST not in f"{told} {raised.value.hint}"
        assert raised.value.hint
        assert not self.whl.exists()
        assert sum(self.got) == 0
        return told


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    return Setting(tmp_path, monkeypatch)


def once(first: Reply | Exception, then: Answer) -> Answer:
    """Answers so, and from then on otherwise."""
    answers = iter([first])
    return lambda sent: next(answers, None) or then(sent)


# ---- what is asked


def test_what_is_asked(setting: Setting) -> None:
    setting.fetches()
    assert setting.wire.said == ["GET /simple/tiny-wheel/", f"GET /files/{FILE}"]
    page, whole = setting.wire.seen
    assert "json" in page.headers["Accept"]
    assert whole.headers["Accept-Encoding"] == "identity"  # or its length would be another one
    assert "Range" not in whole.headers
    for sent in setting.wire.seen:
        assert sent.options["timeout"] == (10, 30)
        assert sent.options["verify"] is True


def test_only_what_is_missing_is_asked_for(setting: Setting) -> None:
    setting.part.write_bytes(CONTENT[:1000])
    setting.fetches()
    assert setting.wire.seen[1].headers["Range"] == "bytes=1000-"


def test_a_page_in_json(setting: Setting) -> None:
    listed = {"filename": FILE, "url": f"https://elsewhere.test/{FILE}", "hashes": {"sha256": SHA256}}
    setting.page = lambda _: as_json({"meta": {"api-version": "1.0"}, "name": "tiny-wheel", "files": [listed]})
    setting.fetches()
    assert setting.wire.seen[1].url == f"https://elsewhere.test/{FILE}"


def test_a_page_without_hashes(setting: Setting) -> None:
    setting.page = lambda _: html(sha256="")
    setting.fetches()
    setting.whl.unlink()
    setting.got.clear()
    setting.file = lambda _: Reply(body=bytes(len(CONTENT)))
    assert "other bytes than the lock says" in setting.fails()


@pytest.mark.parametrize("there", [b"", CONTENT[:1000], CONTENT, b"wrong" * 9])
def test_a_wheel_of_unknown_size(setting: Setting, there: bytes) -> None:
    setting.part.write_bytes(there)
    setting.fetches(UNKNOWN)


def test_a_wheel_that_is_there(setting: Setting) -> None:
    setting.whl.write_bytes(CONTENT)
    setting.fetches()
    setting.got.clear()
    setting.fetches(UNKNOWN)
    assert setting.wire.said == []


def test_a_wheel_is_dropped(setting: Setting) -> None:
    fetcher = setting.fetcher()
    assert fetcher.path(WHEEL) == setting.whl
    setting.fetches()
    fetcher.drop(WHEEL)
    fetcher.drop(WHEEL)
    assert list(setting.folder.iterdir()) == []


@pytest.mark.parametrize("left", [b"", CONTENT[:10]], ids=["nothing", "a part"])
def test_a_wheel_that_came_and_went_while_this_one_waited(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    """Another process had the lock: what this one has locked now has no name any more, or it is another file's."""
    lock = fcntl.flock
    waits = 0

    def wait(file: Any, operation: int) -> None:
        nonlocal waits
        waits += 1
        if waits == 1:
            file.write(CONTENT)
            file.flush()
            setting.part.unlink()
            if left:
                setting.part.write_bytes(left)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", wait)
    setting.fetches()
    assert waits == 2


@pytest.mark.parametrize(
    ("settings", "verify", "proxies"),
    [
        ({}, "/etc/another.pem", {}),
        ({"ca_bundle": "/etc/ca.pem"}, "/etc/ca.pem", {}),
        ({"trusted_host": f"other.test {HOST}"}, False, {}),
        ({"trusted_host": f"{HOST}:8443", "url": f"https://{HOST}:8443/simple/"}, False, {}),
        ({"trusted_host": "other.test", "ca_bundle": "/etc/ca.pem"}, "/etc/ca.pem", {}),
        ({"trusted_host": "example.test"}, "/etc/another.pem", {}),
        ({"proxy": "http://p.test:1"}, "/etc/another.pem", {"http": "http://p.test:1", "https": "http://p.test:1"}),
    ],
)
def test_the_settings_of_the_machine(
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    verify: bool | str,
    proxies: dict[str, str],
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/etc/another.pem")
    setting.fetches(WHEEL, **settings)
    for sent in setting.wire.seen:
        assert sent.options["verify"] == verify
        assert {name: url for name, url in sent.options["proxies"].items() if name in ("http", "https")} == proxies


def test_only_the_trusted_host_is_trusted(setting: Setting) -> None:
    """Not every host that one of its pages names."""
    setting.page = lambda _: html(url="https://elsewhere.test/x.whl")
    setting.fetches(WHEEL, trusted_host=HOST, ca_bundle="/etc/ca.pem")
    assert [sent.options["verify"] for sent in setting.wire.seen] == [False, "/etc/ca.pem"]


def test_without_an_index_of_its_own_the_machine_uses_pypi(setting: Setting) -> None:
    setting.fetches(url="")
    assert setting.wire.seen[0].url == "https://pypi.org/simple/tiny-wheel/"


# ---- asked again


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("what", ["page", "file"])
def test_answers_that_may_be_better_next_time(setting: Setting, what: str, status: int) -> None:
    good = getattr(setting, what)
    setattr(setting, what, once(Reply(status=status), good))
    setting.fetches()
    assert len(setting.wire.seen) == 3
    setting.whl.unlink()
    setting.got.clear()
    setattr(setting, what, lambda _: Reply(status=status))
    assert f"the index answers {status} " in setting.fails()


@pytest.mark.parametrize("status", [400, 401, 403, 410, 418, 451, 501])
@pytest.mark.parametrize("what", ["page", "file"])
def test_answers_that_will_not_change(setting: Setting, what: str, status: int) -> None:
    setattr(setting, what, lambda _: Reply(status=status))
    assert f"the index answers {status}" in setting.fails()
    assert len(setting.wire.seen) == (1 if what == "page" else 2)
    assert setting.waited == []


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_it_asks_a_few_times_and_waits_longer_each_time(setting: Setting, attempts: int) -> None:
    setting.file = lambda _: Reply(status=503)
    setting.fails(Patience(attempts=attempts, pause=0.5))
    assert len(setting.wire.seen) == 1 + attempts
    assert len(setting.waited) == attempts - 1
    for number, waited in enumerate(setting.waited):
        assert 0.5 * 2**number <= waited <= 0.5 * 2 ** (number + 1)


@pytest.mark.parametrize(
    "error", [broken(), ConnectionResetError(104, "reset"), requests.ReadTimeout(), requests.exceptions.SSLError("bad")]
)
@pytest.mark.parametrize("what", ["page", "file"])
def test_connections_that_break(setting: Setting, what: str, error: Exception) -> None:
    setattr(setting, what, once(error, getattr(setting, what)))
    setting.fetches()


def test_a_body_that_breaks_off(setting: Setting) -> None:
    setting.file = once(Reply(body=CONTENT[:700_000], broken=True), file)
    setting.fetches()
    start = int(setting.wire.seen[2].headers["Range"].removeprefix("bytes=").removesuffix("-"))
    assert 700_000 - fetch.PIECE < start <= 700_000


def test_a_body_that_ends_too_early(setting: Setting) -> None:
    """Without a word: there is nothing that says how long it should have been."""
    setting.file = once(Reply(body=CONTENT[:200_000]), file)
    setting.fetches()
    assert setting.wire.seen[2].headers["Range"] == "bytes=200000-"


@pytest.mark.parametrize(
    "wrong",
    [
        Reply(status=416),
        Reply(status=206, body=CONTENT),
        Reply(status=206, body=CONTENT[999:]),
        Reply(status=206, body=CONTENT[1001:] + b"x"),
        Reply(status=200, body=CONTENT),
    ],
    ids=["no such part", "everything as a part", "one byte more", "another part", "everything"],
)
def test_an_answer_that_is_not_the_part_that_was_asked_for(setting: Setting, wrong: Reply) -> None:
    setting.part.write_bytes(CONTENT[:1000])
    setting.file = once(wrong, file)
    setting.fetches()


def test_a_page_that_cannot_be_read(setting: Setting) -> None:
    setting.page = lambda _: as_json({"meta": {"api-version": "1.0"}, "files": 5})
    assert "the index's page of tiny-wheel cannot be read" in setting.fails()
    setting.page = lambda _: as_json({"meta": {"api-version": "99.0"}, "name": "x", "files": []})
    assert "cannot be read" in setting.fails()
    setting.page = lambda _: Reply(body=b"%PDF", headers={"Content-Type": "application/pdf"})
    assert "cannot be read" in setting.fails()
    assert len(setting.wire.seen) == 15


# ---- what is said


def test_a_wheel_that_is_not_listed(setting: Setting) -> None:
    for reply in (Reply(status=404), html(url="../other-1.0.whl"), as_json({"meta": {"api-version": "1.0"}})):
        setting.page = once(Reply(status=404), lambda _, reply=reply: reply)  # type: ignore[misc]
        assert "the index does not list it" in setting.fails()


@pytest.mark.parametrize("size", [1, len(CONTENT)])
def test_more_bytes_than_there_may_be(setting: Setting, size: int) -> None:
    setting.file = lambda _: Reply(body=CONTENT + bytes(size))
    assert f"serves more than the {len(CONTENT)} bytes" in setting.fails()
    assert setting.part.read_bytes() == b""


def test_other_bytes(setting: Setting) -> None:
    setting.file = lambda _: Reply(body=CONTENT[::-1])
    told = setting.fails()
    assert SHA256[:12] in told
    assert hashlib.sha256(CONTENT[::-1]).hexdigest()[:12] in told
    assert setting.part.read_bytes() == b""
    assert len(setting.wire.seen) == 2


def test_another_hash_is_listed(setting: Setting) -> None:
    setting.page = lambda _: html(sha256="0" * 64)
    assert "lists another SHA-256 (000000000000...)" in setting.fails()
    assert len(setting.wire.seen) == 1


@pytest.mark.parametrize(
    "url",
    [f"ftp://{HOST}/x.whl", "file:///etc/passwd", "data:,x", "javascript:x", f"httpx://{HOST}/", "http://x:99999/"],
)
def test_addresses_that_are_not_fetched(setting: Setting, url: str) -> None:
    setting.page = lambda _: html(url=url)
    setting.file = lambda _: pytest.fail("it was asked for")
    assert "the index names an address" in setting.fails()


@pytest.mark.parametrize("url", ["http://[::1", "http://a b/", "https://", "http://x:y/", "https://\u2100.test/"])
def test_addresses_that_are_none(setting: Setting, url: str) -> None:
    setting.page = lambda _: html(url=url)
    setting.file = lambda _: Reply(status=404)
    setting.fails()


class _Errors:
    """What requests raises, with every host that there may be in it."""

    text = f"HTTPSConnectionPool(host='{HOST}', port=443): https://someone:secret@{HOST}/ via proxy.example.test"
    kinds = (
        requests.ConnectionError, requests.ReadTimeout, requests.ConnectTimeout, requests.exceptions.SSLError,
        requests.exceptions.ProxyError, requests.TooManyRedirects, requests.exceptions.ChunkedEncodingError,
        requests.exceptions.InvalidURL, requests.exceptions.ContentDecodingError, ConnectionResetError,
    )  # fmt: skip


@pytest.mark.parametrize("kind", _Errors.kinds, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("what", ["page", "file"])
def test_neither_a_host_nor_a_password_is_said(setting: Setting, what: str, kind: type[Exception]) -> None:
    setattr(setting, what, lambda _: kind(_Errors.text))
    told = setting.fails(url=f"https://someone:secret@{HOST}/simple/", proxy="http://user:word@proxy.example.test:1")
    for word in ("example.test", "someone", "secret", "user", "word", "://", "HTTPSConnectionPool"):
        assert word not in told
    assert len(setting.wire.seen) == (5 if what == "page" else 6)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (requests.ReadTimeout(), "the index is silent"),
        (requests.ConnectTimeout(), "the index does not answer"),
        (requests.exceptions.SSLError(), "the certificate of the index is not trusted"),
        (requests.exceptions.ProxyError(), "the proxy to the index does not answer"),
        (requests.TooManyRedirects(), "the index sends from one address to the next"),
        (broken(), "the index cannot be reached, or the connection broke off"),
        (ConnectionResetError(), "the connection broke off"),
        (requests.exceptions.InvalidURL(), "the index cannot be asked (InvalidURL)"),
        (Reply(body=CONTENT[:99], broken=True), "the connection broke off"),
        (Reply(body=CONTENT[:99]), f"was cut off after 99 of {len(CONTENT)} bytes"),
        (Reply(status=503), "the index answers 503 Service Unavailable"),
        (Reply(status=599), "the index answers 599"),
    ],
)
def test_what_is_said(setting: Setting, error: Reply | Exception, words: str) -> None:
    setting.file = lambda _: error
    assert setting.fails(Patience(attempts=1)) == f"{FILE}: {words}"


def test_a_full_disk_is_called_that(setting: Setting) -> None:
    setting.file = lambda _: OSError(28, "No space left on device")
    with pytest.raises(DiskError):
        setting.fetcher().fetch(WHEEL)


def test_a_disk_that_is_full_while_it_comes(setting: Setting) -> None:
    """Its store is named, and what came is kept."""

    def got(size: int) -> None:
        if size:
            raise OSError(28, "No space left on device")

    fetcher = setting.fetcher()
    fetcher._got = got
    with pytest.raises(DiskError, match="the disk of the store is full") as raised:
        fetcher.fetch(WHEEL)
    assert str(setting.folder.parent) in str(raised.value)
    assert setting.part.read_bytes() == CONTENT[: fetch.PIECE]


@pytest.mark.parametrize("what", ["page", "file"])
@pytest.mark.parametrize(
    "to", ["https://elsewhere.test/x?token=abc", "http://[::1?token=abc", "http://elsewhere.test:99999/?token=abc"]
)
def test_a_redirect_is_told_neither_the_login_nor_told_of(setting: Setting, what: str, to: str) -> None:
    def answer(sent: Sent) -> Reply | Exception:
        if "elsewhere" in sent.url:
            assert "Authorization" not in sent.headers
            return requests.ConnectionError(f"no answer from {sent.url}")
        return Reply(status=302, headers={"Location": to})

    setattr(setting, what, answer)
    if what == "page":
        setting.file = answer
    told = setting.fails(url=f"https://someone:secret@{HOST}/simple/")
    for word in ("elsewhere", "token", "abc", "::1", "secret"):
        assert word not in told


# ---- stopped


def test_it_stops_between_two_attempts(setting: Setting) -> None:
    fetcher = setting.fetcher()
    setting.file = lambda _: fetcher.stop() or Reply(status=503)  # type: ignore[func-returns-value]
    with pytest.raises(FetchError, match=f"{FILE}: the download was stopped"):
        fetcher.fetch(WHEEL)
    assert len(setting.wire.seen) == 2


def test_it_stops_in_the_middle_and_keeps_what_came(setting: Setting) -> None:
    whole = CONTENT * 5
    sha256 = hashlib.sha256(whole).hexdigest()
    wheel = Wheel(component="x", name="tiny-wheel", version="1.0", file=FILE, size=len(whole), sha256=sha256)
    setting.page = lambda _: html(sha256=sha256)
    setting.file = lambda _: Reply(body=whole)
    fetcher = setting.fetcher()
    fetcher._got = lambda size: fetcher.stop() if size else None
    with pytest.raises(FetchError, match=f"{FILE}: the download was stopped"):
        fetcher.fetch(wheel)
    part = (setting.folder / f"{sha256}.part").read_bytes()
    assert 0 < len(part) < len(whole)
    assert whole.startswith(part)


# ---- logins


def test_a_login_is_for_the_index_alone(setting: Setting) -> None:
    """Where its pages name addresses without one, and nobody else's."""
    for url, has_login in (
        (f"https://{HOST}/files/x.whl", True),
        ("../../files/x.whl", True),
        (f"https://{HOST}:8443/files/x.whl", False),
        (f"http://{HOST}/files/x.whl", False),
        ("https://elsewhere.test/x.whl", False),
    ):
        setting.wire.seen.clear()
        setting.got.clear()
        setting.page = lambda _, url=url: html(url=url)  # type: ignore[misc]
        setting.fetches(WHEEL, url=f"https://some%40one:se%2Fcret@{HOST}/simple/")
        setting.whl.unlink()
        page, whole = setting.wire.seen
        login = "Basic " + base64.b64encode(b"some@one:se/cret").decode()
        assert page.headers["Authorization"] == login
        assert whole.headers.get("Authorization") == (login if has_login else None), url
