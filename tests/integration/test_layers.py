"""Nothing of the build host is in an image, in any of its layers, or in the files that `builder` writes."""

from __future__ import annotations

import dataclasses
import re
import ssl
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.integration.checkout import Checkout
from tests.integration.index import Index

PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\r?\n[A-Za-z0-9+/=]{16}")
# GnuTLS tests itself at start, with published keys that are part of the library.
NO_SECRETS = re.compile(r"usr/lib/[a-z0-9_-]+/libgnutls\.so\.[0-9.]+")


def saved(image: str) -> Iterator[tuple[str, bytes | None]]:
    """Path and content of every file in the layers, also of files that a higher layer deletes; None for folders."""
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
                        data = file.read() if file else entry.linkname.encode()
                        yield entry.name.removeprefix("./"), None if entry.isdir() else data
            except tarfile.ReadError:
                continue  # configuration and manifest: the inspect test below covers them
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


def test_no_layer_has_anything_of_the_build_host_or_deletes_files(
    released_once: Checkout, needles: dict[str, bytes]
) -> None:
    """A container shows all files then: the image tests search them for keys in images that are too large to save."""
    for image in released_once.image_ids():
        files: Counter[str] = Counter()
        faults = []
        for path, content in saved(image):
            faults += secrets_in(path, content or b"", needles)
            if content is not None:
                files[path] += 1
        assert faults == []
        assert {"etc/passwd", "opt/venv/bin/tinyframe", "etc/profile.d/10-venv.sh"} <= files.keys()
        assert [path for path in files if "/.wh." in f"/{path}"] == []
        # At the top, each layer has a mark of its own.
        assert [path for path, count in files.items() if count > 1 and "/" in path] == []


def test_the_search_finds_secrets(needles: dict[str, bytes], authority: Path) -> None:
    content = b"".join(needles.values()) + (authority.parent / "key.pem").read_bytes()
    assert {name for _, name in secrets_in("some/file", content, needles)} == {*needles, "private key"}
    assert secrets_in("some/file", b"harmless", needles) == []


def test_inspect_and_history_have_no_secrets(released_once: Checkout, needles: dict[str, bytes]) -> None:
    for image in released_once.image_ids():
        for command in (("image", "inspect"), ("history", "--no-trunc")):
            assert secrets_in("", released_once.docker(*command, image).encode(), needles) == []


def test_the_files_that_builder_writes_have_no_secrets(
    released_once: Checkout, needles: dict[str, bytes], seed: Path
) -> None:
    both = [released_once, dataclasses.replace(released_once, root=seed.parent / "checkout")]
    names = (".builder", "locks", "images", "templates")
    folders_on_disk = [checkout.files(name) for checkout in both for name in names]
    assert [fault for files in folders_on_disk for item in files.items() for fault in secrets_in(*item, needles)] == []
