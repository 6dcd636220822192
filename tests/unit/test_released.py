"""What is read off an index, how little of a wheel is fetched, and what is said when that does not work."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable

import pytest
import requests
from packaging.version import Version

from builder import released
from builder.errors import FetchError
from builder.index import IndexSettings
from builder.released import Index, Metadata
from tests.unit.wire import Reply, Sent, Wire

HOST = "index.example.test"
ONE = Version("1.0")
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
READ = Metadata(
    name="tiny-pack",
    version="1.0",
    requires=("nvidia-cuda-runtime-cu12 ==12.8.90 ; extra == 'with_cuda'", "numpy>=1.20"),
    extras=("with-cuda",),
)
LINUX = "tiny_pack-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
ARM = "tiny_pack-1.0-cp311-cp311-manylinux_2_28_aarch64.whl"


def wheel(metadata: bytes = METADATA, folder: str = "tiny_pack-1.0.dist-info") -> bytes:
    """With a megabyte before its metadata, which nobody should fetch."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("tiny_pack/large.so", bytes(1 << 20))
        archive.writestr("tiny_pack/vendored/other-1.0.dist-info/METADATA", b"Name: other\nVersion: 2\n")
        archive.writestr(f"{folder}/METADATA", metadata)
    return packed.getvalue()


def page(*files: str, attributes: str = "") -> Reply:
    links = "".join(f'<a href="/files/{file}" {attributes}>{file}</a>' for file in files)
    return Reply(body=f"<html><body>{links}</body></html>".encode(), headers={"Content-Type": "text/html"})


def part(content: bytes, sent: Sent) -> Reply:
    first, _, last = sent.headers["Range"].removeprefix("bytes=").partition("-")
    start = int(first) if first else max(0, len(content) - int(last))
    end = min(int(last) if first and last else len(content) - 1, len(content) - 1)
    return Reply(
        status=206, body=content[start : end + 1], headers={"Content-Range": f"bytes {start}-{end}/{len(content)}"}
    )


Laid = Callable[..., tuple[Index, Wire]]


@pytest.fixture
def lay(monkeypatch: pytest.MonkeyPatch) -> Laid:
    """An index whose one page and whose files are answered as told."""

    def laid(pages: Reply | Exception, files: Callable[[Sent], Reply | Exception] | None = None) -> tuple[Index, Wire]:
        def answer(sent: Sent) -> Reply | Exception:
            if "/simple/" in sent.url:
                return pages
            assert files is not None
            return files(sent)

        wire = Wire.lay(monkeypatch, answer)
        return Index(IndexSettings(url=f"https://me:secret@{HOST}/simple/")), wire

    return laid


def test_releases_in_the_order_of_versions(lay: Laid) -> None:
    index, wire = lay(page("a-1.10-py3-none-any.whl", "a-1.9-py3-none-any.whl", "a-1.9.tar.gz", "a-2.0rc1.tar.gz"))
    found = index.package("A")
    assert [(str(one.version), one.wheels) for one in found.releases] == [
        ("1.9", ("a-1.9-py3-none-any.whl",)),
        ("1.10", ("a-1.10-py3-none-any.whl",)),
        ("2.0rc1", ()),
    ]
    assert [one.is_stable for one in found.releases] == [True, True, False]
    assert found.release(Version("1.9.0")) is found.releases[0]
    assert found.release(Version("3")) is None
    index.package("a")
    assert len(wire.seen) == 1  # each page once


def test_what_a_link_says_of_a_release(lay: Laid) -> None:
    attributes = 'data-requires-python="&gt;=3.9" data-yanked="broken"'
    release = lay(page("a-1.0-py3-none-any.whl", attributes=attributes))[0].package("a").releases[0]
    assert (release.requires_python, release.is_yanked, release.is_stable) == (">=3.9", True, False)


def test_a_release_is_yanked_when_all_its_files_are(lay: Laid) -> None:
    both = page("a-1.0-py3-none-any.whl").body + page("a-1.0.tar.gz", attributes="data-yanked").body
    index, _ = lay(Reply(body=both, headers={"Content-Type": "text/html"}))
    assert index.package("a").releases[0].is_stable


def test_names_that_are_no_files_of_a_release_are_passed_over(lay: Laid) -> None:
    index, _ = lay(page("readme.txt", "a-1-py3-none-any.whl", f"a-2-{'py3.' * 200}py3-none-any.whl"))
    assert [str(one.version) for one in index.package("a").releases] == ["1"]


def test_a_package_that_the_index_does_not_have(lay: Laid) -> None:
    index, _ = lay(Reply(status=404))
    assert index.package("a").releases == ()
    with pytest.raises(FetchError, match=r"^a 1\.0: the index has no wheel of it$"):
        index.metadata("a", ONE)


