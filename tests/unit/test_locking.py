"""The lock step, with a resolver that needs no index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from builder import lock, locking
from builder.cells import Cell
from builder.errors import LockError, StaleError
from builder.host import Host
from builder.lock import Lock
from builder.project import Project
from tests.unit import tiny_locks

Edit = Callable[[str, str], Project]
CELL = "em-1.10-cu1210-py311"
GROUP = "em-1.10-cu1210-py311"
SAME_CUDA = ["em-1.10-cu1210-py39", GROUP, "qz-0.5-cu1210-py39"]  # in the order of the matrix


class FakeResolver:
    """Gives a cell a lock with pip and one of CUDA's wheels, but for groups that are broken.

    `known` and `together` are what each group was asked with; versions that are known are kept, others are `newest`.
    """

    known: ClassVar[dict[str, dict[str, str]]] = {}
    together: ClassVar[dict[str, list[str]]] = {}
    broken: frozenset[str] = frozenset()
    newest: str = "9"

    def __init__(self, project: Project, *_: object, **__: object) -> None:
        self.matrix = project.matrix

    def resolve(self, group: Sequence[Cell], together: Sequence[Cell], known: Mapping[str, str]) -> list[Lock]:
        name = group[0].group
        assert name not in self.known, "a group is resolved once"
        self.known[name] = dict(known)
        self.together[name] = sorted({cell.group for cell in together})
        if name in self.broken:
            raise LockError(f"{group[0].id}: cannot be resolved", hint="change it")
        wheels = [("cuda", "nvidia-sums"), ("python", "pip")]
        return [
            Lock(
                cell=cell.id,
                inputs=lock.inputs(self.matrix, cell, together),
                requirements=lock.requirements(self.matrix, cell),
                wheels=tuple(tiny_locks.wheel(part, name, known.get(name, self.newest), 1) for part, name in wheels),
            )
            for cell in group
        ]


@pytest.fixture(autouse=True)
def resolver(monkeypatch: pytest.MonkeyPatch) -> type[FakeResolver]:
    class Fresh(FakeResolver):
        known: ClassVar[dict[str, dict[str, str]]] = {}
        together: ClassVar[dict[str, list[str]]] = {}

    monkeypatch.setattr(locking, "Resolver", Fresh)
    return Fresh


def update(
    project: Project, *wanted: str, upgrade: bool = False, say: Callable[[str], None] = lambda _: None
) -> list[str]:
    locking.Resolver.known.clear()  # type: ignore[attr-defined]
    return locking.update(project, project.select(wanted), Host(), upgrade=upgrade, say=say)


def test_check(tiny: Project) -> None:
    locking.check(tiny, tiny.select(tiny_locks.LOCKED))
    with pytest.raises(StaleError) as caught:
        locking.check(tiny, tiny.select([f"{CELL}*"]))
    assert str(caught.value).splitlines()[1:] == [f"  locks/{CELL}-board.json: missing"]
    assert caught.value.hint == "Resolve again: builder lock"


def test_check_names_what_is_stale_and_what_is_stray(tiny: Project, edit: Edit) -> None:
    (tiny.root / "locks/gone.json").write_text("{}")
    project = edit("packages: [notebook]", "packages: [notebook>=2]")
    with pytest.raises(StaleError) as caught:
        locking.check(project, project.select([CELL]))
    assert str(caught.value).splitlines()[1:] == [
        f"  locks/{CELL}.json: matrix.yaml asks for something else now",
        "  locks/gone.json: belongs to no cell",
    ]


def test_update_writes_whole_groups_once(tiny: Project, resolver: type[FakeResolver]) -> None:
    (tiny.root / "locks/gone.json").write_text("{}")
    changed = update(tiny, CELL, f"{CELL}-jupyter")
    assert list(resolver.known) == SAME_CUDA
    assert changed == [
        *(f"locks/{cell.id}.json" for group in SAME_CUDA for cell in tiny.groups[group]),
        "locks/gone.json (removed: no such cell)",
    ]
    assert not (tiny.root / "locks/gone.json").exists()
    locking.check(tiny, tiny.select(["*-cu1210-*"]))
    assert update(tiny, CELL) == []


def test_locks_of_another_cuda_are_left_alone(tiny: Project) -> None:
    others = {path: path.read_bytes() for path in (tiny.root / "locks").glob("*-cu129-*.json")}
    assert others
    update(tiny, CELL, upgrade=True)
    assert {path: path.read_bytes() for path in (tiny.root / "locks").glob("*-cu129-*.json")} == others


def test_every_group_is_told_what_it_is_resolved_with(tiny: Project, resolver: type[FakeResolver]) -> None:
    update(tiny, "*")
    old, new = "em-1.10-cu129-py311", "em-1.10-cu1210-py39"
    assert resolver.together == {
        "em-1.9-cu129-py39": ["em-1.9-cu129-py39"],
        GROUP: [GROUP],
        old: [old, "qz-0.5-cu129-py311"],
        "qz-0.5-cu129-py311": [old, "qz-0.5-cu129-py311"],
        new: [new, "qz-0.5-cu1210-py39"],
        "qz-0.5-cu1210-py39": [new, "qz-0.5-cu1210-py39"],
    }


def test_present_versions_are_kept_unless_upgraded(tiny: Project, edit: Edit, resolver: type[FakeResolver]) -> None:
    update(tiny, CELL, upgrade=True)
    first, *others = SAME_CUDA
    assert resolver.known[first] == {}
    resolver.newest = "10"
    edit("packages: [notebook]", "packages: [notebook>=2]")
    project = Project(tiny.root)
    update(project, CELL)
    assert list(resolver.known) == [first, GROUP, others[-1]]
    assert list(resolver.known.values()) == [{"nvidia-sums": "9", "pip": "9"}] * 3
    update(project, CELL, upgrade=True)
    assert resolver.known == {first: {}} | {group: {"nvidia-sums": "10"} for group in others}


def test_locks_that_are_what_is_asked_for_are_left_as_they_are(
    tiny: Project, edit: Edit, resolver: type[FakeResolver]
) -> None:
    """A change of one framework on one Python does not move the versions of another."""
    update(tiny, "*", upgrade=True)
    update(tiny, "*")
    assert resolver.known == {}, "nothing is asked for"
    before = {path: path.read_bytes() for path in (tiny.root / "locks").glob("*.json")}
    resolver.newest = "10"
    lock.path(tiny.root, f"{CELL}-board").unlink()
    assert update(tiny, "*") == [f"locks/{CELL}-board.json"]
    assert list(resolver.known) == [GROUP], "a group is resolved as a whole"
    assert {path: path.read_bytes() for path in before} == before


def test_a_new_group_takes_the_cuda_of_those_that_stay(tiny: Project, resolver: type[FakeResolver]) -> None:
    """Wherever it stands in the matrix: else there would be two sets, and the second never be mended."""
    update(tiny, "*", upgrade=True)
    for cell in tiny.together[SAME_CUDA[0]]:  # all of its Python, so that none of it is known
        lock.path(tiny.root, cell.id).unlink()
    resolver.newest = "10"
    update(tiny, "*")
    assert list(resolver.known.values()) == [{"nvidia-sums": "9"}] * 2


def test_versions_of_cuda_are_shared_between_pythons(tiny: Project, resolver: type[FakeResolver]) -> None:
    """An upgrade begins without versions; of what the first Python got, the second is to have CUDA's."""
    update(tiny, "*", upgrade=True)
    firsts = {"em-1.9-cu129-py39", SAME_CUDA[0]}
    assert {group for group, known in resolver.known.items() if not known} == firsts
    assert [known for group, known in resolver.known.items() if group not in firsts] == [{"nvidia-sums": "9"}] * 4


