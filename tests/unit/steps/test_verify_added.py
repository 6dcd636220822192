"""`builder verify` of images that `builder add` made: the configuration is derived from that of the parent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from builder.common.errors import VerifyError
from builder.common.reference import ImageRef
from builder.evidence import signing
from builder.evidence.signing import Signer, Trust
from builder.host import Host
from builder.layers import oci
from builder.layers.blobs import CONFIG_TYPE, MANIFEST_TYPE, Descriptor
from builder.layers.store import Store
from builder.matrix.schema import Trusted
from builder.plan.plan import PlannedImage
from builder.release import added_images, expected, verify
from builder.release.attestations import Attestations
from builder.release.expected import PlannedDigests
from builder.release.image_sources import sources_in_registry
from builder.release.verify import Finding
from builder.steps.verify import verify_image
from tests.unit.release.parents import plain, project
from tests.unit.steps.test_add import PARENT, TARGET, Bench, ImportingEngine, addition

PLANNED = PlannedDigests(image=cast("PlannedImage", SimpleNamespace(wheels=())), layers={})


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

    def add(self, **options: Any) -> None:
        signatures = self.signatures

        class MemorySigner(Signer):
            def attest(
                self, repository: Any, digest: str, statements: Mapping[str, bytes], is_same: Any = None
            ) -> None:
                signatures.statements |= {(digest, kind): [text] for kind, text in statements.items()}

            def sign_manifest(self, repository: Any, digest: str, annotations: Mapping[str, str] = {}) -> None:
                signatures.manifests.setdefault(digest, []).append(dict(annotations))

        self.bench.add(addition("einops", env={"TEAM": "vision"}), signer=MemorySigner(key="k"), **options)
        self.bench.target.contents |= {
            digest: content for digest, content in self.bench.parent.registry.contents.items()
            if digest not in self.bench.parent.registry.types
        }  # fmt: skip

    def sign_parent(self) -> None:
        notes = {"cell": "em-1-cpu-py311", "image": "em", "tag": "1"}
        self.signatures.manifests[self.bench.parent.registry.tags["1"]] = [notes]

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

    def findings(
        self, *, is_signed: bool = True, planned: PlannedDigests | None = None, registries: tuple[str, ...] = ()
    ) -> dict[str, Finding]:
        [source] = sources_in_registry(self.bench.target, "1", self.bench.store.root / "tmp", "amd64")
        trust = Trust(signers=[Trusted.model_construct(key="k.pub")], root=Path.cwd())
        with self.bench.store.used():
            found = verify_image(
                source, planned, Attestations(source=source, reference=TARGET, trust=trust) if is_signed else None,
                self.bench.fetcher(Host().index, self.bench.store.downloads),
                find_parent=partial(
                    added_images.find_parent, source.image, None if is_signed else registries, Host(),
                    self.bench.store, self.bench.registry,
                ),
            )  # fmt: skip
            return {finding.layer: finding for finding in found}

    def verdict(self, **options: Any) -> str:
        error = verify.verdict("it", list(self.findings(**options).values()), allow_unknown=True)
        return str(error or "")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(bench := Bench(Store(tmp_path / "store")))
    bench.parent.push("1")
    bench.offer(project("einops", version="0.8"))
    bench.share()
    desk.add()
    monkeypatch.setattr(signing, "signer_of_manifest", desk.signatures.signer_of)
    monkeypatch.setattr(signing, "statements_of_image", desk.signatures.statements_of)
    return desk


def test_a_signed_image_is_verified(desk: Desk) -> None:
    findings = desk.findings()
    states = {name: finding.state for name, finding in findings.items()}
    assert states == {
        "signature": "signed",
        "parent": "signed",
        "configuration": "same",
        "ember, tinylib": "signed",  # the SBOM of additions does not know the index of these
        "os": "signed",
        "files": "signed",
        "einops": "derived",
        "test results": "signed",
        "SBOM": "signed",
        "provenance": "signed",
    }
    digest = desk.bench.parent.registry.tags["1"]
    assert findings["parent"].digest == digest
    assert findings["parent"].detail == (f"{PARENT.name}: no trusted signer signed it, only this image that names it")
    assert findings["test results"].detail.startswith("not tested")
    assert findings["SBOM"].detail == "4 packages, the same as in the files of the image"
    assert findings["provenance"].detail == f"parent {digest[7:19]}"
    assert desk.verdict() == ""


def test_the_signer_of_the_parent_is_named(desk: Desk) -> None:
    desk.sign_parent()
    assert desk.findings()["parent"].detail == f"{PARENT.name}: signed by ours"


def test_results_of_tests_are_signed(desk: Desk) -> None:
    desk.add(engine=ImportingEngine())
    assert desk.findings()["test results"].detail == "2 passed, gpu: not run (the image is for the CPU)"


def test_layers_of_a_parent_whose_sbom_names_the_index_are_rebuilt(desk: Desk) -> None:
    """The parent is what a release signed: its SBOM says where its wheels are."""
    desk.sign_parent()
    desk.bench.offer(project("ember"), project("tinylib"), project("einops", version="0.8"))
    [line, *_] = oci.read_image(
        desk.bench.parent.registry.contents[desk.bench.parent.registry.tags["1"]], desk.bench.parent.registry.read_blob
    ).history
    layer = oci.parse_history(line)
    assert layer
    components = [
        {
            "purl": f"pkg:pypi/{file.split('-')[0]}@1.9", "name": file.split("-")[0], "version": "1.9",
            "hashes": [{"alg": "SHA-256", "content": sha256}],
            "properties": [{"name": "gpu-images:index", "value": "-"}],
        }
        for file, sha256 in layer.wheels
    ]  # fmt: skip
    sbom = json.dumps({"components": components}).encode()
    desk.signatures.statements[desk.bench.parent.registry.tags["1"], "cyclonedx"] = [sbom]
    assert desk.findings()["ember, tinylib"].state == "derived"


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda config: config["config"]["Env"].append("LD_PRELOAD=/srv/a"), "config.Env"),
        (lambda config: config["config"].update(User="0:0"), "config.User"),
        (lambda config: config["config"]["Labels"].update(added="x"), "config.Labels.added"),
        (
            lambda config: config["config"]["Labels"].update({"io.github.gpu-images.cell": "em-1"}),
            "config.Labels.io.github.gpu-images.cell",
        ),
        (lambda config: config.update(created="2026-01-01T00:00:00Z"), "created"),
    ],
)
def test_a_configuration_that_add_would_not_write(
    desk: Desk, change: Callable[[dict[str, Any]], object], detail: str
) -> None:
    """Even if it is signed: a signer can be wrong about what it signs."""
    desk.forge(change)
    desk.signatures.manifests[desk.bench.target.tags["1"]].append({"cell": "em-1", "image": "vision", "tag": "1"})
    finding = desk.findings()["configuration"]
    assert (finding.state, finding.detail.partition(":")[0].partition("[")[0]) == ("different", detail)
    assert "not as expected" in desk.verdict()


def test_another_parent(desk: Desk) -> None:
    """The label names an image that the image was not made of."""
    desk.bench.parent.layers[1] = "os", desk.bench.parent.layer(plain({"etc/evil": b"x"}))
    other = desk.bench.parent.push()
    desk.forge(lambda config: config["config"]["Labels"].update({"io.github.gpu-images.parent": other}))
    findings = desk.findings()
    assert findings["parent"].digest == other
    assert findings["configuration"].state == "different"
    assert "rootfs.diff_ids[1]" in findings["configuration"].detail
    assert findings["provenance"].detail == "it is about another parent"


def test_the_lowest_layers_are_those_of_the_parent(desk: Desk) -> None:
    """The same tar, compressed by someone else, with another table of contents."""
    desk.forge(lambda _: None, lambda manifest: manifest["layers"][1].update(digest="sha256:" + "5" * 64))
    finding = desk.findings()["configuration"]
    assert (finding.state, finding.detail.partition(":")[0]) == ("different", "manifest.layers[1].digest")


def test_a_parent_that_cannot_be_read(desk: Desk) -> None:
    del desk.bench.parent.registry.contents[desk.bench.parent.registry.tags["1"]]
    findings = desk.findings()
    assert findings["parent"].state == findings["configuration"].state == "signed"
    assert "not read: " in findings["parent"].detail
    assert findings["configuration"].detail == "not compared with that of its parent"
    assert desk.verdict() == ""
    assert "no plan to compare" in desk.verdict(is_signed=False, registries=(PARENT.registry,))


# ---- without signatures


def test_without_signatures_an_unknown_parent_is_no_proof(desk: Desk) -> None:
    """Whoever made the image made the parent, too."""
    findings = desk.findings(is_signed=False, registries=(PARENT.registry,))
    assert {name: finding.state for name, finding in findings.items()} == {
        "parent": "unknown", "configuration": "unknown",
    }  # fmt: skip
    assert "no plan to compare" in desk.verdict(is_signed=False, registries=(PARENT.registry,))


def test_without_signatures_no_other_registry_is_read(desk: Desk) -> None:
    before = list(desk.bench.parent.registry.calls)
    findings = desk.findings(is_signed=False, registries=("other.example.test",))
    assert "not read from another registry" in findings["parent"].detail
    assert list(findings) == ["parent", "configuration"]
    assert desk.bench.parent.registry.calls == before


def test_a_parent_as_planned_does_not_make_its_additions_known(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "differences", lambda *_: [])
    findings = desk.findings(is_signed=False, planned=PLANNED, registries=(PARENT.registry,))
    assert findings["parent"].detail == f"{PARENT.name}: as planned in this checkout"
    assert findings["configuration"].state == "unknown", "whoever pushed the image chose its variables"
    assert findings["einops"].state == "unknown", "and the package"
    monkeypatch.setattr(expected, "differences", lambda *_: ["config.User"])
    findings = desk.findings(is_signed=False, planned=PLANNED, registries=(PARENT.registry,))
    assert findings["configuration"].state == "unknown"


@pytest.mark.parametrize("label", ["io.github.gpu-images.parent", "org.opencontainers.image.base.name"])
def test_labels_that_add_does_not_write(desk: Desk, label: str) -> None:
    desk.forge(lambda config: config["config"]["Labels"].pop(label))
    with pytest.raises(VerifyError, match="invalid labels of its parent"):
        desk.findings()


def test_a_parent_of_the_store(desk: Desk) -> None:
    local = ImageRef.parse("vision:1")
    desk.bench.add(addition("einops", target=local), engine=ImportingEngine())
    desk.bench.target.others = {}
    desk.bench.offer(project("tqdm", version="4"))
    desk.bench.add(addition("tqdm", parent=local, target=replace(TARGET, tag="1")))
    findings = desk.findings(is_signed=False)
    assert findings["parent"].detail == "vision: no trusted signer signed it"