def test_metadata_out_of_a_wheel_that_is_not_fetched(lay: Laid) -> None:
    content = wheel()
    index, wire = lay(page(ARM, LINUX), lambda sent: part(content, sent))
    assert index.metadata("tiny.pack", ONE) == READ
    assert index.metadata("tiny-pack", ONE) is index.metadata("tiny.pack", ONE)
    fetched = [one for one in wire.seen if "/files/" in one.url]
    assert {one.path for one in fetched} == {f"/files/{LINUX}"}  # that of this platform
    sizes = [int(part(content, one).headers["Content-Range"].split("/")[0].split("-")[1]) for one in fetched]
    assert len(sizes) <= 3
    assert sum(len(part(content, one).body) for one in fetched) < len(content) / 4
    assert all(one.headers["Authorization"].startswith("Basic ") for one in fetched)


def test_metadata_as_a_file_of_its_own(lay: Laid) -> None:
    index, wire = lay(page(LINUX, attributes='data-core-metadata="true"'), lambda _: Reply(body=METADATA))
    assert index.metadata("tiny-pack", ONE) == READ
    assert wire.said[1:] == [f"GET /files/{LINUX}.metadata"]


def whole(_: Sent) -> Reply:
    return Reply(body=wheel())


def refused(_: Sent) -> Reply:
    return Reply(status=403)


def silent(_: Sent) -> Exception:
    return requests.ReadTimeout(f"https://me:secret@{HOST} took too long")


def without_metadata(sent: Sent) -> Reply:
    return part(wheel(folder="x"), sent)


def no_metadata(sent: Sent) -> Reply:
    return part(wheel(b"\x00\xff"), sent)


def no_zip(sent: Sent) -> Reply:
    return part(bytes(100_000), sent)


def huge(sent: Sent) -> Reply:
    return part(wheel(METADATA + bytes(released.LARGEST)), sent)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (whole, "the index serves neither metadata nor parts of a wheel"),
        (refused, "the index answers 403"),
        (silent, "the index is silent"),
        (without_metadata, "what the index serves cannot be read"),
        (no_metadata, "its METADATA cannot be read"),
        (no_zip, "what the index serves cannot be read"),
        (huge, "what the index serves cannot be read"),
    ],
)
def test_what_is_said_when_metadata_cannot_be_had(lay: Laid, files: Callable[[Sent], Reply], said: str) -> None:
    index, _ = lay(page(LINUX), files)
    with pytest.raises(FetchError) as failed:
        index.metadata("tiny-pack", ONE)
    assert str(failed.value) == f"{LINUX}: {said}"
    assert failed.value.hint
    assert HOST not in str(failed.value) + failed.value.hint


def test_a_file_of_metadata_is_not_read_to_its_end_where_it_has_none(lay: Laid) -> None:
    index, _ = lay(
        page(LINUX, attributes='data-core-metadata="true"'), lambda _: Reply(body=METADATA + bytes(released.LARGEST))
    )
    with pytest.raises(FetchError, match="what the index serves cannot be read"):
        index.metadata("tiny-pack", ONE)


def encrypted(sent: Sent) -> Reply:
    """Flags of the entry, and of its own header, say that it needs a password."""
    content = wheel()
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.rindex(mark) + flags
        content = content[:at] + bytes([content[at] | 1]) + content[at + 1 :]
    return part(content, sent)


def test_a_wheel_that_wants_a_password(lay: Laid) -> None:
    index, _ = lay(page(LINUX), encrypted)
    with pytest.raises(FetchError, match="what the index serves cannot be read"):
        index.metadata("tiny-pack", ONE)


@pytest.mark.parametrize(
    "text", [b"Name: x(\nVersion: 1\n", b"Name: x\nVersion: one\n", b"Name: \x1b[31m\nVersion: 1\n", b"Name: x\n"]
)
def test_metadata_without_a_name_or_version_that_is_one(text: bytes) -> None:
    with pytest.raises(FetchError, match="its METADATA cannot be read"):
        released.parse("x.whl", text)


def test_an_extra_that_is_no_name_is_passed_over() -> None:
    text = b"Name: x\nVersion: 1\nProvides-Extra: \x1b[31m\nProvides-Extra: one\n"
    assert released.parse("x.whl", text).extras == ("one",)


def test_what_cannot_be_shown_is_passed_over(lay: Laid) -> None:
    content = page("a-1-py3-none-any.whl", attributes='data-requires-python="\x1b[31m"').body
    more = page("a-2-py3-none-\x1b[31m.whl").body
    found = lay(Reply(body=content + more, headers={"Content-Type": "text/html"}))[0].package("a")
    assert [(str(one.version), one.requires_python) for one in found.releases] == [("1", "")]


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        (Reply(status=500), "a: the index answers 500"),
        (requests.exceptions.SSLError(HOST), "a: the certificate of the index is not trusted"),
        (Reply(body=b"{", headers={"Content-Type": "application/vnd.pypi.simple.v1+json"}), "a: what the index serves"),
        (Reply(body=b"x", headers={"Content-Type": "image/png"}), "a: what the index serves cannot be read"),
    ],
)
def test_what_is_said_when_a_page_cannot_be_had(lay: Laid, pages: Reply | Exception, said: str) -> None:
    with pytest.raises(FetchError) as failed:
        lay(pages)[0].package("a")
    assert str(failed.value).startswith(said)
    assert HOST not in str(failed.value)
