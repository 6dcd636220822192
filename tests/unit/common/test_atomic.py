"""Atomic writes: the whole new file or the old one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from builder.common import atomic


def test_new_file_in_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "a/b/c.txt"
    atomic.write_text(path, "é\n", mode=0o640)
    assert path.read_bytes() == "é\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in path.parent.iterdir()] == ["c.txt"]


def test_mode_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        atomic.write_text(tmp_path / "f", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o644


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
        atomic.write_text(path, "new and longer")
    assert [file.name for file in tmp_path.iterdir()] == (["f"] if existing else [])
    assert not existing or path.read_text() == "old"


def test_text_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        atomic.write_text(tmp_path / "f", "begin \ud800")
    assert [file.name for file in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "old"
