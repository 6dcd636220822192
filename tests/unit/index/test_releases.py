"""What is read from an index, how little of a wheel is downloaded, and the errors."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace

import pytest
import requests
from packaging.version import Version

from builder.common.errors import FetchError
from builder.index import releases
from builder.index.releases import Index, Metadata
from builder.index.settings import IndexSettings
from tests.fakes.wire import Reply, Sent, Wire, part, untrusted

HOST = "index.example.test"
METADATA = b"""\
Metadata-Version: 2.1
Name: Tiny_Pack
Version: 1.0
Requires-Python: >=3.9
Requires-Dist: nvidia-cuda-runtime-cu12 ==12.8.90 ; extra == 'with_cuda'
Requires-Dist: numpy>=1.20
Provides-Extra: with_cuda

Requires-Dist: not-a-header
"""
READ = Metadata(requires=("nvidia-cuda-runtime-cu12 ==12.8.90 ; extra == 'with_cuda'", "numpy>=1.20"))
LINUX = "tiny_pack-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"


def wheel(metadata: bytes = METADATA, folder: str = "tiny_pack-1.0.dist-info") -> bytes:
    """With a megabyte before its metadata, which must not be downloaded."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("tiny_pack/large.so", bytes(1 << 20))
        archive.writestr("tiny_pack/vendored/other-1.0.dist-info/METADATA", b"Name: other\nVersion: 2\n")
        archive.writestr(f"{folder}/METADATA", metadata)
    return packed.getvalue()


def page(*files: str, attributes: str = "") -> Reply:
    links = "".join(f'<a href="/files/{file}" {attributes}>{file}</a>' for file in files)
    return Reply(body=f"<html><body>{links}</body></html>".encode(), headers={"Content-Type": "text/html"})


Laid = Callable[..., tuple[Index, Wire]]


def read(index: Index) -> Metadata:
    (file,) = index.files("tiny-pack")
    return releases.parse_metadata(file.filename, index.metadata_text(file))


@pytest.fixture
def lay(monkeypatch: pytest.MonkeyPatch) -> Laid:
    """An index whose one page and whose files are given."""

    def laid(pages: Reply | Exception, files: Callable[[Sent], Reply | Exception] | None = None) -> tuple[Index, Wire]:
        def answer(sent: Sent) -> Reply | Exception:
            if "/simple/" in sent.url:
                return pages
            assert files is not None
            return files(sent)

        wire = Wire.install(monkeypatch, answer)
        return Index(IndexSettings(url=f"https://me:secret@{HOST}/simple/")), wire

    return laid


def test_releases_in_the_order_of_versions(lay: Laid) -> None:
    index, wire = lay(page("a-1.10-py3-none-any.whl", "a-1.9-py3-none-any.whl", "a-1.9.tar.gz", "a-2.0rc1.tar.gz"))
    package = index.package("A")
    assert [(str(release.version), release.wheels) for release in package.releases] == [
        ("1.9", ("a-1.9-py3-none-any.whl",)),
        ("1.10", ("a-1.10-py3-none-any.whl",)),
        ("2.0rc1", ()),
    ]
    assert [release.is_stable for release in package.releases] == [True, True, False]
    assert package.release(Version("1.9.0")) is package.releases[0]
    assert package.release(Version("3")) is None
    index.package("a")
    assert len(wire.seen) == 1  # each page once


def test_a_local_version_is_a_build_of_another_spelling_of_its_release(lay: Laid) -> None:
    package = lay(page("a-2.9.0+cu128-py3-none-any.whl", "a-2.10+cu128-py3-none-any.whl"))[0].package("a")
    assert package.release(Version("2.9")) is package.releases[0]
    assert package.release(Version("2.10.0+cu128")) is package.releases[1]
    assert package.release(Version("2.10+cpu")) is None


def test_attributes_of_a_link(lay: Laid) -> None:
    attributes = 'data-requires-python="&gt;=3.9" data-yanked="broken"'
    release = lay(page("a-1.0-py3-none-any.whl", attributes=attributes))[0].package("a").releases[0]
    assert (release.requires_python, release.is_yanked, release.is_stable) == (">=3.9", True, False)


def test_a_release_is_yanked_when_all_its_files_are(lay: Laid) -> None:
    both = page("a-1.0-py3-none-any.whl").body + page("a-1.0.tar.gz", attributes="data-yanked").body
    index, _ = lay(Reply(body=both, headers={"Content-Type": "text/html"}))
    assert index.package("a").releases[0].is_stable


def test_files_of_no_release_are_ignored(lay: Laid) -> None:
    index, _ = lay(page("readme.txt", "a-1-py3-none-any.whl", f"a-2-{'py3.' * 200}py3-none-any.whl"))
    assert [str(release.version) for release in index.package("a").releases] == ["1"]


def test_a_package_that_the_index_does_not_have(lay: Laid) -> None:
    index, _ = lay(Reply(status=404))
    assert index.package("a").releases == ()


def test_metadata_out_of_a_wheel_that_is_not_downloaded(lay: Laid) -> None:
    content = wheel()
    index, wire = lay(page(LINUX), lambda sent: part(content, sent))
    assert read(index) == READ
    fetched = [sent for sent in wire.seen if "/files/" in sent.url]
    assert read(index) == READ
    assert len([sent for sent in wire.seen if "/files/" in sent.url]) == len(fetched), "requested once"
    sizes = [int(part(content, sent).headers["Content-Range"].split("/")[0].split("-")[1]) for sent in fetched]
    assert len(sizes) <= 3
    assert sum(len(part(content, sent).body) for sent in fetched) < len(content) / 4
    assert all(sent.headers["Authorization"].startswith("Basic ") for sent in fetched)


