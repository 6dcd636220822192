"""The lock step, with a resolver that needs no index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from builder.common.errors import FileError, IncompleteError, LockError, StaleError, UsageError
from builder.debian import os_lock
from builder.lock import checks, lockfile
from builder.lock.lockfile import GROUP_LOCKS, Lock, LockedComponent
from builder.lock.python_builds import PythonBuilds
from builder.lock.python_lock import PYTHON_LOCKS
from builder.lock.resolve import Resolver
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.steps import lock as locking
from tests.fakes import locks
from tests.fakes.engine import MemoryConsole
from tests.fakes.run import new_run

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
        components={
            name: LockedComponent(requirements=packages, wheels=list(WHEELS)) for name, packages in needs.items()
        },
        wheels=tuple(locks.entry(name, versions[name], 1, tag) for name, tag in WHEELS.items()),
    )


@dataclass
class FakeResolver:
    """Makes a lock for each group that is not `broken`.

    Versions of the present lock are taken first, then preferred ones, else `newest`. `present` and `preferred` are what
    each group of the latest update was resolved with, in order.
    """

    newest: str = "9"
    broken: frozenset[str] = frozenset()
    present: dict[str, Lock | None] = field(default_factory=dict)
    preferred: dict[str, dict[str, str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
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
        builds: PythonBuilds | None = None,
    ) -> locking.Updated:
        """Locks cells with this resolver."""
        self.project = project
        self.present.clear()
        self.preferred.clear()
        self.console = MemoryConsole()
        return locking.lock(
            new_run(project, console=self.console), project.select(names), cast("Resolver", self),
            upgrade=upgrade, refresh=False, packages=packages, builds=builds,
        )  # fmt: skip

    def update(self, project: Project, *names: str, **options: Any) -> list[str]:
        """The changed paths; raises the error for what failed."""
        updated = self.run(project, names, **options)
        if updated.error:
            raise updated.error
        return list(updated.written)

    @property
    def resolved(self) -> list[str]:
        return list(self.preferred)

    def lock(self, group: Sequence[Cell], present: Lock | None, prefer: Mapping[str, str]) -> Lock:
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


def write(project: Project, group: str, version: str) -> Lock:
    """Writes a current lock with this version of every wheel."""
    lock = lock_of(project, group, dict.fromkeys(WHEELS, version))
    (project.root / GROUP_LOCKS.path(group)).write_text(GROUP_LOCKS.dump(lock))
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


def test_check_says_why_a_lock_is_stale_for_a_cell(edit: Edit) -> None:
    """Once for all cells of the group, and not for those that lack the component."""
    project = edit("packages: [notebook]", "packages: [notebook>=2]")
    line = f"locks/{LOCKED}.json: jupyter: matrix.yaml requires notebook>=2, the lock has notebook"
    assert stale_lines(project, f"{LOCKED}*") == stale_lines(project, f"{LOCKED}-jupyter") == [line]
    checks.check_locks(project, project.select([LOCKED, f"{LOCKED}-board"]))


def test_check_names_files_that_belong_to_no_cell(tiny: Project) -> None:
    (tiny.root / "locks/gone.json").write_text("{}")
    assert stale_lines(tiny, LOCKED) == ["locks/gone.json: belongs to no cell"]


def test_update_resolves_the_stale_groups_of_the_chosen_cells(tiny: Project, resolver: FakeResolver) -> None:
    (tiny.root / "locks/gone.json").write_text("{}")
    changed = resolver.update(tiny, f"{LOCKED}*", CU1210_39, f"{CU1210_39}-jupyter", f"{QUARTZ_39}-board")
    assert resolver.resolved == [CU1210_39, QUARTZ_39]
    assert changed == [*paths(CU1210_39, QUARTZ_39), "locks/gone.json (removed: no cell needs it)"]
    assert contents(tiny).keys() == {LOCKED, LOCKED_QUARTZ, CU1210_39, QUARTZ_39}
    checks.check_locks(tiny, tiny.select(["*-cu1210-*"]))
    assert resolver.update(tiny, "*-cu1210-*") == []
    assert resolver.resolved == []


def test_the_sizes_of_locked_wheels_are_known(tiny: Project, resolver: FakeResolver) -> None:
    resolver.update(tiny, OLD_39)
    locked = [wheel for lock in locks.locks(tiny).values() for wheel in lock.wheels]
    assert resolver.sizes == {wheel.sha256: wheel.size for wheel in locked}


def test_an_upgrade_of_one_group_leaves_the_other_locks_alone_and_prefers_their_versions(
    tiny: Project, resolver: FakeResolver
) -> None:
    for group in GROUPS:
        write(tiny, group, "8")
    write(tiny, LOCKED, "7")
    before = contents(tiny)
    resolver.newest = "10"
    assert resolver.update(tiny, LOCKED, upgrade=True) == paths(LOCKED)
    assert resolver.preferred == {LOCKED: dict.fromkeys(WHEELS, "8")}
    assert contents(tiny).keys() == before.keys()
    assert {group for group, content in contents(tiny).items() if content != before[group]} == {LOCKED}


CHANGES: dict[str, tuple[str, str, list[str]]] = {
    "release of a framework": ("release: 0.5.3", "release: 0.5.4", [LOCKED_QUARTZ, QUARTZ_39]),
    "constraint of a line": ("{release: 1.9.2", "{constraints: [sums<3], release: 1.9.2", [OLD_39]),
    "toolkit of a CUDA": ("toolkit: 12.10.1", "toolkit: 12.10.2", [CU1210_39, LOCKED, QUARTZ_39]),
    "component of a variant": ("packages: [notebook]", "packages: [notebook>=2]", GROUPS[:-1]),
    "new group": (
        '{release: 0.5.3, cuda: ["12.9"]',
        '{release: 0.5.3, cuda: ["12.9", "12.10"]',
        ["qz-0.5-cu1210-py311"],
    ),
}


@pytest.mark.parametrize(("old", "new", "resolved"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_leaves_the_locks_of_groups_that_it_does_not_concern(
    tiny: Project, edit: Edit, resolver: FakeResolver, old: str, new: str, resolved: list[str]
) -> None:
    """Even if the index has newer versions in the meantime."""
    for number, group in enumerate(GROUPS):
        write(tiny, group, str(number))
    before = contents(tiny)
    resolver.newest = "10"
    project = edit(old, new)
    assert resolver.update(project, "*") == paths(*resolved)
    assert resolver.resolved == resolved
    after = contents(tiny)
    assert {group for group in after if after[group] != before.get(group)} == set(resolved)
    checks.check_locks(project, project.cells)


def test_an_unused_component_leaves_the_lock(tiny: Project, edit: Edit, resolver: FakeResolver) -> None:
    """`check` says so. `update` writes the lock again without it, and touches no lock that never had it."""
    resolver.update(tiny, "*")
    quartz = contents(tiny)[QUARTZ_39]
    project = edit("jupyter: [board, jupyter]", "jupyter: [board]")
    lines = [f"{path}: no cell has the component jupyter" for path in paths(*GROUPS[:-1])]
    assert stale_lines(project, "*") == lines
    assert resolver.update(project, "*") == paths(*GROUPS[:-1])
    for group in GROUPS[:-1]:
        lock = GROUP_LOCKS.read(tiny.root, group)
        assert lock is not None
        assert list(lock.components) == ["python", project.groups[group][0].framework, "board"]
    assert contents(tiny)[QUARTZ_39] == quartz, "it never had the component"
    assert resolver.update(project, "*") == []


def test_the_present_lock_is_kept_unless_upgraded(tiny: Project, edit: Edit, resolver: FakeResolver) -> None:
    present = write(tiny, LOCKED, "8")
    project = edit("packages: [notebook]", "packages: [notebook>=2]")
    resolver.update(project, LOCKED, OLD_39)
    assert resolver.present == {OLD_39: None, LOCKED: present}
    assert resolver.update(project, LOCKED, upgrade=True) == paths(LOCKED)
    assert resolver.present == {LOCKED: None}


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe"], ids=["empty", "cut short", "not UTF-8"])
def test_a_damaged_lock_is_resolved_again(tiny: Project, resolver: FakeResolver, damage: bytes) -> None:
    (tiny.root / GROUP_LOCKS.path(LOCKED)).write_bytes(damage)
    assert resolver.update(tiny, f"{LOCKED}-board") == paths(LOCKED)
    assert resolver.present == {LOCKED: None}
    assert GROUP_LOCKS.read(tiny.root, LOCKED) is not None


def test_a_group_prefers_the_versions_of_its_cuda_and_its_python(tiny: Project, resolver: FakeResolver) -> None:
    """Wherever it is in the matrix. The first of several groups counts."""
    for number, group in enumerate(GROUPS[:-1], start=1):
        write(tiny, group, str(number))
    resolver.update(tiny, "*")
    first_of_python, first_of_cuda = "1", "3"
    assert resolver.preferred == {QUARTZ_39: dict.fromkeys(NO_CUDA, first_of_python) | {CUDA: first_of_cuda}}
    (tiny.root / GROUP_LOCKS.path(OLD_39)).unlink()
    (tiny.root / GROUP_LOCKS.path(LOCKED_QUARTZ)).unlink()
    resolver.update(tiny, "*")
    assert resolver.preferred == {
        OLD_39: dict.fromkeys(NO_CUDA, "3") | {CUDA: "2"},
        LOCKED_QUARTZ: dict.fromkeys(WHEELS, "2"),
    }


def test_a_group_on_a_cuda_and_a_python_of_its_own_prefers_nothing(tiny: Project, resolver: FakeResolver) -> None:
    (tiny.root / GROUP_LOCKS.path(LOCKED)).unlink()
    write(tiny, LOCKED_QUARTZ, "8")
    resolver.update(tiny, CU1210_39)
    assert resolver.preferred == {CU1210_39: {}}


def test_an_upgrade_prefers_only_what_the_same_upgrade_has_resolved(tiny: Project, resolver: FakeResolver) -> None:
    """Old versions of the chosen groups do not count, so all move to the new ones together."""
    for group in GROUPS:
        write(tiny, group, "8")
    resolver.newest = "10"
    assert resolver.update(tiny, "*", upgrade=True) == paths(*GROUPS)
    assert resolver.preferred == {
        OLD_39: {},
        CU129_311: {CUDA: "10"},
        CU1210_39: dict.fromkeys(NO_CUDA, "10"),
        LOCKED: dict.fromkeys(WHEELS, "10"),
        LOCKED_QUARTZ: dict.fromkeys(WHEELS, "10"),
        QUARTZ_39: dict.fromkeys(WHEELS, "10"),
    }


def test_groups_that_stay_count_more_than_those_resolved_before(
    tiny: Project, edit: Edit, resolver: FakeResolver
) -> None:
    write(tiny, OLD_39, "7")
    for group in (LOCKED, LOCKED_QUARTZ):
        write(tiny, group, "8")
    project = edit("release: 1.9.2", "release: 1.9.3")
    resolver.update(project, OLD_39, CU129_311)
    lock = GROUP_LOCKS.read(tiny.root, OLD_39)
    assert lock is not None
    assert lock.versions == dict.fromkeys(WHEELS, "7")
    assert resolver.preferred == {OLD_39: {CUDA: "8"}, CU129_311: dict.fromkeys(WHEELS, "8")}


def test_stale_and_failed_locks_of_other_groups_are_not_preferred(
    tiny: Project, edit: Edit, resolver: FakeResolver
) -> None:
    for number, group in enumerate(GROUPS, start=1):
        write(tiny, group, str(number))
    project = edit("packages: [notebook]", "packages: [notebook>=2]")  # QUARTZ_39 alone does not have it
    resolver.broken = frozenset({CU129_311})
    with pytest.raises(IncompleteError):
        resolver.update(project, "*")
    assert resolver.preferred == {
        OLD_39: dict.fromkeys(NO_CUDA, "6"),
        CU129_311: {CUDA: "1"},
        CU1210_39: dict.fromkeys(WHEELS, "6"),
        LOCKED: {CUDA: "6"},
        LOCKED_QUARTZ: dict.fromkeys(NO_CUDA, "4") | {CUDA: "1"},
    }


def test_old_and_new_versions_are_shown(tiny: Project, resolver: FakeResolver) -> None:
    resolver.update(tiny, "*", upgrade=True)
    assert resolver.update(tiny, "*", upgrade=True) == []
    assert resolver.said == [], "nothing changed"
    resolver.newest = "10"
    (tiny.root / GROUP_LOCKS.path(OLD_39)).unlink()
    assert resolver.update(tiny, "*", upgrade=True) == paths(*GROUPS)
    groups = f"{', '.join(GROUPS[1:4])} and 2 more"
    assert resolver.said == [
        f"{OLD_39}: new, 3 packages",
        f"nvidia-ml-py 9 -> 10 ({groups})",
        f"{CUDA} 9 -> 10 ({groups})",
        f"triton 9 -> 10 ({groups})",
    ]


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
    assert resolver.resolved == [OLD_39, CU129_311, CU1210_39, QUARTZ_39]
    assert [line.partition(":")[0] for line in resolver.said] == [CU129_311, QUARTZ_39]
    assert contents(tiny).keys() == {*GROUPS, "gone"} - {OLD_39, CU1210_39}, "unused locks are kept after a failure"


def test_an_upgrade_that_fails_in_part_writes_the_groups_that_could_be_resolved(
    tiny: Project, resolver: FakeResolver
) -> None:
    for group in GROUPS:
        write(tiny, group, "8")
    before = contents(tiny)
    resolver.broken = frozenset({LOCKED})
    resolver.newest = "10"
    with pytest.raises(IncompleteError):
        resolver.update(tiny, "*-cu1210-*", upgrade=True)
    after = contents(tiny)
    assert {group for group in GROUPS if after[group] != before[group]} == {CU1210_39, QUARTZ_39}


def test_an_update_in_which_everything_failed_has_the_error_of_the_first(tiny: Project, resolver: FakeResolver) -> None:
    """Locks that were current already do not count as done."""
    resolver.broken = frozenset({OLD_39, CU1210_39})
    with pytest.raises(LockError):
        resolver.update(tiny, OLD_39, CU1210_39, LOCKED)


def test_an_upgrade_of_a_framework_prefers_no_versions_of_others(tiny: Project, resolver: FakeResolver) -> None:
    """Frameworks that are upgraded one after the other would keep each other's versions forever."""
    for group in GROUPS:
        write(tiny, group, "8")
    resolver.newest = "10"
    assert resolver.update(tiny, "quartz", upgrade=True) == paths(LOCKED_QUARTZ, QUARTZ_39)
    assert resolver.preferred == {LOCKED_QUARTZ: {}, QUARTZ_39: {}}


