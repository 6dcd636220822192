"""Requests of a download, retries, and errors."""

from __future__ import annotations

import fcntl
import hashlib
import re
import ssl
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from builder.common.errors import DiskError, FetchError
from builder.common.http import PIECE
from builder.common.tasks import RetryPolicy
from builder.index.download import Fetcher, wheels_of_index
from builder.index.releases import Index
from builder.index.settings import IndexSettings
from builder.index.wheels import LockedWheel, Wheel
from tests.fakes.wire import Reply, Sent, Wire, broken, untrusted

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
FILE = "tiny_wheel-1.0-py3-none-any.whl"
HOST = "index.example.test"
INDEX = f"https://{HOST}/simple/"
SETTINGS = IndexSettings(url=INDEX)
WHEEL = Wheel(component="tiny", name="Tiny_Wheel", version="1.0", file=FILE, size=len(CONTENT), sha256=SHA256)
UNKNOWN = Wheel(component="tiny", name="Tiny_Wheel", version="1.0", file=FILE, size=0, sha256=SHA256)


def html(url: str = f"../../files/{FILE}", sha256: str = SHA256, attributes: str = "", file: str = FILE) -> Reply:
    link = f'<a href="{url}{"#sha256=" + sha256 if sha256 else ""}"{attributes}>{file}</a>'
    return Reply(
        body=f"<!DOCTYPE html><html><body>{link}</body></html>".encode(), headers={"Content-Type": "text/html"}
    )


def file(sent: Sent) -> Reply:
    """The wheel, or the requested part of it."""
    if byte_range := sent.headers.get("Range"):
        start = int(byte_range.removeprefix("bytes=").removesuffix("-"))
        return Reply(status=206, body=CONTENT[start:]) if start < len(CONTENT) else Reply(status=416)
    return Reply(body=CONTENT)


Answer = Callable[[Sent], Reply | Exception]


class Stop(threading.Event):
    """Does not wait, but records for how long it should have."""

    def __init__(self, waited: list[float]) -> None:
        super().__init__()
        self._waited = waited

    def wait(self, timeout: float | None = None) -> bool:
        self._waited.append(timeout or 0)
        return self.is_set()


