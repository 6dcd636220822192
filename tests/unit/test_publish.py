"""What may be published, and that a tag that moves does so when everything else is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from builder import assemble, digest, evidence, plan, publish, push
from builder.errors import BuilderError, ImageTestError, RegistryError, UsageError
from builder.evidence import Evidence
from builder.host import Host
from builder.load import Assembled
from builder.oci import BuiltLayer
from builder.plan import Plan, PlannedImage
from builder.project import Project
from builder.publish import Target
from builder.push import Blob, Pushed
from builder.reference import ImageRef
from builder.store import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, Store
from builder.view import View
from tests.unit.fakes import MemoryConsole

Edit = Callable[[str, str], Project]
EMBER, BOARD = "em-1.10-cu1210-py311", "qz-0.5-cu129-py311-board"
REGISTRY = "registry.example.test:5000"


class Bench:
    """Two images of the tiny project in a store, with passing evidence, and a registry that is not there.

    `calls` says what was asked of it; `broken` are images by id for which it fails.
    """

    def __init__(self, project: Project, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        self.store = Store(root)
        self.store.prepare()
        self.console = MemoryConsole()
        self.plan: Plan = plan.make_locked(project, project.select([EMBER, BOARD]))
        self.made = {image.id: self._make(image) for image in self.plan.images}
        self.calls: list[str] = []
        self.blobs: dict[str, list[Blob]] = {}
        self.mounts: list[Sequence[str]] = []
        self.broken: dict[str, BuilderError] = {}
        self.answer = Pushed(digest="sha256:answered", sent=3_000_000, skipped=2_000, mounted=0)
        self._ids = {made.manifest.digest: image_id for image_id, made in self.made.items()}
        for image in self.plan.images:
            self.prove(image)
        monkeypatch.setattr(assemble, "find", lambda _, image: self.made.get(image.id))
        monkeypatch.setattr(publish, "Registry", self._registry)
        monkeypatch.setattr(push, "push", self._push)
        monkeypatch.setattr(push, "tag", self._tag)

    def _make(self, image: PlannedImage) -> Assembled:
        blob = self.store.put(f"layer of {image.id}".encode(), LAYER_TYPE)
        layer = BuiltLayer(planned=image.layers[0], digest=blob.digest, diff_id="", size=blob.size)
        return Assembled(
            config=self.store.put(f"config of {image.id}".encode(), CONFIG_TYPE),
            manifest=self.store.put(f"manifest of {image.id}".encode(), MANIFEST_TYPE),
            layers=(layer, layer),
        )

    def prove(self, image: PlannedImage, image_id: str = "", **changes: Any) -> None:
        """Writes evidence, of a pass unless told otherwise."""
        proof = Evidence(
            image_id=image_id or self.made[image.id].config.digest,
            cell=image.id,
            plan=image.digest,
            suite=evidence.suite_digest(self.project.root),
            passed=("test_it",),
            failed=(),
            gpu="not run",
        )
        evidence.write(self.project.state, proof.model_copy(update=changes))

    def image(self, cell: str) -> PlannedImage:
        return next(image for image in self.plan.images if image.id == cell)

    def tags(self, cell: str) -> list[str]:
        """Its full tag first."""
        return [ImageRef.parse(text).tag for text in self.image(cell).references]

    def targets(self, registry: str = "") -> list[Target]:
        return publish.targets(self.project, self.store, self.plan, registry)

    def publish(self, registry: str = "") -> list[str]:
        return publish.publish(Host(), View(self.console), self.store, self.targets(registry))

    # ---- the registry

    def _registry(self, reference: ImageRef, *, host: Host, write: bool) -> ImageRef:
        assert write
        return reference

    def _push(
        self,
        to: ImageRef,
        *,
        manifest: bytes,
        media_type: str,
        blobs: Sequence[Blob],
        mount_from: Sequence[str],
        progress: Callable[[int], None],
    ) -> Pushed:
        cell = self._ids[digest.of_bytes(manifest)]
        self.calls.append(f"push {cell} to {to.registry}/{to.repository}")
        assert media_type == MANIFEST_TYPE
        self.blobs[cell], self.mounts = list(blobs), [*self.mounts, mount_from]
        if cell in self.broken:
            raise self.broken[cell]
        return self.answer

    def _tag(
        self, to: ImageRef, blob: str, manifest: bytes, media_type: str, versioned: Sequence[str], moving: Sequence[str]
    ) -> list[str]:
        assert (digest.of_bytes(manifest), media_type) == (blob, MANIFEST_TYPE)
        told = [f"versioned {name}" for name in versioned] + [f"moving {name}" for name in moving]
        self.calls += [f"{self._ids[blob]} {one}" for one in told]
        return told


@pytest.fixture
def bench(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tiny, tmp_path / "store", monkeypatch)


# ---- what may be


def test_where_images_go(bench: Bench) -> None:
    found = bench.targets()
    assert [target.image.id for target in found] == [EMBER, BOARD]
    for target in found:
        assert tuple(map(str, target.references)) == target.image.references
        assert target.made == bench.made[target.image.id]
        assert {reference.registry for reference in target.references} == {REGISTRY}


def test_another_registry(bench: Bench) -> None:
    for target in bench.targets("other.example.test"):
        assert {reference.registry for reference in target.references} == {"other.example.test"}
        names = [str(reference).partition("/")[2] for reference in target.references]
        assert names == [name.partition("/")[2] for name in target.image.references]


def test_without_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    bench = Bench(edit(f"registry: {REGISTRY}", 'registry: ""'), tmp_path / "store", monkeypatch)
    with pytest.raises(UsageError, match="names no registry") as caught:
        bench.targets()
    assert "--to" in caught.value.hint
    assert len(bench.targets("other.example.test")) == 2


def refused(bench: Bench) -> str:
    """Why EMBER is, which also keeps BOARD from being published."""
    with pytest.raises(ImageTestError) as caught:
        bench.publish()
    assert bench.calls == []
    assert caught.value.hint == f"builder images {EMBER}"
    return str(caught.value)


def test_what_is_not_built(bench: Bench) -> None:
    del bench.made[EMBER]
    assert refused(bench) == f"{EMBER}: not built"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": "sha256:other"}, "not tested"),
        ({"suite": "sha256:other"}, "tested by other tests than those of today"),
        ({"failed": ("test_that",)}, "its tests failed"),
        ({"gpu": "failed"}, "its tests failed"),
        ({"passed": ()}, "its tests failed"),
    ],
    ids=str,
)
def test_evidence_that_does_not_do(bench: Bench, changes: dict[str, Any], words: str) -> None:
    bench.prove(bench.image(EMBER), **changes)
    assert refused(bench) == f"{EMBER}: {words}"


def test_no_evidence_or_none_that_can_be_read(bench: Bench) -> None:
    path = evidence.path(bench.project.state, bench.made[EMBER].config.digest)
    path.write_text("{")
    assert refused(bench) == f"{EMBER}: not tested"
    path.unlink()
    assert refused(bench) == f"{EMBER}: not tested"


def test_tests_that_were_edited(bench: Bench) -> None:
    (bench.project.root / "tests/images").mkdir(parents=True)
    (bench.project.root / "tests/images/test_new.py").write_text("")
    with pytest.raises(ImageTestError, match=r"^2 images failed\n") as caught:
        bench.publish()
    assert str(caught.value).count("tested by other tests") == 2


def test_evidence_by_the_id_of_a_containerd_store(bench: Bench) -> None:
    made = bench.made[EMBER]
    evidence.path(bench.project.state, made.config.digest).unlink()
    bench.prove(bench.image(EMBER), made.manifest.digest)
    assert len(bench.targets()) == 2


# ---- what is done


def test_tags_that_move_come_after_everything_else(bench: Bench) -> None:
    """The full tag right after its image."""
    told = bench.publish()
    pushed = [
        f"push {EMBER} to {REGISTRY}/team/ember-cuda",
        f"{EMBER} versioned {bench.tags(EMBER)[0]}",
        f"push {BOARD} to {REGISTRY}/team/quartz-cuda",
        f"{BOARD} versioned {bench.tags(BOARD)[0]}",
    ]
    moving = [f"{cell} moving {tag}" for cell in (EMBER, BOARD) for tag in bench.tags(cell)[1:]]
    assert bench.calls == pushed + moving
    assert moving
    assert [line for line in told if line.startswith("moving")] == [line.split(maxsplit=1)[1] for line in moving]


def test_what_is_pushed(bench: Bench) -> None:
    """Under the registry that was asked for; layers that other repositories have are taken from there."""
    bench.publish("other.example.test")
    assert [call.split()[3] for call in bench.calls if call.startswith("push")] == [
        "other.example.test/team/ember-cuda",
        "other.example.test/team/quartz-cuda",
    ]
    assert bench.mounts == [["team/quartz-cuda"], ["team/ember-cuda"]]
    for cell, blobs in bench.blobs.items():
        made = bench.made[cell]
        assert [blob.digest for blob in blobs] == [made.config.digest, *(layer.digest for layer in made.layers)]
        for blob in blobs:
            assert blob.path is not None
            assert blob.path.stat().st_size == blob.size


@pytest.mark.parametrize("gpu", ["passed", "not run"])
def test_what_is_told(bench: Bench, gpu: str) -> None:
    bench.prove(bench.image(EMBER), gpu=gpu)
    first, second, *_ = bench.publish()
    assert first == f"{EMBER}: sha256:answered, 3.0 MB sent, 2 kB there already, gpu: {gpu}"
    assert second == f"versioned {bench.tags(EMBER)[0]}"


def test_an_image_that_fails_keeps_all_tags_from_moving_and_no_image_from_being_pushed(bench: Bench) -> None:
    bench.broken[EMBER] = RegistryError("the registry is silent")
    with pytest.raises(RegistryError, match="the registry is silent"):
        bench.publish()
    assert [call.split()[:2] for call in bench.calls] == [["push", EMBER], ["push", BOARD], [BOARD, "versioned"]]
    assert f"{EMBER}: failed" in bench.console.text
    bench.broken.clear()
    bench.calls.clear()
    bench.publish()
    assert [call for call in bench.calls if " moving " in call]


def test_failures_are_told_together(bench: Bench) -> None:
    bench.broken = {EMBER: RegistryError("first"), BOARD: RegistryError("second")}
    with pytest.raises(RegistryError) as caught:
        bench.publish()
    assert str(caught.value).splitlines() == ["2 images failed", "first", "second"]