# ---- one package


def test_one_package_is_chosen_again_in_the_groups_that_have_it_and_others_keep_their_versions(
    tiny: Project, resolver: FakeResolver
) -> None:
    for group in GROUPS:
        write(tiny, group, "8")
    resolver.newest = "10"
    assert resolver.update(tiny, f"{LOCKED}*", packages=["Triton"]) == paths(LOCKED)
    lock = GROUP_LOCKS.read(tiny.root, LOCKED)
    assert lock is not None
    assert lock.versions == {"nvidia-ml-py": "8", CUDA: "8", "triton": "10"}
    assert resolver.present == {LOCKED: None}, "a lock that is kept would keep the version too"


def test_groups_share_the_new_version_of_one_package(tiny: Project, resolver: FakeResolver) -> None:
    """And never the old one of a group that is not chosen: its file may have been deleted."""
    for group in GROUPS:
        write(tiny, group, "8")
    resolver.newest = "10"
    resolver.update(tiny, "*-py311*", packages=["triton"])
    assert [preferred.get("triton") for preferred in resolver.preferred.values()] == [None, "10", "10"]
    assert {preferred["nvidia-ml-py"] for preferred in resolver.preferred.values()} == {"8"}


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


def test_an_unknown_package_is_a_usage_error(tiny: Project, resolver: FakeResolver) -> None:
    before = contents(tiny)
    write(tiny, LOCKED, "8")
    with pytest.raises(UsageError, match=r"^no lock of these cells has the package tritn; did you mean 'triton'\?$"):
        resolver.update(tiny, LOCKED, packages=["tritn"])
    assert resolver.resolved == []
    assert contents(tiny).keys() == before.keys()


