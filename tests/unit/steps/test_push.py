"""Which images may be pushed, and that moving tags move last."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from builder.common.console import View
from builder.common.errors import BuilderError, ImageTestError, RegistryError, UsageError
from builder.common.reference import ImageRef
from builder.common.text import size
from builder.evidence import results
from builder.evidence.suite import GPU_TESTS
from builder.host import Host
from builder.layers import oci
from builder.layers.blobs import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE
from builder.layers.oci import Image, Layer, Manifest
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import Plan, PlannedImage
from builder.release import publish
from builder.release.publish import PublishableImage, Released
from builder.steps.push import push
from tests.fakes.engine import MemoryConsole
from tests.fakes.registry import MemoryRegistry
from tests.fakes.suites import passing_evidence, write_tests

Edit = Callable[[str, str], Project]
EMBER, BOARD = "em-1.10-cu1210-py311", "qz-0.5-cu129-py311-board"
REGISTRY = "registry.example.test:5000"
DAY = "20261122"


class PublishBench:
    """Two images of the tiny project in a store, with passing evidence, and a registry in memory.

    `calls` are the changes to it; `broken` are the errors of pushes by cell.
    """

    def __init__(self, project: Project, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        self.store = Store(root)
        self.store.prepare()
        self.console = MemoryConsole()
        self.plan: Plan = plan.make_locked_plan(project, project.select([EMBER, BOARD]))
        self.stored = {image.id: self._make(image) for image in self.plan.images}
        self.calls: list[str] = []
        self.today = date(2026, 11, 22)
        self.broken: dict[str, BuilderError] = {}
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
        evidence = passing_evidence(self.project.root, image, self.stored[image.id])
        results.write_evidence(self.project.state, evidence.model_copy(update=changes))

    def image(self, cell: str) -> PlannedImage:
        return next(image for image in self.plan.images if image.id == cell)

    def tags(self, cell: str) -> list[str]:
        """The full tag first."""
        return [ImageRef.parse(text).tag for text in self.image(cell).references]

    def stamped(self, cell: str, stamp: str = DAY) -> str:
        return f"{self.tags(cell)[0]}-{stamp}"

    def repository(self, cell: str) -> MemoryRegistry:
        return self._registry(ImageRef.parse(self.image(cell).references[0]), host=Host(), write=True)

    def publish(self, registry: str = "", **options: Any) -> Released:
        """Raises the error that ended it."""
        with pytest.MonkeyPatch.context() as patch:
            for module in ("builder.steps.push", "builder.release.publish"):
                patch.setattr(f"{module}.Repository", self._registry)
            self.result = push(
                self.project, Host(), self.store, View(self.console), self.plan,
                today=self.today, registry=registry, **options,
            )  # fmt: skip
        if self.result.error:
            raise self.result.error
        return self.result

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
            registry.on_upload = self._upload
        return self.registries[reference.name]

    def _upload(self, digest: str) -> None:
        for cell, error in self.broken.items():
            if digest == self.stored[cell].config.digest:
                raise error


@pytest.fixture
def bench(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishBench:
    return PublishBench(tiny, tmp_path / "store", monkeypatch)


# ---- which images


def passed(bench: PublishBench, registry: str = "") -> list[PublishableImage]:
    images, failures = publish.passed_images(bench.project, bench.store, bench.plan, registry)
    assert not failures
    return images


def test_the_references_of_images(bench: PublishBench) -> None:
    images = passed(bench)
    assert [image.cell for image in images] == [EMBER, BOARD]
    for image in images:
        assert tuple(map(str, image.references)) == bench.image(image.cell).references
        assert image.stored == bench.stored[image.cell]
        assert {reference.registry for reference in image.references} == {REGISTRY}


def test_another_registry(bench: PublishBench) -> None:
    for image in passed(bench, "other.example.test"):
        assert {reference.registry for reference in image.references} == {"other.example.test"}
        names = [str(reference).partition("/")[2] for reference in image.references]
        assert names == [name.partition("/")[2] for name in bench.image(image.cell).references]


def test_without_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    bench = PublishBench(edit(f"registry: {REGISTRY}", 'registry: ""'), tmp_path / "store", monkeypatch)
    with pytest.raises(UsageError, match="no registry in matrix") as caught:
        publish.require_registry(bench.project, "")
    assert "--to" in caught.value.hint
    publish.require_registry(bench.project, "other.example.test")
    assert len(passed(bench, "other.example.test")) == 2


def rejection(bench: PublishBench) -> str:
    """Why EMBER may not be published; BOARD is not pushed either."""
    with pytest.raises(ImageTestError) as caught:
        bench.publish()
    assert bench.calls == []
    assert caught.value.hint == f"builder images {EMBER}"
    return str(caught.value)


def test_an_image_that_is_not_built(bench: PublishBench) -> None:
    del bench.stored[EMBER]
    assert rejection(bench) == f"{EMBER}: not built"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"plan": "sha256:other"}, "it is about another plan"),
        ({"suite": {}}, "test suite changed since it was tested: builder/build/pytest_run.py and "),
        ({"kind": "gpu", "failed": ("test_it",)}, "tests failed"),
    ],
    ids=str,
)
def test_invalid_evidence(bench: PublishBench, changes: dict[str, Any], reason: str) -> None:
    bench.prove(bench.image(EMBER), **changes)
    assert rejection(bench).startswith(f"{EMBER}: {reason}")


def test_evidence_that_is_missing_or_cannot_be_read(bench: PublishBench) -> None:
    digest = bench.stored[EMBER].manifest.digest
    [path] = (bench.project.state / "evidence").glob(f"{digest.replace(':', '-')}.image.json")
    path.write_text("{")
    assert rejection(bench) == f"{EMBER}: not tested"
    path.unlink()
    assert rejection(bench) == f"{EMBER}: not tested"


def test_edited_tests(bench: PublishBench) -> None:
    (bench.project.root / "tests/images/test_new.py").write_text("")
    with pytest.raises(ImageTestError, match=r"^2 images are not built or have not passed their tests\n") as caught:
        bench.publish()
    assert str(caught.value).count("test suite changed since it was tested: tests/images/test_new.py\n") == 2
    (bench.project.root / "tests/images/test_new.py").unlink()
    (bench.project.root / "tests/images/.test_new.py.swp").write_text("an editor's")
    bench.publish()


# ---- pushing


def test_tags_come_after_all_images_and_those_that_move_last(bench: PublishBench) -> None:
    """An interrupted push left stamped tags, which never move or disappear, of images that were not published."""
    result = bench.publish()
    stamped = [bench.stamped(EMBER), bench.stamped(BOARD)]
    moving = [tag for cell in (EMBER, BOARD) for tag in bench.tags(cell)]
    assert bench.puts == [EMBER, BOARD, *stamped, *moving]
    assert [change.tag for change in result.tags] == [*stamped, *moving]
    assert len(result.changed) == len(result.tags)


def test_a_released_image_gets_no_other_stamp(bench: PublishBench) -> None:
    bench.publish()
    bench.today = date(2026, 11, 23)
    assert bench.publish().changed == []
    alias = bench.tags(EMBER)[1]  # as if the release had been interrupted
    del bench.repository(EMBER).tags[alias]
    assert [change.tag for change in bench.publish().changed] == [alias]


def test_a_new_image_of_one_cell_stamps_that_cell_alone(bench: PublishBench) -> None:
    bench.publish()
    stored = bench.stored[EMBER]
    manifest = Manifest.of(stored.manifest.content + b" ")
    bench.stored[EMBER] = replace(stored, manifest=manifest)
    bench.prove(bench.image(EMBER))
    changed = [change.tag for change in bench.publish().changed]
    assert changed == [bench.stamped(EMBER, f"{DAY}.1"), *bench.tags(EMBER)]
    assert bench.repository(EMBER).tags[bench.stamped(EMBER)] == stored.manifest.digest, (
        "the first release is unchanged"
    )


def test_the_stamp_is_one_for_all_images_of_a_release(bench: PublishBench) -> None:
    """If one image has the tag of the day from another release, all get the next stamp."""
    bench.repository(BOARD).tags |= {
        bench.stamped(BOARD): "sha256:other",
        bench.stamped(BOARD, f"{DAY}.1"): "sha256:more",
    }
    changed = [change.tag for change in bench.publish().changed]
    assert changed[:2] == [bench.stamped(EMBER, f"{DAY}.2"), bench.stamped(BOARD, f"{DAY}.2")]


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


def test_the_blobs_that_are_pushed(bench: PublishBench) -> None:
    """To the given registry; blobs of other repositories are mounted."""
    bench.publish("other.example.test")
    assert list(bench.registries) == ["other.example.test/team/ember-cuda", "other.example.test/team/quartz-cuda"]
    first = bench.calls.index(f"put {bench.stored[EMBER].manifest.digest}")
    mounts = [{call for call in part if "mount" in call} for part in (bench.calls[:first], bench.calls[first:])]
    assert mounts == [{"mount from team/quartz-cuda"}, {"mount from team/ember-cuda"}]
    for cell, registry in zip((EMBER, BOARD), bench.registries.values(), strict=True):
        stored = bench.stored[cell]
        for blob in (stored.config, *(layer.descriptor for layer in stored.layers)):
            assert registry.contents[blob.digest] == bench.store.read(blob.digest)


@pytest.mark.parametrize("gpu", ["passed", "not run"])
def test_the_result_of_a_push(bench: PublishBench, gpu: str) -> None:
    if gpu == "passed":
        bench.prove(bench.image(EMBER), kind="gpu", passed=bench.passed_on_gpu[EMBER])
    stored = bench.stored[EMBER]
    bench.repository(EMBER).has.add(stored.config.digest)
    first, _ = bench.publish().in_registry
    sent, present = stored.layers[0].size, stored.config.size
    digest = stored.manifest.digest
    assert str(first) == f"{EMBER}: {digest}, {size(sent)} sent, {size(present)} already present, gpu: {gpu}"
    data = first.as_data()
    assert data.pop("seconds") >= 0
    assert data == {
        "cell": EMBER,
        "digest": digest,
        "bytes": {"sent": sent, "mounted": 0, "present": present},
        "gpu": gpu,
    }


@pytest.mark.parametrize("cell", [EMBER, BOARD])
def test_a_failed_image_prevents_all_tags_and_other_images_are_pushed(bench: PublishBench, cell: str) -> None:
    bench.broken[cell] = RegistryError("no response")
    with pytest.raises(RegistryError, match="no response"):
        bench.publish()
    assert bench.puts == [other for other in (EMBER, BOARD) if other != cell]
    assert f"{cell}: failed" in bench.console.text
    bench.broken.clear()
    bench.calls.clear()
    assert bench.publish().changed


def test_failures_are_reported_together(bench: PublishBench) -> None:
    bench.broken = {EMBER: RegistryError("first"), BOARD: RegistryError("second")}
    with pytest.raises(RegistryError) as caught:
        bench.publish()
    assert str(caught.value).splitlines() == ["2 images failed", "first", "second"]


def test_a_failed_push_lists_the_tags_that_it_changed(bench: PublishBench) -> None:
    last = bench.tags(BOARD)[-1]

    def fail(tag: str) -> None:
        if tag == last:
            raise RegistryError("no response", hint="again")

    bench.on_put = fail
    with pytest.raises(RegistryError) as caught:
        bench.publish()
    head, title, *lines = str(caught.value).splitlines()
    assert (head, title) == ("no response", "tags changed before the failure:")
    assert len(lines) == 2 + len(bench.tags(EMBER)) + len(bench.tags(BOARD)) - 1
    assert lines[0].startswith(f"  {REGISTRY}/team/ember-cuda:{bench.stamped(EMBER)} is sha256:")
    assert caught.value.hint == "again"
    assert len(bench.result.tags) == len(lines)


def test_an_interrupted_push_lists_the_tags_that_it_changed(bench: PublishBench) -> None:
    def interrupt(tag: str) -> None:
        if tag == bench.stamped(BOARD):
            raise KeyboardInterrupt

    bench.on_put = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench.publish()
    tag = f"{REGISTRY}/team/ember-cuda:{bench.stamped(EMBER)}"
    assert f"changed before the interruption: {tag} is sha256:" in bench.console.text
    assert bench.console.text.count("changed before the interruption: ") == 1


def test_a_registry_that_does_not_respond_is_tried_once(bench: PublishBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name was tried for ten seconds for every image."""

    def ask(registry: MemoryRegistry, _: str) -> str | None:
        bench.calls.append("read")
        raise RegistryError("unknown host")

    monkeypatch.setattr(MemoryRegistry, "digest_of", ask)
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


