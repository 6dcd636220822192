"""How much disk images need; and building within a limit: what is removed, in which order, and what never is."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from builder.build import disk
from builder.build.work import RunContext, clean, record_built
from builder.common.console import View
from builder.common.errors import DiskError
from builder.index.host import Host
from builder.layers import images as stored_image
from builder.layers.blobs import MANIFEST_TYPE, Descriptor
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.matrix.tags import CUDA_LABEL, PLAN_LABEL
from builder.plan import plan
from builder.plan.plan import Plan
from builder.registry import evidence
from tests.fakes.engine import FakeEngine, MemoryConsole
from tests.fakes.locks import LOCKED
from tests.fakes.suites import passing_evidence, write_tests

GB = 1_000_000_000
Usage = namedtuple("Usage", "total used free")
KB = 1_000  # the files of an empty store have some hundred bytes
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
        image = self.known.pop(reference, None)
        if image is None or not image.tags:
            self.known = {name: info for name, info in self.known.items() if info.id != reference}
        return True

    def used_images(self) -> set[str]:
        return {self.in_use}

    def cache_bytes(self) -> int:
        return self.cache

    def layers(self) -> dict[str, dict[tuple[str, ...], int]]:
        return {info.id: {(info.id,): 10 * GB} for info in self.known.values()}


@dataclass
class DiskBench:
    """The plan of all locked images, each group of which needs 5 GB; `stored` are ids of images in the store."""

    project: Project
    store: Store
    engine: FullEngine = field(default_factory=FullEngine)
    stored: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.work = RunContext(engine=self.engine, project=self.project, host=Host(), view=View(MemoryConsole()))
        self.plan = plan.make_plan(self.project, self.project.select(LOCKED))

    def add_image(self, name: str, cuda: str, *, ours: bool = True, stored: bool = True) -> str:
        """Puts an image into the engine; returns its id."""
        image_id = self.engine.add_image(name, labels={PLAN_LABEL: name, CUDA_LABEL: cuda, "gpu-images.cell": name})
        if ours:
            record_built(self.project.state, name.replace("/", "-"), image_id)
        if stored:
            self.stored.add(image_id)
        return image_id

    def make_room(self, limit: int, *, prune_cache: bool = False, plan: Plan | None = None) -> None:
        disk.make_room(self.work, self.store, plan or self.plan, limit, prune_cache=prune_cache)


@pytest.fixture
def bench(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskBench:
    store = Store(tmp_path / "store")
    store.prepare()
    bench = DiskBench(tiny, store)
    monkeypatch.setattr(disk, "peak_bytes", lambda *_: 5 * GB)
    monkeypatch.setattr(stored_image, "image_ids", lambda _: bench.stored)
    return bench


def test_a_dockerfile_needs_room_for_shared_wheels_once(bench: DiskBench) -> None:
    [first, second] = [Plan(images=bench.plan.images[:count]) for count in (1, 2)]
    needed = disk.dockerfile_bytes(first, "overlay2")
    assert needed == int(first.unique_bytes * 3.6) + disk.SPARE
    assert disk.dockerfile_bytes(second, "overlay2") < needed * 2 - disk.SPARE
    cached = disk.dockerfile_bytes(first, "overlay2", cached=first.unique_bytes)
    assert cached == int(first.unique_bytes * 2.6) + disk.SPARE
    assert disk.dockerfile_bytes(first, "overlay2", cached=GB) == disk.SPARE


def test_a_store_of_containerd_keeps_the_compressed_layers_too(bench: DiskBench) -> None:
    first = Plan(images=bench.plan.images[:1])
    assert disk.dockerfile_bytes(first, "containerd") == int(first.unique_bytes * 4.6) + disk.SPARE
    assert disk.download_bytes(1000, "overlay2", is_shared=False) == 1800 + disk.SPARE
    assert disk.download_bytes(1000, "containerd", is_shared=False) == 2800 + disk.SPARE
    assert disk.download_bytes(1000, "containerd", is_shared=True) == 3800 + disk.SPARE


def test_groups_of_one_cuda_follow_each_other(bench: DiskBench) -> None:
    images = bench.plan.images
    groups = disk.groups(Plan(images=(images[0], images[2], images[1], images[3])))
    assert [{image.cell.group for image in group.images} for group in groups] == [
        {"em-1.10-cu1210-py311"},
        {"qz-0.5-cu129-py311"},
    ]
    assert sorted(image.id for group in groups for image in group.images) == sorted(image.id for image in images)

    other = replace(images[2], cell=replace(images[2].cell, python="3.9"))
    groups = disk.groups(Plan(images=(images[2], images[0], other)))
    assert [group.images[0].cell.cuda for group in groups] == ["12.9", "12.9", "12.10"]


def test_nothing_is_removed_if_there_is_room(bench: DiskBench) -> None:
    bench.add_image(TAGS[0], "12.9")
    bench.make_room(20 * GB)
    assert bench.engine.calls == []


def test_a_limit_of_what_is_free(bench: DiskBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.add_image(TAGS[0], "12.9")
    taken = bench.store.size() + bench.engine.disk_bytes()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 9 * GB if path == bench.store.root else 7 * GB))
    assert disk.free_limit(bench.work, bench.store) == taken + 9 * GB - disk.SPARE
    local = replace(bench.engine.info(), is_local=True)
    monkeypatch.setattr(bench.engine, "info", lambda: local)
    assert disk.free_limit(bench.work, bench.store) == taken + 7 * GB - disk.SPARE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1))
    assert disk.free_limit(bench.work, bench.store) == taken


def test_the_build_cache_is_emptied_last_and_only_on_request(bench: DiskBench) -> None:
    bench.add_image(TAGS[0], "12.9")
    with pytest.raises(DiskError, match=r"12\.0 GB too small: .* and only 10\.0 GB of it can be freed") as caught:
        bench.make_room(6 * GB)  # 5, and 3 of cache
    assert "--prune-cache also empties the build cache, 3.0 GB" in caught.value.hint
    assert bench.engine.calls == []
    bench.make_room(6 * GB, prune_cache=True)
    assert bench.engine.calls[0] == f"remove {TAGS[0]}"
    assert bench.engine.calls[-1] == "prune"


def test_nothing_is_removed_if_that_would_not_be_enough(bench: DiskBench) -> None:
    """`--max-disk 1GB` removed every image and emptied the build cache, and then failed for lack of room."""
    bench.add_image(TAGS[0], "12.9")
    bench.add_image(TAGS[1], "12.10")
    with pytest.raises(DiskError, match=r"--max-disk 1\.0 GB is 27\.0 GB too small") as caught:
        bench.make_room(1 * GB, prune_cache=True)
    assert "--prune-cache" not in caught.value.hint
    assert bench.engine.calls == []


def test_layers_that_must_be_loaded_again_are_not_counted_as_freed(
    bench: DiskBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images were removed for the next ones, which then needed their layers again, and there was no room after all."""
    ids = {bench.add_image(TAGS[0], "12.9"), bench.add_image(TAGS[1], "12.9")}
    monkeypatch.setattr(disk, "peak_bytes", lambda _, __, diff_ids: 25 * GB - 10 * GB * len(ids & diff_ids))
    with pytest.raises(DiskError, match="is 3\\.0 GB too small"):
        bench.make_room(25 * GB + KB)
    assert bench.engine.calls == []
    bench.make_room(25 * GB + KB, prune_cache=True)


