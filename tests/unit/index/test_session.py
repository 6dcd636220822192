"""How every request to the index is made: login, proxy, certificates, timeout, redirects."""

from __future__ import annotations

import base64
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from pypi_simple import PYPI_SIMPLE_ENDPOINT

from builder.common.errors import FetchError
from builder.common.http import failure_sentence
from builder.index.session import IndexSession, fetch_errors
from builder.index.settings import IndexSettings
from tests.fakes.wire import Reply, Sent, Wire, part, untrusted

HOST = "index.example.test"
INDEX = f"https://{HOST}/simple/"
LOGIN = f"https://some%40one:se%2Fcret@{HOST}/simple/"


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    for name in ("CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/etc/another.pem")
    return Wire.install(monkeypatch, lambda _: Reply())


def session(**settings: Any) -> IndexSession:
    return IndexSession(IndexSettings(**({"url": INDEX} | settings)))


@pytest.mark.parametrize(
    ("settings", "verify", "proxies"),
    [
        ({}, "/etc/another.pem", {}),
        ({"ca_bundle": "/etc/ca.pem"}, "/etc/ca.pem", {}),
        ({"proxy": "http://p.test:1"}, "/etc/another.pem", {"http": "http://p.test:1", "https": "http://p.test:1"}),
    ],
)
def test_the_settings_apply_to_every_request(
    wire: Wire, settings: dict[str, str], verify: bool | str, proxies: dict[str, str]
) -> None:
    client = session(**settings)
    client.get(settings.get("url", INDEX) + "x.whl")
    client.head(settings.get("url", INDEX) + "x.whl")
    for sent in wire.seen:
        assert sent.options["verify"] == verify
        assert {name: url for name, url in sent.options["proxies"].items() if name in ("http", "https")} == proxies
        assert sent.options["timeout"] == (10, 30)


def test_pypi_is_the_default_index(wire: Wire) -> None:
    wire.answers = lambda _: Reply(status=404)
    assert session(url="").files("tiny") == []
    assert wire.seen[0].url == f"{PYPI_SIMPLE_ENDPOINT}tiny/"


@pytest.mark.parametrize(
    ("url", "has_login"),
    [
        (f"https://{HOST}/files/x.whl", True),
        (f"https://{HOST.upper()}:443/files/x.whl", True),
        (f"https://{HOST}:80/files/x.whl", False),
        # requests takes the host before the backslash, urlsplit the one after it.
        (f"https://elsewhere.test\\@{HOST}/x.whl", False),
        (f"https://elsewhere.test/@{HOST}/x.whl", False),
        (f"https://{HOST}@elsewhere.test/x.whl", False),
        (f"https://{HOST}:8443/files/x.whl", False),
        (f"http://{HOST}/files/x.whl", False),
        ("https://elsewhere.test/x.whl", False),
    ],
)
def test_the_login_is_sent_to_the_index_only(wire: Wire, url: str, has_login: bool) -> None:
    """Also for links without it."""
    login = "Basic " + base64.b64encode(b"some@one:se/cret").decode()
    for index in (LOGIN, LOGIN.replace(f"{HOST}/", f"{HOST}:443/")):
        session(url=index).get(url)
        assert (wire.seen[-1].headers.get("Authorization") == login) is has_login


SIZE = 123_456


def without_ranges(_: Sent) -> Reply:
    return Reply(body=bytes(SIZE))


def chunked(_: Sent) -> Reply:
    return Reply(body=bytes(SIZE), headers={"Content-Length": ""})


@pytest.mark.parametrize("answer", [lambda sent: part(bytes(SIZE), sent), without_ranges, chunked])
def test_the_size_of_a_file_that_no_head_request_gives(wire: Wire, answer: Callable[[Sent], Reply]) -> None:
    """Object stores answer HEAD with 403 if an address is signed for GET, others with 405, or without a length."""
    wire.answers = lambda sent: Reply(status=403) if sent.method == "HEAD" else answer(sent)
    assert session(url=LOGIN).file_size(f"{INDEX}x.whl") == SIZE
    (sent,) = wire.seen
    assert sent.headers["Accept-Encoding"] == "identity"
    assert "Authorization" in sent.headers


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(status=403), requests.HTTPError),
        (Reply(status=206, body=b"x"), ValueError),
        (Reply(status=206, body=b"x", headers={"Content-Range": "bytes 0-0/*"}), ValueError),
    ],
)
def test_a_file_whose_size_cannot_be_had(wire: Wire, reply: Reply, error: type[Exception]) -> None:
    wire.answers = lambda _: reply
    with pytest.raises(error):
        session().file_size(f"{INDEX}x.whl")


