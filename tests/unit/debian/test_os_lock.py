"""Locks of operating systems: their files, and how they change. (For apt itself, see tests/integration.)"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.build.outcomes import Report
from builder.common.errors import BuilderError, FetchError, IncompleteError, LockError, MatrixError, StaleError
from builder.debian import apt, os_lock, os_resolve
from builder.debian.os_lock import OS_LOCKS, OsLock, OsRequest
from builder.index.host import Apt, AptSource, Host, RunProgram
from builder.lock import checks
from builder.lock.lockfile import GROUP_LOCKS
from builder.matrix.project import Project
from builder.matrix.schema import Arch
from builder.plan.plan import PACKAGES_SCRIPT
from builder.steps import lock as locking
from tests.fakes import locks
from tests.fakes.engine import MemoryConsole
from tests.fakes.run import FakeApt, new_run

Edit = Callable[[str, str], Project]
CELL = "qz-0.5-cu129-py311"
OLD_CELL = "em-1.9-cu129-py39"


def request_of(project: Project, name: str = CELL) -> OsRequest:
    [cell] = project.select([name])
    return os_lock.request_of_cell(project.matrix, cell)


ON_ARM64 = ('python: ["3.11"]}', 'python: ["3.11"], arch: [amd64, arm64]}')


def test_arm64_has_locks_of_its_own(edit: Edit) -> None:
    """Those of amd64 keep their names: every image of today keeps its lock."""
    project = edit(*ON_ARM64)
    ours, theirs = (request_of(project, f"{CELL}{suffix}") for suffix in ("", "-arm64"))
    assert theirs == replace(ours, arch="arm64")
    assert theirs.path == ours.path.replace("os-newbird-", "os-newbird-arm64-")
    lock = locks.os_lock_of(theirs)
    assert lock.arch == "arm64"
    assert OS_LOCKS.parse(OS_LOCKS.dump(lock), theirs) == lock
    assert locks.os_lock_of(ours).arch == "amd64"


def test_packages_for_arm64_are_chosen_from_lists_of_their_own(edit: Edit, archive: locks.FakeArchive) -> None:
    project = edit(*ON_ARM64)
    report, said = update(project, "*")
    assert (report.written, report.error) == ([request_of(project, f"{CELL}-arm64").path], None)
    assert said[0] == "Debian newbird for arm64: reading the lists of packages"
    assert update(project, "*", refresh=True)[0].written


@pytest.mark.parametrize("arch", ["amd64", "arm64"])
def test_apt_is_configured_for_the_architecture(tmp_path: Path, arch: Arch) -> None:
    apt.Archive("newbird", Host(), tmp_path, lambda command, **_: subprocess.CompletedProcess(command, 0, "", ""), arch)
    lines = (tmp_path / "apt.conf").read_text().splitlines()
    assert {f'APT::Architecture "{arch}";', f'APT::Architectures "{arch}";'} <= set(lines)


def test_packages_sh_reads_every_package_with_and_without_a_source(tiny: Project) -> None:
    """Its pattern needs the fields in their order. It is an input of every operating system, so it must not change.

    Locks of earlier builders have no sources.
    """
    [pattern] = re.findall(r"sed -nE 's/(.*)/[^/]*/p'", (tiny.root / PACKAGES_SCRIPT).read_text())
    request = request_of(tiny)
    lock = locks.os_lock_of(request)
    first, *others = lock.packages
    named = replace(lock, packages=(replace(first, source="glibc (2.36-9)"), *others))
    text = OS_LOCKS.dump(named)
    assert text.count('"source"') == 1
    assert OS_LOCKS.parse(text, request) == named
    lines = [(*fields[:3], *fields[4:]) for fields in re.findall(pattern, text, re.MULTILINE)]
    assert lines == [
        (package.name, package.version, package.architecture, "glibc" if package.source else "", package.sha256)
        for package in named.packages
    ]
    assert named.packages[0].source_package == ("glibc", "2.36-9")
    assert others[0].source_package == (others[0].name, others[0].version)


SHOWN = """\
Package: libc6
Source: glibc (2.36-9)
Version: 2.36-9+b1
Architecture: amd64
Size: 10
SHA256: {sha256}
Description: a library
 Source: not a field

