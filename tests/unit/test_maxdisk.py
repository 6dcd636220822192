"""Building within a limit of disk: what is freed, in which order, and what never is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from builder import assemble, build, load, maxdisk, plan, publish
from builder.errors import DiskError
from builder.host import Host
from builder.plan import Plan
from builder.project import Project
from builder.settings import CUDA_LABEL, PLAN_LABEL
from builder.store import Store
from builder.view import View
from builder.work import Work
from tests.unit.fakes import FakeEngine, MemoryConsole
from tests.unit.tiny_locks import LOCKED

GB = 1_000_000_000
KEPT: set[str] = set()  # what the store of these tests has
TAGS = [f"registry.example.test:5000/team/ember-cuda:{tag}" for tag in ("1.10", "1.9")]


class FullEngine(FakeEngine):
    """Its images take 10 GB each, its cache 3 GB."""

    cache = 3 * GB
    in_use = ""

    def disk_bytes(self) -> int:
        return self.cache + 10 * GB * len({info.id for info in self.known.values()})

    def prune_cache(self) -> int:
        self.cache = 0
        return super().prune_cache()

    def remove_image(self, reference: str) -> bool:
        super().remove_image(reference)
        found = self.known.pop(reference, None)
        if found is None or not found.tags:
            self.known = {name: info for name, info in self.known.items() if info.id != reference}
        return True

    def used_images(self) -> set[str]:
        return {self.in_use}

    def chains(self) -> set[tuple[str, ...]]:
        return set()


@pytest.fixture
def made(tiny: Project) -> Plan:
    return plan.make(tiny, tiny.select(LOCKED))


@pytest.fixture
def work(tiny: Project) -> Work:
    return Work(engine=FullEngine(), project=tiny, host=Host(), view=View(MemoryConsole()))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(maxdisk, "_need", lambda *_: 5 * GB)
    monkeypatch.setattr(load, "image_ids", lambda _: KEPT)
    KEPT.clear()
    found = Store(tmp_path / "store")
    found.prepare()
    return found


def have(work: Work, name: str, cuda: str, *, ours: bool = True, kept: bool = True) -> str:
    assert isinstance(work.engine, FakeEngine)
    image_id = work.engine.have(name, labels={PLAN_LABEL: name, CUDA_LABEL: cuda, "gpu-images.cell": name})
    if ours:
        record = build.record(work.project.state, name.replace("/", "-"))
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(image_id + "\n", encoding="ascii")
    if kept:
        KEPT.add(image_id)
    return image_id


def removed(work: Work) -> list[str]:
    assert isinstance(work.engine, FakeEngine)
    return [call for call in work.engine.calls if call.startswith("remove ")]


def test_parts_are_groups_and_those_of_one_cuda_lie_together(made: Plan) -> None:
    mixed = Plan(images=(made.images[0], made.images[2], made.images[1], made.images[3]))
    parts = maxdisk.parts(mixed)
    assert [{image.cell.group for image in part.images} for part in parts] == [
        {"em-1.10-cu1210-py311"},
        {"qz-0.5-cu129-py311"},
    ]
    assert sorted(image.id for part in parts for image in part.images) == sorted(image.id for image in made.images)

    other = replace(made.images[2], cell=replace(made.images[2].cell, python="3.9"))
    cudas = [part.images[0].cell.cuda for part in maxdisk.parts(Plan(images=(made.images[2], made.images[0], other)))]
    assert cudas == ["12.9", "12.9", "12.10"]


def test_nothing_is_freed_where_there_is_room(work: Work, store: Store, made: Plan) -> None:
    have(work, TAGS[0], "12.9")
    maxdisk.make_room(work, store, made, 20 * GB)
    assert isinstance(work.engine, FakeEngine)
    assert work.engine.calls == []


def test_the_cache_goes_last_for_others_use_it_too(work: Work, store: Store, made: Plan) -> None:
    have(work, TAGS[0], "12.9")
    maxdisk.make_room(work, store, made, 6 * GB)  # 5, and 3 of cache
    assert isinstance(work.engine, FakeEngine)
    assert work.engine.calls[0] == f"remove {TAGS[0]}"
    assert work.engine.calls[-1] == "prune"


def test_images_of_another_cuda_go_before_those_whose_layers_are_wanted(work: Work, store: Store, made: Plan) -> None:
    part = Plan(images=made.images[2:])
    assert {image.cell.cuda for image in part.images} == {"12.9"}
    have(work, TAGS[0], "12.9")
    have(work, TAGS[1], "12.10")
    maxdisk.make_room(work, store, part, 19 * GB)
    assert f"remove {TAGS[1]}" in removed(work)
    assert f"remove {TAGS[0]}" not in removed(work)


def test_what_cannot_be_loaded_again_or_is_somebodys_stays(work: Work, store: Store, made: Plan) -> None:
    have(work, TAGS[0], "12.10", ours=False)
    with pytest.raises(DiskError, match=r"more than --max-disk 9.0 GB"):
        maxdisk.make_room(work, store, made, 9 * GB)
    assert removed(work) == []


def test_what_the_store_lost_stays(work: Work, store: Store, made: Plan) -> None:
    have(work, TAGS[0], "12.10", kept=False)
    with pytest.raises(DiskError):
        maxdisk.make_room(work, store, made, 9 * GB)
    assert removed(work) == []


def test_what_a_container_uses_stays(work: Work, store: Store, made: Plan) -> None:
    assert isinstance(work.engine, FullEngine)
    work.engine.in_use = have(work, TAGS[0], "12.10")
    with pytest.raises(DiskError):
        maxdisk.make_room(work, store, made, 9 * GB)
    assert removed(work) == []


def test_what_somebody_gave_a_name_of_their_own_stays(work: Work, store: Store, made: Plan) -> None:
    have(work, "mine/for-the-course:1", "12.10")
    with pytest.raises(DiskError):
        maxdisk.make_room(work, store, made, 9 * GB)
    assert removed(work) == []


@pytest.mark.parametrize(
    ("found", "fault", "kept"), [(False, "", False), (True, "not tested", False), (True, "", True)]
)
def test_what_the_store_keeps_is_not_made_again(
    work: Work, store: Store, made: Plan, monkeypatch: pytest.MonkeyPatch, found: bool, fault: str, kept: bool
) -> None:
    answer: Callable[..., object] = lambda *_: object() if found else None  # noqa: E731
    monkeypatch.setattr(assemble, "find", answer)
    monkeypatch.setattr(publish, "fault", lambda *_: fault)
    assert bool(maxdisk.rest(work, store, made, test=True).images) is not kept
    assert bool(maxdisk.rest(work, store, made, test=False).images) is not found
