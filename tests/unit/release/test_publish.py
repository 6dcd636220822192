"""Which images may be published, and that moving tags move last."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from builder.common.console import View
from builder.common.errors import BuilderError, ImageTestError, RegistryError, UsageError
from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.evidence import results
from builder.evidence.suite import GPU_TESTS
from builder.host import Host
from builder.layers import oci
from builder.layers.blobs import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, Descriptor
from builder.layers.oci import Image, Layer, Manifest
from builder.layers.store import Store
from builder.matrix import tags
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import Plan, PlannedImage
from builder.registry import transfer
from builder.registry.client import Repository
from builder.registry.failures import StoppedError
from builder.registry.transfer import Pushed
from builder.release import publish
from builder.release.publish import Fetch, PublishableImage, Publisher, Released, ReleaseDocuments
from tests.fakes.engine import MemoryConsole
from tests.fakes.registry import MemoryRegistry
from tests.fakes.suites import passing_evidence, write_tests

Edit = Callable[[str, str], Project]
EMBER, BOARD = "em-1.10-cu1210-py311", "qz-0.5-cu129-py311-board"
REGISTRY = "registry.example.test:5000"
DAY = "20261122"


@dataclass
class FakeDocuments:
    """Notes when the release is recorded, and for which image and stamped tag something is attached."""

    calls: list[str]

    def record(self) -> None:
        self.calls.append("record")

    def attach(self, registry: Repository, image: PublishableImage, stamped: str) -> None:
        self.calls.append(f"attach {image.cell} {stamped}")

    def sign_index(self, registry: Repository, digest: str, images: Sequence[PublishableImage], stamped: str) -> None:
        self.calls.append(f"sign the index of {' and '.join(image.cell for image in images)} {stamped}")


class PublishBench:
    """Two images of the tiny project in a store, with passing evidence, and a registry in memory.

    `calls` are the changes to it; `broken` are the errors of pushes by image id.
    """

    def __init__(self, project: Project, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        self.store = Store(root)
        self.store.prepare()
        self.console = MemoryConsole()
        self.plan: Plan = plan.make_locked_plan(project, project.select([EMBER, BOARD]))
        self.stored = {image.id: self._make(image) for image in self.plan.images}
        self.calls: list[str] = []
        self.files: dict[str, Mapping[Descriptor, Path | None]] = {}
        self.mounts: list[Sequence[str]] = []
        self.fetches: list[Fetch | None] = []
        self.broken: dict[str, BuilderError] = {}
        self.registries: dict[str, MemoryRegistry] = {}
        self.on_put: Callable[[str], None] = lambda _: None
        self.answer = Pushed(digest="sha256:answered", sent=3_000_000, present=2_000, mounted=0)
        self._ids = {stored.manifest.digest: image_id for image_id, stored in self.stored.items()}
        self.passed = {image.id: write_tests(project.root, image.components) for image in self.plan.images}
        self.passed_on_gpu = {
            image.id: write_tests(project.root, [image.cell.framework], GPU_TESTS) for image in self.plan.images
        }
        for image in self.plan.images:
            self.prove(image)
        monkeypatch.setattr("builder.layers.images.find_stored_image", lambda _, image: self.stored.get(image.id))
        monkeypatch.setattr(transfer, "push_image", self._push)

    def _make(self, image: PlannedImage) -> Image:
        blob = self.store.put(f"layer of {image.id}".encode(), LAYER_TYPE)
        layer = Layer(digest=blob.digest, diff_id="", size=blob.size)
        config = self.store.put(json.dumps({"architecture": image.cell.arch, "author": image.id}).encode(), CONFIG_TYPE)
        manifest = json.dumps({"config": config.as_data(), "layers": []}).encode()
        return Image(config=config, manifest=Manifest.of(manifest), layers=(layer, layer))

    def prove(self, image: PlannedImage, **changes: Any) -> None:
        """Writes evidence of a pass, with changes."""
        proof = passing_evidence(self.project.root, image, self.stored[image.id])
        results.write_evidence(self.project.state, proof.model_copy(update=changes))

    def image(self, cell: str) -> PlannedImage:
        return next(image for image in self.plan.images if image.id == cell)

    def tags(self, cell: str) -> list[str]:
        """The full tag first."""
        return [ImageRef.parse(text).tag for text in self.image(cell).references]

    def stamped(self, cell: str, stamp: str = DAY) -> str:
        return f"{self.tags(cell)[0]}-{stamp}"

    def repository(self, cell: str) -> MemoryRegistry:
        return self._registry(ImageRef.parse(self.image(cell).references[0]), host=Host(), write=True)

    def targets(self, registry: str = "") -> list[PublishableImage]:
        return publish.targets(self.project, self.store, self.plan, registry)

    def publish(
        self, registry: str = "", *, roll_back: bool = False, documents: ReleaseDocuments | None = None
    ) -> Released:
        """Raises the error that ended it."""
        publisher = self.publisher(roll_back=roll_back, documents=documents)
        self.result = publisher.publish(self.targets(registry))
        if self.result.error:
            raise self.result.error
        return self.result

    def publisher(self, **options: Any) -> Publisher:
        stamps = tags.stamps(DAY)
        return Publisher(
            host=Host(),
            view=View(self.console),
            store=self.store,
            stamps=stamps,
            new_registry=self._registry,
            **options,
        )

    # ---- the registry

    def _registry(self, reference: ImageRef, *, host: Host, write: bool) -> MemoryRegistry:
        assert write
        if reference.name not in self.registries:
            self.registries[reference.name] = registry = MemoryRegistry()
            registry.name = reference.name
            registry.calls = self.calls
            registry.on_put = lambda tag: self.on_put(tag)  # noqa: PLW0108  set later
        return self.registries[reference.name]

    def _push(
        self,
        to: MemoryRegistry,
        manifest: Manifest,
        files: Mapping[Descriptor, Path | None],
        *,
        fetch: Fetch | None,
        mount_from: Sequence[str],
        progress: Callable[[int], None],
    ) -> Pushed:
        cell = self._ids[digest_of_bytes(manifest.content)]
        self.calls.append(f"push {cell} to {to.name}")
        assert manifest.media_type == MANIFEST_TYPE
        self.files[cell], self.mounts = files, [*self.mounts, mount_from]
        self.fetches.append(fetch)
        if cell in self.broken:
            raise self.broken[cell]
        config = self.stored[cell].config.digest
        to.contents[config] = self.store.read(config)
        return self.answer


@pytest.fixture
def bench(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishBench:
    return PublishBench(tiny, tmp_path / "store", monkeypatch)


# ---- targets


def test_the_references_of_targets(bench: PublishBench) -> None:
    targets = bench.targets()
    assert [target.cell for target in targets] == [EMBER, BOARD]
    for target in targets:
        assert tuple(map(str, target.references)) == bench.image(target.cell).references
        assert target.stored == bench.stored[target.cell]
        assert {reference.registry for reference in target.references} == {REGISTRY}


def test_another_registry(bench: PublishBench) -> None:
    for target in bench.targets("other.example.test"):
        assert {reference.registry for reference in target.references} == {"other.example.test"}
        names = [str(reference).partition("/")[2] for reference in target.references]
        assert names == [name.partition("/")[2] for name in bench.image(target.cell).references]


def test_without_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    bench = PublishBench(edit(f"registry: {REGISTRY}", 'registry: ""'), tmp_path / "store", monkeypatch)
    with pytest.raises(UsageError, match="no registry in matrix") as caught:
        publish.require_registry(bench.project, "")
    assert "--to" in caught.value.hint
    publish.require_registry(bench.project, "other.example.test")
    assert len(bench.targets("other.example.test")) == 2


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
        ({"suite": {}}, "test suite changed since it was tested: builder/build/image_tests.py and "),
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
    """An interrupted release left stamped tags, which never move or disappear, of images that were not released."""
    result = bench.publish(documents=FakeDocuments(bench.calls))
    images = {
        f"push {EMBER} to {REGISTRY}/team/ember-cuda",
        f"attach {EMBER} {bench.stamped(EMBER)}",
        f"push {BOARD} to {REGISTRY}/team/quartz-cuda",
        f"attach {BOARD} {bench.stamped(BOARD)}",
    }
    stamped = [bench.stamped(EMBER), bench.stamped(BOARD)]
    moving = [tag for cell in (EMBER, BOARD) for tag in bench.tags(cell)]
    assert bench.calls[0] == "record"
    assert set(bench.calls[1:5]) == images
    assert bench.calls[5:] == [f"put {tag}" for tag in (*stamped, *moving)]
    assert [change.tag for change in result.tags] == [bench.stamped(EMBER), bench.stamped(BOARD), *moving]
    assert len(result.changed) == len(result.tags)


def test_a_release_is_recorded_once_before_it_changes_anything(bench: PublishBench) -> None:
    bench.publish(documents=FakeDocuments(bench.calls))
    assert bench.calls[0] == "record"
    assert bench.calls.count("record") == 1


def test_a_release_that_is_refused_is_not_recorded(bench: PublishBench) -> None:
    older(bench, bench.tags(EMBER)[-1])
    publisher = bench.publisher(documents=FakeDocuments(bench.calls))
    assert publisher.publish(bench.targets()).error
    assert bench.calls == []


def test_a_released_image_gets_no_other_stamp(bench: PublishBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.publish()
    monkeypatch.setattr("tests.unit.release.test_publish.DAY", "20261123")
    assert bench.publish().changed == []
    alias = bench.tags(EMBER)[1]  # as if the release had been interrupted
    del bench.repository(EMBER).tags[alias]
    assert [change.tag for change in bench.publish().changed] == [alias]


def test_a_new_image_of_one_cell_stamps_that_cell_alone(bench: PublishBench) -> None:
    bench.publish()
    stored = bench.stored[EMBER]
    bench.stored[EMBER] = replace(stored, manifest=Manifest.of(b"a new manifest"))
    bench._ids[bench.stored[EMBER].manifest.digest] = EMBER
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
    assert [call.split()[3] for call in bench.calls if call.startswith("push")] == [
        "other.example.test/team/ember-cuda",
        "other.example.test/team/quartz-cuda",
    ]
    assert bench.mounts == [["team/quartz-cuda"], ["team/ember-cuda"]]
    for cell, files in bench.files.items():
        stored = bench.stored[cell]
        assert {blob.digest for blob in files} == {stored.config.digest, *(layer.digest for layer in stored.layers)}
        for blob, path in files.items():
            assert path is not None
            assert path.stat().st_size == blob.size


def test_a_push_can_download_what_the_store_lacks(bench: PublishBench) -> None:
    def fetch(blob: Descriptor) -> Path:
        raise AssertionError(blob)

    bench.publisher().publish([replace(target, fetch=fetch) for target in bench.targets()])
    assert bench.fetches == [fetch, fetch]


@pytest.mark.parametrize("gpu", ["passed", "not run"])
def test_the_result_of_a_push(bench: PublishBench, gpu: str) -> None:
    if gpu == "passed":
        bench.prove(bench.image(EMBER), kind="gpu", passed=bench.passed_on_gpu[EMBER])
    first, _ = bench.publish().images
    assert str(first) == f"{EMBER}: sha256:answered, 3.0 MB sent, 2 kB already present, gpu: {gpu}"
    data = first.as_data()
    assert data.pop("seconds") >= 0
    assert data == {
        "cell": EMBER,
        "digest": "sha256:answered",
        "bytes": {"sent": 3_000_000, "mounted": 0, "present": 2_000},
        "gpu": gpu,
    }


@pytest.mark.parametrize("cell", [EMBER, BOARD])
def test_a_failed_image_prevents_all_tags_and_other_images_are_pushed(bench: PublishBench, cell: str) -> None:
    bench.broken[cell] = RegistryError("no response")
    with pytest.raises(RegistryError, match="no response"):
        bench.publish()
    assert [call.split()[0] for call in bench.calls] == ["push", "push"]
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


def test_an_interrupt_stops_what_is_attached(bench: PublishBench) -> None:
    """No tag is set."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not set in background jobs of a shell

    class InterruptedDocuments(FakeDocuments):
        def attach(self, registry: Repository, image: PublishableImage, stamped: str) -> None:
            attach(registry, image)

    def attach(registry: Repository, target: PublishableImage) -> None:
        if target.cell == BOARD:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
            stop = cast("MemoryRegistry", registry).stop
            assert stop.wait(10)
            raise StoppedError("stopped")

    with pytest.raises(KeyboardInterrupt):
        bench.publish(documents=InterruptedDocuments([]))
    assert not [call for call in bench.calls if call.startswith("put")]
    assert "changed before the interruption" not in bench.console.text


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


