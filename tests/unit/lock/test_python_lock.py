"""Locks of uv's builds of Python, from uv's list; and downloads of the archives."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from builder.common.errors import FetchError, LockError
from builder.common.tasks import RetryPolicy
from builder.index.download import Fetcher
from builder.index.host import Host
from builder.lock.python_builds import PythonBuilds
from builder.lock.python_lock import PYTHON_LOCKS, LockedPython
from tests.fakes.wire import Reply, Wire

MIRROR = "https://mirror.example.test/builds"
CONTENT = b"an archive of Python"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
POLICY = RetryPolicy(retries=1, first_delay_s=0.001)


def file_of(release: str, date: str) -> str:
    return f"cpython-{release}+{date}-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"


LOCKED = LockedPython(release="3.12.12", file=file_of("3.12.12", "20260211"), sha256=SHA256)


class Uv:
    """Prints what uv prints: its list, and the hash of an archive that is not the listed one."""

    def __init__(self, **dates: str) -> None:
        self.files = {release.replace("_", ".")[1:]: date for release, date in dates.items()}
        self.sha256 = SHA256
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        assert command[1] == "python"
        if command[2] == "list":
            entries = [
                {
                    "key": f"cpython-{release}{variant}-linux-x86_64-gnu",
                    "version": release,
                    "url": f"{MIRROR}/{date}/{file_of(release, date).replace('+', '%2B')}{variant}",
                }
                for release, date in self.files.items()
                for variant in ("", "+freethreaded")
            ]
            return subprocess.CompletedProcess(command, 0, stdout=json.dumps(entries), stderr="")
        [release] = (each.split("-")[1] for each in command if each.startswith("cpython-"))
        mirror = Path(unquote(urlsplit(command[command.index("--mirror") + 1]).path))
        date = self.files[release]
        with tarfile.open(mirror / date / file_of(release, date)) as archive:
            assert archive.getnames() == []
        message = f"error: Hash mismatch\n\n  Expected:\n  {self.sha256}\n\n  Computed:\n  {'0' * 64}\n"
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=message)


@pytest.fixture
def uv() -> Uv:
    return Uv(_3_12_16="20261110", _3_12_12="20260211", _3_10_0="20211017")


def builds(run: Callable[..., Any]) -> PythonBuilds:
    """uv's builds, with a stand-in for uv."""
    builds = PythonBuilds(Host())
    builds.run = run
    return builds


def test_a_lock_has_name_and_hash_and_no_address(uv: Uv) -> None:
    lock = builds(uv).lock("3.12.12", None)
    assert lock == LOCKED
    assert "example.test" not in PYTHON_LOCKS.dump(lock)


def test_a_lock_is_kept_while_uv_has_its_build(uv: Uv) -> None:
    assert builds(uv).lock("3.12.12", LOCKED) is LOCKED
    assert len(uv.commands) == 1
    uv.files["3.12.12"], uv.sha256 = "20270101", "1" * 64
    assert builds(uv).lock("3.12.12", LOCKED) == LockedPython(
        release="3.12.12", file=file_of("3.12.12", "20270101"), sha256="1" * 64
    )


@pytest.mark.parametrize(
    ("release", "date", "sha256", "message", "hint"),
    [
        (
            "3.12.99", "", SHA256, "uv has no build of Python 3.12.99 that images can use",
            'Change `uv` of python."3.12" in matrix.yaml. uv\'s newest release of it is 3.12.16.',
        ),
        (
            "3.99.1", "", SHA256, "uv has no build of Python 3.99.1 that images can use",
            'Change `uv` of python."3.99" in matrix.yaml. uv has no Python 3.99.',
        ),
        ("3.10.0", "pgo", SHA256, "uv has no build of Python 3.10.0 that images can use", ""),
        ("3.12.12", "20260211", "unknown", "uv's list has no SHA-256 of its build of Python 3.12.12", ""),
    ],
    ids=["no such release", "no such line", "an archive in another format", "no hash"],
)  # fmt: skip
def test_builds_that_cannot_be_locked(uv: Uv, release: str, date: str, sha256: str, message: str, hint: str) -> None:
    uv.files |= {release: date} if date else {}
    uv.sha256 = sha256
    with pytest.raises(LockError) as caught:
        builds(uv).lock(release, None)
    assert str(caught.value) == message
    assert hint in caught.value.hint


@pytest.mark.parametrize(("status", "output"), [(2, "[]"), (0, "[]"), (0, "not JSON"), (0, '[{"key": 1}]')])
def test_a_list_that_cannot_be_read(tmp_path: Path, status: int, output: str) -> None:
    def fail(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, status, stdout=output, stderr=f"error: {MIRROR} is wrong")

    with pytest.raises(FetchError, match=r"^uv cannot list its builds of Python$"):
        _ = builds(fail).addresses
    with pytest.raises(FetchError, match=r"uv cannot list its builds of Python$"):
        fetch(fail, tmp_path)


def fetch(run: Callable[..., Any], folder: Path) -> Path:
    (folder / "blobs").mkdir()
    fetcher = Fetcher(builds(run).archives(), folder / "blobs")
    fetcher.policy = POLICY
    return fetcher.fetch(LOCKED)


@pytest.mark.parametrize("date", ["20260211", "20270101", ""])
def test_the_locked_build_is_downloaded_from_the_mirror(
    uv: Uv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, date: str
) -> None:
    """Also if a newer uv has another build of the release, or none."""
    del uv.files["3.12.12"]
    uv.files |= {"3.12.12": date} if date else {}
    wire = Wire.install(monkeypatch, lambda _: Reply(body=CONTENT))
    path = fetch(uv, tmp_path)
    assert path == tmp_path / "blobs" / SHA256
    assert path.read_bytes() == CONTENT
    assert [sent.url for sent in wire.seen] == [f"{MIRROR}/20260211/{LOCKED.file.replace('+', '%2B')}"]


@pytest.mark.parametrize(
    ("reply", "message", "hint"),
    [
        (Reply(status=404), "uv's mirror of Python builds returned 404 Not Found", "set UV_PYTHON_INSTALL_MIRROR"),
        (Reply(body=CONTENT + b"x"), "SHA-256 mismatch", "do not use this mirror"),
    ],
)
def test_what_is_not_the_locked_archive_is_an_error(
    uv: Uv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: Reply, message: str, hint: str
) -> None:
    Wire.install(monkeypatch, lambda _: reply)
    with pytest.raises(FetchError) as caught:
        fetch(uv, tmp_path)
    assert str(caught.value).startswith(f"{LOCKED.file}: {message}")
    assert hint in caught.value.hint
    assert "example.test" not in f"{caught.value} {caught.value.hint}"
    assert not (tmp_path / "blobs" / SHA256).exists()
