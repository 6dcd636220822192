"""Image references: Docker's grammar, and nothing ambiguous."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.common.reference import ImageRef

HEX = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("debian", "", "debian", "", ""),
        ("org/pt-cuda:2.9", "", "org/pt-cuda", "2.9", ""),
        ("localhost/a:1", "localhost", "a", "1", ""),
        ("localhost:5000/a/b:24", "localhost:5000", "a/b", "24", ""),
        ("host.example.test/a__b-c.d", "host.example.test", "a__b-c.d", "", ""),
        ("[::1]:5000/a:t", "[::1]:5000", "a", "t", ""),
        ("h-1.x.test:65535/a", "h-1.x.test:65535", "a", "", ""),
        (f"debian:slim@{HEX}", "", "debian", "slim", HEX),
        (f"host:1/debian@{HEX}", "host:1", "debian", "", HEX),
    ],
)
def test_a_reference_is_printed_as_it_was_parsed(
    text: str, registry: str, repository: str, tag: str, digest: str
) -> None:
    reference = ImageRef.parse(text)
    assert reference == ImageRef(registry=registry, repository=repository, tag=tag, digest=digest)
    assert str(reference) == text
    assert reference.name == text.partition("@")[0].removesuffix(f":{tag}")


REFUSED = {
    "not an image name": ["", "Org/x", "a//b", "/a", "a b", "a\n", "a/b\nRUN x", "{{x}}", "a" * 256],
    "is not a registry": [
        "../a",
        "ho_st.x/a",
        "-x.y/a",
        "x-.y/a",
        "host:999999/a",
        "host:65536/a",
        "host:0/a",
        "a..b/c",
        "[::1::2]/a",
    ],
    "empty tag": ["a:"],
    "is not a tag": ["a:-x", "a:x\n", "a:x y", "a:٣", f"a:{'t' * 129}"],
    "empty digest": ["a@"],
    "is not a digest": ["a@sha256:00", f"a@{HEX}\n", f"a@{HEX.upper()}"],
}


@pytest.mark.parametrize(("text", "message"), [(text, message) for message in REFUSED for text in REFUSED[message]])
def test_an_invalid_reference_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageRef.parse(text)


@given(st.text(alphabet="aA0._-/:@ \n", max_size=24))
def test_what_parses_prints_unchanged(text: str) -> None:
    try:
        reference = ImageRef.parse(text)
    except ValueError:
        return
    assert str(reference) == text
    assert not set(text) & set(" \n")
