"""The lock step, with a resolver that needs no index."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import pytest

from builder.build.outcomes import Report
from builder.common.errors import FileError, IncompleteError, LockError, StaleError, UsageError
from builder.debian import os_lock
from builder.index.wheels import LockedWheel
from builder.lock import checks, lockfile
from builder.lock.lockfile import GROUP_LOCKS, Lock, LockedComponent
from builder.lock.python_builds import PythonBuilds
from builder.lock.python_lock import PYTHON_LOCKS, LockedPython
from builder.lock.resolve import Resolver
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.steps.lock import lock
from tests.fakes import locks
from tests.fakes.engine import MemoryConsole
from tests.fakes.run import new_run
from tests.fakes.wire import Reply, Sent, Wire

Edit = Callable[[str, str], Project]
# The groups of the tiny matrix, in its order. Those in tiny_locks.GROUPS have a lock.
OLD_39 = "em-1.9-cu129-py39"
CU129_311 = "em-1.10-cu129-py311"
CU1210_39 = "em-1.10-cu1210-py39"
LOCKED, LOCKED_QUARTZ = locks.GROUPS
QUARTZ_39 = "qz-0.5-cu1210-py39"
GROUPS = [OLD_39, CU129_311, CU1210_39, LOCKED, LOCKED_QUARTZ, QUARTZ_39]
CUDA = "nvidia-sums-cu12"
WHEELS = {
    "nvidia-ml-py": "py3-none-any",  # NVIDIA's, but not a CUDA wheel
    CUDA: "py3-none-manylinux_2_28_x86_64",
    "triton": "py3-none-manylinux_2_28_x86_64",  # for one platform, but not NVIDIA's
}
NO_CUDA = [name for name in WHEELS if name != CUDA]


def lock_of(project: Project, group: str, versions: Mapping[str, str]) -> Lock:
    """A current lock in which each component needs all of WHEELS, in the versions given."""
    members = project.groups[group]
    needs = lockfile.group_requirements(project.matrix, members)
    return Lock(
        group=group,
        basis=lockfile.basis(project.matrix, members[0]),
        held=[],
        toolkit={},
        components={
            name: LockedComponent(requirements=packages, wheels=list(WHEELS)) for name, packages in needs.items()
        },
        wheels=tuple(locks.entry(name, versions[name], 1, tag) for name, tag in WHEELS.items()),
    )


@dataclass
class FakeResolver:
    """Stands in for `Resolver.lock` and for uv's list: makes a lock for each group that is not `broken`.

    Versions of the present lock are taken first, then preferred ones, else `newest`. `present` and `preferred` are what
    each group of the latest update was resolved with, in order; `known` are the wheels that the resolver knew. uv has
    one build of each release of Python but `unknown`. `wire` is the index with the days of releases.
    """

    newest: str = "9"
    broken: frozenset[str] = frozenset()
    present: dict[str, Lock | None] = field(default_factory=dict)
    preferred: dict[str, dict[str, str]] = field(default_factory=dict)
    known: dict[str, LockedWheel] = field(default_factory=dict)
    unknown: str = ""
    wire: Wire = field(default_factory=lambda: Wire(lambda _: Reply(404)))
    console: MemoryConsole = field(default_factory=MemoryConsole)

    @property
    def said(self) -> list[str]:
        """The lines of the latest update."""
        return self.console.text.splitlines()

    def run(
        self,
        project: Project,
        names: Sequence[str],
        *,
        upgrade: bool = False,
        packages: Sequence[str] = (),
    ) -> Report:
        """Locks cells with this resolver."""
        self.project = project
        self.present.clear()
        self.preferred.clear()
        self.console = MemoryConsole()
        run = new_run(project, console=self.console)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Resolver, "lock", lambda resolver, *options: self.lock(resolver.known, *options))
            patch.setattr(PythonBuilds, "lock", lambda _, *options: self.lock_python(*options))
            self.wire = Wire.install(patch, self.wire.answers)
            return lock(run, project.select(names), upgrade=upgrade, refresh=False, packages=packages)

    def update(self, project: Project, *names: str, **options: Any) -> list[str]:
        """The changed paths; raises the error for what failed."""
        report = self.run(project, names, **options)
        if report.error:
            raise report.error
        return report.written

    def lock_python(self, release: str, present: LockedPython | None) -> LockedPython:
        if release == self.unknown:
            raise LockError(f"uv has no build of Python {release} that images can use")
        return present or locks.python_lock_of(release)

    def lock(
        self, known: dict[str, LockedWheel], group: Sequence[Cell], present: Lock | None, prefer: Mapping[str, str]
    ) -> Lock:
        self.known = known
        name = group[0].group
        assert list(group) == self.project.groups[name], "a group is resolved as a whole"
        assert name not in self.preferred, "a group is resolved once"
        self.present[name] = present
        self.preferred[name] = dict(prefer)
        if name in self.broken:
            raise LockError(f"{group[0].id}: cannot be resolved", hint="change it")
        newest = dict.fromkeys(WHEELS, self.newest)
        return lock_of(self.project, name, {**newest, **prefer, **(present.versions if present else {})})


@pytest.fixture
def resolver() -> FakeResolver:
    return FakeResolver()


def write(project: Project, versions: Mapping[str, str]) -> None:
    """Writes a current lock of each group, with its version of every wheel."""
    for group, version in versions.items():
        GROUP_LOCKS.write(project.root, group, lock_of(project, group, dict.fromkeys(WHEELS, version)))


def read(project: Project, group: str) -> Lock:
    lock = GROUP_LOCKS.read(project.root, group)
    assert lock is not None
    return lock


def contents(project: Project) -> dict[str, bytes]:
    """Group -> the bytes of its lock file."""
    files = (project.root / "locks").glob("*.json")
    return {path.stem: path.read_bytes() for path in files if not path.name.startswith(os_lock.PREFIX)}


def paths(*groups: str) -> list[str]:
    return [f"locks/{group}.json" for group in groups]


def stale_lines(project: Project, *names: str) -> list[str]:
    with pytest.raises(StaleError) as caught:
        checks.check_locks(project, project.select(names))
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_check(tiny: Project) -> None:
    """One lock covers all cells of its group. A missing lock is named once."""
    checks.check_locks(tiny, tiny.select([f"{LOCKED}*", f"{LOCKED_QUARTZ}*"]))
    assert stale_lines(tiny, f"{LOCKED}*", f"{OLD_39}*") == [f"locks/{OLD_39}.json: missing"]
    [system] = {os_lock.request_of_cell(tiny.matrix, cell).path for cell in tiny.select([LOCKED])}
    (tiny.root / system).unlink()
    (tiny.root / "locks/gone.json").write_text("{}")
    assert stale_lines(tiny, LOCKED) == [f"{system}: missing", "locks/gone.json: belongs to no cell"]


def test_check_says_why_a_lock_is_stale_for_a_cell(edit: Edit) -> None:
    """Once for all cells of the group, and not for those that lack the component."""
    project = edit("packages: [notebook]", "packages: [notebook>=2]")
    line = f"locks/{LOCKED}.json: jupyter: matrix.yaml requires notebook>=2, the lock has notebook"
    assert stale_lines(project, f"{LOCKED}*") == stale_lines(project, f"{LOCKED}-jupyter") == [line]
    checks.check_locks(project, project.select([LOCKED, f"{LOCKED}-board"]))


def test_update_resolves_the_stale_groups_of_the_chosen_cells(tiny: Project, resolver: FakeResolver) -> None:
    (tiny.root / "locks/gone.json").write_text("{}")
    present = read(tiny, LOCKED)
    first, *others = present.wheels
    described = replace(first, license="MIT")
    GROUP_LOCKS.write(tiny.root, LOCKED, replace(present, wheels=(described, *others)))
    changed = resolver.update(tiny, f"{LOCKED}*", CU1210_39, f"{CU1210_39}-jupyter", f"{QUARTZ_39}-board")
    assert list(resolver.preferred) == [CU1210_39, QUARTZ_39]
    assert changed == [*paths(CU1210_39, QUARTZ_39), "locks/gone.json (removed: no cell needs it)"]
    assert contents(tiny).keys() == {LOCKED, LOCKED_QUARTZ, CU1210_39, QUARTZ_39}
    assert resolver.said == [f"{group}: new, 3 packages" for group in (CU1210_39, QUARTZ_39)]
    assert resolver.known == {first.sha256: described}, "older builders locked no licences: the others are read again"
    checks.check_locks(tiny, tiny.select(["*-cu1210-*"]))
    assert resolver.update(tiny, "*-cu1210-*") == []
    assert resolver.preferred == {}
    assert resolver.said == []


def test_an_unused_component_leaves_the_lock(tiny: Project, edit: Edit, resolver: FakeResolver) -> None:
    """`check` says so. `update` writes the lock again without it, and touches no lock that never had it."""
    resolver.update(tiny, "*")
    quartz = contents(tiny)[QUARTZ_39]
    project = edit("jupyter: [board, jupyter]", "jupyter: [board]")
    lines = [f"{path}: no cell has the component jupyter" for path in paths(*GROUPS[:-1])]
    assert stale_lines(project, "*") == lines
    assert resolver.update(project, "*") == paths(*GROUPS[:-1])
    for group in GROUPS[:-1]:
        components = list(read(tiny, group).components)
        assert components == ["python", project.groups[group][0].framework, "board"]
    assert contents(tiny)[QUARTZ_39] == quartz, "it never had the component"
    assert resolver.update(project, "*") == []


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe"], ids=["empty", "cut short", "not UTF-8"])
def test_a_damaged_lock_is_resolved_again(tiny: Project, resolver: FakeResolver, damage: bytes) -> None:
    (tiny.root / GROUP_LOCKS.path(LOCKED)).write_bytes(damage)
    assert resolver.update(tiny, f"{LOCKED}-board") == paths(LOCKED)
    assert resolver.present == {LOCKED: None}
    assert read(tiny, LOCKED).group == LOCKED


def test_a_lock_of_a_newer_builder_ends_the_update_before_anything_is_written(
    tiny: Project, resolver: FakeResolver
) -> None:
    """Also that of another group: its versions are preferred."""
    for path in (tiny.root / "locks").glob("os-*"):
        path.unlink()
    (tiny.root / GROUP_LOCKS.path(LOCKED_QUARTZ)).write_text('{"format": 99}')
    before = contents(tiny)
    with pytest.raises(FileError):
        resolver.update(tiny, LOCKED)
    assert contents(tiny) == before
    assert list((tiny.root / "locks").glob("os-*")) == []


# ---- versions of other groups


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Groups with a lock and the version of its wheels, what is updated, and what each new lock prefers.

    `edited` is a change of matrix.yaml after the locks were made, `broken` a group that does not resolve.
    """

    locked: dict[str, str]
    cells: str = "*"
    edited: tuple[str, str] = ("", "")
    upgrade: bool = False
    packages: tuple[str, ...] = ()
    broken: str = ""
    preferred: dict[str, dict[str, str]]


