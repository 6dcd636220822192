"""What uv gets from several indexes: each package from its own one, and nothing from another one."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import FetchError
from builder.index.local_index import LocalIndex
from builder.index.releases import Index
from builder.index.settings import IndexSettings
from builder.index.wheels import InstalledWheel, LockedWheel
from tests.fakes.wire import Reply, Sent, Wire

PUBLIC, PRIVATE = "public.example.test", "private.example.test"
OWN = "own-3.0-py3-none-any.whl"
METADATA = b"Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n"


def wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("acme-1.0.dist-info/METADATA", METADATA)
    return buffer.getvalue()


WHEEL = wheel()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[LocalIndex, Wire]]:
    """Two indexes with the packages `acme` and `other`; the public index has higher versions."""
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))

    def answer(sent: Sent) -> Reply:
        if "/files/" in sent.url:
            return Reply(body=WHEEL)
        version = "9.0" if PUBLIC in sent.url else "1.0%2Bco"
        name = sent.url.rstrip("/").rsplit("/", maxsplit=1)[-1]
        if name not in ("acme", "other"):
            return Reply(status=404)
        sha256 = hashlib.sha256(WHEEL).hexdigest()
        file = f"{name}-{version}-py3-none-any.whl"
        link = f'<a href="/files/{file}#sha256={sha256}" data-requires-python="&gt;=3.9" data-yanked="old">{file}</a>'
        page = f"<!DOCTYPE html><html><body>{link.replace('>' + file, '>' + file.replace('%2B', '+'))}</body></html>"
        return Reply(body=page.encode(), headers={"Content-Type": "text/html"})

    def served(private: Callable[[Sent], Reply] = answer) -> tuple[LocalIndex, Wire]:
        wire = Wire.install(monkeypatch, lambda sent: (private if PRIVATE in sent.url else answer)(sent))
        settings = IndexSettings(url=f"https://{PUBLIC}/simple/").with_index("co", f"https://{PRIVATE}/simple")
        return LocalIndex(Index(settings), {"acme": "co"}), wire

    return served


def page(local: LocalIndex, name: str) -> dict[str, Any]:
    answered = local.answer(f"simple/{name}/")
    assert answered
    assert answered[0] == "application/vnd.pypi.simple.v1+json"
    content: dict[str, Any] = json.loads(answered[1])
    return content


def test_each_package_is_requested_from_its_own_index_alone(serve: Callable[..., tuple[LocalIndex, Wire]]) -> None:
    local, wire = serve()
    assert page(local, "acme")["files"] == [
        {
            "filename": "acme-1.0+co-py3-none-any.whl",
            "url": "../../files/acme/acme-1.0%2Bco-py3-none-any.whl",
            "hashes": {"sha256": hashlib.sha256(WHEEL).hexdigest()},
            "requires-python": ">=3.9",
            "yanked": "old",
            "core-metadata": True,
        }
    ]
    assert local.answer("files/acme/acme-1.0%2Bco-py3-none-any.whl.metadata") == (
        "text/plain; charset=utf-8", METADATA
    )  # fmt: skip
    assert {sent.url.split("/")[2] for sent in wire.seen} == {PRIVATE}
    wire.seen.clear()
    assert page(local, "other")["files"][0]["filename"] == "other-9.0-py3-none-any.whl"
    assert {sent.url.split("/")[2] for sent in wire.seen} == {PUBLIC}


def test_the_listed_size_of_a_file_is_passed_on(serve: Callable[..., tuple[LocalIndex, Wire]]) -> None:
    listed = {"filename": "acme-1.0-py3-none-any.whl", "url": "/files/a.whl", "hashes": {}, "size": 77}
    page_of_index = {"meta": {"api-version": "1.1"}, "name": "acme", "versions": ["1.0"], "files": [listed]}
    kind = {"Content-Type": "application/vnd.pypi.simple.v1+json"}
    local, _ = serve(lambda _: Reply(body=json.dumps(page_of_index).encode(), headers=kind))
    assert page(local, "acme")["files"][0]["size"] == 77


def test_a_wheel_without_a_hash_is_named(serve: Callable[..., tuple[LocalIndex, Wire]]) -> None:
    """uv downloads such a wheel to compute its hash. The message was that of the 404 from here."""
    link = '<a href="/files/{0}">{0}</a>'.format("acme-1.0-py3-none-any.whl")
    html = {"Content-Type": "text/html"}
    local, wire = serve(lambda _: Reply(body=f"<!DOCTYPE html><html><body>{link}</body></html>".encode(), headers=html))
    assert page(local, "acme")["files"][0]["hashes"] == {}
    assert local.failures == []
    assert local.answer("files/acme/acme-1.0-py3-none-any.whl") is None
    (failure,) = local.failures
    assert str(failure) == "acme-1.0-py3-none-any.whl: the index co has no SHA-256 for it"
    assert failure.hint == "Use an index that has hashes."
    assert not any("/files/" in sent.url for sent in wire.seen)


@pytest.mark.parametrize("path", ["", "simple/none/", "files/acme/acme-9.0-py3-none-any.whl.metadata", "other/acme/"])
def test_what_there_is_not(serve: Callable[..., tuple[LocalIndex, Wire]], path: str) -> None:
    local, _ = serve()
    assert local.answer(path) is None
    assert local.failures == []
    assert local.absent == (["none"] if path == "simple/none/" else [])


def test_an_index_that_refuses_is_reported_and_replaced_by_no_other_one(
    serve: Callable[..., tuple[LocalIndex, Wire]],
) -> None:
    local, wire = serve(lambda _: Reply(status=403))
    assert local.answer("simple/acme/") is None
    (failure,) = local.failures
    assert isinstance(failure, FetchError)
    assert str(failure) == "acme: the index co returned 403 Forbidden"
    assert {sent.url.split("/")[2] for sent in wire.seen} == {PRIVATE}


def test_a_kept_wheel_is_the_only_one_of_a_held_package(serve: Callable[..., tuple[LocalIndex, Wire]]) -> None:
    local, wire = serve()
    wheel = LockedWheel(name="own", version="3.0", file=OWN, size=1, sha256="e" * 64)
    local = LocalIndex(local._catalogue, {}, {"own": InstalledWheel(wheel=wheel, read=lambda: METADATA)}, {"own"})
    assert {each["filename"]: each["hashes"] for each in page(local, "own")["files"]} == {OWN: {"sha256": "e" * 64}}
    assert local.answer(f"files/own/{OWN}.metadata") == ("text/plain; charset=utf-8", METADATA)
    assert wire.seen == [], "no index sees its name"


@pytest.mark.parametrize(
    ("version", "sha256", "others"),
    [("9.0", "", True), ("9.0", "e" * 64, False), ("3.0", "", False)],
    ids=["the same file", "another file with its name", "no such file"],
)
def test_an_index_without_the_kept_wheel_has_another_package_of_its_name(
    serve: Callable[..., tuple[LocalIndex, Wire]], version: str, sha256: str, others: bool
) -> None:
    """Anybody can publish the name of a private package. A wheel of the image can be chosen though it is yanked."""
    catalogue, file = serve()[0]._catalogue, f"other-{version}-py3-none-any.whl"
    listed = catalogue.files("other")
    listed.append(replace(listed[0], filename="other-99-py3-none-any.whl"))
    sha256 = sha256 or hashlib.sha256(WHEEL).hexdigest()
    wheel = LockedWheel(name="other", version=version, file=file, size=1, sha256=sha256)
    local = LocalIndex(catalogue, {}, {"other": InstalledWheel(wheel=wheel, read=lambda: b"")})
    found = {each["filename"]: each["yanked"] for each in page(local, "other")["files"]}
    assert found == {file: False} | ({"other-99-py3-none-any.whl": "old"} if others else {})
    assert local.answer(f"files/other/{file}.metadata") == ("text/plain; charset=utf-8", b"")


def test_a_folder_is_an_index(tmp_path: Path) -> None:
    (tmp_path / "Acme-1.0-py3-none-any.whl").write_bytes(WHEEL)
    (tmp_path / "acme_tools-1.0-py3-none-any.whl").write_bytes(b"another package")
    (tmp_path / "acme-1.0.tar.gz").write_bytes(b"no wheel")
    settings = IndexSettings().with_index("own", "", folder=tmp_path)
    local = LocalIndex(Index(settings), {"acme": "own", "absent": "own"})
    [listed] = page(local, "acme")["files"]
    assert listed["filename"] == "Acme-1.0-py3-none-any.whl"
    assert (listed["hashes"], listed["size"]) == ({"sha256": hashlib.sha256(WHEEL).hexdigest()}, len(WHEEL))
    answered = local.answer("files/acme/Acme-1.0-py3-none-any.whl.metadata")
    assert answered == ("text/plain; charset=utf-8", METADATA)
    assert local.answer("simple/absent/") is None
    assert (local.absent, local.failures) == (["absent"], [])
