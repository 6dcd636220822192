"""Host names of mirrors and credentials are hidden."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.common.redact import Redactor

MIRROR = "https://user:secret@mirror.example.test:8443/simple"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("GET https://mirror.example.test:8443/simple/x", "GET https://<mirror>/simple/x"),
        ("lookup mirror.example.test: no such host", "lookup <mirror>: no such host"),
        ("mirror.example.test.", "<mirror>."),
        ("to mirror.example.test", "to <mirror>"),
        ("(mirror.example.test)", "(<mirror>)"),
        ("https://user:secret@mirror.example.test/x", "https://<mirror>/x"),
        ("https://a:b@other.example.test/x", "https://other.example.test/x"),
        ("https://token@other.example.test/x", "https://other.example.test/x"),
        ("https://a:b@c@other.example.test/x", "https://other.example.test/x"),
        ("not-mirror.example.test", "not-mirror.example.test"),
        ("mirror.example.tests", "mirror.example.tests"),
        ("mail to a@b", "mail to a@b"),
        ("MIRROR.Example.test is down", "<mirror> is down"),
    ],
)
def test_hosts_and_credentials_are_hidden(text: str, redacted: str) -> None:
    assert Redactor.for_urls([MIRROR])(text) == redacted


def test_the_longer_name_is_hidden_first() -> None:
    redact = Redactor.for_urls(["http://example.test/", "http://a.example.test:80/"])
    assert redact("a.example.test:80 a.example.test example.test") == "<mirror> <mirror> <mirror>"


@pytest.mark.parametrize("url", ["http://mirror.example.test:x/", "http://mirror.example.test:99999/", "http://[::1/"])
def test_invalid_urls_are_ignored(url: str) -> None:
    redacted = Redactor.for_urls([url])(f"from {url}")
    assert redacted.startswith("from ")
    assert "mirror.example.test" not in redacted


@given(st.text(alphabet="ab /.:-_\n", max_size=30), st.text(alphabet=" /:.,\n\"'(", max_size=5))
def test_the_host_is_never_left(before: str, after: str) -> None:
    redacted = Redactor.for_urls([MIRROR])(f"{before} mirror.example.test{after}")
    assert "mirror.example.test" not in redacted