Package: tini
Version: 0.19.0-1
Architecture: amd64
Size: 20
SHA256: {sha256}
"""


def archive_with(folder: Path, **installed: str) -> apt.Archive:
    """The archive of a release with the packages in SHOWN; apt would install these versions."""
    output = {
        "update": "",
        "install": "".join(f"Inst {name} ({version} Debian [amd64])\n" for name, version in installed.items()),
        "show": SHOWN.format(sha256="a" * 64),
    }

    def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert (folder / "status").read_text(encoding="utf-8") == ""
        assert ("?essential" in command) == (command[1] == "install")
        return subprocess.CompletedProcess(command, 0, output[command[1]], "")

    sources = (AptSource(kind="main", uri="http://deb.example.test"),)
    return apt.Archive("newbird", Host(archives=Apt(sources=sources)), folder, run)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("tini", "Debian newbird: editor is a virtual package"),
        ("vim", "Debian newbird: apt-cache does not show vim 1"),
    ],
)
def test_a_package_that_apt_does_not_show(tmp_path: Path, other: str, message: str) -> None:
    archive = archive_with(tmp_path, libc6="1", **{other: "1"})
    with pytest.raises(LockError, match=message):
        archive.resolve(OsRequest(debian="newbird", packages=("editor",)), locks.TIME)


@pytest.mark.parametrize(("failing", "kind"), [("update", FetchError), ("install", LockError)])
def test_an_archive_that_does_not_respond_is_no_wrong_package(
    tmp_path: Path, failing: str, kind: type[BuilderError]
) -> None:
    def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 100 if command[1] == failing else 0, "", "E: it failed")

    with pytest.raises(kind, match=f"Debian newbird: apt-get {failing} failed\n  \\| E: it failed"):
        apt.Archive("newbird", Host(), tmp_path, run).resolve(TINI, locks.TIME)


def test_cells_with_the_same_packages_share_a_lock(tiny: Project, edit: Edit) -> None:
    before = request_of(tiny)
    assert request_of(tiny, f"{CELL}-board").path == before.path
    assert request_of(tiny, OLD_CELL).path != before.path, "another Debian release"
    changed = edit("board: {needs: [python]", "board: {apt: [git], needs: [python]")
    assert request_of(changed, f"{CELL}-board").path != before.path
    assert request_of(changed) == before


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> locks.FakeArchive:
    fake = locks.FakeArchive()
    monkeypatch.setattr(apt, "open_archive", fake)
    monkeypatch.setattr(locking, "_record_release_days", lambda *_: [])  # without an index
    return fake


def update(project: Project, *names: str, refresh: bool = False) -> tuple[Report, list[str]]:
    """The report, and what was said. The locks of wheels are current."""
    console = MemoryConsole()
    for group, cells in project.groups.items():
        GROUP_LOCKS.write(project.root, group, locks.lock_of(project, cells))
    chosen = project.select(names) if names else []
    report = locking.lock(new_run(project, console=console), chosen, upgrade=False, refresh=refresh)
    return report, console.text.splitlines()


def test_a_missing_or_damaged_lock_is_written(tiny: Project, archive: locks.FakeArchive) -> None:
    path, old_path = (request_of(tiny, cell).path for cell in (CELL, OLD_CELL))
    (tiny.root / path).unlink()
    (tiny.root / old_path).write_text("{}")
    report, said = update(tiny, CELL)
    count = len(request_of(tiny).packages) + 2
    assert (report.written, report.error) == ([path], None)
    assert said == ["Debian newbird: reading the lists of packages", f"{path}: new, {count} packages"]
    assert update(tiny, "*")[0].written == [old_path]
    lock = OS_LOCKS.read(tiny.root, request_of(tiny))
    assert lock
    assert lock.packages == locks.os_lock_of(request_of(tiny), "2.0-1").packages
    assert lock.time >= "20261122T000000Z"
    assert update(tiny, "*") == (Report(), [])


def test_a_refresh_shows_old_and_new_versions(tiny: Project, archive: locks.FakeArchive) -> None:
    """What has no new packages does not change, not even the time of its lock."""
    archive.versions["oldbird"] = "1.0-1"
    request = request_of(tiny)
    report, said = update(tiny, "*", refresh=True)
    assert (report.written, report.error) == ([request.path], None)
    assert said[0] == "Debian newbird: reading the lists of packages"
    assert f"libc6 2.36-1.0-1 -> 2.36-2.0-1 ({request.path})" in said
    assert [line for line in said[2:] if "libc6" not in line] == [
        f"{name} 1.0-1 -> 2.0-1 ({request.path})" for name in request.packages
    ]


WRONG_SYSTEMS = {
    "a Debian release without the Python": (
        '"3.11": {debian: newbird}', '"3.11": {debian: oldbird}',
        "matrix.yaml:15:20: Python 3.11: its packages on Debian oldbird install Python 3.9",
        "Name a Debian release that has Python 3.11, or add `uv` with a full release of it.",
    ),
    "another C library": (
        'glibc: "2.36"', 'glibc: "2.99"',
        "matrix.yaml:11:12: debian.newbird.glibc: Debian newbird has glibc 2.36, not 2.99",
        'Write: glibc: "2.36"',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message", "hint"), WRONG_SYSTEMS.values(), ids=WRONG_SYSTEMS.keys())
def test_a_lock_refuses_what_the_locked_packages_contradict(
    edit: Edit, archive: locks.FakeArchive, old: str, new: str, message: str, hint: str
) -> None:
    """No wheels are locked for such an image: they would be for another Python or C library."""
    project = edit(old, new)
    wheels = {path: path.read_bytes() for path in (project.root / "locks").iterdir() if not path.match("os-*")}
    report = locking.lock(new_run(project), project.select([CELL]), upgrade=True, refresh=False)
    assert report.error
    assert (type(report.error), str(report.error), report.error.hint) == (MatrixError, message, hint)
    assert {path: path.read_bytes() for path in wheels} == wheels


def test_a_lock_of_no_cell_is_found_and_removed(tiny: Project, archive: locks.FakeArchive, edit: Edit) -> None:
    path = request_of(tiny).path
    project = edit("apt: [python3]", "apt: [python3, git]")
    with pytest.raises(StaleError, match=f"  {path}: belongs to no cell"):
        checks.check_locks(project, [])
    archive.broken = "newbird"
    assert type(update(project, CELL, refresh=True)[0].error) is FetchError
    assert (project.root / path).exists(), "undoing the edit needs it again"
    assert f"{path} (removed: no cell needs it)" in update(project)[0].written
    assert not (project.root / path).exists()


def test_an_unknown_package_is_named_once_with_its_component(edit: Edit, archive: locks.FakeArchive) -> None:
    """It was reported for each set of packages with it, without the place in matrix.yaml."""
    edit("jupyter:\n    needs: [python]\n", "jupyter:\n    needs: [python]\n    apt: [git]\n")
    project = edit(
        "  python: {needs: [base], apt: [python3],", "  python: {needs: [base], apt: [python3, no-such-package],"
    )
    archive.unknown = "no-such-package"
    report, _ = update(project, "qz-0.5-cu129-py311*", refresh=True)
    assert len({os_lock.request_of_cell(project.matrix, cell) for cell in project.select(["qz-0.5-cu129-py311*"])}) > 1
    message = "Unable to locate package no-such-package\n  matrix.yaml:42:42: components.python.apt: no-such-package"
    assert str(report.error) == message


# ---- packages that the archives no longer have


def current_locks(
    project: Project, found: locks.FakeArchives, blobs: Path | None = None
) -> tuple[dict[OsRequest, OsLock], list[str]]:
    """The new locks of both releases, and what was said."""
    found.runner = runner = FakeApt()
    requests = {request_of(project), request_of(project, OLD_CELL)}
    new, failures = os_resolve.current_locks_of_stale(project, requests, found, blobs)
    return new, [*runner.said, *map(str, failures)]


OLD_GONE = {"newbird": "1.0-1", "oldbird": "2.0-1"}
NEW_GONE = {"newbird": "2.0-1", "oldbird": "1.0-1"}
BOTH_GONE = {"newbird": "2.0-1", "oldbird": "2.0-1"}


def test_only_locks_with_packages_that_are_gone_are_renewed(tiny: Project, archive: locks.FakeArchive) -> None:
    new, said = current_locks(tiny, locks.FakeArchives(tiny.matrix, NEW_GONE))
    assert {request: lock.versions["libc6"] for request, lock in new.items()} == {request_of(tiny): "2.36-2.0-1"}
    assert archive.resolved == [request_of(tiny).path], "nothing else is downloaded"
    assert said == [f"Debian {release}: looking up the locked packages" for release in ("newbird", "oldbird")]
    assert OS_LOCKS.read(tiny.root, request_of(tiny)) == locks.os_lock_of(request_of(tiny)), "nothing is written"


@pytest.mark.parametrize(
    ("setting", "address"),
    [
        ("snapshot: http://snapshot.example.test/archive", r"http://snapshot.example.test/archive/{}/\d{{8}}T\d{{6}}Z"),
        ("archive: http://moved.example.test", "http://moved.example.test/{}"),
    ],
    ids=["snapshot archive", "moved release"],
)
def test_a_release_is_locked_from_the_archive_in_the_matrix(
    edit: Edit, archive: locks.FakeArchive, setting: str, address: str
) -> None:
    project = edit('    glibc: "2.36"\n', f'    glibc: "2.36"\n    {setting}\n')

    def assert_used() -> None:
        assert re.search(f"{address.format('debian')} newbird main", archive.sources)
        assert re.search(f"{address.format('debian-security')} newbird-security main", archive.sources)
        archive.sources = ""

    update(project, CELL, refresh=True)
    assert_used()
    (project.root / request_of(project).path).write_text(OS_LOCKS.dump(locks.os_lock_of(request_of(project))))
    assert current_locks(project, locks.FakeArchives(project.matrix, NEW_GONE))[0]
    assert_used()


def test_packages_in_the_store_are_not_gone(tiny: Project, archive: locks.FakeArchive, tmp_path: Path) -> None:
    for request in (request_of(tiny), request_of(tiny, OLD_CELL)):
        for package in locks.os_lock_of(request).packages:
            (tmp_path / package.sha256).touch()
    assert current_locks(tiny, locks.FakeArchives(tiny.matrix, BOTH_GONE), tmp_path)[0] == {}
    assert archive.resolved == []


NOT_RENEWED: dict[str, tuple[dict[str, str], dict[str, str], dict[str, Any], list[str], str]] = {
    "a release that cannot be looked up": (
        {},
        BOTH_GONE,
        {"broken": "newbird"},
        ["oldbird"],
        "^Debian newbird: cannot look up the locked packages; going on with them: this machine's archives: the archive "
        "timed out$",
    ),
    # It counted as archives that cannot be looked up: gigabytes were downloaded, and then the build failed.
    "a package that no release has": (
        {"unknown": "python3"},
        NEW_GONE,
        {},
        [],
        r"^Unable to locate package python3\n  matrix.yaml:\d+:\d+: components.python.apt: python3$",
    ),
    "apt cannot run": (
        {"broken": "oldbird"},
        OLD_GONE,
        {},
        [],
        r"^Debian oldbird: no archive has .* 1\.0-1.* any more\nDebian oldbird: apt-get update failed$",
    ),
    "another file of a locked version": (
        {},
        BOTH_GONE,
        {"different": ("libc6",)},
        [],
        "^locks/os-oldbird-.*: Debian's archives have a different file for libc6 2.31-1.0-1$",
    ),
}


@pytest.mark.parametrize(
    ("changes", "versions", "options", "renewed", "message"), NOT_RENEWED.values(), ids=NOT_RENEWED.keys()
)
def test_locks_that_cannot_be_renewed(
    tiny: Project, archive: locks.FakeArchive, changes: dict[str, str], versions: dict[str, str],
    options: dict[str, Any], renewed: list[str], message: str,
) -> None:  # fmt: skip
    vars(archive).update(changes)
    new, said = current_locks(tiny, locks.FakeArchives(tiny.matrix, versions, **options))
    assert [request.debian for request in new] == renewed
    assert [line for line in said if re.search(message, line)]


def test_a_debian_release_that_fails_does_not_stop_the_others(edit: Edit, archive: locks.FakeArchive) -> None:
    """Nor a system the others of its release. What is locked is written."""
    project = edit("board: {needs: [python]", "board: {apt: [no-such-package], needs: [python]")
    archive.broken, archive.unknown = "oldbird", "no-such-package"
    report, _ = update(project, f"{CELL}*", OLD_CELL, refresh=True)
    assert type(report.error) is IncompleteError
    assert report.written == [request_of(project).path]
    lines = [line for line in str(report.error).splitlines() if not line.startswith("    ")]
    assert lines == [
        "2 lock updates failed, 1 done",
        "failed:",
        "  Debian newbird: Unable to locate package no-such-package",
        "  Debian oldbird: apt-get update failed",
        "done:",
        "  Debian newbird (1 other system)",
        "written:",
        f"  {request_of(project).path}",
    ]


# ---- where apt runs


class Elsewhere:
    """A container of Debian, whose apt gives the packages in SHOWN. `seen` are the apt commands, with their files."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    @contextmanager
    def open(self) -> Iterator[RunProgram]:
        def run(
            command: Sequence[str], env: Mapping[str, str] | None = None, **_: object
        ) -> subprocess.CompletedProcess[str]:
            sources = (Path(env["APT_CONFIG"]).parent / "sources.list").read_text() if env else ""
            self.seen.append((" ".join(command[:2]), sources))
            output = {
                "update": "",
                "indextargets": "http://deb.example.test Debian newbird main\n"
                "http://s.example.test Debian newbird-security main\n",
                "install": "Inst libc6 (2.36-9+b1 Debian [amd64])\nInst tini (0.19.0-1 Debian [amd64])\n",
                "show": SHOWN.format(sha256="a" * 64),
                "dump": "",
            }[command[1]]
            return subprocess.CompletedProcess(command, 0, output, "")

        yield run


