"""The packages that changed between locks, and the command that compares revisions."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from builder.common.errors import FileError, MatrixError, UsageError
from builder.debian import os_lock
from builder.debian.os_lock import OS_LOCKS
from builder.lock import diff
from builder.lock.lockfile import GROUP_LOCKS
from builder.matrix.project import Project
from builder.steps.diff import compare_revisions
from tests.fakes import locks
from tests.fakes.locks import entry

GROUP = "em-1.10-cu1210-py311"
CUDA, EMBER, PIP = entry("nvidia-sums", "12.1", 2), entry("ember", "1.10.0", 3), entry("pip", "25.0", 1)
NEWER = entry("ember", "1.11.0", 3)


def test_each_package_that_differs_has_a_line() -> None:
    other_file, come = replace(PIP, sha256="5" * 64), entry("come", "2", 4)
    assert diff.package_changes([CUDA, EMBER, PIP], [come, other_file, NEWER]) == [
        "come none -> 2",
        "ember 1.10.0 -> 1.11.0",
        "nvidia-sums 12.1 -> none",
        "pip 25.0 (another file)",
    ]
    assert diff.package_changes([CUDA, EMBER], [EMBER, CUDA]) == []


def test_a_change_of_several_locks_is_one_line() -> None:
    old = {name: [EMBER] for name in "abcde"} | {"same": [CUDA]}
    new = {name: [NEWER] for name in "bcde"} | {"same": [CUDA], "x": [CUDA, PIP]}
    assert diff.lock_changes(old, new) == [
        "x: new, 2 packages",
        "a: removed",
        "ember 1.10.0 -> 1.11.0 (b, c, d and 1 more)",
    ]


# ---- the command


@pytest.fixture
def before(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the revision `old`, which are those of the checkout."""
    locks.write_os_locks(tiny)
    revision = tmp_path / "old"
    for name in ("matrix.yaml", "locks"):
        copy = shutil.copytree if (tiny.root / name).is_dir() else shutil.copy2
        revision.mkdir(exist_ok=True)
        copy(tiny.root / name, revision / name)

    def export(root: Path, name: str, folder: Path) -> None:
        assert root == tiny.root
        if name != "old":
            raise UsageError(f"no git revision {name!r}")
        shutil.copytree(revision, folder, dirs_exist_ok=True)

    monkeypatch.setattr("builder.common.git.export", export)
    return revision


def test_revisions_are_compared_by_their_locks(before: Path, tiny: Project) -> None:
    assert compare_revisions(tiny, "old", "") == compare_revisions(tiny, "old", "old") == []
    request = os_lock.request_of_cell(tiny.matrix, tiny.groups[GROUP][0])
    system = locks.os_lock_of(request)
    newer = replace(system, packages=(replace(system.packages[0], version="9"), *system.packages[1:]))
    (tiny.root / request.path).write_text(OS_LOCKS.dump(newer), encoding="utf-8")
    (before / GROUP_LOCKS.path("qz-0.5-cu129-py311")).unlink()
    shown = compare_revisions(tiny, "old", "")
    name, version = system.packages[0].name, system.packages[0].version
    assert shown == ["qz-0.5-cu129-py311: new, 6 packages", f"{name} {version} -> 9 ({request.path})"]


def test_the_revision_of_an_error_is_named(before: Path, tiny: Project) -> None:
    with pytest.raises(UsageError, match="no git revision 'none'"):
        compare_revisions(tiny, "none", "")
    path = before / GROUP_LOCKS.path(GROUP)
    path.write_text(path.read_text().replace('"format": 2', '"format": 9'), encoding="utf-8")
    with pytest.raises(FileError, match=rf"old:locks/{GROUP}\.json has lock format 9"):
        compare_revisions(tiny, "old", "")
    (before / "matrix.yaml").write_text("namespaces: team\n", encoding="utf-8")
    with pytest.raises(MatrixError, match=r"old:matrix\.yaml:1:1: "):
        compare_revisions(tiny, "old", "")