def test_tags_move_back_only_with_roll_back(bench: PublishBench) -> None:
    """If another machine's store was outdated, aliases moved to an older operating system without a message."""
    alias = bench.tags(EMBER)[-1]
    registry = older(bench, alias)
    before = dict(registry.tags)
    with pytest.raises(RegistryError) as caught:
        bench.publish()
    assert f":{alias} would move back from Debian packages of 2026-11-20 to those of 2026-11-01" in str(caught.value)
    assert "--roll-back" in caught.value.hint
    assert (bench.calls, registry.tags) == ([], before)
    [moved] = [change for change in bench.publish(roll_back=True).tags if change.tag == alias]
    assert (moved.state, moved.before) == ("moved", before[alias])


@pytest.mark.parametrize("lost", ["the manifest", "the configuration"])
def test_a_tag_of_an_image_that_cannot_be_read_moves_only_with_roll_back(bench: PublishBench, lost: str) -> None:
    """Its age is unknown: the tag moved to older images without a message."""
    alias = bench.tags(EMBER)[-1]
    registry = older(bench, alias)
    before = registry.tags[alias]
    config = json.loads(registry.contents[before])["config"]["digest"]
    registry.contents[config if lost == "the configuration" else before] = b"damaged"
    with pytest.raises(RegistryError, match=f":{alias} names an image that cannot be read: ") as caught:
        bench.publish()
    assert "--roll-back" in caught.value.hint
    assert bench.calls == []
    [moved] = [change for change in bench.publish(roll_back=True).tags if change.tag == alias]
    assert (moved.state, moved.before) == ("moved", before)