def of_all(version: str) -> dict[str, str]:
    return dict.fromkeys(WHEELS, version)


def of_python(version: str) -> dict[str, str]:
    """CUDA's wheels are for any Python: they are those of another group, or none."""
    return dict.fromkeys(NO_CUDA, version)


EIGHT = dict.fromkeys(GROUPS, "8")
PREFERENCES = {
    "the first group of the same CUDA and of the same Python, wherever it is in the matrix": Preference(
        locked=dict(zip(GROUPS, "12345", strict=False)), preferred={QUARTZ_39: of_python("1") | {CUDA: "3"}}
    ),
    "also one that comes later": Preference(
        locked=dict(zip(GROUPS, "023406", strict=True)),
        edited=("release: 1.9.2", "release: 1.9.3"),
        preferred={OLD_39: of_python("3") | {CUDA: "2"}},
    ),
    "none of another CUDA and another Python": Preference(
        locked={LOCKED_QUARTZ: "8"}, cells=CU1210_39, preferred={CU1210_39: {}}
    ),
    "groups that stay count more than those resolved before": Preference(
        locked={OLD_39: "7", LOCKED: "8", LOCKED_QUARTZ: "8"},
        cells="ember",
        edited=("release: 1.9.2", "release: 1.9.3"),
        preferred={OLD_39: {CUDA: "8"}, CU129_311: of_all("8"), CU1210_39: of_python("7") | {CUDA: "8"}},
    ),
    "never those that are stale or failed": Preference(
        locked=dict(zip(GROUPS, "123456", strict=True)),
        edited=("packages: [notebook]", "packages: [notebook>=2]"),  # QUARTZ_39 alone does not have it
        broken=CU129_311,
        preferred={
            OLD_39: of_python("6"),
            CU129_311: {CUDA: "1"},
            CU1210_39: of_all("6"),
            LOCKED: {CUDA: "6"},
            LOCKED_QUARTZ: of_python("4") | {CUDA: "1"},
        },
    ),
    "an upgrade of one group: the others of its framework": Preference(
        locked=EIGHT | {LOCKED: "7"}, cells=LOCKED, upgrade=True, preferred={LOCKED: of_all("8")}
    ),
    "an upgrade of all: only what it has resolved itself, so all move together": Preference(
        locked=EIGHT,
        upgrade=True,
        preferred={
            OLD_39: {},
            CU129_311: {CUDA: "10"},
            CU1210_39: of_python("10"),
            LOCKED: of_all("10"),
            LOCKED_QUARTZ: of_all("10"),
            QUARTZ_39: of_all("10"),
        },
    ),
    "an upgrade of a framework: none of others, or each would keep the other's versions": Preference(
        locked=EIGHT, cells="quartz", upgrade=True, preferred={LOCKED_QUARTZ: {}, QUARTZ_39: {}}
    ),
    "one package: its new version, and the old ones of all others": Preference(
        locked=EIGHT,
        cells="*-py311*",
        packages=("Triton",),
        preferred={
            CU129_311: {"nvidia-ml-py": "8", CUDA: "8"},
            LOCKED: of_all("8") | {"triton": "10"},
            LOCKED_QUARTZ: of_all("8") | {"triton": "10"},
        },
    ),
    "one package of a new group: not what others have, which may be withdrawn": Preference(
        locked=dict.fromkeys(GROUPS[1:], "8"),
        cells=OLD_39,
        packages=("triton",),
        preferred={OLD_39: {"nvidia-ml-py": "8", CUDA: "8"}},
    ),
}


