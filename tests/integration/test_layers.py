"""Nothing of the building machine is in an image, in any of its layers, or in what `builder` keeps."""

from __future__ import annotations

import re
import ssl
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.checkout import Checkout
from tests.integration.index import Index

PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\r?\n[A-Za-z0-9+/=]{16}")
# GnuTLS tests itself at start, with published keys that are part of the library.
NO_SECRETS = re.compile(r"usr/lib/[a-z0-9_-]+/libgnutls\.so\.[0-9.]+")


def saved(image: str) -> Iterator[tuple[str, bytes]]:
    """Path and content of every file of `docker save`, and of every layer in it, whited out above or not."""
    with (
        subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for item in archive:
            content = archive.extractfile(item) if item.isfile() else None
            if content is None:
                continue
            try:
                with tarfile.open(fileobj=content, mode="r|*") as layer:
                    for entry in layer:
                        file = layer.extractfile(entry) if entry.isfile() else None
                        yield entry.name.removeprefix("./"), file.read() if file else entry.linkname.encode()
            except tarfile.ReadError:
                yield item.name, b""  # configuration and manifest: `told` has what they say
    assert process.returncode == 0


def found(path: str, content: bytes, needles: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """What must not be there, with its place."""
    names = [name for name, needle in needles.items() if needle in content or needle in path.encode()]
    if PRIVATE_KEY.search(content) and not NO_SECRETS.fullmatch(path):
        names.append("private key")
    return [(path, name) for name in names]


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
        paths, faults = set(), []
        for path, content in saved(image):
            paths.add(path)
            faults += found(path, content, needles)
        assert faults == []
        assert {"etc/passwd", "opt/venv/bin/tinyframe", "etc/profile.d/10-venv.sh"} <= paths


def test_no_layer_hides_what_another_holds(built: Checkout) -> None:
    """So what a container shows is all that there is; image tests search that for keys, in images too large to save."""
    for image in built.image_ids():
        paths = [path for path, _ in saved(image) if "/" in path and not path.startswith("blobs/")]
        files = [path for path in paths if not path.endswith(("/layer.tar", "/json", "/VERSION"))]
        assert [path for path in files if "/.wh." in path] == []
        links = {path for path in files if files.count(path) > 1}
        assert {path for path in links if not path.endswith("/") and path not in folders(image)} == set()


def folders(image: str) -> set[str]:
    """Folders of all layers, which several may name."""
    result = set()
    with (
        subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for item in archive:
            content = archive.extractfile(item) if item.isfile() else None
            if content is not None:
                with suppress(tarfile.ReadError), tarfile.open(fileobj=content, mode="r|*") as layer:
                    result |= {entry.name.removeprefix("./") for entry in layer if entry.isdir()}
    return result


def test_the_search_finds_what_is_there(needles: dict[str, bytes], authority: Path) -> None:
    content = b"".join(needles.values()) + (authority.parent / "key.pem").read_bytes()
    assert {name for _, name in found("some/file", content, needles)} == {*needles, "private key"}
    assert found("some/file", b"harmless", needles) == []


def test_neither_does_what_is_told_of_it(built: Checkout, needles: dict[str, bytes]) -> None:
    for image in built.image_ids():
        for command in (("image", "inspect"), ("history", "--no-trunc")):
            assert found("", built.docker(*command, image).encode(), needles) == []


def test_neither_does_what_builder_keeps(built: Checkout, needles: dict[str, bytes]) -> None:
    kept = [built.files(folder) for folder in (".builder", "locks", "images", "templates")]
    assert [fault for files in kept for item in files.items() for fault in found(*item, needles)] == []