def twins(bench: PublishBench) -> list[PublishableImage]:
    """EMBER, which the matrix has for two architectures; the image for arm64 has the contents of BOARD."""
    amd64, other = bench.targets()
    cells = {"amd64": EMBER, "arm64": TWIN}
    return [
        replace(amd64, cells=cells),
        replace(other, cell=TWIN, arch="arm64", cells=cells, references=amd64.references),
    ]


def test_a_tag_of_several_architectures_is_an_index_that_is_signed_before_it(bench: PublishBench) -> None:
    pair = twins(bench)
    result = bench.publisher(documents=FakeDocuments(bench.calls)).publish(pair)
    assert result.error is None
    assert [sent.target.cell for sent in result.images] == [EMBER, TWIN]
    tags = [bench.stamped(EMBER), *bench.tags(EMBER)]
    registry = bench.repository(EMBER)
    [index] = {registry.tags[tag] for tag in tags}
    signed = bench.calls.index(f"sign the index of {EMBER} and {TWIN} {bench.stamped(EMBER)}")
    assert bench.calls[signed - 1 :] == [f"put {index}", bench.calls[signed], *(f"put {tag}" for tag in tags)]
    assert {f"attach {EMBER} {tags[0]}", f"attach {TWIN} {tags[0]}"} <= set(bench.calls[:signed])
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
        for image in pair
    ]
    assert publish.tagged_manifest(pair[::-1]) == stored, "its bytes depend on the images alone"
    assert not bench.publisher().publish(pair).changed