class Setting:
    """An index in memory: `page` and `file` answer. `progress` is what was reported, `waited` the pauses in seconds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.page: Answer = lambda _: html()
        self.file: Answer = file
        self.progress: list[int] = []
        self.waited: list[float] = []
        self.wire = Wire.install(monkeypatch, lambda sent: (self.page if "/simple/" in sent.url else self.file)(sent))
        self.whl, self.part = folder / f"{SHA256}.whl", folder / f"{SHA256}.part"

    def fetcher(self, policy: RetryPolicy = Fetcher.policy, settings: IndexSettings = SETTINGS) -> Fetcher[LockedWheel]:
        fetcher = Fetcher(wheels_of_index(Index(settings)), self.folder, progress=self.progress.append)
        fetcher.policy = policy
        fetcher._stopped = Stop(self.waited)
        return fetcher

    def fetches(self, wheel: Wheel = WHEEL) -> None:
        assert self.fetcher().fetch(wheel) == self.whl
        assert self.whl.read_bytes() == CONTENT
        assert list(self.folder.iterdir()) == [self.whl]
        assert sum(self.progress) == len(CONTENT)

    def fails(self, policy: RetryPolicy = Fetcher.policy, settings: IndexSettings = SETTINGS) -> FetchError:
        with pytest.raises(FetchError) as caught:
            self.fetcher(policy, settings).fetch(WHEEL)
        message = str(caught.value)
        assert message.startswith((f"{FILE}: ", "tiny-wheel: "))
        assert HOST not in f"{message} {caught.value.hint}"
        assert caught.value.hint
        assert not self.whl.exists()
        assert sum(self.progress) == 0
        return caught.value

    def forget(self) -> None:
        """As if nothing was downloaded yet."""
        self.whl.unlink(missing_ok=True)
        self.progress.clear()
        self.wire.seen.clear()


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    return Setting(tmp_path, monkeypatch)


def once(first: Reply | Exception, then: Answer) -> Answer:
    """Gives the first reply once, then the others."""
    replies = iter([first])
    return lambda sent: next(replies, None) or then(sent)


# ---- requests


def test_a_wheel_of_a_named_index_is_requested_from_that_index_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_INDEX_COMPANY_PASSWORD", "cret")
    fetcher = setting.fetcher(settings=SETTINGS.with_index("company", "https://private.example.test/simple"))
    fetcher.fetch(replace(WHEEL, index="company"))
    assert {sent.url.split("/")[2] for sent in setting.wire.seen} == {"private.example.test"}
    assert all(sent.headers["Authorization"].startswith("Basic ") for sent in setting.wire.seen)

    setting.forget()
    fetcher.fetch(WHEEL)
    assert {sent.url.split("/")[2] for sent in setting.wire.seen} == {HOST}
    assert not any("Authorization" in sent.headers for sent in setting.wire.seen)


@pytest.mark.parametrize("what", ["page", "file"])
def test_an_index_that_demands_a_login_is_named(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    setattr(setting, what, lambda _: Reply(status=401))
    settings = SETTINGS.with_index("my-team", "https://private.example.test/simple")
    with pytest.raises(FetchError, match=": the index my-team returned 401") as caught:
        setting.fetcher(settings=settings).fetch(replace(WHEEL, index="my-team"))
    assert "set UV_INDEX_MY_TEAM_USERNAME and UV_INDEX_MY_TEAM_PASSWORD" in caught.value.hint
    assert "machine private.example.test" in caught.value.hint
    assert "upgrade-package" not in caught.value.hint, "another version would not help"


def test_an_index_that_the_matrix_no_longer_has(setting: Setting) -> None:
    with pytest.raises(FetchError, match=r"matrix\.yaml has no index 'gone', from which it was locked"):
        setting.fetcher().fetch(replace(WHEEL, index="gone"))
    assert setting.wire.seen == []


def test_the_requests_of_a_download(setting: Setting) -> None:
    setting.fetcher(RetryPolicy(connect_s=3, read_s=4)).fetch(WHEEL)
    assert setting.wire.lines == ["GET /simple/tiny-wheel/", f"GET /files/{FILE}"]
    page, whole = setting.wire.seen
    assert "json" in page.headers["Accept"]
    assert whole.headers["Accept-Encoding"] == "identity", "its length would be another"
    assert "Range" not in whole.headers
    assert whole.options["timeout"] == (3, 4)


def test_nothing_is_decompressed(setting: Setting) -> None:
    """Some servers take the format of an sdist for the encoding of the response."""
    setting.file = lambda _: Reply(body=CONTENT, headers={"Content-Encoding": "gzip"})
    setting.fetches()


def test_a_page_without_hashes(setting: Setting) -> None:
    setting.page = lambda _: html(sha256="")
    setting.fetches()
    setting.forget()
    setting.file = lambda _: Reply(body=bytes(len(CONTENT)))
    setting.fails()


@pytest.mark.parametrize("has_ranges", [True, False], ids=["ranges", "no ranges"])
@pytest.mark.parametrize("wheel", [WHEEL, UNKNOWN], ids=["known size", "unknown size"])
@pytest.mark.parametrize(
    "left",
    [
        b"",
        b"wrong",
        CONTENT[:1000],
        bytes(len(CONTENT) - 1),
        bytes(len(CONTENT)),
        bytes(len(CONTENT) + 1),
        CONTENT + b"x",
    ],
    ids=["empty", "wrong", "a part", "one byte less", "as long", "longer", "right but longer"],
)
def test_bytes_that_an_earlier_run_left(setting: Setting, left: bytes, wheel: Wheel, has_ranges: bool) -> None:
    setting.part.write_bytes(left)
    if not has_ranges:
        setting.file = lambda _: Reply(body=CONTENT)
    setting.fetches(wheel)


def test_a_file_that_is_there_is_not_requested(setting: Setting) -> None:
    """Nor a complete part, as after a kill just before the rename."""
    setting.part.write_bytes(CONTENT)
    setting.fetches()
    assert setting.wire.lines == ["GET /simple/tiny-wheel/"]
    for wheel in (WHEEL, UNKNOWN):
        setting.progress.clear()
        setting.fetches(wheel)
    assert setting.wire.lines == ["GET /simple/tiny-wheel/"]
    with pytest.raises(FetchError, match=rf"{FILE}: size is {len(CONTENT)} bytes, but the lock has 7"):
        setting.fetcher().fetch(replace(WHEEL, size=7))


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], bytes(len(CONTENT))], ids=["empty", "short", "zeros"])
def test_a_damaged_wheel_is_downloaded_again(setting: Setting, damaged: bytes) -> None:
    """As after a power failure."""
    setting.whl.write_bytes(damaged)
    setting.fetches()


def folder_fetcher(setting: Setting, content: bytes) -> Fetcher[LockedWheel]:
    """Gets the wheel from an index that is a folder."""
    folder = setting.folder.parent / f"{setting.folder.name}-wheels"
    folder.mkdir()
    (folder / FILE).write_bytes(content)
    return setting.fetcher(settings=SETTINGS.with_index("own", "", folder=folder))


@pytest.mark.parametrize(
    "left", [b"", b"wrong" * 80, CONTENT[:1000], CONTENT], ids=["nothing", "junk", "a part", "all"]
)
def test_a_wheel_of_a_folder_replaces_what_an_earlier_run_left(setting: Setting, left: bytes) -> None:
    """It was appended: 1,400 bytes under the name of a file of 1,000 bytes."""
    setting.part.write_bytes(left)
    assert folder_fetcher(setting, CONTENT).fetch(replace(WHEEL, index="own")) == setting.whl
    assert setting.whl.read_bytes() == CONTENT
    assert list(setting.folder.iterdir()) == [setting.whl]
    assert sum(setting.progress) == len(CONTENT)
    assert setting.wire.seen == []


@pytest.mark.parametrize("content", [CONTENT[::-1], CONTENT + b"x", b""])
def test_a_changed_wheel_of_a_folder_is_refused(setting: Setting, content: bytes) -> None:
    with pytest.raises(FetchError, match=rf"^{re.escape(FILE)}: SHA-256 mismatch: .* is listed by the index own, "):
        folder_fetcher(setting, content).fetch(replace(WHEEL, index="own"))
    assert not setting.whl.exists()


def test_only_a_folder_lists_paths(setting: Setting) -> None:
    """A server must not choose which file of this machine is read."""
    (setting.folder / FILE).write_bytes(CONTENT)
    setting.page = lambda _: html(url=str(setting.folder / FILE))
    setting.file = lambda _: Reply(status=404)
    setting.fails()


@pytest.mark.parametrize("left", [b"", CONTENT[:10]], ids=["nothing", "a part"])
def test_a_wheel_that_another_process_downloads_and_removes_meanwhile(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    """The file that is now locked has no name any more, or its name is that of another file."""
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


# ---- retries


PASSING = [
    *(Reply(status=status) for status in (408, 425, 429, 500, 502, 503, 504, 520)),
    broken(),
    ConnectionResetError(104, "reset"),
    requests.ReadTimeout(),
    requests.exceptions.SSLError("bad"),
]
FINAL = [*(Reply(status=status) for status in (400, 401, 403, 410, 418, 451, 501, 505, 507)), untrusted()]


@pytest.mark.parametrize("fault", PASSING, ids=str)
def test_a_fault_that_may_pass_is_retried(setting: Setting, fault: Reply | Exception) -> None:
    setting.file = once(fault, setting.file)
    setting.fetches()
    assert len(setting.wire.seen) == 3
    setting.forget()
    setting.file = lambda _: fault
    setting.fails()
    assert len(setting.waited) == 1 + Fetcher.policy.retries


@pytest.mark.parametrize("fault", FINAL, ids=str)
def test_any_other_fault_is_final(setting: Setting, fault: Reply | Exception) -> None:
    setting.file = lambda _: fault
    setting.fails()
    assert len(setting.wire.seen) == 2
    assert setting.waited == []


def test_a_short_body_is_resumed(setting: Setting) -> None:
    """Even if no Content-Length tells that it is short."""
    setting.file = once(Reply(body=CONTENT[:200_000]), file)
    setting.fetches()
    assert setting.wire.seen[2].headers["Range"] == "bytes=200000-"


def cut_after(step: int, sent: Sent) -> Reply:
    """The rest of the wheel, through a connection that breaks after so many bytes."""
    start = int(sent.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
    is_last = start + step >= len(CONTENT)
    headers = {"Content-Length": str(len(CONTENT) - start)}
    return Reply(206 if start else 200, CONTENT[start : start + step], headers, broken=not is_last)


def test_a_download_that_progresses_is_not_given_up(setting: Setting) -> None:
    """It was after five cuts, although each attempt had received megabytes."""
    setting.file = lambda sent: cut_after(PIECE, sent)
    policy = RetryPolicy(retries=1, first_delay_s=1)
    assert setting.fetcher(policy).fetch(WHEEL) == setting.whl
    assert setting.whl.read_bytes() == CONTENT
    assert sum(setting.progress) == len(CONTENT)
    assert len(setting.waited) == len(CONTENT) // PIECE > 2 * policy.retries
    assert max(setting.waited) <= 1, "the delay begins again too"


@pytest.mark.parametrize(
    "answer",
    [
        lambda sent: Reply(status=206, body=file(sent).body[:10]),
        lambda _: Reply(body=CONTENT[: 2 * PIECE], broken=True),
        lambda sent: Reply(status=416) if "Range" in sent.headers else Reply(body=CONTENT[: 2 * PIECE], broken=True),
    ],
    ids=["a few bytes more", "the same bytes", "the same bytes, then no range"],
)
def test_a_download_without_progress_is_given_up(setting: Setting, answer: Answer) -> None:
    setting.file = answer
    setting.fails(RetryPolicy(retries=2, first_delay_s=1))
    assert len(setting.waited) == 2


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
def test_a_response_with_another_part_than_requested(setting: Setting, wrong: Reply) -> None:
    setting.part.write_bytes(CONTENT[:1000])
    setting.file = once(wrong, file)
    setting.fetches()


# ---- errors


@pytest.mark.parametrize(
    ("attributes", "warning"),
    [
        ("", None),
        (' data-yanked=""', f"{FILE} is yanked on the index, without a reason"),
        (' data-yanked="it eats data"', f"{FILE} is yanked on the index: it eats data"),
        (' data-yanked="a&#10;\x1b[31mb"', f"{FILE} is yanked on the index: a[31mb"),
        (f' data-yanked="{"x" * 1000}"', f"{FILE} is yanked on the index: {'x' * 200}"),
    ],
    ids=["not yanked", "without a reason", "with a reason", "hostile", "long"],
)
def test_a_yanked_wheel_is_downloaded_with_a_warning(setting: Setting, attributes: str, warning: str | None) -> None:
    """It was locked before it was yanked, and installed silently. The reason is text of the index: it is cleaned."""
    setting.page = lambda _: html(attributes=attributes)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        setting.fetches()
    assert [str(each.message) for each in warned] == ([warning] if warning else [])


@pytest.mark.parametrize(
    "url",
    [f"ftp://{HOST}/x.whl", "file:///etc/passwd", "data:,x", "javascript:x", f"httpx://{HOST}/", "http://x:99999/"],
)
def test_an_unsupported_address_is_refused(setting: Setting, url: str) -> None:
    setting.page = lambda _: html(url=url)
    setting.file = lambda _: pytest.fail("it was requested")
    assert str(setting.fails()) == f"{FILE}: the index lists an unsupported address"


TEXT = f"HTTPSConnectionPool(host='{HOST}', port=443): https://someone:secret@{HOST}/ via proxy.example.test"
KINDS = (
    requests.ConnectionError, requests.ReadTimeout, requests.ConnectTimeout, requests.exceptions.SSLError,
    requests.exceptions.ProxyError, requests.TooManyRedirects, requests.exceptions.ChunkedEncodingError,
    requests.exceptions.InvalidURL, requests.exceptions.ContentDecodingError, ConnectionResetError,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("what", ["page", "file"])
def test_messages_have_neither_hosts_nor_passwords(setting: Setting, what: str, kind: type[Exception]) -> None:
    setattr(setting, what, lambda _: kind(TEXT))
    settings = IndexSettings(
        url=f"https://someone:secret@{HOST}/simple/", proxy="http://user:word@proxy.example.test:1"
    )
    error = setting.fails(settings=settings)
    for word in ("example.test", "someone", "secret", "user", "word", "://", "HTTPSConnectionPool"):
        assert word not in str(error)


def test_a_disk_that_fills_up_during_a_download(setting: Setting) -> None:
    """The error names its store, and the part is kept."""

    def progress(size: int) -> None:
        if size:
            raise OSError(28, "No space left on device")

    fetcher = setting.fetcher()
    fetcher._progress = progress
    with pytest.raises(DiskError, match="the disk of the store is full") as raised:
        fetcher.fetch(WHEEL)
    assert str(setting.folder.parent) in str(raised.value)
    assert setting.part.read_bytes() == CONTENT[:PIECE]


def tls_error(reason: str) -> Exception:
    cause = ssl.SSLError(1, "x")
    cause.reason = reason
    return requests.exceptions.SSLError(cause)


UPGRADE = "Choose another version: builder lock --upgrade-package PACKAGE CELLS && builder render"
DOCTOR = "`builder doctor` checks the index."
DISTRUST = "Do not use this index until the difference is explained."
KEPT = "Several attempts failed. The part that was downloaded is kept: run again."
UNLISTED = f"The file was withdrawn, or the locks were made with another index. {UPGRADE}"
FAULTS: dict[str, tuple[str, Reply | Exception, str, str]] = {
    "no page": ("page", Reply(status=404), "not listed by the index", UNLISTED),
    "another wheel": ("page", html(url="../other-1.0.whl", file="other.whl"), "not listed by the index", UNLISTED),
    "deleted": ("file", Reply(status=404), "the index returned 404 Not Found", f"{DOCTOR} {UPGRADE}"),
    "refused": ("file", Reply(status=403), "the index returned 403 Forbidden", f"{DOCTOR} {UPGRADE}"),
    "broken server": ("file", Reply(status=500), "the index returned 500 Internal Server Error", KEPT),
    # The hint was to upgrade the locks, which would have locked the replaced file.
    "another hash is listed": (
        "page",
        html(sha256="0" * 64),
        f"SHA-256 mismatch: 000000000000... is listed by the index, {SHA256[:12]}... is locked",
        f"The file was replaced, or the locks were made with another index. {DISTRUST}",
    ),
    "too many bytes": (
        "file",
        Reply(body=CONTENT + b"x"),
        f"the index serves more than the {len(CONTENT)} bytes in the lock",
        f"The download was discarded. {DISTRUST}",
    ),
    "other bytes": (
        "file",
        Reply(body=CONTENT[::-1]),
        f"SHA-256 mismatch: {hashlib.sha256(CONTENT[::-1]).hexdigest()[:12]}... was downloaded, "
        f"{SHA256[:12]}... is locked",
        f"The download was discarded. {DISTRUST}",
    ),
    "cut off": ("file", Reply(body=CONTENT[:PIECE], broken=True), "the connection was lost", KEPT),
    "untrusted": (
        "file",
        untrusted(),
        "the certificate of the index is not trusted (unable to get local issuer certificate)",
        "Set SSL_CERT_FILE, or pip's `cert`, to a PEM file with the certificate of its authority.",
    ),
    # The next two were tried five times, and the message was that the TLS connection failed.
    "no TLS": ("file", tls_error("WRONG_VERSION_NUMBER"), "the index does not use https", DOCTOR),
    "no client certificate": (
        "file",
        tls_error("TLSV13_ALERT_CERTIFICATE_REQUIRED"),
        "the index requires a client certificate",
        DOCTOR,
    ),
}


@pytest.mark.parametrize(("what", "fault", "message", "hint"), FAULTS.values(), ids=FAULTS.keys())
def test_the_message_of_a_download_that_fails(
    setting: Setting, what: str, fault: Reply | Exception, message: str, hint: str
) -> None:
    setattr(setting, what, lambda _: fault)
    error = setting.fails()
    assert (str(error), error.hint) == (f"{FILE}: {message}", hint)
    if "discarded" in hint:
        assert setting.part.read_bytes() == b""
        assert len(setting.wire.seen) == 2


# ---- stopped


def test_it_stops_during_a_download_and_keeps_the_part(setting: Setting) -> None:
    fetcher = setting.fetcher()
    fetcher._progress = lambda size: fetcher.stop() if size else None
    with pytest.raises(FetchError, match=f"{FILE}: the download was stopped"):
        fetcher.fetch(WHEEL)
    assert setting.part.read_bytes() == CONTENT[:PIECE]


def test_it_stops_while_another_process_downloads_the_wheel(setting: Setting) -> None:
    """Ctrl-C had to wait for the download of the other process."""
    fetcher = setting.fetcher()
    with setting.part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        fetcher._stopped = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            download = pool.submit(fetcher.fetch, WHEEL)
            with pytest.raises(TimeoutError):
                download.result(0.2)
            fetcher.stop()
            try:
                with pytest.raises(FetchError):
                    download.result(5)
            finally:
                fcntl.flock(other, fcntl.LOCK_UN)
    assert setting.wire.seen == []
    setting.fetches()
