"""Which images may be staged, and that moving tags move last."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import RegistryError
from builder.common.reference import ImageRef
from builder.evidence import results
from builder.evidence.results import Coverage
from builder.evidence.suite import GPU_TESTS
from builder.index.host import Host
from builder.layers.oci import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, Image, Layer, Manifest
from builder.layers.store import Store
from builder.matrix import tags
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import Plan, PlannedImage
from builder.release import staging, tagging
from builder.release.staging import Candidate
from builder.release.tagging import TagChange
from tests.fakes.engine import MemoryConsole
from tests.fakes.registry import MemoryRegistry
from tests.fakes.run import new_run
from tests.fakes.suites import passing_evidence, write_tests

Edit = Callable[[str, str], Project]
EMBER, BOARD = "em-1.10-cu1210-py311", "qz-0.5-cu129-py311-board"
REGISTRY = "registry.example.test:5000"
DAY = "20261122"


class PublishBench:
    """Two images of the tiny project in a store, with passing evidence, and a registry in memory.

    `calls` are the changes to it.
    """

    def __init__(self, project: Project, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        self.store = Store(root)
        self.store.prepare()
        self.console = MemoryConsole()
        self.context = new_run(project, store=self.store, console=self.console)
        self.plan: Plan = plan.make_locked_plan(project, project.select([EMBER, BOARD]))
        self.stored = {image.id: self._make(image) for image in self.plan.images}
        self.calls: list[str] = []
        self.day = DAY
        self.registries: dict[str, MemoryRegistry] = {}
        self.on_put: Callable[[str], None] = lambda _: None
        self.passed = {image.id: write_tests(project.root, image.components) for image in self.plan.images}
        self.passed_on_gpu = {
            image.id: write_tests(project.root, [image.cell.framework], GPU_TESTS) for image in self.plan.images
        }
        for image in self.plan.images:
            self.prove(image)
        monkeypatch.setattr(
            "builder.layers.stored_images.find_stored_image", lambda _, image: self.stored.get(image.id)
        )

    def _make(self, image: PlannedImage) -> Image:
        blob = self.store.put(f"layer of {image.id}".encode(), LAYER_TYPE)
        layer = Layer(digest=blob.digest, diff_id="", size=blob.size)
        config = self.store.put(json.dumps({"architecture": image.cell.arch, "author": image.id}).encode(), CONFIG_TYPE)
        manifest = json.dumps({"config": config.as_data(), "layers": []}).encode()
        return Image(config=config, manifest=Manifest.of(manifest), layers=(layer, layer))

    def prove(self, image: PlannedImage, **changes: Any) -> None:
        """Writes evidence of a pass, with changes."""
        evidence = passing_evidence(self.project.root, image, self.stored[image.id].manifest.digest, **changes)
        results.write_evidence(self.project.state, evidence)

    def image(self, cell: str) -> PlannedImage:
        return next(image for image in self.plan.images if image.id == cell)

    def tags(self, cell: str) -> list[str]:
        """The full tag first."""
        return [ImageRef.parse(text).tag for text in self.image(cell).references]

    def stamped(self, cell: str, stamp: str = DAY) -> str:
        return f"{self.tags(cell)[0]}-{stamp}"

    def repository(self, cell: str) -> MemoryRegistry:
        return self._registry(ImageRef.parse(self.image(cell).references[0]), host=Host(), write=True)

    def publish(self, *, roll_back: bool = False, allow_missing_arch: bool = False) -> list[TagChange]:
        """Publishes the images as a release does; `changes` are the tags that it set, also before an error."""
        images, view = passed(self), self.context.view
        self.changes: list[TagChange] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builder.release.tagging.Repository", self._registry)
            groups = tagging.group_by_tags(self.context, images)
        tagging.check_tags(groups, view, roll_back=roll_back, allow_missing_arch=allow_missing_arch)
        stamp = tagging.free_stamp(groups, tags.stamps(self.day))
        for group in groups:
            for image in group.images:
                staging.push_image(self.context, group.repository, image, [])
            if group.is_index:
                manifest = group.manifest
                group.repository.put_manifest(manifest.digest, manifest.content, manifest.media_type)
        tagging.set_tags(groups, stamp, self.changes)
        return self.changes

    @property
    def puts(self) -> list[str]:
        """The manifests that were stored, in order: tags by name, images by cell."""
        ids = {stored.manifest.digest: cell for cell, stored in self.stored.items()}
        names = (call.removeprefix("put ") for call in self.calls if call.startswith("put "))
        return [ids.get(name, name) for name in names]

    # ---- the registry

    def _registry(self, reference: ImageRef, *, host: Host, write: bool) -> MemoryRegistry:
        assert write
        if reference.name not in self.registries:
            self.registries[reference.name] = registry = MemoryRegistry()
            registry.name = reference.name
            registry.calls = self.calls
            registry.on_put = lambda tag: self.on_put(tag)  # noqa: PLW0108  set later
        return self.registries[reference.name]


@pytest.fixture
def bench(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishBench:
    return PublishBench(tiny, tmp_path / "store", monkeypatch)


def passed(bench: PublishBench) -> list[Candidate]:
    stored = bench.stored
    return [Candidate(planned=image, stored=stored[image.id], coverage=Coverage()) for image in bench.plan.images]


# ---- pushing


def changed(changes: list[TagChange]) -> list[str]:
    return [change.tag for change in changes if change.is_change]


def test_a_released_image_gets_no_other_stamp(bench: PublishBench) -> None:
    bench.publish()
    bench.day = "20261123"
    assert changed(bench.publish()) == []
    alias = bench.tags(EMBER)[1]  # as if the release had been interrupted
    del bench.repository(EMBER).tags[alias]
    assert changed(bench.publish()) == [alias]


def test_a_new_image_of_one_cell_stamps_that_cell_alone(bench: PublishBench) -> None:
    bench.publish()
    stored = bench.stored[EMBER]
    manifest = Manifest.of(stored.manifest.content + b" ")
    bench.stored[EMBER] = replace(stored, manifest=manifest)
    bench.prove(bench.image(EMBER))
    assert changed(bench.publish()) == [bench.stamped(EMBER, f"{DAY}.1"), *bench.tags(EMBER)]
    assert bench.repository(EMBER).tags[bench.stamped(EMBER)] == stored.manifest.digest, (
        "the first release is unchanged"
    )


def test_the_stamp_is_one_for_all_images_of_a_release(bench: PublishBench) -> None:
    """If one image has the tag of the day from another release, all get the next stamp."""
    bench.repository(BOARD).tags |= {
        bench.stamped(BOARD): "sha256:other",
        bench.stamped(BOARD, f"{DAY}.1"): "sha256:more",
    }
    assert changed(bench.publish())[:2] == [bench.stamped(EMBER, f"{DAY}.2"), bench.stamped(BOARD, f"{DAY}.2")]


def test_a_release_that_stopped_half_way_is_finished_under_its_stamp(bench: PublishBench) -> None:
    def fail(tag: str) -> None:  # called when the tag is set
        if tag == bench.stamped(EMBER):
            raise RegistryError("no response")

    bench.on_put = fail
    with pytest.raises(RegistryError):
        bench.publish()
    bench.on_put = lambda _: None
    bench.calls.clear()
    bench.publish()
    assert f"put {bench.stamped(BOARD)}" in bench.calls
    assert f"put {bench.stamped(EMBER)}" not in bench.calls, "it is already set"


def test_another_release_that_takes_the_stamp_wins(bench: PublishBench) -> None:
    def cross(tag: str) -> None:
        if tag == bench.stamped(EMBER):
            bench.repository(BOARD).tags[bench.stamped(BOARD)] = "sha256:theirs"

    bench.on_put = cross
    with pytest.raises(
        RegistryError, match=rf"another push changed tags \S.*: tag {bench.stamped(BOARD)} changed from unset to"
    ):
        bench.publish()
    assert not [call for call in bench.calls if call == f"put {bench.tags(EMBER)[-1]}"], "no moving tag was moved"


def test_a_registry_that_does_not_respond_is_tried_once(bench: PublishBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name was tried for ten seconds for every image."""

    def ask(registry: MemoryRegistry) -> list[str]:
        bench.calls.append("read")
        raise RegistryError("unknown host")

    monkeypatch.setattr(MemoryRegistry, "list_tags", ask)
    with pytest.raises(RegistryError, match="unknown host"):
        bench.publish()
    assert bench.calls == ["read"]


