"""The packages that the records in an image's layers list."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping

import pytest

from builder.common.errors import VerifyError
from builder.layers.estargz import SMALL
from builder.layers.installed import Installed

STATUS = b"""Package: bash
Status: install ok installed
Source: bash (5.2.15-2)
Version: 5.2.15-2+b8
Description: a shell
 Version: not a field

Package: gone
Status: deinstall ok config-files
Version: 1
"""
SITE = "opt/venv/lib/python/site-packages"
BASH = ("deb", "bash", "5.2.15-2+b8")


def layer(files: Mapping[str, bytes | str | None]) -> io.BytesIO:
    """A layer of files; text is the target of a link, None is a folder."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = (tarfile.SYMTYPE, content) if content else (tarfile.DIRTYPE, "")
                tar.addfile(info)
    half = len(plain.getvalue()) // 2
    return io.BytesIO(gzip.compress(plain.getvalue()[:half]) + gzip.compress(plain.getvalue()[half:]))


def metadata(name: str, version: str) -> bytes:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: not a header\n".encode()


def packages(*layers: io.BytesIO) -> set[tuple[str, str, str]]:
    installed = Installed()
    for each in layers:
        installed.add(each)
    return {(package.kind, package.name, package.version) for package in installed.packages}


def test_debian_and_python_packages() -> None:
    system = layer({"./var/lib/dpkg/status": STATUS})
    wheels = layer(
        {
            f"{SITE}/Some_Package-1.0.dist-info/METADATA": metadata("Some.Package", "1.0.0"),
            f"{SITE}/nvidia_cublas_cu12-12.8.4.1.dist-info/METADATA": metadata("nvidia-cublas-cu12", "12.8.4.1"),
            # In images of earlier builders.
            "opt/nvidia/nvidia_cufft_cu12-11.3.dist-info/METADATA": metadata("nvidia-cufft-cu12", "11.3"),
            # Neither of these is an installed package.
            f"{SITE}/setuptools/_vendor/wheel-0.45.dist-info/METADATA": metadata("wheel", "0.45"),
            f"{SITE}/linked-1.dist-info/METADATA": "../elsewhere",
            "usr/lib/python3/dist-packages/six-1.16.dist-info/METADATA": metadata("six", "1.16"),
        }
    )
    assert packages(system, wheels) == {
        BASH,
        ("pypi", "some-package", "1"),
        ("pypi", "nvidia-cublas-cu12", "12.8.4.1"),
        ("pypi", "nvidia-cufft-cu12", "11.3"),
    }


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (f"{SITE}/.wh.a-1.dist-info", b""),
        (f"{SITE}/a-1.dist-info/.wh.METADATA", b""),
        ("opt/.wh..wh..opq", b""),
        ("opt/venv", "/elsewhere"),
        (f"{SITE}/a-1.dist-info/METADATA", "/dev/null"),
    ],
)
def test_what_a_higher_layer_removes_is_not_installed(path: str, content: bytes | str) -> None:
    lower = layer({"var/lib/dpkg/status": STATUS, f"{SITE}/a-1.dist-info/METADATA": metadata("a", "1")})
    assert packages(lower) == {BASH, ("pypi", "a", "1")}
    lower = layer({"var/lib/dpkg/status": STATUS, f"{SITE}/a-1.dist-info/METADATA": metadata("a", "1")})
    assert packages(lower, layer({path: content})) == {BASH}


def test_debian_packages_have_a_source() -> None:
    status = STATUS + b"\nPackage: tini\nStatus: install ok installed\nVersion: 0.19.0-1\n"
    installed = Installed()
    installed.add(layer({"var/lib/dpkg/status": status, f"{SITE}/a-1.dist-info/METADATA": metadata("a", "1")}))
    assert {package.name: package.source for package in installed.packages} == {
        "bash": ("bash", "5.2.15-2"),
        "tini": ("tini", "0.19.0-1"),
        "a": ("", ""),
    }


def test_a_higher_layer_replaces_a_record() -> None:
    lower = layer({f"{SITE}/a-1.dist-info/METADATA": metadata("a", "1"), "var/lib/dpkg/status": STATUS})
    upper = layer({"var": None, "var/lib/dpkg/status": STATUS.replace(b"5.2.15", b"5.3")})
    assert packages(lower, upper) == {("deb", "bash", "5.3-2+b8"), ("pypi", "a", "1")}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip",
        gzip.compress(b"not a tar" * 100),
        layer({"a": b"1" * 5000}).getvalue()[:-20],
        layer({"var/lib/dpkg/status": bytes(SMALL + 1)}).getvalue(),
    ],
    ids=["empty", "not gzip", "not a tar", "cut", "large"],
)
def test_a_damaged_layer_is_an_error(content: bytes) -> None:
    with pytest.raises(VerifyError, match="the layer cannot be read"):
        packages(io.BytesIO(content))