def test_rolling_back_an_index_that_cannot_be_read_keeps_its_architectures(bench: PublishBench) -> None:
    alias = bench.tags(EMBER)[-1]
    registry = older(bench, alias)
    amd64, arm64 = registry.tags[alias], registry.add_image({"architecture": "arm64"})
    registry.tags[alias] = registry.add_index(amd64=amd64, arm64=arm64)
    registry.contents[arm64] = b"damaged"
    with pytest.raises(RegistryError, match="would have no image for arm64"):
        bench.publish(roll_back=True)


def test_a_tag_whose_manifest_is_missing_moves_only_with_roll_back(bench: PublishBench) -> None:
    alias = bench.tags(EMBER)[-1]
    registry = older(bench, alias)
    del registry.contents[registry.tags[alias]]
    with pytest.raises(RegistryError, match=r"the manifest sha256:\w+ is missing"):
        bench.publish()


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
    result = bench.publish()
    assert [pushed.image.cell for pushed in result.in_registry] == [EMBER, TWIN]
    tags = [bench.stamped(EMBER), *bench.tags(EMBER)]
    registry = bench.repository(EMBER)
    [index] = {registry.tags[tag] for tag in tags}
    assert bench.puts == [EMBER, TWIN, index, *tags]
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
        for image in result.images
    ]
    assert publish.tagged_manifest(result.images[::-1]) == stored, "its bytes depend on the images alone"
    assert not bench.publish().changed