@pytest.mark.parametrize("case", PREFERENCES.values(), ids=PREFERENCES.keys())
def test_versions_that_a_new_lock_prefers(tiny: Project, edit: Edit, resolver: FakeResolver, case: Preference) -> None:
    for path in paths(*locks.GROUPS):
        (tiny.root / path).unlink()
    write(tiny, case.locked)
    present = {group: None if case.upgrade or case.packages else read(tiny, group) for group in case.locked}
    before = contents(tiny)
    resolver.newest = "10"
    resolver.broken = frozenset([case.broken])
    report = resolver.run(
        edit(*case.edited) if case.edited[0] else tiny, [case.cells], upgrade=case.upgrade, packages=case.packages
    )
    assert resolver.preferred == case.preferred
    assert resolver.present == {group: present.get(group) for group in case.preferred}, "no kept lock in an upgrade"
    after = contents(tiny)
    changed = [group for group in GROUPS if group in after and after[group] != before.get(group)]
    assert changed == [group for group in case.preferred if group != case.broken]
    assert [case.broken] == re.findall(r"^  (\S+): cannot be", str(report.error), re.MULTILINE) or not report.error


def test_an_unknown_package_is_a_usage_error(tiny: Project, resolver: FakeResolver) -> None:
    write(tiny, {LOCKED: "8"})
    before = contents(tiny)
    with pytest.raises(UsageError, match=r"^no lock of these cells has the package tritn; did you mean 'triton'\?$"):
        resolver.update(tiny, LOCKED, packages=["tritn"])
    assert contents(tiny) == before