def older(bench: PublishBench, tag: str) -> MemoryRegistry:
    """The registry, with a tag of an image with newer packages than ours."""
    registry = bench.repository(EMBER)
    ours, newer = (
        {"org.opencontainers.image.version": "1", "org.opencontainers.image.created": f"{day}T00:00:00Z"}
        for day in ("2026-11-01", "2026-11-20")
    )
    registry.tags[tag] = registry.add_image({"config": {"Labels": newer}, "rootfs": {"diff_ids": []}})
    bench.stored[EMBER] = replace(bench.stored[EMBER], labels=ours)
    return registry


@pytest.mark.parametrize("lost", ["the manifest", "the configuration", "both"])
def test_a_tag_of_an_image_that_cannot_be_read_moves_only_with_roll_back(bench: PublishBench, lost: str) -> None:
    """Its age is unknown: the tag moved to older images without a message."""
    alias = bench.tags(EMBER)[-1]
    registry = older(bench, alias)
    before = registry.tags[alias]
    config = json.loads(registry.contents[before])["config"]["digest"]
    if lost == "both":
        del registry.contents[before]
    else:
        registry.contents[config if lost == "the configuration" else before] = b"damaged"
    with pytest.raises(RegistryError, match=f":{alias} names an image that cannot be read: ") as caught:
        bench.publish()
    assert "--roll-back" in caught.value.hint
    assert bench.calls == []
    [moved] = [change for change in bench.publish(roll_back=True) if change.tag == alias]
    assert (moved.state, moved.before) == ("moved", before)