def test_a_group_without_a_lock_does_not_get_the_version_that_others_have(
    tiny: Project, resolver: FakeResolver
) -> None:
    """The release may have been withdrawn, and the hint for the new group names it."""
    for group in GROUPS[1:]:
        write(tiny, group, "8")
    (tiny.root / GROUP_LOCKS.path(OLD_39)).unlink(missing_ok=True)
    resolver.newest = "10"
    assert resolver.update(tiny, OLD_39, packages=["triton"]) == paths(OLD_39)
    assert resolver.preferred == {OLD_39: {"nvidia-ml-py": "8", CUDA: "8"}}


# ---- uv's Pythons

# With the packages of Debian's Python: the operating systems are locked.
BY_UV = '"3.11": {debian: newbird, uv: 3.11.15, apt: [python3, python3-venv]}'
PYTHON_LOCK = "locks/python-3.11.15.json"


def update_pythons(project: Project, unknown: str = "") -> locking.Updated:
    return FakeResolver().run(project, ["*"], builds=locks.FakeBuilds(unknown))


def test_the_build_of_uv_is_locked_once(edit: Edit) -> None:
    project = edit('"3.11": {debian: newbird}', BY_UV)
    assert f"{PYTHON_LOCK}: missing" in stale_lines(project)
    assert LOCKED not in {cell.id for cell in checks.current_cells(project)}
    updated = update_pythons(project)
    assert updated.error is None
    assert PYTHON_LOCK in updated.written
    assert "Python 3.11.15" in updated.done
    assert PYTHON_LOCKS.read(project.root, "3.11.15") == locks.python_lock_of("3.11.15")
    checks.check_locks(project, project.cells)
    assert update_pythons(project).written == ()

    (project.root / PYTHON_LOCK).write_text("{}")
    assert any(line.startswith(f"{PYTHON_LOCK} is damaged") for line in stale_lines(project))
    assert update_pythons(project).written == (PYTHON_LOCK,)

    project = edit(BY_UV, '"3.11": {debian: newbird}')
    assert stale_lines(project)[-1] == f"{PYTHON_LOCK}: belongs to no cell"
    assert update_pythons(project).written == (f"{PYTHON_LOCK} (removed: no cell needs it)",)


def test_a_python_that_uv_does_not_have_stops_nothing_else(edit: Edit) -> None:
    project = edit('"3.11": {debian: newbird}', BY_UV)
    updated = update_pythons(project, unknown="3.11.15")
    assert list(updated.failures) == ["Python 3.11.15"]
    assert isinstance(updated.error, IncompleteError)
    assert LOCKED_QUARTZ not in updated.failures
    assert OLD_39 in updated.done