# ---- failures


def test_failures_do_not_stop_other_groups(tiny: Project, resolver: FakeResolver) -> None:
    (tiny.root / "locks/gone.json").write_text("{}")
    resolver.broken = frozenset({OLD_39, CU1210_39})
    with pytest.raises(IncompleteError) as caught:
        resolver.update(tiny, "*")
    assert str(caught.value).splitlines() == [
        "2 lock updates failed, 2 done",
        "failed:",
        f"  {OLD_39}: cannot be resolved",
        "    -> change it",
        f"  {CU1210_39}: cannot be resolved",
        "    -> change it",
        "done:",
        f"  {CU129_311}",
        f"  {QUARTZ_39}",
        "written:",
        *(f"  {path}" for path in paths(CU129_311, QUARTZ_39)),
    ]
    assert contents(tiny).keys() == {*GROUPS, "gone"} - {OLD_39, CU1210_39}, "unused locks are kept after a failure"
    with pytest.raises(LockError):  # locks that were current already do not count as done
        resolver.update(tiny, OLD_39, CU1210_39, LOCKED)


# ---- uv's Pythons

# With the packages of Debian's Python: the operating systems are locked.
BY_UV = '"3.11": {debian: newbird, uv: 3.11.15, apt: [python3, python3-venv]}'
PYTHON_LOCK = "locks/python-3.11.15.json"