@pytest.mark.parametrize(
    "to", ["https://elsewhere.test/x?token=abc", "http://[::1?token=abc", "http://elsewhere.test:99999/?token=abc"]
)
def test_a_redirect_gets_no_login_and_is_not_shown(wire: Wire, to: str) -> None:
    def answer(sent: Sent) -> Reply | Exception:
        if "elsewhere" in sent.url:
            assert "Authorization" not in sent.headers
            return requests.ConnectionError(f"no answer from {sent.url}")
        return Reply(status=302, headers={"Location": to})

    wire.answers = answer
    with pytest.raises(FetchError) as caught, fetch_errors("tiny", opened := session(url=LOGIN)):
        opened.get(f"{INDEX}x.whl")
    for word in ("elsewhere", "token", "abc", "::1", "cret"):
        assert word not in str(caught.value)


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> IndexSession:
    """A session of a named index with a login, on a machine with a default login in netrc."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login anybody password of-the-default\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("UV_INDEX_COMPANY_USERNAME", "me")
    monkeypatch.setenv("UV_INDEX_COMPANY_PASSWORD", "s3cret\u00e9")
    return IndexSession(IndexSettings().with_index("company", INDEX).of("company"))


def test_the_login_of_a_named_index_goes_to_its_own_origin_only(wire: Wire, private: IndexSession) -> None:
    """Also where requests would take the default entry of netrc, and after a redirect back."""
    places = {f"{INDEX}x.whl": "https://elsewhere.test/x", "https://elsewhere.test/x": f"{INDEX}y.whl"}
    wire.answers = lambda sent: (
        Reply(status=302, headers={"Location": places[sent.url]}) if sent.url in places else Reply()
    )
    private.get(f"{INDEX}x.whl")
    login = "Basic " + base64.b64encode("me:s3cret\u00e9".encode()).decode()
    assert [sent.headers.get("Authorization") for sent in wire.seen] == [login, None, login]
    wire.seen.clear()
    private.get("https://elsewhere.test/z")
    private.get("https://user:pw@elsewhere.test/z")
    private.get(INDEX.replace("https://", "http://"))
    private.get(f"https://elsewhere.test\\@{HOST}/z")
    assert [sent.headers.get("Authorization") for sent in wire.seen] == [None, None, None, None]


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        ("", "The login is wrong, or has no access to this package."),
        ("https://elsewhere.test/x", "The index company refers to files on another host, which requires a login."),
    ],
)
def test_a_refused_login(wire: Wire, private: IndexSession, place: str, hint: str) -> None:
    redirect = Reply(status=302, headers={"Location": place})
    wire.answers = lambda sent: redirect if place and HOST in sent.url else Reply(status=401)
    message = r"^tiny: the index company returned 401 Unauthorized$"
    with pytest.raises(FetchError, match=message) as caught, fetch_errors("tiny", private):
        private.get(f"{INDEX}x.whl").raise_for_status()
    assert caught.value.hint.startswith(hint)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("settings", "error", "hint"),
    [
        ({}, untrusted(), "Set SSL_CERT_FILE, or pip's `cert`, to a PEM file with the certificate of its authority."),
        (
            {"ca_bundle": "/etc/ours.pem"},
            untrusted("self-signed certificate", 18),
            "Set SSL_CERT_FILE, or pip's `cert`, to a PEM file with the certificate of its authority. The current "
            "file, /etc/ours.pem, does not contain it.",
        ),
        ({}, untrusted("certificate has expired", 10), "Run again. `builder doctor` checks the index."),
        ({}, untrusted("Hostname mismatch, x", 62), "Run again. `builder doctor` checks the index."),
        ({}, requests.exceptions.SSLError(), "Run again. `builder doctor` checks the index."),
    ],
)
def test_an_untrusted_certificate_names_the_setting(
    wire: Wire, settings: dict[str, str], error: Exception, hint: str
) -> None:
    """The hint was to run again."""
    wire.answers = lambda _: error
    with pytest.raises(FetchError) as caught, fetch_errors("tiny", opened := session(**settings)):
        opened.get(f"{INDEX}x.whl")
    assert caught.value.hint == hint
    with pytest.raises(FetchError) as caught, fetch_errors("tiny", opened), opened.open_wheel(f"{INDEX}x.whl"):
        pass
    assert caught.value.hint == hint


def refused(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(INDEX, response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refused(503), "the index returned 503 Service Unavailable"),
        (refused(599), "the index returned 599"),
        (requests.ReadTimeout(), "the index timed out"),
        (requests.ConnectTimeout(), "the connection to the index timed out"),
        (requests.exceptions.SSLError(), "the TLS connection to the index failed"),
        (untrusted(), "the certificate of the index is not trusted (unable to get local issuer certificate)"),
        (
            untrusted(f"Hostname mismatch, certificate is not valid for '{HOST}'.", 62),
            "the certificate of the index is not trusted (Hostname mismatch)",
        ),
        (requests.exceptions.ProxyError(), "cannot connect to the index through the proxy"),
        (requests.TooManyRedirects(), "too many redirects"),
        (requests.ConnectionError(), "cannot connect to the index, or the connection was lost"),
        (requests.exceptions.ChunkedEncodingError(), "the connection was lost"),
        (requests.exceptions.JSONDecodeError("secret", "", 0), "the index sent an invalid response"),
        (ConnectionResetError(), "the connection was lost"),
        (requests.exceptions.InvalidURL(INDEX), "the request to the index failed (InvalidURL)"),
        (requests.exceptions.ContentDecodingError(INDEX), "the request to the index failed (ContentDecodingError)"),
    ],
)
def test_messages_without_addresses(error: Exception, message: str) -> None:
    assert failure_sentence(error) == message
