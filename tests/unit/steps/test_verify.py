"""`builder verify`: an image is compared with its plan or its parent, and made again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import EngineError, UsageError, VerifyError
from builder.common.reference import ImageRef
from builder.evidence import signing
from builder.evidence.signing import Trust
from builder.layers import oci
from builder.layers.oci import CONFIG_TYPE, MANIFEST_TYPE, Descriptor
from builder.matrix.project import Project
from builder.matrix.schema import Trusted
from builder.plan.plan import make_locked_plan
from builder.release import expected
from builder.release.additions import Addition
from builder.release.attestations import Finding
from builder.release.image_sources import find_images, sources_in_registry
from builder.steps import verify
from builder.steps.verify import verify_image
from tests.fakes.engine import FakeEngine
from tests.fakes.run import new_run
from tests.unit.release.parents import plain, project
from tests.unit.steps.adding import LOCAL, PARENT, TARGET, Bench, ImportingEngine, RecordingSigner, addition

CELL = "qz-0.5-cu129-py311-board"
NOBODY = Trust(signers=[], root=Path.cwd())


@dataclass
class Signatures:
    """What one key signed, without cosign: manifests, with annotations, and statements by image and kind."""

    manifests: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    statements: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)

    def signer_of(
        self, repository: object, digest: str, annotations: Mapping[str, str], trust: object
    ) -> tuple[str, list[dict[str, str]]]:
        found = [notes for notes in self.manifests.get(digest, ()) if annotations.items() <= notes.items()]
        return ("ours", found) if found else ("", [])

    def statements_of(self, repository: object, digest: str, kind: str, trust: object) -> list[bytes]:
        return self.statements.get((digest, kind), [])


@dataclass
class Desk:
    """An image with additions, signed, in the registry of `bench`."""

    bench: Bench
    signatures: Signatures = field(default_factory=Signatures)

    def add(self, given: Addition | None = None, engine: FakeEngine | None = None) -> None:
        signer = RecordingSigner(key="k")
        self.bench.add(given or addition("einops", env={"TEAM": "vision"}), signer=signer, engine=engine)
        for digest, notes, statements in signer.signed:
            self.signatures.statements |= {(digest, kind): [text] for kind, text in statements.items()}
            self.signatures.manifests.setdefault(digest, []).append(dict(notes))
        self.bench.mount()

    def forge(
        self, change: Callable[[dict[str, Any]], object], change_manifest: Callable[[Any], object] = list
    ) -> None:
        """Puts a changed configuration and manifest under the tag, with the signature and statements of the image."""
        registry = self.bench.target
        before = registry.tags["1"]
        manifest = json.loads(registry.contents[before])
        config = json.loads(registry.contents[manifest["config"]["digest"]])
        change(config)
        content = oci._json(config)
        blob = Descriptor.of(content, CONFIG_TYPE)
        registry.contents[blob.digest] = content
        manifest["config"] |= {"digest": blob.digest, "size": blob.size}
        change_manifest(manifest)
        after = registry.put_manifest("1", oci._json(manifest), MANIFEST_TYPE)
        self.signatures.manifests[after] = self.signatures.manifests[before]
        for (_, kind), statements in list(self.signatures.statements.items()):
            self.signatures.statements[after, kind] = statements

    def findings(self, *, is_signed: bool = True) -> dict[str, Finding]:
        [source] = sources_in_registry(self.bench.target, "1", "amd64")
        trust = Trust(signers=[Trusted.model_construct(key="k.pub")], root=Path.cwd()) if is_signed else NOBODY
        return {finding.part: finding for finding in verify_image(self.bench.run(), source, TARGET, trust)}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(Bench.install(tmp_path / "store", monkeypatch))
    desk.add()
    monkeypatch.setattr(signing, "signer_of_manifest", desk.signatures.signer_of)
    monkeypatch.setattr(signing, "statements_of_image", desk.signatures.statements_of)
    return desk


# ---- images that `builder add` made


def test_an_image_with_additions(desk: Desk) -> None:
    findings = desk.findings()
    assert {part: finding.state for part, finding in findings.items()} == {
        "signature": "signed", "parent": "same", "test results": "signed", "provenance": "signed",
    }  # fmt: skip
    digest = desk.bench.parent.registry.tags["1"]
    assert findings["parent"].digest == digest
    assert findings["parent"].detail == f"{PARENT.name}: no trusted signer signed it, only this image"
    assert findings["test results"].detail.startswith("not tested")
    assert findings["provenance"].detail == f"parent {digest[7:19]}"


def test_the_signer_of_the_parent_is_named(desk: Desk) -> None:
    notes = {"cell": "em-1-cpu-py311", "image": "em", "tag": "1"}
    desk.signatures.manifests[desk.bench.parent.registry.tags["1"]] = [notes]
    assert desk.findings()["parent"].detail == f"{PARENT.name}: by ours"


def test_results_of_tests_are_signed(desk: Desk) -> None:
    desk.add(engine=ImportingEngine())
    assert desk.findings()["test results"].detail == "2 passed, gpu: not run (the image is for the CPU)"


def test_another_parent(desk: Desk) -> None:
    """The label names an image that the image was not made of."""
    desk.bench.parent.layers[1] = "os", desk.bench.parent.layer(plain({"etc/evil": b"x"}))
    other = desk.bench.parent.push()
    desk.forge(lambda config: config["config"]["Labels"].update({"io.github.gpu-images.parent": other}))
    findings = desk.findings()
    assert (findings["parent"].digest, findings["parent"].state) == (other, "different")
    assert findings["provenance"].detail == "it is about another parent"


@pytest.mark.parametrize("key", ["digest", "annotations"])
def test_the_lowest_layers_are_those_of_the_parent(desk: Desk, key: str) -> None:
    """The same tar, compressed by someone else, or with another table of contents."""
    other = "sha256:" + "5" * 64
    value = other if key == "digest" else {"containerd.io/snapshot/stargz/toc.digest": other}
    desk.forge(lambda _: None, lambda manifest: manifest["layers"][1].update({key: value}))
    assert desk.findings()["parent"].detail == f"{PARENT.name} does not have its lowest layers"


def test_a_wheel_that_the_provenance_does_not_name(desk: Desk) -> None:
    def change(config: dict[str, Any]) -> None:
        line = config["history"][-1]["created_by"]
        config["history"][-1]["created_by"] = line.replace("einops-0.8-", "evil-0.8-")[:-8] + "0" * 8

    desk.forge(change)
    finding = desk.findings()["provenance"]
    assert (finding.state, finding.detail) == ("different", "it does not name evil-0.8-py3-none-any.whl")


def test_a_parent_that_cannot_be_read(desk: Desk) -> None:
    del desk.bench.parent.registry.contents[desk.bench.parent.registry.tags["1"]]
    assert desk.findings()["parent"].state == "different"


@pytest.mark.parametrize("label", ["io.github.gpu-images.parent", "org.opencontainers.image.base.name"])
def test_labels_that_add_does_not_write(desk: Desk, label: str) -> None:
    desk.forge(lambda config: config["config"]["Labels"].pop(label))
    with pytest.raises(VerifyError):
        desk.findings()


def test_without_signatures_nothing_is_read(desk: Desk) -> None:
    """Whoever made the image chose the name of its parent."""
    before = list(desk.bench.parent.registry.calls)
    assert desk.findings(is_signed=False) == {}
    assert desk.bench.parent.registry.calls == before


def test_a_parent_of_the_store(desk: Desk) -> None:
    desk.bench.add(addition("einops", target=LOCAL), engine=ImportingEngine())
    desk.bench.target.others = {}
    desk.bench.offer(project("tqdm", version="4"))
    desk.add(addition("tqdm", parent=LOCAL))
    finding = desk.findings()["parent"]
    assert (finding.state, finding.detail) == ("signed", "vision is in no registry, only this image names it")


# ---- images of the checkout


@dataclass
class Shelf:
    """An image of the store with the labels of the first cell; `lines` are its differences from the plan."""

    project: Project
    lines: list[str] = field(default_factory=list)
    made: str = ""

    def __post_init__(self) -> None:
        self.run = new_run(self.project)
        with self.run.store.used():
            config = oci._json(
                {
                    "architecture": "amd64",
                    "config": {"Labels": {"io.github.gpu-images.cell": CELL}},
                    "rootfs": {"diff_ids": []},
                    "history": [],
                }
            )
            blob = self.run.store.put(config, CONFIG_TYPE)
            manifest = self.run.store.put(oci.manifest(blob, []), MANIFEST_TYPE)
            self.run.store.name("it:1", manifest)
        self.digest = manifest.digest

    def findings(self, *, rebuild: bool = False) -> list[tuple[str, str, str]]:
        reference = ImageRef.parse("it:1")
        [source] = find_images(self.run, reference, "all")
        found = verify_image(self.run, source, reference, NOBODY, rebuild=rebuild)
        return [(finding.part, finding.state, finding.detail) for finding in found]


@pytest.fixture
def shelf(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    shelf = Shelf(tiny)

    def compare_with_plan(*_: object, is_trusted: bool) -> None:
        assert not is_trusted
        if shelf.lines:
            raise VerifyError("; ".join(shelf.lines))

    monkeypatch.setattr(expected, "compare_with_plan", compare_with_plan)
    monkeypatch.setattr(verify, "rebuild_image", lambda *_: shelf.made)
    return shelf


def test_an_image_as_planned(shelf: Shelf) -> None:
    """How it is compared: test_expected.py."""
    assert shelf.findings() == [("plan", "as planned", "")]
    shelf.lines = ["config.User"]
    assert shelf.findings() == [("plan", "different", "config.User")]


def test_a_cell_that_the_checkout_does_not_have(shelf: Shelf) -> None:
    shelf.run = replace(shelf.run, checkout=None)
    assert shelf.findings() == []
    with pytest.raises(UsageError):
        shelf.findings(rebuild=True)


def test_an_image_is_made_again(shelf: Shelf) -> None:
    shelf.made = shelf.digest
    assert shelf.findings(rebuild=True)[1] == ("built again", "same", "")
    shelf.made = "sha256:" + "4" * 64
    assert shelf.findings(rebuild=True)[1] == ("built again", "different", "this checkout makes 444444444444")


def test_an_image_for_another_architecture_cannot_be_made_again(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(type(engine.info()), "foreign_error", lambda *_: EngineError("foreign"))
    [planned] = make_locked_plan(tiny, tiny.select([CELL])).images
    with pytest.raises(EngineError):
        verify.rebuild_image(new_run(tiny, engine=engine), planned)
