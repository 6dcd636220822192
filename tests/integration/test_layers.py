"""Nothing of the build host is in an image, in any of its layers, or in the files that `builder` writes."""

from __future__ import annotations

import dataclasses
import re
import ssl
import subprocess
import tarfile
from collections import Counter
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
    """Path and content of every file of `docker save` and of its layers, also of files that a higher layer deletes."""
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
                yield item.name, b""  # configuration and manifest: the inspect test below covers them
        assert process.stdout
        while process.stdout.read(1 << 20):  # docker may write more after the archive's end, and must not fail for it
            pass
    assert process.returncode == 0


def secrets_in(path: str, content: bytes, needles: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """The secrets in a file, with its path."""
    names = [name for name, needle in needles.items() if needle in content or needle in path.encode()]
    if PRIVATE_KEY.search(content) and not NO_SECRETS.fullmatch(path):
        names.append("private key")
    return [(path, name) for name in names]


@pytest.fixture
def needles(index: Index, authority: Path, seed: Path) -> dict[str, bytes]:
    """Of this process, and of the one that made the layers."""
    texts = {"authority, by name": b"private authority of the tests"}
    for whose, address, path in (
        ("", index.address, authority),
        (" of the layers", (seed.parent / "index").read_text(encoding="utf-8"), seed.parent / "authority.pem"),
    ):
        pem = path.read_text(encoding="ascii")
        texts |= {
            f"index{whose}": address.encode(),
            f"authority{whose}": pem.splitlines()[1].encode(),
            f"authority{whose}, binary": ssl.PEM_cert_to_DER_cert(pem),
        }
    return texts


def test_no_layer_has_anything_of_the_build_host(built: Checkout, needles: dict[str, bytes]) -> None:
    for image in built.image_ids():
        paths, faults = set(), []
        for path, content in saved(image):
            paths.add(path)
            faults += secrets_in(path, content, needles)
        assert faults == []
        assert {"etc/passwd", "opt/venv/bin/tinyframe", "etc/profile.d/10-venv.sh"} <= paths


def test_no_layer_deletes_files_of_another(built: Checkout) -> None:
    """So a container shows all files: the image tests search them for keys in images that are too large to save."""
    for image in built.image_ids():
        paths = [path for path, _ in saved(image) if "/" in path and not path.startswith("blobs/")]
        files = [path for path in paths if not path.endswith(("/layer.tar", "/json", "/VERSION"))]
        assert [path for path in files if "/.wh." in path] == []
        twice = {path for path, count in Counter(files).items() if count > 1}
        assert {path for path in twice if not path.endswith("/")} - folders(image) == set()


def folders(image: str) -> set[str]:
    """The folders in all layers; several layers may have the same one."""
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


def test_the_search_finds_secrets(needles: dict[str, bytes], authority: Path) -> None:
    content = b"".join(needles.values()) + (authority.parent / "key.pem").read_bytes()
    assert {name for _, name in secrets_in("some/file", content, needles)} == {*needles, "private key"}
    assert secrets_in("some/file", b"harmless", needles) == []


def test_inspect_and_history_have_no_secrets(built: Checkout, needles: dict[str, bytes]) -> None:
    for image in built.image_ids():
        for command in (("image", "inspect"), ("history", "--no-trunc")):
            assert secrets_in("", built.docker(*command, image).encode(), needles) == []


def test_the_files_that_builder_writes_have_no_secrets(built: Checkout, needles: dict[str, bytes], seed: Path) -> None:
    both = [built, dataclasses.replace(built, root=seed.parent / "checkout")]
    names = (".builder", "locks", "images", "templates")
    folders_on_disk = [checkout.files(name) for checkout in both for name in names]
    assert [fault for files in folders_on_disk for item in files.items() for fault in secrets_in(*item, needles)] == []
