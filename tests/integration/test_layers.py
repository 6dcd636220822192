"""Nothing of the building machine is in an image, in any of its layers, or in what `builder` keeps."""

from __future__ import annotations

import re
import ssl
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.integration.checkout import Checkout
from tests.integration.index import Index

CHUNK = 1 << 22
# Keys as files hold them: TLS libraries hold the words alone.
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\r?\n[A-Za-z0-9+/=]{16}")


def found(stream: Iterable[bytes], needles: dict[str, bytes]) -> set[str]:
    """What occurs in a stream of bytes, over the borders of its pieces too."""
    overlap = max(256, *(len(needle) for needle in needles.values()))
    names, tail = set(), b""
    for piece in stream:
        text = tail + piece
        names |= {name for name, needle in needles.items() if needle in text}
        if PRIVATE_KEY.search(text):
            names.add("private key")
        tail = text[-overlap:]
    return names


def saved(image: str) -> Iterator[bytes]:
    """`docker save`: a tar of every layer's tar, not compressed, and of the configuration and history."""
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while piece := process.stdout.read(CHUNK):
            yield piece
        assert process.wait(60) == 0


@pytest.fixture
def needles(index: Index, authority: Path) -> dict[str, bytes]:
    pem = authority.read_text(encoding="ascii")
    return {
        "index": index.address.encode(),
        "authority": pem.splitlines()[1].encode(),
        "authority, binary": ssl.PEM_cert_to_DER_cert(pem),
        "authority, by name": b"private authority of the tests",
    }


def test_no_layer_holds_anything_of_the_machine(built: Checkout, needles: dict[str, bytes]) -> None:
    for image in built.image_ids():
        assert found(saved(image), needles) == set()


def test_the_search_finds_what_is_there(needles: dict[str, bytes], authority: Path) -> None:
    key = (authority.parent / "key.pem").read_bytes()
    hidden = b"".join(needles.values()) + authority.read_bytes() + key
    pieces = [hidden[start : start + 100] for start in range(0, len(hidden), 100)]
    assert found(pieces, needles) == {*needles, "private key"}


def test_layers_are_saved_as_they_are(built: Checkout) -> None:
    """Else the search above would look at compressed bytes: a file of every image is there as plain text."""
    for image in built.image_ids():
        assert found(saved(image), {"a script": b"put the environment first again"}) == {"a script"}


def test_neither_does_what_is_told_of_it(built: Checkout, needles: dict[str, bytes]) -> None:
    told = [built.docker("image", "inspect", image) for image in built.image_ids()]
    told += [built.docker("history", "--no-trunc", image) for image in built.image_ids()]
    assert found([text.encode() for text in told], needles) == set()


def test_neither_does_what_builder_keeps(built: Checkout, needles: dict[str, bytes]) -> None:
    for folder in (".builder", "locks", "images", "templates"):
        for name, content in built.files(folder).items():
            assert (name, found([content], needles)) == (name, set())