def test_a_cell_of_one_architecture_keeps_its_manifest(bench: PublishBench) -> None:
    bench.publish()
    assert bench.repository(EMBER).tags[bench.tags(EMBER)[0]] == bench.stored[EMBER].manifest.digest


def refused_for_arm64(bench: PublishBench, images: Sequence[PublishableImage]) -> None:
    bench.calls.clear()
    error = bench.publisher(documents=FakeDocuments(bench.calls)).publish(images).error
    assert error
    assert str(error).splitlines()[1:] == [f"  {images[0].references[0]} would have no image for arm64"]
    assert "--allow-missing-arch" in error.hint
    assert bench.calls == [], "not recorded either"


def test_an_image_is_not_published_without_another_architecture_of_the_matrix(bench: PublishBench) -> None:
    alone = twins(bench)[:1]
    refused_for_arm64(bench, alone)
    assert bench.publisher(allow_missing_arch=True).publish(alone).error is None
    index = bench.repository(EMBER).tags[bench.tags(EMBER)[0]]
    assert list(oci.read_platforms(bench.repository(EMBER).contents[index])) == ["amd64"], "a clear error on arm64"
    assert f"{REGISTRY}/team/ember-cuda:{bench.tags(EMBER)[0]} has no image for arm64" in bench.console.text


