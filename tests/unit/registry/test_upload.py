"""The upload of a blob, with all failures that a registry may cause."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from builder.common.digest import of_bytes
from builder.common.errors import FileError, RegistryError
from builder.common.retry import RetryPolicy
from builder.registry import upload as registry_upload
from builder.registry.client import Registry
from builder.registry.failures import RejectedError
from builder.registry.upload import parse_range
from tests.fakes.wire import CONTENT, DIGEST, HOST, QUICK, Reply, Sent, Wire, broken, connect, errors
from tests.unit.registry.conftest import Lay

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
    """Uploads by the specification. `before` may answer instead, `after` may replace the answer."""

    def __init__(self, *, origin: str = "") -> None:
        self.origin = origin  # of Locations; relative if empty
        self.parts: dict[str, bytes] = {}
        self.blobs: set[str] = set()
        self.before: Callable[[Sent], Reply | Exception | None] = lambda _: None
        self.after: Callable[[Sent], Reply | Exception | None] = lambda _: None

    def __call__(self, sent: Sent) -> Reply | Exception:
        if (instead := self.before(sent)) is not None:
            return instead
        answer = self.answer(sent)
        return self.after(sent) or answer

    def answer(self, sent: Sent) -> Reply:
        name, _, query = sent.path.rpartition("/")[2].partition("?")
        if sent.method == "HEAD":
            return Reply(status=200 if name in self.blobs else 404)
        if sent.method == "POST":
            name = str(len(self.parts) + 1)
            self.parts[name] = b""
        elif name not in self.parts:
            return Reply(status=404, body=errors({"code": "BLOB_UPLOAD_UNKNOWN"}))
        held = self.parts[name]
        if sent.method in ("PATCH", "PUT") and sent.body:
            if int(sent.headers.get("Content-Range", "0-").partition("-")[0]) != len(held):
                return Reply(status=416)
            self.parts[name] = held = held + sent.body
        where = {"Location": f"{self.origin}/v2/a/b/blobs/uploads/{name}", "Range": f"0-{max(0, len(held) - 1)}"}
        if sent.method == "PUT":
            digest = query.removeprefix("digest=").replace("%3A", ":")
            if digest != of_bytes(held):
                return Reply(status=400, body=errors({"code": "DIGEST_INVALID"}))
            self.blobs.add(digest)
            return Reply(status=201)
        return Reply(status=204 if sent.method == "GET" else 202, headers=where)


def once(method: str, number: int, answer: Reply | Exception) -> Callable[[Sent], Reply | Exception | None]:
    """`answer` for the request of that number (from 1) of that method."""
    counted = [0]

    def trouble(sent: Sent) -> Reply | Exception | None:
        counted[0] += sent.method == method
        return answer if sent.method == method and counted[0] == number else None

    return trouble


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    (tmp_path / "blob").write_bytes(CONTENT)
    return tmp_path / "blob"


def upload(path: Path, registry: Registry | None = None) -> list[int]:
    """Uploads CONTENT; the progress."""
    progress: list[int] = []
    (registry or connect()).upload(DIGEST, path, len(CONTENT), progress.append)
    assert sum(progress) == len(CONTENT)
    return progress


def methods(wire: Wire) -> list[str]:
    return [sent.method for sent in wire.seen]


@pytest.mark.parametrize("origin", ["", f"https://{HOST}", "https://uploads.example.test"])
def test_an_upload_in_chunks(lay: Lay, blob: Path, origin: str) -> None:
    uploads = Uploads(origin=origin)
    wire = lay(uploads)
    upload(blob)
    assert uploads.blobs == {DIGEST}
    assert methods(wire) == ["POST", "PATCH", "PATCH", "PATCH", "PUT"]
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
    connect().upload(of_bytes(content), blob, size, lambda _: None)
    assert uploads.blobs == {of_bytes(content)}
    assert methods(wire) == ["POST", "PUT"]
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


def test_an_upload_without_tls_is_rejected(lay: Lay, blob: Path) -> None:
    lay(Uploads(origin="http://uploads.example.test"))
    with pytest.raises(RegistryError, match="not https"):
        upload(blob)


RESUMED = "POST PATCH PATCH HEAD GET PATCH PATCH PUT"


@pytest.mark.parametrize(
    ("when", "method", "number", "answer", "requests"),
    [
        ("before", "PATCH", 2, broken(), RESUMED),
        ("before", "PATCH", 2, Reply(status=416), RESUMED),
        ("after", "PATCH", 2, broken(), "POST PATCH PATCH HEAD GET PATCH PUT"),
        ("after", "PUT", 1, Reply(status=504), "POST PATCH PATCH PATCH PUT HEAD"),
    ],
    ids=["broken chunk", "rejected chunk", "lost response to a chunk", "lost response to the end"],
)
def test_only_what_is_missing_is_sent_again(
    lay: Lay, blob: Path, when: str, method: str, number: int, answer: Reply | Exception, requests: str
) -> None:
    uploads = Uploads()
    setattr(uploads, when, once(method, number, answer))
    wire = lay(uploads)
    progress = upload(blob)
    assert " ".join(methods(wire)) == requests
    assert (-CHUNK in progress) == (requests == RESUMED), "progress goes back by a lost chunk"


def test_a_later_chunk_that_is_invalid_ends_the_upload(lay: Lay, blob: Path) -> None:
    uploads = Uploads()
    uploads.before = once("PATCH", 2, Reply(status=400))
    lay(uploads)
    with pytest.raises(RejectedError, match="400 Bad Request"):
        upload(blob)


@pytest.mark.parametrize("answers", [True, False])
def test_an_upload_that_is_gone_is_restarted(lay: Lay, blob: Path, answers: bool) -> None:
    """The registry answers 404 to the next chunk, or after a broken connection."""
    uploads = Uploads()
    trouble = once("PATCH", 2, Reply(status=404) if answers else broken())

    def forget(sent: Sent) -> Reply | Exception | None:
        answer = trouble(sent)
        if answer is not None:
            uploads.parts.pop("1")
            uploads.parts["other"] = b""
        return answer

    uploads.before = forget
    wire = lay(uploads)
    upload(blob)
    assert methods(wire) == ["POST", "PATCH", "PATCH", "HEAD", "GET", "POST", "PATCH", "PATCH", "PATCH", "PUT"]
    assert uploads.blobs == {DIGEST}


@pytest.mark.parametrize("size", [400, 5000])
def test_a_wrong_range_of_the_registry(lay: Lay, blob: Path, size: int) -> None:
    """After a wrong digest, or a range longer than the file, the upload is restarted."""
    uploads = Uploads()
    broke = once("PATCH", 2, broken())

    def trouble(sent: Sent) -> Reply | Exception | None:
        if sent.method == "GET" and len(uploads.parts) == 1:
            uploads.parts["1"] = b"x" * size
        return broke(sent)

    uploads.before = trouble
    wire = lay(uploads)
    upload(blob)
    assert methods(wire).count("POST") == 2
    assert uploads.blobs == {DIGEST}


@pytest.mark.parametrize("status", [400, 405, 416])
def test_a_registry_without_chunks_gets_the_blob_in_one_request(lay: Lay, blob: Path, status: int) -> None:
    uploads = Uploads()
    uploads.before = lambda sent: Reply(status=status) if sent.method == "PATCH" else None
    wire = lay(uploads)
    registry = connect()
    upload(blob, registry)
    assert methods(wire) == ["POST", "PATCH", "POST", "PUT"]
    assert len(wire.seen[-1].body) == len(CONTENT)
    wire.seen.clear()
    upload(blob, registry)
    assert methods(wire) == ["POST", "PUT"], "chunks are not tried again"


def test_an_upload_fails_only_without_progress(lay: Lay, blob: Path) -> None:
    uploads = Uploads()
    counted = [0]

    def every_second(sent: Sent) -> Exception | None:
        counted[0] += sent.method == "PATCH"
        return broken() if sent.method == "PATCH" and counted[0] % 2 else None

    uploads.before = every_second
    lay(uploads)
    upload(blob, connect(policy=RetryPolicy(retries=1, first_delay_s=0.001)))
    uploads.before = lambda sent: broken() if sent.method == "PUT" else None
    uploads.blobs.clear()
    wire = lay(uploads)
    with pytest.raises(RegistryError, match="reset by peer: tried 3 times"):
        upload(blob)
    assert methods(wire).count("PUT") == 3


def test_a_rejection_ends_an_upload(lay: Lay, blob: Path) -> None:
    wire = lay(lambda _: Reply(status=403, body=errors({"code": "DENIED", "message": "no"})))
    with pytest.raises(RejectedError, match=r"403 Forbidden \(DENIED: no\)") as caught:
        upload(blob)
    assert (caught.value.status, caught.value.code) == (403, "DENIED")
    assert methods(wire) == ["POST"]


def test_a_wrong_digest_is_final(lay: Lay, blob: Path) -> None:
    blob.write_bytes(CONTENT[:-1] + b"x")
    wire = lay(Uploads())
    with pytest.raises(RejectedError) as caught:
        upload(blob)
    assert caught.value.code == "DIGEST_INVALID"
    assert methods(wire).count("PUT") == 1


def test_a_truncated_file(lay: Lay, blob: Path) -> None:
    blob.write_bytes(CONTENT[:500])
    lay(Uploads())
    with pytest.raises(FileError, match="was truncated") as caught:
        upload(blob)
    assert str(blob) in str(caught.value)
    blob.unlink()
    with pytest.raises(FileError, match="no such file"):
        upload(blob)


def test_a_file_that_cannot_be_read_is_no_failure_of_the_registry(
    lay: Lay, blob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pread(*_: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", pread)
    wire = lay(Uploads())
    with pytest.raises(FileError, match="input/output error") as caught:
        upload(blob)
    assert str(blob) in str(caught.value)
    assert methods(wire).count("POST") == 1