def test_the_build_of_uv_is_locked_once(edit: Edit, resolver: FakeResolver) -> None:
    project = edit('"3.11": {debian: newbird}', BY_UV)
    assert f"{PYTHON_LOCK}: missing" in stale_lines(project)
    assert LOCKED not in {cell.id for cell in checks.current_cells(project)}
    assert PYTHON_LOCK in resolver.update(project, "*")
    assert PYTHON_LOCKS.read(project.root, "3.11.15") == locks.python_lock_of("3.11.15")
    checks.check_locks(project, project.cells)
    assert resolver.update(project, "*") == []

    (project.root / PYTHON_LOCK).write_text("{}")
    assert any(line.startswith(f"{PYTHON_LOCK} is damaged") for line in stale_lines(project))
    assert resolver.update(project, "*") == [PYTHON_LOCK]

    project = edit(BY_UV, '"3.11": {debian: newbird}')
    assert stale_lines(project)[-1] == f"{PYTHON_LOCK}: belongs to no cell"
    assert resolver.update(project, "*") == [f"{PYTHON_LOCK} (removed: no cell needs it)"]


def test_a_python_that_uv_does_not_have_stops_nothing_else(edit: Edit, resolver: FakeResolver) -> None:
    project = edit('"3.11": {debian: newbird}', BY_UV)
    resolver.unknown = "3.11.15"
    with pytest.raises(IncompleteError, match=rf"^1 lock [\s\S]*\n  Python 3.11.15: [\s\S]*\n  {OLD_39}\n"):
        resolver.update(project, "*")


# ---- the days of releases


def listing(sent: Sent) -> Reply:
    """An index with two releases of ember, whose days it says, and two of quartz, of which it says one."""
    days = {"1.9.2": "2025-11-12", "1.10.0": "2026-02-01", "2.0": "2026-10-28", "2.1rc1": "2026-11-01"}
    days = {"0.5.3": "2026-01-01", "0.6": ""} if "quartz" in sent.url else days
    files = [
        {"filename": f"x-{version}-py3-none-any.whl", "url": "x", "hashes": {}}
        | ({"upload-time": f"{day}T01:00:00Z"} if day else {})
        for version, day in days.items()
    ]
    body = json.dumps({"meta": {"api-version": "1.1"}, "name": "x", "files": files}).encode()
    return Reply(body=body, headers={"Content-Type": "application/vnd.pypi.simple.v1+json"})


def test_the_days_of_releases_are_recorded_for_locks_that_are_current(tiny: Project, resolver: FakeResolver) -> None:
    """Each framework is requested once, and again if it is resolved: there may be a newer release by then."""
    resolver.update(tiny, "*")
    resolver.wire = Wire(listing)
    before = contents(tiny)
    assert resolver.update(tiny, "ember") == [lockfile.RELEASE_DAYS]
    assert contents(tiny) == before | {"releases": (tiny.root / lockfile.RELEASE_DAYS).read_bytes()}
    days = {"1.9.2": date(2025, 11, 12), "1.10.0": date(2026, 2, 1), "2.0": date(2026, 10, 28)}
    assert lockfile.read_release_days(tiny.root) == {"ember": days}
    assert resolver.update(tiny, "ember") == []
    assert resolver.wire.seen == []
    assert resolver.update(tiny, "*") == [lockfile.RELEASE_DAYS]
    assert lockfile.read_release_days(tiny.root) == {"ember": days, "quartz": {"0.5.3": date(2026, 1, 1)}}
    resolver.update(tiny, "ember", upgrade=True)
    assert [sent.path for sent in resolver.wire.seen] == ["/simple/ember/"]


def test_an_index_that_does_not_give_the_days_is_no_failure(tiny: Project, resolver: FakeResolver) -> None:
    resolver.update(tiny, "*")
    resolver.wire = Wire(lambda _: Reply(403))
    assert resolver.update(tiny, "*") == []
    [line] = resolver.said
    assert line.startswith("locks/releases.json: not updated: ")
    resolver.broken = frozenset(GROUPS)
    assert resolver.run(tiny, "*", upgrade=True).error
    assert resolver.wire.seen == [], "nothing is requested for what failed"


def test_a_private_framework_is_not_looked_up_on_the_default_index(
    tiny: Project, edit: Edit, resolver: FakeResolver
) -> None:
    resolver.wire = Wire(listing)
    edit("frameworks:\n", "indexes: {own: 'https://own.example.test/simple/'}\nframeworks:\n")
    project = edit("release: 0.5.3,", "release: 0.5.3, index: own,")
    assert resolver.update(project, "quartz") == paths(LOCKED_QUARTZ, QUARTZ_39)
    assert resolver.wire.seen == []