def test_an_image_that_only_an_emulation_has_run_is_refused(bench: PublishBench) -> None:
    amd64, arm64 = twins(bench)
    publish.require_run([amd64, arm64], hint="builder stage")
    [report] = arm64.coverage.reports
    emulated = replace(report, evidence=report.evidence.model_copy(update={"machine": {"emulated": "arm64"}}))
    arm64 = replace(arm64, coverage=replace(arm64.coverage, reports=(emulated,)))
    with pytest.raises(ImageTestError, match=rf"^{TWIN}: built, not run \(\d+ tests? passed under emulation\)$"):
        publish.require_run([amd64, arm64], hint="builder stage")


def test_a_tag_does_not_lose_an_architecture_that_left_the_matrix(bench: PublishBench) -> None:
    registry = bench.repository(EMBER)
    labels: dict[str, object] = {"config": {"Labels": {}}}
    images = {arch: registry.add_image({"architecture": arch, **labels}) for arch in ("amd64", "arm64")}
    registry.tags[bench.tags(EMBER)[-1]] = registry.add_index(**images)
    alone = bench.targets()[:1]
    refused_for_arm64(bench, alone)
    assert bench.publisher(allow_missing_arch=True).publish(alone).error is None
    assert set(registry.tags.values()) == {alone[0].digest}