def test_rolling_back_an_index_that_cannot_be_read_keeps_its_architectures(bench: PublishBench) -> None:
    alias = bench.tags(EMBER)[-1]
    registry = older(bench, alias)
    amd64, arm64 = registry.tags[alias], registry.add_image({"architecture": "arm64"})
    registry.tags[alias] = registry.add_index(amd64=amd64, arm64=arm64)
    registry.contents[arm64] = b"damaged"
    with pytest.raises(RegistryError, match="would have no image for arm64"):
        bench.publish(roll_back=True)


def test_the_loser_of_two_pushes_may_end_first(bench: PublishBench) -> None:
    """The other push moves an alias after our last tag."""
    last = bench.tags(BOARD)[-1]

    def cross(tag: str) -> None:
        if tag == last:
            name = ImageRef.parse(bench.image(EMBER).references[0]).name
            bench.registries[name].tags[bench.tags(EMBER)[-1]] = "sha256:theirs"

    bench.on_put = cross
    with pytest.raises(
        RegistryError, match=r"another push changed tags .*: tag \S+ changed from sha256:\w+ to sha256:theirs"
    ):
        bench.publish()


# ---- several architectures

TWIN = f"{EMBER}-arm64"


def twins(bench: PublishBench) -> None:
    """EMBER, which the matrix has for two architectures; the image for arm64 has the contents of BOARD."""
    amd64 = bench.image(EMBER)
    twin = replace(amd64, cell=replace(amd64.cell, arch="arm64"))
    assert twin.id == TWIN
    bench.project.__dict__["cells"] = [*bench.project.cells, twin.cell]
    bench.plan = Plan(images=(amd64, twin))
    bench.stored[TWIN] = bench.stored.pop(BOARD)
    bench.prove(twin)


def test_a_tag_of_several_architectures_is_an_index(bench: PublishBench) -> None:
    twins(bench)
    bench.publish()
    images, names = passed(bench), [bench.stamped(EMBER), *bench.tags(EMBER)]
    registry = bench.repository(EMBER)
    [index] = {registry.tags[tag] for tag in names}
    assert bench.puts == [EMBER, TWIN, index, *names]
    stored = registry.manifest(index)
    assert stored
    assert stored.media_type == "application/vnd.oci.image.index.v1+json"
    assert json.loads(stored.content)["manifests"] == [
        {
            "mediaType": MANIFEST_TYPE,
            "digest": image.digest,
            "size": len(image.stored.manifest.content),
            "platform": {"architecture": image.arch, "os": "linux"},
        }
        for image in images
    ]
    assert not changed(bench.publish())


def refused_for_arm64(bench: PublishBench) -> None:
    bench.calls.clear()
    with pytest.raises(RegistryError) as caught:
        bench.publish()
    reference = bench.image(EMBER).references[0]
    assert str(caught.value).splitlines()[1:] == [f"  {reference} would have no image for arm64"]
    assert "--allow-missing-arch" in caught.value.hint
    assert bench.calls == []


def test_a_tag_does_not_lose_an_architecture_that_left_the_matrix(bench: PublishBench) -> None:
    registry = bench.repository(EMBER)
    labels: dict[str, object] = {"config": {"Labels": {}}}
    images = {arch: registry.add_image({"architecture": arch, **labels}) for arch in ("amd64", "arm64")}
    registry.tags[bench.tags(EMBER)[-1]] = registry.add_index(**images)
    bench.plan = Plan(images=(bench.image(EMBER),))
    refused_for_arm64(bench)
    bench.publish(allow_missing_arch=True)
    assert set(registry.tags.values()) == {bench.stored[EMBER].manifest.digest}
    assert f"{REGISTRY}/team/ember-cuda:{bench.tags(EMBER)[0]} has no image for arm64" in bench.console.text
