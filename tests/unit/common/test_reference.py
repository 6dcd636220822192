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
        (f"debian:slim@{HEX}", "", "debian", "slim", HEX),
        (f"host:1/debian@{HEX}", "host:1", "debian", "", HEX),
    ],
)
def test_parse_and_print(text: str, registry: str, repository: str, tag: str, digest: str) -> None:
    reference = ImageRef.parse(text)
    assert reference == ImageRef(registry=registry, repository=repository, tag=tag, digest=digest)
    assert str(reference) == text
    assert reference.name == text.partition("@")[0].removesuffix(f":{tag}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not an image name"),
        ("Org/x", "not an image name"),
        ("a//b", "not an image name"),
        ("/a", "not an image name"),
        ("../a", "is not a registry"),
        ("a b", "not an image name"),
        ("a\n", "not an image name"),
        ("a/b\nRUN x", "not an image name"),
        ("{{x}}", "not an image name"),
        ("a:", "empty tag"),
        ("a:-x", "is not a tag"),
        ("a:x\n", "is not a tag"),
        ("a:x y", "is not a tag"),
        ("a:٣", "is not a tag"),
        (f"a:{'t' * 129}", "is not a tag"),
        ("a@", "empty digest"),
        ("a@sha256:00", "is not a digest"),
        (f"a@{HEX}\n", "is not a digest"),
        (f"a@{HEX.upper()}", "is not a digest"),
        ("ho_st.x/a", "is not a registry"),
        ("-x.y/a", "is not a registry"),
        ("host:999999/a", "is not a registry"),
        ("a" * 256, "not an image name"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageRef.parse(text)


def test_longest_tag() -> None:
    assert ImageRef.parse("a:" + "t" * 128).tag == "t" * 128


@given(st.text(alphabet="aA0._-/:@ \n", max_size=24))
def test_what_parses_prints_unchanged(text: str) -> None:
    try:
        reference = ImageRef.parse(text)
    except ValueError:
        return
    assert str(reference) == text
    assert not set(text) & set(" \n")
