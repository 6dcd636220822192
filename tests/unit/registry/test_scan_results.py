"""Results of scans in a registry: which one counts for an image, and scans of released images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import cast

import pytest

from builder.common.errors import SigningError, UsageError, VerifyError
from builder.index.host import Host
from builder.layers import oci
from builder.layers.blobs import MANIFEST_TYPE, Descriptor
from builder.matrix.project import Project
from builder.matrix.schema import Scan
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.registry import artifacts, scan, scan_results, signing, statements
from builder.registry.client import Registry
from builder.registry.scan import Finding, Result
from builder.registry.scan_results import Scanned, Scanner
from builder.registry.signing import SIGNATURE_TYPE, Signer
from tests.unit.registry.test_artifacts import Memory

CELL = "qz-0.5-cu129-py311"
HIGH = Finding(id="CVE-1", package="libtls", version="1.1", severity="high")


class Desk:
    """A registry with an image whose full tag is released, and a scanner that finds `findings`."""

    def __init__(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = Memory()
        path = project.root / "matrix.yaml"
        path.write_text(f'scan: {{command: [scanner, "{{sbom}}"]}}\n{path.read_text("utf-8")}', encoding="utf-8")
        self.project = Project(project.root)
        [self.planned] = plan.make_locked(self.project, self.project.select([CELL])).images
        self.tag = self.planned.references[0].rpartition(":")[2]
        self.digest = self.registry.put_manifest(self.tag, b'{"layers": []}', MANIFEST_TYPE)
        self.image = Descriptor(media_type=MANIFEST_TYPE, digest=self.digest, size=14)
        self.findings: tuple[Finding, ...] = ()
        monkeypatch.setattr(artifacts, "CONFIRM_S", 0)
        monkeypatch.setattr(scan_results, "Registry", lambda *_, **__: self.registry)
        monkeypatch.setattr(scan, "scan", self._scan)

    def _scan(self, _: Scan, image: str, sbom: bytes) -> Result:
        return self.result("2026-11-24", image, *self.findings)

    def result(self, day: str, image: str, *findings: Finding) -> Result:
        return Result(image=image, scanner="s 1", time=f"{day}T00:00:00Z", findings=findings)

    def attach(self, result: Result, signer: Signer | None = None) -> None:
        with artifacts.attaching(cast("Registry", self.registry), self.image) as attachments:
            scan_results.add(attachments, result, signer)

    def attach_file(self, kind: str, content: bytes) -> None:
        notes = {artifacts.CREATED: "2026-12-31T00:00:00Z"}
        artifacts.attach(cast("Registry", self.registry), self.image, kind, {kind: content}, notes)

    def attach_sbom(self, subject: str) -> None:
        component = {"name": "image", "bom-ref": subject}
        self.attach_file(
            statements.SBOM_TYPE,
            json.dumps({"bomFormat": "CycloneDX", "metadata": {"component": component}}).encode(),
        )

    @property
    def state(self) -> str:
        return scan_results.state(self.project, cast("Registry", self.registry), self.digest)

    def scan(self, *images: PlannedImage) -> Iterator[Scanned]:
        return Scanner(self.project, Host(), "registry.example.test", None).scan(images or (self.planned,))


@pytest.fixture
def desk(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tiny, monkeypatch)


def test_the_newest_result_counts_in_any_order(desk: Desk) -> None:
    assert desk.state == "unscanned"
    desk.attach(desk.result("2026-11-24", desk.digest, HIGH))
    desk.attach(desk.result("2026-11-23", desk.digest))
    assert desk.state == "1 high 2026-11-24, unsigned"
    assert desk.registry.listed(desk.digest.replace(":", "-"))[0]["annotations"]["gpu-images.scan"] == "1 high"


def test_an_annotation_does_not_make_a_result_newer(desk: Desk) -> None:
    """The list of attachments is not signed."""
    desk.attach(desk.result("2026-11-24", desk.digest, HIGH))
    desk.attach(desk.result("2026-11-23", desk.digest))
    tag = desk.digest.replace(":", "-")
    entries = desk.registry.listed(tag)
    entries[-1]["annotations"][artifacts.CREATED] = "2030-01-01T00:00:00Z"
    desk.registry.put_manifest(tag, json.dumps({"manifests": entries}).encode(), oci.INDEX_TYPE)
    assert desk.state == "1 high 2026-11-24, unsigned"


def test_results_that_are_forged_or_of_another_image(desk: Desk) -> None:
    desk.attach(desk.result("2026-11-25", "sha256:" + "e" * 64))
    desk.attach_file(scan_results.TYPE, b'{"format": 1}')
    assert desk.state == "unscanned, 2 invalid"
    desk.attach(desk.result("2026-11-23", desk.digest, HIGH))
    assert desk.state == "1 high 2026-11-23, unsigned"


def test_a_damaged_list_does_not_end_the_status(desk: Desk) -> None:
    desk.registry.put_manifest(desk.digest.replace(":", "-"), b"[]", MANIFEST_TYPE)
    assert desk.state == "unscanned, invalid list"


@pytest.mark.parametrize(
    ("signer", "end"), [("keys/ci.pub", ""), ("", ", unsigned"), (SigningError("cosign"), ", signature not checked")]
)
def test_whether_a_result_is_signed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, signer: str | SigningError, end: str
) -> None:
    def trusted_signer(_: object, documents: dict[str, bytes], kind: str) -> str:
        assert json.loads(documents[kind])["image"] == desk.digest
        assert documents[SIGNATURE_TYPE] == b"signature"
        if isinstance(signer, SigningError):
            raise signer
        return signer

    monkeypatch.setattr(Signer, "sign", lambda *_: b"signature")
    monkeypatch.setattr(signing, "trusted_signer", trusted_signer)
    desk.attach(desk.result("2026-11-23", desk.digest), Signer(key="k"))
    [artifact] = artifacts.attached(cast("Registry", desk.registry), desk.digest, scan_results.TYPE)
    assert SIGNATURE_TYPE in (
        artifacts.read(cast("Registry", desk.registry), artifact, scan_results.TYPE, desk.digest) or {}
    )
    assert desk.state == f"clean 2026-11-23{end}"


def test_a_released_image_is_scanned(desk: Desk) -> None:
    desk.attach_sbom(desk.digest)
    [clean] = desk.scan()
    assert (clean.cell, clean.state, clean.refused) == (CELL, "clean", ())
    assert desk.state == "clean 2026-11-24, unsigned"
    desk.findings = (HIGH,)
    [refused] = desk.scan()
    assert (refused.state, refused.refused) == ("refused", (HIGH,))
    assert refused.as_data()["counts"]["high"] == 1
    desk.findings = (HIGH.model_copy(update={"severity": "low"}),)
    assert [each.state for each in desk.scan()] == ["1 low"]


@pytest.mark.parametrize("subject", ["", "sha256:" + "e" * 64])
def test_an_image_without_an_sbom_of_its_own(desk: Desk, subject: str) -> None:
    if subject:
        desk.attach_sbom(subject)
    [failed] = desk.scan()
    assert (failed.state, failed.result) == ("scan failed", None)
    assert failed.failure == "no SBOM is attached to this image: `builder release` attaches one"
    assert desk.state == "unscanned"


def test_a_scanner_that_fails(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Result:
        raise VerifyError("scanner: exit status 1")

    desk.attach_sbom(desk.digest)
    monkeypatch.setattr(scan, "scan", fail)
    [failed] = desk.scan()
    assert (failed.state, failed.failure) == ("scan failed", "scanner: exit status 1")
    assert desk.state == "unscanned"


def test_cells_that_are_not_released_are_left_out(desk: Desk) -> None:
    del desk.registry.tags[desk.tag]
    assert list(desk.scan()) == []


def test_without_a_scanner(tiny: Project) -> None:
    with pytest.raises(UsageError, match="`scan` is not set") as caught:
        Scanner(tiny, Host(), "", None)
    assert 'scan:\n  command: [grype, "sbom:{sbom}"' in caught.value.hint