@pytest.mark.parametrize(
    ("fields", "license_", "supplier"),
    [
        ("License-Expression: MIT OR Apache-2.0\nAuthor: A. Person", "MIT OR Apache-2.0", "A. Person"),
        ("License: BSD-3-Clause\nAuthor-email: The team <team@example.test>", "BSD-3-Clause", "The team"),
        ("License: UNKNOWN\nMaintainer: M\nAuthor: UNKNOWN\nClassifier: License :: OSI", "OSI", "M"),
        (f"License: {'All rights. ' * 99}\nAuthor: \x1b[2J", "", ""),
    ],
)
def test_licence_and_supplier(fields: str, license_: str, supplier: str) -> None:
    metadata = releases.parse_metadata(LINUX, f"Metadata-Version: 2.4\nName: x\nVersion: 1\n{fields}\n".encode())
    assert (metadata.license, metadata.supplier) == (license_, supplier)


def test_metadata_as_a_file_of_its_own(lay: Laid) -> None:
    index, wire = lay(page(LINUX, attributes='data-core-metadata="true"'), lambda _: Reply(body=METADATA))
    assert read(index) == READ
    assert wire.lines[1:] == [f"GET /files/{LINUX}.metadata"]


def damaged() -> bytes:
    """One byte of the metadata is another one."""
    content = wheel()
    at = content.index(b"Metadata-Version")
    return content[:at] + b"X" + content[at + 1 :]


def encrypted() -> bytes:
    """The flags in both headers of the entry are set."""
    content = wheel()
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.rindex(mark) + flags
        content = content[:at] + bytes([content[at] | 1]) + content[at + 1 :]
    return content


def cut_on_the_way(sent: Sent) -> Reply:
    whole = part(wheel(), sent)
    return replace(whole, body=whole.body[: len(whole.body) // 2], broken=True)


INVALID = "the index sent an invalid response"
FAULTS: dict[str, tuple[Callable[[Sent], Reply | Exception], str]] = {
    "refused": (lambda _: Reply(status=403), "the index returned 403 Forbidden"),
    "silent": (lambda _: requests.ReadTimeout(f"https://me:secret@{HOST} took too long"), "the index timed out"),
    "no metadata": (lambda sent: part(wheel(folder="x"), sent), INVALID),
    "invalid metadata": (lambda sent: part(wheel(b"\x00\xff"), sent), "invalid METADATA"),
    "encrypted": (lambda sent: part(encrypted(), sent), INVALID),
    "cut on the way": (cut_on_the_way, "the connection was lost"),
    "huge": (lambda sent: part(wheel(METADATA + bytes(releases.LARGEST)), sent), INVALID),
}


@pytest.mark.parametrize(("files", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_errors_of_metadata(lay: Laid, files: Callable[[Sent], Reply | Exception], message: str) -> None:
    index, _ = lay(page(LINUX), files)
    with pytest.raises(FetchError) as failed:
        read(index)
    assert str(failed.value) == f"{LINUX}: {message}"
    assert failed.value.hint
    assert HOST not in str(failed.value) + failed.value.hint


def test_a_metadata_file_that_is_too_large(lay: Laid) -> None:
    index, _ = lay(
        page(LINUX, attributes='data-core-metadata="true"'), lambda _: Reply(body=METADATA + bytes(releases.LARGEST))
    )
    with pytest.raises(FetchError):
        read(index)


DAMAGED = "the file on the index is damaged or incomplete"


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "content", [wheel()[: len(wheel()) // 2], bytes(100_000), damaged()], ids=["cut short", "no zip", "damaged"]
)
def test_a_wheel_that_is_not_all_there(lay: Laid, content: bytes, whole: bool) -> None:
    """The message was that the index sent an invalid response, and the hint was `builder doctor`."""
    index, _ = lay(page(LINUX), lambda sent: Reply(body=content) if whole else part(content, sent))
    (file,) = index.files("tiny-pack")
    with pytest.raises(FetchError, match=f"^{re.escape(LINUX)}: {DAMAGED}$") as failed:
        index.metadata_text(file)
    assert failed.value.hint == "Upload the wheel to the index again, or pin another version in matrix.yaml."


@pytest.mark.parametrize(
    "text", [b"Name: x(\nVersion: 1\n", b"Name: x\nVersion: one\n", b"Name: \x1b[31m\nVersion: 1\n", b"Name: x\n"]
)
def test_metadata_with_an_invalid_name_or_version(text: bytes) -> None:
    with pytest.raises(FetchError):
        releases.parse_metadata("x.whl", text)


def test_unprintable_text_is_ignored(lay: Laid) -> None:
    content = page("a-1-py3-none-any.whl", attributes='data-requires-python="\x1b[31m"').body
    more = page("a-2-py3-none-\x1b[31m.whl").body
    package = lay(Reply(body=content + more, headers={"Content-Type": "text/html"}))[0].package("a")
    assert [(str(release.version), release.requires_python) for release in package.releases] == [("1", "")]


@pytest.mark.parametrize(
    "pages",
    [Reply(status=500), untrusted(), Reply(body=b"x", headers={"Content-Type": "image/png"})],
    ids=["status", "certificate", "content"],
)
def test_errors_of_a_page_name_the_package(lay: Laid, pages: Reply | Exception) -> None:
    with pytest.raises(FetchError, match=r"^a: ") as failed:
        lay(pages)[0].package("a")
    assert HOST not in str(failed.value)
