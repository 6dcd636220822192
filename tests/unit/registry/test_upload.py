"""The upload of a blob, with all failures that a registry may cause."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from builder.common.errors import FileError, RegistryError
from builder.common.files import digest_of_bytes
from builder.registry import client
from builder.registry.failures import RejectedError, StoppedError
from tests.fakes.wire import CONTENT, DIGEST, HOST, QUICK, Reply, Sent, broken, connect, errors
from tests.unit.registry.fixtures import Lay


class Uploads:
    """Uploads by the specification. `before` may answer instead."""

    def __init__(self, *, origin: str = "") -> None:
        self.origin = origin  # of Locations; relative if empty
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
            where = f"{self.origin}/v2/a/b/blobs/uploads/{next(self._names)}?state=x"
            return Reply(status=202, headers={"Location": where})
        digest = query.removeprefix("state=x&digest=").replace("%3A", ":")
        if digest != digest_of_bytes(sent.body):
            return Reply(status=400, body=errors({"code": "DIGEST_INVALID"}))
        self.blobs.add(digest)
        return Reply(status=201)


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    (tmp_path / "blob").write_bytes(CONTENT)
    return tmp_path / "blob"


def upload(path: Path) -> list[int]:
    """Uploads CONTENT; the progress."""
    progress: list[int] = []
    connect().upload(DIGEST, path, len(CONTENT), progress.append)
    assert sum(progress) == len(CONTENT)
    return progress


@pytest.mark.parametrize("origin", ["", f"https://{HOST}", "https://uploads.example.test"])
@pytest.mark.parametrize("size", [0, 1, len(CONTENT)])
def test_a_blob_is_sent_in_one_request(lay: Lay, blob: Path, origin: str, size: int) -> None:
    uploads, content = Uploads(origin=origin), CONTENT[:size]
    wire = lay(uploads)
    blob.write_bytes(content)
    connect().upload(digest_of_bytes(content), blob, size, lambda _: None)
    assert uploads.blobs == {digest_of_bytes(content)}
    assert wire.methods == ["POST", "PUT"]
    assert wire.seen[1].url.startswith(origin or f"https://{HOST}")
    assert wire.seen[1].headers["Content-Length"] == str(size)
    assert wire.seen[1].options["timeout"] == (QUICK.connect_s, QUICK.commit_s)


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
    [there] = [sent for sent in wire.seen if sent.url.startswith("https://uploads.")]
    assert "Authorization" not in there.headers


def once(method: str, answer: Reply | Exception) -> Callable[[Sent], Reply | Exception | None]:
    """`answer` for the first request of that method."""
    seen = list[str]()

    def trouble(sent: Sent) -> Reply | Exception | None:
        seen.append(sent.method)
        return answer if sent.method == method and seen.count(method) == 1 else None

    return trouble


@pytest.mark.parametrize(
    ("method", "failure"),
    [("POST", broken()), ("PUT", broken()), ("PUT", Reply(status=404)), ("PUT", Reply(status=416))],
    ids=["POST", "PUT", "unknown upload", "unknown position"],
)
def test_an_upload_begins_again_after_a_failure(lay: Lay, blob: Path, method: str, failure: Reply | Exception) -> None:
    uploads = Uploads()
    uploads.before = once(method, failure)
    wire = lay(uploads)
    upload(blob)
    assert uploads.blobs == {DIGEST}
    assert wire.methods == ["POST", *(["PUT"] if method == "PUT" else []), "HEAD", "POST", "PUT"]


def test_a_blob_that_arrived_although_the_answer_was_lost_is_not_sent_again(lay: Lay, blob: Path) -> None:
    uploads = Uploads()

    def lose(sent: Sent) -> Reply | Exception | None:
        if sent.method == "PUT":
            uploads.answer(sent)
            return broken()
        return None

    uploads.before = lose
    wire = lay(uploads)
    upload(blob)
    assert wire.methods == ["POST", "PUT", "HEAD"]


def test_a_stopped_upload_sends_no_more(lay: Lay, blob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WRITE_BYTES", 100)
    lay(Uploads())
    stop, progress = threading.Event(), list[int]()

    def count_bytes(size: int) -> None:
        progress.append(size)
        if size:
            stop.set()

    with pytest.raises(StoppedError):
        connect().stoppable(stop).upload(DIGEST, blob, len(CONTENT), count_bytes)
    assert progress == [0, 100]


def test_an_upload_that_ends_with_status_200(lay: Lay, blob: Path) -> None:
    uploads = Uploads()
    uploads.before = lambda sent: Reply(status=200) if sent.method == "PUT" else None
    wire = lay(uploads)
    upload(blob)
    assert wire.methods.count("PUT") == 1


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
