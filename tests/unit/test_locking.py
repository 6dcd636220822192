"""The lock step, with a resolver that needs no index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


class FakeResolver:
    """Gives a cell a lock without wheels, but for groups that are broken."""

    known: ClassVar[Mapping[str, str]] = {}
    asked: ClassVar[list[str]] = []
    broken: frozenset[str] = frozenset()

    def __init__(self, project: Project, *_: object, **__: object) -> None:
        self.matrix = project.matrix

    def resolve(self, group: Sequence[Cell], known: Mapping[str, str]) -> list[Lock]:
        type(self).known = dict(known)
        type(self).asked.append(group[0].group)
        if group[0].group in self.broken:
            raise LockError(f"{group[0].id}: cannot be resolved", hint="change it")
        return [
            Lock(
                cell=cell.id,
                inputs=lock.inputs(self.matrix, cell, group),
                requirements=lock.requirements(self.matrix, cell),
                wheels=(tiny_locks.wheel("python", "pip", "9", 1),),
            )
            for cell in group
        ]


@pytest.fixture(autouse=True)
def resolver(monkeypatch: pytest.MonkeyPatch) -> type[FakeResolver]:
    class Fresh(FakeResolver):
        asked: ClassVar[list[str]] = []

    monkeypatch.setattr(locking, "Resolver", Fresh)
    return Fresh


def update(project: Project, *wanted: str, upgrade: bool = False) -> list[str]:
    return locking.update(project, project.select(wanted), Host(), upgrade=upgrade, say=lambda _: None)


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
    assert resolver.asked == [GROUP]
    assert changed == [
        *(f"locks/{GROUP}{suffix}.json" for suffix in ("", "-jupyter", "-board")),
        "locks/gone.json (removed: no such cell)",
    ]
    assert not (tiny.root / "locks/gone.json").exists()
    locking.check(tiny, tiny.select([f"{GROUP}*"]))
    assert update(tiny, CELL) == []


def test_present_versions_are_kept_unless_upgraded(tiny: Project, resolver: type[FakeResolver]) -> None:
    update(tiny, CELL, upgrade=True)
    assert resolver.known == {}
    update(tiny, CELL)
    assert resolver.known == {"pip": "9"}


def test_failures_do_not_stop_other_groups(tiny: Project, resolver: type[FakeResolver]) -> None:
    resolver.broken = frozenset({"em-1.9-cu129-py39", "qz-0.5-cu129-py311"})
    with pytest.raises(LockError) as caught:
        update(tiny, "*")
    assert "em-1.9-cu129-py39: cannot be resolved" in str(caught.value)
    assert "qz-0.5-cu129-py311: cannot be resolved" in str(caught.value)
    assert len(resolver.asked) == len(tiny.groups)
    assert lock.read(tiny.root, "qz-0.5-cu1210-py39-board") is not None


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe"], ids=["empty", "cut short", "not UTF-8"])
def test_a_damaged_lock_is_made_again(tiny: Project, damage: bytes) -> None:
    path = lock.path(tiny.root, CELL)
    path.write_bytes(damage)
    assert f"locks/{CELL}.json" in update(tiny, CELL)
    assert lock.read(tiny.root, CELL) is not None
