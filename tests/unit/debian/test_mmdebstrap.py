"""The local repository that mmdebstrap installs from. (For apt itself, see tests/integration.)"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from builder.common.errors import BuildError
from builder.debian import control_files, mmdebstrap
from builder.debian.os_lock import DebianPackage, OsLock
from tests.fakes.locks import TIME

CONTROL = """\
Package: {name}
Version: 1:2.0
Architecture: amd64
Depends: libc6 (>= 2.36)
Description: a program
 with a second line
"""


def archive(members: Mapping[str, bytes]) -> bytes:
    """An archive of ar. Source: deb(5)."""
    out = b"!<arch>\n"
    for name, content in members.items():
        out += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
            + content
            + b"\n" * (len(content) % 2)
        )
    return out


def control_tar(name: str, compression: str, path: str = "./control") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{compression}") as tar:  # type: ignore[call-overload]
        for entry, text in (("./md5sums", "x"), (path, CONTROL.format(name=name))):
            info = tarfile.TarInfo(entry)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def deb(name: str, compression: str = "xz") -> bytes:
    members = {
        "debian-binary": b"2.0\n",
        f"control.tar.{compression}": control_tar(name, compression),
        "data.tar.xz": b"odd",
    }
    return archive(members)


def index(folder: Path, **files: bytes) -> dict[str, bytes]:
    packages, paths = [], {}
    for name, content in files.items():
        sha256 = hashlib.sha256(content).hexdigest()
        packages.append(
            DebianPackage(name=name, version="1:2.0", architecture="amd64", size=len(content), sha256=sha256)
        )
        paths[sha256] = folder / sha256
        paths[sha256].write_bytes(content)
    return mmdebstrap.repository_lists(
        OsLock(debian="newbird", time=TIME, requested=(), packages=tuple(packages)), paths
    )


def test_every_field_of_a_package_and_what_apt_checks(tmp_path: Path) -> None:
    """apt would take a package with other fields for another one than the installed one."""
    first, second = deb("first"), deb("second", "gz")
    text = index(tmp_path, first=first, second=second)["Packages"].decode()
    assert text.startswith(CONTROL.format(name="first"))
    one, two = control_files.stanzas(text)
    assert (one["Package"], one["Filename"], one["Size"]) == ("first", "./first_2.0_amd64.deb", str(len(first)))
    assert two["SHA256"] == hashlib.sha256(second).hexdigest()
    assert text.count("\n\n") == 2


def test_the_release_has_its_codename_and_the_hash_of_the_list(tmp_path: Path) -> None:
    files = index(tmp_path, first=deb("first"))
    release = files["Release"].decode()
    assert "\nCodename: newbird\n" in release
    match = re.search(r"^SHA256:\n (\S+) (\d+) Packages$", release, re.MULTILINE)
    assert match
    assert match.groups() == (hashlib.sha256(files["Packages"]).hexdigest(), str(len(files["Packages"])))


DAMAGED = {
    "not an archive": b"<html>",
    "cut off": deb("first")[:100],
    "without a control file": archive({"control.tar.xz": control_tar("first", "xz", "./other")}),
    "without control.tar": archive({"debian-binary": b"2.0\n"}),
    "another compression": archive({"control.tar.zst": b"\x28\xb5\x2f\xfd"}),
    "an invalid size": archive({"control.tar.xz": b""}).replace(b"0         `", b"x         `"),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_what_is_not_a_package_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BuildError, match=r"^first_2\.0_amd64\.deb is not a Debian package: "):
        index(tmp_path, first=content)
