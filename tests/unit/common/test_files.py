"""Atomic writes, and digests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from builder.common import files
from builder.common.errors import FileError
from builder.common.files import (
    digest_of_bytes,
    digest_of_data,
    digests_of_tree,
    files_below,
    short_digest,
    write_atomically,
)


def test_a_new_file_has_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "a/b/c.txt"
    old = os.umask(0o077)
    try:
        write_atomically(path, "é\n")
    finally:
        os.umask(old)
    assert path.read_bytes() == "é\n".encode()
    assert path.stat().st_mode & 0o777 == 0o644
    assert [file.name for file in path.parent.iterdir()] == ["c.txt"]


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.chmod", "pathlib.Path.replace"])
@pytest.mark.parametrize("crash", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "Ctrl-C"])
@pytest.mark.parametrize("existing", [True, False], ids=["replace", "new"])
def test_a_crash_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, crash: BaseException, existing: bool
) -> None:
    path = tmp_path / "f"
    if existing:
        path.write_text("old")

    def fail(*_: object) -> None:
        raise crash

    monkeypatch.setattr(call, fail)
    with pytest.raises(type(crash)):
        write_atomically(path, "new and longer")
    assert [file.name for file in tmp_path.iterdir()] == (["f"] if existing else [])
    assert not existing or path.read_text() == "old"


def test_the_digest_of_bytes_is_their_sha256() -> None:
    assert digest_of_bytes(b"") == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert short_digest(digest_of_bytes(b"")) == "e3b0c44298fc"


def test_order_of_keys_does_not_matter_order_of_lists_does() -> None:
    assert digest_of_data({"a": 1, "b": "é"}) == digest_of_data({"b": "é", "a": 1})
    assert digest_of_data([1, 2]) != digest_of_data([2, 1])


def test_tree(tmp_path: Path) -> None:
    for name, text in (("d/b", "1"), ("d/a/c", "2"), ("d/__pycache__/x.pyc", "3"), ("e", "4")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    digests = digests_of_tree(tmp_path, tmp_path / "d")
    assert list(digests) == ["d/a/c", "d/b"]
    assert digests_of_tree(tmp_path, tmp_path / "d/b") == {"d/b": digests["d/b"]}
    assert digests_of_tree(tmp_path, tmp_path / "absent") == {}


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link to a folder is one entry, a link to a file has another digest than the file, a broken link counts too."""
    (tmp_path / "d").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x").write_text("1")
    for name, target in (
        ("folder", "../other"),
        ("file", "../other/x"),
        ("nothing", "/nowhere/x"),
        ("itself", "itself"),
    ):
        (tmp_path / "d" / name).symlink_to(target)
    digests = digests_of_tree(tmp_path, tmp_path / "d")
    assert list(digests) == ["d/file", "d/folder", "d/itself", "d/nothing"]
    assert len(set(digests.values())) == 4
    assert digests_of_tree(tmp_path, tmp_path / "other/x")["other/x"] not in digests.values()
    (tmp_path / "other/x").write_text("2")
    assert digests_of_tree(tmp_path, tmp_path / "d") == digests
    (tmp_path / "d/nothing").unlink()
    (tmp_path / "d/nothing").symlink_to("/nowhere/y")
    assert digests_of_tree(tmp_path, tmp_path / "d")["d/nothing"] != digests["d/nothing"]


@pytest.mark.parametrize("change", ["content", "execute bit"])
def test_a_change_of_a_file_changes_its_digest(tmp_path: Path, change: str) -> None:
    path = tmp_path / "f"
    path.write_text("1")
    path.chmod(0o644)
    before = digests_of_tree(tmp_path, path)
    path.chmod(0o600)
    assert digests_of_tree(tmp_path, path) == before
    if change == "content":
        path.write_text("2")
    else:
        path.chmod(0o755)
    assert digests_of_tree(tmp_path, path) != before


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """It would lead out of the checkout."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/files").symlink_to(outside)
    with pytest.raises(FileError):
        files_below(tmp_path / "templates/files")


@pytest.mark.parametrize(
    ("value", "is_digest"),
    [
        ("sha256:" + "0a" * 32, True),
        ("sha256:" + "0A" * 32, False),
        ("sha256:" + "0a" * 32 + "\n", False),
        ("sha256:" + "0a" * 31, False),
        ("sha512:" + "0a" * 32, False),
        ("0a" * 32, False),
        (None, False),
    ],
)
def test_only_a_sha256_in_lower_case_is_a_digest(value: object, is_digest: bool) -> None:
    assert files.is_digest(value) is is_digest