TINI = OsRequest(debian="newbird", packages=("tini",))
BOTH = tuple(AptSource(kind=kind, uri=f"http://{kind}.example.test") for kind in ("main", "security"))


@pytest.mark.parametrize("sources", [(), BOTH, BOTH[:1]], ids=["no Debian", "no apt", "no security archive"])
def test_apt_runs_in_a_container_where_it_cannot_run_here(
    monkeypatch: pytest.MonkeyPatch, sources: tuple[AptSource, ...]
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    elsewhere = Elsewhere()
    runner, host = FakeApt(elsewhere.open), Host(archives=Apt(sources=sources))
    with apt.open_archive("newbird", host, runner) as archive:
        lock = archive.resolve(TINI, locks.TIME)
    assert lock.versions == {"libc6": "2.36-9+b1", "tini": "0.19.0-1"}
    assert [package.source for package in lock.packages] == ["glibc (2.36-9)", ""]
    assert [command for command, _ in elsewhere.seen][-3:] == ["apt-get update", "apt-get install", "apt-cache show"]
    expected = "http://main.example.test" if sources == BOTH else "http://deb.example.test"
    assert elsewhere.seen[-1][1].splitlines()[0].endswith(f"{expected} newbird main")
    [line] = runner.said
    assert re.fullmatch(r"apt cannot look up Debian packages here \(.+\): running it in a container of Debian", line)


def test_without_apt_and_container_both_ways_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(LockError) as caught, apt.open_archive("newbird", Host(), FakeApt()):
        pytest.fail("there is no apt")
    assert str(caught.value).startswith("Debian packages cannot be locked on this machine: apt-get is not installed")
    assert "no Docker Engine answers" in str(caught.value)
    assert caught.value.hint.startswith("Start a Docker Engine, to run apt in a container. Or on Debian")