def test_layers_that_another_image_has_are_not_counted_as_freed(
    bench: DiskBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = bench.add_image(TAGS[0], "12.9")
    layers = {ours: {("a",): 8 * GB, ("a", "b"): 2 * GB}, "sha256:other": {("a",): 8 * GB, ("a", "c"): 2 * GB}}
    monkeypatch.setattr(bench.engine, "layers", lambda: layers)
    with pytest.raises(DiskError, match=r"only 2\.0 GB of it can be freed"):
        bench.make_room(9 * GB)
    assert bench.engine.calls == []


def test_images_that_share_the_cuda_are_removed_last(bench: DiskBench) -> None:
    group = Plan(images=bench.plan.images[2:])
    assert {image.cell.cuda for image in group.images} == {"12.9"}
    bench.add_image(TAGS[0], "12.9")
    bench.add_image(TAGS[1], "12.10")
    bench.make_room(19 * GB, plan=group)
    assert f"remove {TAGS[1]}" in bench.engine.calls
    assert f"remove {TAGS[0]}" not in bench.engine.calls


KEPT: dict[str, Callable[[DiskBench], object]] = {
    "of another checkout": lambda bench: bench.add_image(TAGS[0], "12.10", ours=False),
    "not in the store": lambda bench: bench.add_image(TAGS[0], "12.10", stored=False),
    "used by a container": lambda bench: setattr(bench.engine, "in_use", bench.add_image(TAGS[0], "12.10")),
    "with a tag that is not ours": lambda bench: bench.add_image("mine/for-the-course:1", "12.10"),
}


@pytest.mark.parametrize("have", KEPT.values(), ids=KEPT.keys())
def test_images_that_are_never_removed(bench: DiskBench, have: Callable[[DiskBench], object]) -> None:
    have(bench)
    with pytest.raises(DiskError, match=r"--max-disk 9\.0 GB is 9\.0 GB too small"):
        bench.make_room(9 * GB)
    assert bench.engine.calls == []


@pytest.mark.parametrize(
    ("stored", "reason", "is_done"), [(False, "", False), (True, "not tested", False), (True, "", True)]
)
def test_only_outstanding_images_are_built(
    bench: DiskBench, monkeypatch: pytest.MonkeyPatch, stored: bool, reason: str, is_done: bool
) -> None:
    descriptor = Descriptor(media_type=MANIFEST_TYPE, digest="sha256:" + "a" * 64, size=1)
    image = Image(config=descriptor, manifest=descriptor, layers=())
    monkeypatch.setattr(stored_image, "find_stored_image", lambda *_: image if stored else None)
    bench.plan = Plan(images=bench.plan.images[:1])
    if not reason:
        [planned] = bench.plan.images
        write_tests(bench.project.root, planned.components)
        evidence.write_evidence(bench.project.state, passing_evidence(bench.project.root, planned, image))
    assert bool(disk.outstanding(bench.work, bench.store, bench.plan, test=True).images) is not is_done
    assert bool(disk.outstanding(bench.work, bench.store, bench.plan, test=False).images) is not stored


def test_clean_removes_untagged_images_of_this_checkout_and_logs(bench: DiskBench) -> None:
    project, engine = bench.project, FakeEngine()
    untagged = engine.add_image("sha256:old", labels={PLAN_LABEL: "sha256:0"})
    engine.add_image("sha256:others", labels={PLAN_LABEL: "sha256:1"})
    tagged = engine.add_image(TAGS[0], labels={PLAN_LABEL: "sha256:2"})
    record_built(project.state, "sha256:0", untagged)
    record_built(project.state, "sha256:2", tagged)
    project.logs.mkdir(parents=True)
    (project.logs / "x.log").write_text("")
    assert clean(engine, project, cache=False) == "removed 0 containers and 1 image"
    assert engine.calls == ["sweep", f"remove {untagged}"]
    assert list(project.logs.iterdir()) == []
    assert clean(engine, project, cache=True).endswith(", freed 5.0 GB of build cache")