def test_what_the_first_python_got_counts_more_than_the_present_locks(
    tiny: Project, edit: Edit, resolver: type[FakeResolver]
) -> None:
    """Else two Pythons that once differed would differ for ever."""
    update(tiny, "*", upgrade=True)
    path = lock.path(tiny.root, "em-1.10-cu1210-py39")
    here = lock.read(tiny.root, path.stem)
    assert here is not None
    other = tiny_locks.wheel("cuda", "nvidia-sums", "10", 1)
    path.write_text(lock.dump(replace(here, wheels=(other, *here.wheels[1:]))))
    for suffix in ("-board", "-jupyter"):
        lock.path(tiny.root, f"em-1.10-cu1210-py39{suffix}").unlink()
    lock.path(tiny.root, "qz-0.5-cu1210-py39-board").unlink()
    edit("packages: [notebook]", "packages: [notebook>=2]")
    update(Project(tiny.root), GROUP)
    assert [known["nvidia-sums"] for known in resolver.known.values()] == ["10"] * len(SAME_CUDA)


def test_old_and_new_versions_are_told_before_anything_is_written(
    tiny: Project, resolver: type[FakeResolver], monkeypatch: pytest.MonkeyPatch
) -> None:
    update(tiny, CELL, upgrade=True)
    told: list[str] = []
    update(tiny, CELL, upgrade=True, say=told.append)
    assert told == [], "nothing changed"
    resolver.newest = "10"
    for cell in tiny.groups[SAME_CUDA[0]]:
        lock.path(tiny.root, cell.id).unlink()
    monkeypatch.setattr("builder.atomic.write_text", lambda path, _: told.append(f"write {path.stem}"))
    update(tiny, CELL, upgrade=True, say=told.append)
    new, kept = (
        [cell.id for group in groups for cell in tiny.groups[group]] for groups in (SAME_CUDA[:1], SAME_CUDA[1:])
    )
    assert told == [
        *(f"{cell}: new, 2 packages, 2 B" for cell in new),
        f"{', '.join(kept)}:",
        "  nvidia-sums 9 -> 10",
        "  pip 9 -> 10",
        *(f"write {cell}" for cell in (*new, *kept)),
    ]


