"""The upload of a blob, with all failures that a registry may cause."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from builder.common.errors import FileError, RegistryError
from builder.common.files import digest_of_bytes
from builder.common.tasks import RetryPolicy
from builder.registry import upload as registry_upload
from builder.registry.client import Repository
from builder.registry.failures import RejectedError
from builder.registry.upload import parse_range
from tests.fakes.wire import CONTENT, DIGEST, HOST, QUICK, Reply, Sent, Wire, broken, connect, errors
from tests.unit.registry.fixtures import Lay

CHUNK = 300


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_upload, "CHUNK", CHUNK)


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ("", 0), ("0-0", 0), ("0-1", 2), ("bytes=0-99", 100), (" 0-5 ", 6), ("0-0099", 100),
        ("1-5", None), ("0-", None), ("0-5/9", None), ("x", None), ("0-5\n0-7", None), ("0-\u0665", None), ("-1", None),
    ],
)  # fmt: skip
def test_ranges(header: str, size: int | None) -> None:
    assert parse_range(header) == size


class Uploads:
    """Uploads by the specification. `before` may answer instead."""

    def __init__(self, *, origin: str = "") -> None:
        self.origin = origin  # of Locations; relative if empty
        self.parts: dict[str, bytes] = {}
        self.blobs: set[str] = set()
        self.before: Callable[[Sent], Reply | Exception | None] = lambda _: None
        self._names = map(str, count(1))

    def __call__(self, sent: Sent) -> Reply | Exception:
        instead = self.before(sent)
        return self.answer(sent) if instead is None else instead

    def answer(self, sent: Sent) -> Reply:
        name, _, query = sent.path.rpartition("/")[2].partition("?")
        if sent.method == "HEAD":
            return Reply(status=200 if name in self.blobs else 404)
        if sent.method == "POST":
            name = next(self._names)
            self.parts[name] = b""
        elif name not in self.parts:
            return Reply(status=404, body=errors({"code": "BLOB_UPLOAD_UNKNOWN"}))
        held = self.parts[name]
        assert sent.body or "Content-Range" not in sent.headers, "the range of no bytes would be `1000-999`"
        if sent.method in ("PATCH", "PUT") and sent.body:
            if int(sent.headers.get("Content-Range", "0-").partition("-")[0]) != len(held):
                return Reply(status=416)
            self.parts[name] = held = held + sent.body
        where = {"Location": f"{self.origin}/v2/a/b/blobs/uploads/{name}", "Range": f"0-{max(0, len(held) - 1)}"}
        if sent.method == "PUT":
            digest = query.removeprefix("digest=").replace("%3A", ":")
            if digest != digest_of_bytes(held):
                return Reply(status=400, body=errors({"code": "DIGEST_INVALID"}))
            self.blobs.add(digest)
            return Reply(status=201)
        return Reply(status=204 if sent.method == "GET" else 202, headers=where)


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    (tmp_path / "blob").write_bytes(CONTENT)
    return tmp_path / "blob"


def upload(path: Path, registry: Repository | None = None) -> list[int]:
    """Uploads CONTENT; the progress."""
    progress: list[int] = []
    (registry or connect()).upload(DIGEST, path, len(CONTENT), progress.append)
    assert sum(progress) == len(CONTENT)
    return progress


@pytest.mark.parametrize("origin", ["", f"https://{HOST}", "https://uploads.example.test"])
def test_an_upload_in_chunks(lay: Lay, blob: Path, origin: str) -> None:
    uploads = Uploads(origin=origin)
    wire = lay(uploads)
    upload(blob)
    assert uploads.blobs == {DIGEST}
    assert wire.methods == ["POST", "PATCH", "PATCH", "PATCH", "PUT"]
    assert [sent.headers.get("Content-Range") for sent in wire.seen[1:]] == ["0-299", "300-599", "600-899", "900-999"]
    assert [sent.headers["Content-Length"] for sent in wire.seen] == ["0", "300", "300", "300", "100"]
    assert all(sent.url.startswith(origin or f"https://{HOST}") for sent in wire.seen[1:])
    assert wire.seen[-1].options["timeout"] == (QUICK.connect_s, QUICK.commit_s)


@pytest.mark.parametrize("size", [0, 1, CHUNK])
def test_a_small_blob_goes_with_the_end(lay: Lay, blob: Path, size: int) -> None:
    uploads = Uploads()
    wire = lay(uploads)
    content = CONTENT[:size]
    blob.write_bytes(content)
    connect().upload(digest_of_bytes(content), blob, size, lambda _: None)
    assert uploads.blobs == {digest_of_bytes(content)}
    assert wire.methods == ["POST", "PUT"]
    assert "Content-Range" not in wire.seen[1].headers
    assert wire.seen[1].headers["Content-Length"] == str(size)


def test_no_credentials_are_sent_to_another_host_of_uploads(lay: Lay, blob: Path, docker_config: Path) -> None:
    docker_config.write_text(json.dumps({"auths": {HOST: {"auth": "bWU6eA=="}}}))
    uploads = Uploads(origin="https://uploads.example.test")
    uploads.before = lambda sent: (
        Reply(status=401, headers={"WWW-Authenticate": "Basic realm=x"})
        if sent.url.startswith(f"https://{HOST}") and "Authorization" not in sent.headers
        else None
    )
    wire = lay(uploads)
    upload(blob)
    there = [sent for sent in wire.seen if sent.url.startswith("https://uploads.")]
    assert len(there) == 4
    assert all("Authorization" not in sent.headers for sent in there)


class FaultyUploads(Uploads):
    """Has faults at some requests, by number."""

    def __init__(self, faults: Mapping[int, str]) -> None:
        super().__init__()
        self.faults = faults
        self.sent_bytes = 0
        self._numbers = count()

    def __call__(self, sent: Sent) -> Reply | Exception:
        self.sent_bytes += len(sent.body)
        fault = self.faults.get(next(self._numbers), "")
        if fault == "lost upload":
            self.parts.clear()
        elif fault == "other bytes":
            self.parts = {name: b"x" * len(held) for name, held in self.parts.items()}
        elif fault == "more bytes":
            self.parts = dict.fromkeys(self.parts, b"x" * 5000)
        is_processed = fault in ("", "lost upload", "lost answer", "not finished")
        answer = self.answer(sent) if is_processed else broken()
        if fault == "not finished":
            self.blobs.clear()
        return broken() if fault in ("lost answer", "not finished") else answer


# The most bytes that are sent again after each fault.
RESENT = {
    "not processed": CHUNK, "lost answer": 0, "not finished": 0,
    "lost upload": len(CONTENT) + CHUNK, "other bytes": len(CONTENT) + CHUNK, "more bytes": len(CONTENT) + CHUNK,
}  # fmt: skip


@given(st.dictionaries(st.integers(0, 9), st.sampled_from([*RESENT]), max_size=3))
@example({2: "other bytes"})
@example({4: "not finished"})
@example({4: "lost answer"})
def test_an_upload_to_a_faulty_registry_ends_whole_and_sends_only_what_is_missing(faults: dict[int, str]) -> None:
    uploads = FaultyUploads(faults)
    with pytest.MonkeyPatch.context() as patch, tempfile.NamedTemporaryFile() as file:
        patch.setattr(registry_upload, "CHUNK", CHUNK)
        Wire.install(patch, uploads)
        file.write(CONTENT)
        file.flush()
        upload(Path(file.name), connect(policy=replace(QUICK, retries=9)))
    assert uploads.blobs == {DIGEST}
    assert uploads.sent_bytes <= len(CONTENT) + sum(RESENT[fault] for fault in faults.values())


def once(method: str, number: int, answer: Reply | Exception) -> Callable[[Sent], Reply | Exception | None]:
    """`answer` for the request of that number (from 1) of that method."""
    counted = [0]

    def trouble(sent: Sent) -> Reply | Exception | None:
        counted[0] += sent.method == method
        return answer if sent.method == method and counted[0] == number else None

    return trouble


def test_a_later_chunk_that_is_invalid_ends_the_upload(lay: Lay, blob: Path) -> None:
    uploads = Uploads()
    uploads.before = once("PATCH", 2, Reply(status=400))
    lay(uploads)
    with pytest.raises(RejectedError):
        upload(blob)


def test_an_upload_that_ends_with_status_200(lay: Lay, blob: Path) -> None:
    uploads = Uploads()
    uploads.before = lambda sent: Reply(status=200) if sent.method == "PUT" else None
    wire = lay(uploads)
    upload(blob)
    assert wire.methods.count("PUT") == 1


@pytest.mark.parametrize("status", [400, 404, 405, 416])
def test_a_registry_without_chunks_gets_the_blob_in_one_request(lay: Lay, blob: Path, status: int) -> None:
    uploads = Uploads()
    uploads.before = lambda sent: Reply(status=status) if sent.method == "PATCH" else None
    wire = lay(uploads)
    registry = connect()
    upload(blob, registry)
    assert wire.methods == ["POST", "PATCH", "POST", "PUT"]
    assert len(wire.seen[-1].body) == len(CONTENT)
    wire.seen.clear()
    upload(blob, registry)
    assert wire.methods == ["POST", "PUT"], "chunks are not tried again"


def test_an_upload_that_the_registry_lost_does_not_end_the_use_of_chunks(lay: Lay, blob: Path) -> None:
    uploads = Uploads()
    uploads.before = once("PATCH", 1, Reply(status=404, body=errors({"code": "BLOB_UPLOAD_UNKNOWN"})))
    wire = lay(uploads)
    upload(blob)
    assert wire.methods.count("PATCH") > 1


def test_an_upload_fails_only_without_progress(lay: Lay, blob: Path) -> None:
    """Every second request fails: there is progress after each failure."""
    numbers = count()
    uploads = Uploads()
    uploads.before = lambda sent: broken() if sent.method == "PATCH" and next(numbers) % 2 == 0 else None
    lay(uploads)
    upload(blob, connect(policy=RetryPolicy(retries=1, first_delay_s=0.001)))


def test_an_upload_whose_end_always_fails(lay: Lay, blob: Path) -> None:
    uploads = Uploads()
    uploads.before = lambda sent: broken() if sent.method == "PUT" else None
    wire = lay(uploads)
    with pytest.raises(RegistryError):
        upload(blob)
    assert wire.methods.count("PUT") == 3


def test_a_wrong_digest_is_final(lay: Lay, blob: Path) -> None:
    blob.write_bytes(CONTENT[:-1] + b"x")
    wire = lay(Uploads())
    with pytest.raises(RejectedError) as caught:
        upload(blob)
    assert caught.value.code == "DIGEST_INVALID"
    assert wire.methods.count("PUT") == 1


def fail_to_read(*_: int) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("fault", ["truncated", "missing", "unreadable"])
def test_a_file_that_cannot_be_read_is_no_failure_of_the_registry(
    lay: Lay, blob: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """It is named, and the upload is not tried again."""
    if fault == "truncated":
        blob.write_bytes(CONTENT[:500])
    elif fault == "missing":
        blob.unlink()
    else:
        monkeypatch.setattr(os, "pread", fail_to_read)
    wire = lay(Uploads())
    with pytest.raises(FileError, match=re.escape(str(blob))):
        upload(blob)
    assert wire.methods.count("POST") <= 1