def test_a_cell_of_one_architecture_keeps_its_manifest(bench: PublishBench) -> None:
    bench.publish()
    assert bench.repository(EMBER).tags[bench.tags(EMBER)[0]] == bench.stored[EMBER].manifest.digest


def refused_for_arm64(bench: PublishBench) -> None:
    bench.calls.clear()
    with pytest.raises(RegistryError) as caught:
        bench.publish()
    reference = bench.image(EMBER).references[0]
    assert str(caught.value).splitlines()[1:] == [f"  {reference} would have no image for arm64"]
    assert "--allow-missing-arch" in caught.value.hint
    assert bench.calls == []


def test_an_image_is_not_published_without_another_architecture_of_the_matrix(bench: PublishBench) -> None:
    twins(bench)
    bench.plan = Plan(images=bench.plan.images[:1])
    refused_for_arm64(bench)
    bench.publish(allow_missing_arch=True)
    index = bench.repository(EMBER).tags[bench.tags(EMBER)[0]]
    assert list(oci.read_platforms(bench.repository(EMBER).contents[index])) == ["amd64"], "a clear error on arm64"
    assert f"{REGISTRY}/team/ember-cuda:{bench.tags(EMBER)[0]} has no image for arm64" in bench.console.text


def test_an_image_that_only_an_emulation_has_run_is_refused(bench: PublishBench) -> None:
    twins(bench)
    bench.publish()
    bench.prove(bench.image(TWIN), machine={"emulated": "arm64"})
    match = rf"^{TWIN}: built, not run \(\d+ tests? passed under emulation\)$"
    with pytest.raises(ImageTestError, match=match) as caught:
        bench.publish(instead="builder stage && builder release --allow-not-run")
    assert caught.value.hint.endswith(": builder stage && builder release --allow-not-run")


def test_a_tag_does_not_lose_an_architecture_that_left_the_matrix(bench: PublishBench) -> None:
    registry = bench.repository(EMBER)
    labels: dict[str, object] = {"config": {"Labels": {}}}
    images = {arch: registry.add_image({"architecture": arch, **labels}) for arch in ("amd64", "arm64")}
    registry.tags[bench.tags(EMBER)[-1]] = registry.add_index(**images)
    bench.plan = Plan(images=(bench.image(EMBER),))
    refused_for_arm64(bench)
    [pushed] = bench.publish(allow_missing_arch=True).in_registry
    assert set(registry.tags.values()) == {pushed.image.digest}