def test_what_could_be_resolved_is_told_and_written_though_something_failed(
    tiny: Project, resolver: type[FakeResolver]
) -> None:
    resolver.broken = frozenset({GROUP})
    told: list[str] = []
    with pytest.raises(LockError, match=f"^{GROUP}: cannot be resolved"):
        update(tiny, "*", say=told.append)
    assert any(line.startswith("em-1.9-cu129-py39: new, ") for line in told)
    assert not [line for line in told if GROUP in line]
    assert lock.read(tiny.root, "em-1.9-cu129-py39") is not None


def test_failures_do_not_stop_other_groups(tiny: Project, resolver: type[FakeResolver]) -> None:
    resolver.broken = frozenset({"em-1.9-cu129-py39", "qz-0.5-cu129-py311"})
    with pytest.raises(LockError) as caught:
        update(tiny, "*")
    assert "em-1.9-cu129-py39: cannot be resolved" in str(caught.value)
    assert "qz-0.5-cu129-py311: cannot be resolved" in str(caught.value)
    assert set(resolver.known) == set(tiny.groups)
    assert lock.read(tiny.root, "qz-0.5-cu1210-py39-board") is not None


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe"], ids=["empty", "cut short", "not UTF-8"])
def test_a_damaged_lock_is_made_again(tiny: Project, damage: bytes) -> None:
    path = lock.path(tiny.root, CELL)
    path.write_bytes(damage)
    assert f"locks/{CELL}.json" in update(tiny, CELL)
    assert lock.read(tiny.root, CELL) is not None


def test_an_upgrade_that_fails_in_part_writes_nothing_of_that_cuda(tiny: Project, resolver: type[FakeResolver]) -> None:
    """Else some images of a CUDA would be on newer wheels of it than the others."""
    update(tiny, CELL)
    before = {path: path.read_bytes() for path in (tiny.root / "locks").glob("*.json")}
    resolver.broken = frozenset({SAME_CUDA[-1]})
    resolver.newest = "10"
    said: list[str] = []
    with pytest.raises(LockError):
        update(tiny, CELL, upgrade=True, say=said.append)
    assert {path: path.read_bytes() for path in (tiny.root / "locks").glob("*.json")} == before
    assert "nothing is written of a CUDA of which not all could be resolved" in said


def test_several_versions_of_a_cuda_wheel_are_told(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    class Apart(FakeResolver):
        def resolve(self, group: Sequence[Cell], together: Sequence[Cell], known: Mapping[str, str]) -> list[Lock]:
            self.newest = "1" if group[0].framework == "quartz" else "2"
            return super().resolve(group, together, {})

    monkeypatch.setattr(locking, "Resolver", Apart)
    said: list[str] = []
    update(tiny, CELL, say=said.append)
    assert [line for line in said if line.startswith("CUDA 12.10: ")]
    assert "in 2 versions: 1, 2" in said[-1]
