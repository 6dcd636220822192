"""What a release says about an image is compared with the image itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from builder.common.console import View
from builder.common.errors import RegistryError
from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.engine.run import Run
from builder.evidence import reports, signing
from builder.evidence.results import Evidence, Proof, coverage_of
from builder.evidence.signing import Trust
from builder.index.host import Host
from builder.layers import oci
from builder.layers.oci import MANIFEST_TYPE
from builder.layers.store import Store as ImageStore
from builder.matrix.schema import Trusted
from builder.matrix.tags import CELL_LABEL, PLAN_LABEL
from builder.release import image_sources
from builder.release.attestations import Attestations, Finding
from builder.steps import verify
from tests.fakes.engine import MemoryConsole
from tests.fakes.registry import MemoryRegistry
from tests.unit.release.parents import of_wheels, project

CELL, FULL = "pt-2.9-cu128-py311", "2.9.1-cu128-py311"
PLAN, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
LINE, _ = of_wheels(tiny := project("tiny"))
RIGHT = ["signature", "test results", "provenance"]


def provenance(plan: str) -> dict[str, Any]:
    return {
        "buildDefinition": {
            "externalParameters": {"revision": "abc"},
            "internalParameters": {"plan": plan},
            "resolvedDependencies": [{"digest": {"sha256": hashlib.sha256(tiny.content).hexdigest()}}],
        }
    }


class Store(MemoryRegistry):
    """A repository with one image, with a layer of one wheel."""

    def __init__(self) -> None:
        super().__init__()
        config = {
            "rootfs": {"diff_ids": [OTHER]},
            "history": [{"created_by": LINE}],
            "config": {"Labels": {CELL_LABEL: CELL, PLAN_LABEL: PLAN}},
        }
        self.config = json.dumps(config).encode()
        data = {
            "config": {"digest": digest_of_bytes(self.config), "size": len(self.config)},
            "layers": [{"digest": OTHER, "size": 7}],
        }
        manifest = json.dumps(data).encode()
        self.contents[digest_of_bytes(self.config)] = self.config
        self.put_manifest("staged", manifest, MANIFEST_TYPE)
        self.image = oci.read_image(manifest, lambda _: self.config)


@dataclass
class ClaimsDesk:
    """An image, and what our key signed about it."""

    store: Store
    folder: Path
    statements: Mapping[str, object] = None  # type: ignore[assignment]
    is_trusted: bool = True
    earlier: Sequence[object] = ()  # statements of every kind that an earlier release attached
    signed_index: str = ""

    def state_results(self, **changes: Any) -> None:
        """Adds a statement about test results."""
        values = {
            "image": self.store.image.manifest.digest, "cell": CELL, "plan": PLAN, "suite": {"a": "b"},
            "kind": "image", "passed": ("test_it",), "failed": (),
        }  # fmt: skip
        coverage = coverage_of([Proof(evidence=Evidence(**{**values, **changes}), signer="gpu")])
        self.statements = {**self.statements, reports.TEST_RESULT: json.loads(reports.test_result(coverage))}

    def attestations(self, tag: str = "2.9", named: str = "", arch: str = "amd64") -> Attestations:
        name = named or self.store.image.manifest.digest
        [source] = image_sources.sources_in_registry(self.store, name, arch)
        reference = ImageRef(registry="registry.example", repository="org/pt-cuda", tag=tag)
        return Attestations(
            source=source, reference=reference, trust=Trust(signers=[Trusted(key="ours")], root=self.folder)
        )

    def findings(self, tag: str = "2.9", *, named: str = "", arch: str = "amd64") -> dict[str, Finding]:
        attestations = self.attestations(tag, named, arch)
        run = Run(checkout=None, host=Host(), store=ImageStore(self.folder), view=View(MemoryConsole()))
        findings = verify.verify_image(run, attestations.source, attestations.reference, attestations.trust)
        return {finding.part: finding for finding in findings}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClaimsDesk:
    desk = ClaimsDesk(Store(), tmp_path, statements={"slsaprovenance1": provenance(PLAN)})

    def signer_of_manifest(
        registry: object, digest: str, annotations: Mapping[str, str], trust: object
    ) -> tuple[str, list[dict[str, str]]]:
        is_index = digest != desk.store.image.manifest.digest
        assert annotations == ({"image": "pt-cuda"} if is_index else {"cell": CELL, "image": "pt-cuda"})
        if is_index and digest != desk.signed_index:
            return "", []
        return ("ours", [{"tag": FULL, "release": f"{FULL}-20261122"}]) if desk.is_trusted else ("", [])

    def statements_of_image(registry: object, digest: str, kind: str, trust: object) -> list[bytes]:
        return [json.dumps(each).encode() for each in (*desk.earlier, desk.statements.get(kind)) if each is not None]

    monkeypatch.setattr(signing, "signer_of_manifest", signer_of_manifest)
    monkeypatch.setattr(signing, "statements_of_image", statements_of_image)
    return desk


def test_all_claims_of_a_released_image_are_signed(desk: ClaimsDesk) -> None:
    desk.state_results()
    findings = desk.findings()
    assert {name: finding.state for name, finding in findings.items()} == dict.fromkeys(RIGHT, "signed")
    assert findings["test results"].detail == "1 passed, gpu: not run"
    assert findings["provenance"].detail == "commit abc"


def test_the_index_that_names_an_image_is_signed_too(desk: ClaimsDesk) -> None:
    """Otherwise an image that an earlier release signed could be put beside a new one."""
    desk.state_results()
    index = desk.store.add_index(arm64=desk.store.image.manifest.digest)
    findings = desk.findings(named=index, arch="arm64")
    assert {name: finding.state for name, finding in findings.items()} == {"signature of the index": "different"}
    assert findings["signature of the index"].detail == "no trusted signer signed it as pt-cuda"
    desk.signed_index = index
    findings = desk.findings(named=index, arch="arm64")
    assert list(findings) == ["signature of the index", *desk.findings()]
    assert {finding.state for finding in findings.values()} == {"signed"}
    assert findings["signature of the index"].digest == index


def test_an_index_without_this_architecture(desk: ClaimsDesk) -> None:
    index = desk.store.add_index(arm64=desk.store.image.manifest.digest)
    with pytest.raises(RegistryError, match=f"has no {index} for amd64$") as caught:
        desk.findings(named=index)
    assert caught.value.hint == "Choose an architecture that it has with --arch: arm64."
    assert len(image_sources.sources_in_registry(desk.store, index, image_sources.ALL)) == 1


def test_without_a_trusted_signature_nothing_else_is_checked(desk: ClaimsDesk) -> None:
    desk.is_trusted = False
    findings = desk.findings("")
    assert {name: finding.state for name, finding in findings.items()} == {"signature": "different"}


@pytest.mark.parametrize("tag", ["2.9-jupyter", "2.8", "2.9.1-py313", "2.9-20261122-cu128", f"{FULL}-20261121", ""])
def test_a_signature_for_another_tag(desk: ClaimsDesk, tag: str) -> None:
    finding = desk.findings(tag)["signature"]
    assert (finding.state, finding.detail) == (
        "different",
        f"signed for {FULL}, {FULL}-20261122, not for {tag or 'latest'}",
    )


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"failed": ("test_it",)}, "tests failed"),
        ({"cell": "other"}, "it is about the cell 'other'"),
        ({"plan": OTHER}, "it is about another plan"),
        ({"image": OTHER}, "it is about another image"),
    ],
)
def test_results_that_do_not_count(desk: ClaimsDesk, changes: dict[str, Any], detail: str) -> None:
    desk.state_results(**changes)
    finding = desk.findings()["test results"]
    assert finding.state == "different"
    assert detail in finding.detail


@pytest.mark.parametrize(
    ("kind", "statement", "name", "detail"),
    [
        ("slsaprovenance1", provenance(OTHER), "provenance", "it is about another plan"),
        ("slsaprovenance1", None, "provenance", "no statement of a trusted signer"),
        (reports.TEST_RESULT, {}, "test results", "invalid statement"),
        (reports.TEST_RESULT, {"evidence": [{"cell": "\x1b[2J"}]}, "test results", "invalid statement"),
        (reports.TEST_RESULT, None, "test results", "no statement of a trusted signer"),
    ],
)
def test_statements_that_differ(desk: ClaimsDesk, kind: str, statement: object, name: str, detail: str) -> None:
    desk.statements = {other: each for other, each in {**desk.statements, kind: statement}.items() if each is not None}
    finding = desk.findings()[name]
    assert finding.state == "different"
    assert detail in finding.detail


def test_the_tag_of_a_release_is_signed_itself(desk: ClaimsDesk) -> None:
    """Whoever can write to the registry could let a stamped tag name an older image."""
    assert desk.findings(f"{FULL}-20261122")["signature"].state == "signed"


def test_a_corrected_statement_counts(desk: ClaimsDesk) -> None:
    desk.state_results()
    desk.earlier = [{}]
    assert {finding.state for finding in desk.findings().values()} == {"signed"}


def test_the_provenance_names_the_wheels_of_the_image(desk: ClaimsDesk) -> None:
    """The plan is in a label, which anyone can copy to an image of other wheels; a signer may be wrong about it."""
    missing = {**provenance(PLAN)["buildDefinition"], "resolvedDependencies": [{"digest": {"sha256": "3" * 64}}]}
    desk.statements = {"slsaprovenance1": {"buildDefinition": missing}}
    finding = desk.findings()["provenance"]
    assert (finding.state, finding.detail) == ("different", "it does not name tiny-1.9-py3-none-any.whl")
