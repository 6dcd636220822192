"""The upload of a blob, through everything that a registry may do to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from builder import registry_upload
from builder.digest import of_bytes
from builder.errors import FileError, RegistryError
from builder.registry import Registry
from builder.registry_http import Patience, RefusedError
from builder.registry_upload import parse_range
from tests.unit.wire import CONTENT, DIGEST, HOST, QUICK, Reply, Sent, Wire, broken, connect, errors

CHUNK = 300


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
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
    """Uploads as the specification has them. `trouble` may answer first, or break the connection after a request."""

    def __init__(self, *, place: str = "") -> None:
        self.place = place  # the host of Locations; relative if empty
        self.parts: dict[str, bytes] = {}
        self.blobs: set[str] = set()
        self.before: Callable[[Sent], Reply | Exception | None] = lambda _: None
        self.after: Callable[[Sent], Reply | Exception | None] = lambda _: None

    def __call__(self, sent: Sent) -> Reply | Exception:
        early = self.before(sent)
        if early is not None:
            return early
        answer = self.answer(sent)
        late = self.after(sent)
        return answer if late is None else late

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
        where = {"Location": f"{self.place}/v2/a/b/blobs/uploads/{name}", "Range": f"0-{max(0, len(held) - 1)}"}
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
    """Uploads CONTENT; what progress heard."""
    told: list[int] = []
    (registry or connect()).upload(DIGEST, path, len(CONTENT), told.append)
    assert sum(told) == len(CONTENT)
    return told


def methods(wire: Wire) -> list[str]:
    return [one.method for one in wire.seen]


@pytest.mark.parametrize("place", ["", f"https://{HOST}", "https://uploads.example.test"])
def test_an_upload_in_chunks(monkeypatch: pytest.MonkeyPatch, blob: Path, place: str) -> None:
    uploads = Uploads(place=place)
    wire = Wire.lay(monkeypatch, uploads)
    upload(blob)
    assert uploads.blobs == {DIGEST}
    assert methods(wire) == ["POST", "PATCH", "PATCH", "PATCH", "PUT"]
    assert [one.headers.get("Content-Range") for one in wire.seen[1:]] == ["0-299", "300-599", "600-899", "900-999"]
    assert [one.headers["Content-Length"] for one in wire.seen] == ["0", "300", "300", "300", "100"]
    assert all(one.url.startswith(place or f"https://{HOST}") for one in wire.seen[1:])
    assert wire.seen[-1].options["timeout"] == (QUICK.connect_s, QUICK.commit_s)


@pytest.mark.parametrize("size", [0, 1, CHUNK])
def test_a_small_blob_goes_with_the_end(monkeypatch: pytest.MonkeyPatch, blob: Path, size: int) -> None:
    uploads = Uploads()
    wire = Wire.lay(monkeypatch, uploads)
    content = CONTENT[:size]
    blob.write_bytes(content)
    connect().upload(of_bytes(content), blob, size, lambda _: None)
    assert uploads.blobs == {of_bytes(content)}
    assert methods(wire) == ["POST", "PUT"]
    assert "Content-Range" not in wire.seen[1].headers
    assert wire.seen[1].headers["Content-Length"] == str(size)


def test_no_credentials_go_to_where_uploads_are(monkeypatch: pytest.MonkeyPatch, blob: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auths": {HOST: {"auth": "bWU6eA=="}}}))
    uploads = Uploads(place="https://uploads.example.test")
    uploads.before = lambda sent: (
        Reply(status=401, headers={"WWW-Authenticate": "Basic realm=x"})
        if sent.url.startswith(f"https://{HOST}") and "Authorization" not in sent.headers
        else None
    )
    wire = Wire.lay(monkeypatch, uploads)
    upload(blob)
    there = [one for one in wire.seen if one.url.startswith("https://uploads.")]
    assert len(there) == 4
    assert all("Authorization" not in one.headers for one in there)


def test_an_upload_that_leads_away_from_tls(monkeypatch: pytest.MonkeyPatch, blob: Path) -> None:
    Wire.lay(monkeypatch, Uploads(place="http://uploads.example.test"))
    with pytest.raises(RegistryError, match="not https"):
        upload(blob)


def test_a_broken_chunk_is_sent_again_and_no_other(monkeypatch: pytest.MonkeyPatch, blob: Path) -> None:
    uploads = Uploads()
    uploads.before = once("PATCH", 2, broken())
    wire = Wire.lay(monkeypatch, uploads)
    told = upload(blob)
    assert methods(wire) == ["POST", "PATCH", "PATCH", "HEAD", "GET", "PATCH", "PATCH", "PUT"]
    assert -CHUNK in told, "progress went back by the chunk that was lost"


def test_a_chunk_whose_answer_was_lost_is_not_sent_again(monkeypatch: pytest.MonkeyPatch, blob: Path) -> None:
    uploads = Uploads()
    uploads.after = once("PATCH", 2, broken())
    wire = Wire.lay(monkeypatch, uploads)
    upload(blob)
    assert methods(wire) == ["POST", "PATCH", "PATCH", "HEAD", "GET", "PATCH", "PUT"]


def test_an_end_whose_answer_was_lost(monkeypatch: pytest.MonkeyPatch, blob: Path) -> None:
    uploads = Uploads()
    uploads.after = once("PUT", 1, Reply(status=504))
    wire = Wire.lay(monkeypatch, uploads)
    upload(blob)
    assert methods(wire)[-2:] == ["PUT", "HEAD"]


@pytest.mark.parametrize("heard", [True, False])
def test_an_upload_that_is_gone_begins_anew(monkeypatch: pytest.MonkeyPatch, blob: Path, heard: bool) -> None:
    """The registry says so at the next chunk, or the connection breaks and it says so when it is asked."""
    uploads = Uploads()
    trouble = once("PATCH", 2, Reply(status=404) if heard else broken())

    def forget(sent: Sent) -> Reply | Exception | None:
        answer = trouble(sent)
        if answer is not None:
            uploads.parts.pop("1")
            uploads.parts["other"] = b""
        return answer

    uploads.before = forget
    wire = Wire.lay(monkeypatch, uploads)
    upload(blob)
    assert methods(wire) == ["POST", "PATCH", "PATCH", "HEAD", "GET", "POST", "PATCH", "PATCH", "PATCH", "PUT"]
    assert uploads.blobs == {DIGEST}


@pytest.mark.parametrize("size", [400, 5000])
def test_a_registry_that_lies_about_what_it_has(monkeypatch: pytest.MonkeyPatch, blob: Path, size: int) -> None:
    """Resumed where it said, and the digest is wrong in the end, or it is more than there is: from the start again."""
    uploads = Uploads()
    broke = once("PATCH", 2, broken())

    def trouble(sent: Sent) -> Reply | Exception | None:
        if sent.method == "GET" and len(uploads.parts) == 1:
            uploads.parts["1"] = b"x" * size
        return broke(sent)

    uploads.before = trouble
    wire = Wire.lay(monkeypatch, uploads)
    upload(blob)
    assert methods(wire).count("POST") == 2
    assert uploads.blobs == {DIGEST}


@pytest.mark.parametrize("status", [400, 405, 416])
def test_a_registry_without_chunks_gets_all_at_once(monkeypatch: pytest.MonkeyPatch, blob: Path, status: int) -> None:
    uploads = Uploads()
    uploads.before = lambda sent: Reply(status=status) if sent.method == "PATCH" else None
    wire = Wire.lay(monkeypatch, uploads)
    registry = connect()
    upload(blob, registry)
    assert methods(wire) == ["POST", "PATCH", "POST", "PUT"]
    assert len(wire.seen[-1].body) == len(CONTENT)
    wire.seen.clear()
    upload(blob, registry)
    assert methods(wire) == ["POST", "PUT"], "it is not asked for chunks twice"


def test_a_later_chunk_that_does_not_fit_is_resumed(monkeypatch: pytest.MonkeyPatch, blob: Path) -> None:
    uploads = Uploads()
    uploads.before = once("PATCH", 2, Reply(status=416))
    wire = Wire.lay(monkeypatch, uploads)
    upload(blob)
    assert methods(wire) == ["POST", "PATCH", "PATCH", "HEAD", "GET", "PATCH", "PATCH", "PUT"]
    uploads = Uploads()
    uploads.before = once("PATCH", 2, Reply(status=400))
    wire = Wire.lay(monkeypatch, uploads)
    with pytest.raises(RefusedError, match="400 Bad Request"):
        upload(blob)


def test_an_upload_gives_up_without_progress_only(monkeypatch: pytest.MonkeyPatch, blob: Path) -> None:
    uploads = Uploads()
    counted = [0]

    def every_second(sent: Sent) -> Exception | None:
        counted[0] += sent.method == "PATCH"
        return broken() if sent.method == "PATCH" and counted[0] % 2 else None

    uploads.before = every_second
    Wire.lay(monkeypatch, uploads)
    upload(blob, connect(patience=Patience(retries=1, first_s=0.001)))
    uploads.before = lambda sent: broken() if sent.method == "PUT" else None
    uploads.blobs.clear()
    wire = Wire.lay(monkeypatch, uploads)
    with pytest.raises(RegistryError, match="reset by peer: tried 3 times"):
        upload(blob)
    assert methods(wire).count("PUT") == 3


def test_a_refusal_ends_an_upload(monkeypatch: pytest.MonkeyPatch, blob: Path) -> None:
    wire = Wire.lay(monkeypatch, lambda _: Reply(status=403, body=errors({"code": "DENIED", "message": "no"})))
    with pytest.raises(RefusedError, match=r"403 Forbidden \(DENIED: no\)") as caught:
        upload(blob)
    assert (caught.value.status, caught.value.code) == (403, "DENIED")
    assert methods(wire) == ["POST"]


def test_a_wrong_digest_is_the_registry_s_last_word(monkeypatch: pytest.MonkeyPatch, blob: Path) -> None:
    blob.write_bytes(CONTENT[:-1] + b"x")
    wire = Wire.lay(monkeypatch, Uploads())
    with pytest.raises(RefusedError) as caught:
        upload(blob)
    assert caught.value.code == "DIGEST_INVALID"
    assert methods(wire).count("PUT") == 1


def test_a_file_that_shrinks(monkeypatch: pytest.MonkeyPatch, blob: Path) -> None:
    blob.write_bytes(CONTENT[:500])
    Wire.lay(monkeypatch, Uploads())
    with pytest.raises(FileError, match="became shorter") as caught:
        upload(blob)
    assert str(blob) in str(caught.value)
    blob.unlink()
    with pytest.raises(FileError, match="no such file"):
        upload(blob)
