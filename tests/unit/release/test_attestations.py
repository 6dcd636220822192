"""What a release says about an image is compared with the image itself."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from builder.common.errors import RegistryError
from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.evidence import reports, sbom_and_provenance, signing
from builder.evidence.results import Evidence, Report, coverage_of
from builder.evidence.signing import Trust
from builder.index.download import Fetcher
from builder.layers import estargz, oci, splice
from builder.layers.blobs import MANIFEST_TYPE
from builder.layers.splice import Entry
from builder.matrix.schema import Trusted
from builder.matrix.tags import CELL_LABEL, PLAN_LABEL
from builder.registry.failures import RejectedError
from builder.release import image_sources
from builder.release.attestations import Attestations
from builder.release.verify import Finding
from builder.steps import verify
from tests.fakes.registry import MemoryRegistry
from tests.unit.layers.test_estargz import replace_toc
from tests.unit.layers.test_installed import SITE, STATUS, layer, metadata

CELL, FULL = "pt-2.9-cu128-py311", "2.9.1-cu128-py311"
PLAN, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
LAYER = layer({"var/lib/dpkg/status": STATUS, f"{SITE}/a-1.dist-info/METADATA": metadata("a", "1.0")}).getvalue()
SBOM = {
    "components": [
        {"purl": "pkg:deb/debian/bash@5.2.15-2%2Bb8", "name": "bash", "version": "5.2.15-2+b8"},
        {"purl": "pkg:pypi/a@1.0.0", "name": "A", "version": "1.0.0"},
        {"name": "debian", "version": "12"},
        {"purl": "pkg:generic/python@3.12.12", "name": "python", "version": "3.12.12"},
    ]
}
MORE = {"purl": "pkg:pypi/b@2", "name": "b", "version": "2"}
RIGHT = ["signature", "configuration", "os", "test results", "SBOM", "provenance"]


def provenance(plan: str) -> dict[str, Any]:
    return {"buildDefinition": {"externalParameters": {"revision": "abc"}, "internalParameters": {"plan": plan}}}


class Store(MemoryRegistry):
    """A repository with one image, whose layer may be damaged. `toc` is the digest of its table of contents."""

    def __init__(self, layer: bytes = LAYER, toc: str = "") -> None:
        super().__init__()
        self.is_damaged = False
        self.layer = layer
        config = {
            "rootfs": {"diff_ids": [OTHER]},
            "history": [{"created_by": "os"}],
            "config": {"Labels": {CELL_LABEL: CELL, PLAN_LABEL: PLAN}},
        }
        self.config = json.dumps(config).encode()
        blob = {"digest": digest_of_bytes(layer), "size": len(layer)}
        data = {
            "config": {"digest": digest_of_bytes(self.config), "size": len(self.config)},
            "layers": [{**blob, "annotations": {estargz.TOC_ANNOTATION: toc}} if toc else blob],
        }
        manifest = json.dumps(data).encode()
        self.contents |= {digest_of_bytes(content): content for content in (self.config, layer)}
        self.put_manifest("staged", manifest, MANIFEST_TYPE)
        self.image = oci.read_image(manifest, lambda _: self.config)

    def download(self, digest: str, size: int, out: BinaryIO, read: Callable[[int], None]) -> None:
        if self.is_damaged:
            raise RejectedError("content does not match its digest")
        out.write(self.layer)


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
        coverage = coverage_of([Report(evidence=Evidence(**{**values, **changes}), signer="gpu")])
        self.statements = {**self.statements, reports.TEST_RESULT: json.loads(reports.test_result(coverage))}

    def attestations(self, tag: str = "2.9", named: str = "", arch: str = "amd64") -> Attestations:
        name = named or self.store.image.manifest.digest
        [source] = image_sources.sources_in_registry(self.store, name, self.folder, arch)
        reference = ImageRef(registry="registry.example", repository="org/pt-cuda", tag=tag)
        return Attestations(
            source=source, reference=reference, trust=Trust(signers=[Trusted(key="ours")], root=self.folder)
        )

    def findings(
        self, tag: str = "2.9", *, fast: bool = False, named: str = "", arch: str = "amd64"
    ) -> dict[str, Finding]:
        attestations = self.attestations(tag, named, arch)
        findings = verify.verify_image(attestations.source, None, attestations, NoWheels(), fast=fast)
        return {finding.layer: finding for finding in findings}


class NoWheels(Fetcher):
    def __init__(self) -> None: ...

    def stop(self) -> None: ...


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClaimsDesk:
    desk = ClaimsDesk(Store(), tmp_path, statements={"cyclonedx": SBOM, "slsaprovenance1": provenance(PLAN)})

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
    assert findings["SBOM"].detail == "2 packages, the same as in the files of the image"
    assert findings["test results"].detail == "1 passed, gpu: not run"
    assert findings["provenance"].detail == "commit abc"
    assert not list(desk.folder.iterdir())


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
    assert len(image_sources.sources_in_registry(desk.store, index, desk.folder, image_sources.ALL)) == 1


def test_without_hashing_the_sbom_is_not_compared(desk: ClaimsDesk) -> None:
    desk.state_results()
    assert desk.findings(fast=True)["SBOM"].detail == "2 packages, not compared with the files of the image"


def test_without_a_trusted_signature_nothing_else_is_checked(desk: ClaimsDesk) -> None:
    """Whoever can write to the registry chose which layers and wheels this machine downloaded."""
    desk.is_trusted = False
    findings = desk.findings("")
    assert {name: finding.state for name, finding in findings.items()} == {"signature": "different"}


@pytest.mark.parametrize("tag", ["2.9-jupyter", "2.8", "2.9.1-py313", "2.9-20261122-cu128", f"{FULL}-20261121"])
def test_a_signature_for_another_tag(desk: ClaimsDesk, tag: str) -> None:
    finding = desk.findings(tag, fast=True)["signature"]
    assert (finding.state, finding.detail) == ("different", f"signed for {FULL}, {FULL}-20261122, not for {tag}")


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
        ("cyclonedx", {"components": SBOM["components"][1:]}, "SBOM", "not in the SBOM: bash 5.2.15-2+b8"),
        ("cyclonedx", {"components": [*SBOM["components"], MORE]}, "SBOM", "not in the image: b 2"),
        ("cyclonedx", {"components": [{**MORE, "purl": "nonsense"}]}, "SBOM", "invalid SBOM"),
        ("cyclonedx", {"components": [{**MORE, "purl": "pkg:deb/"}]}, "SBOM", "invalid SBOM"),
        ("cyclonedx", {"components": [{**MORE, "purl": "pkg:pypi/other@2"}]}, "SBOM", "pkg:pypi/other@2 is b 2"),
        ("cyclonedx", {"components": [{**MORE, "purl": "pkg:deb/debian/b@1"}]}, "SBOM", "pkg:deb/debian/b@1 is b 2"),
        ("cyclonedx", {}, "SBOM", "invalid SBOM"),
        ("cyclonedx", None, "SBOM", "no statement of a trusted signer"),
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


def sbom_with(purl: str) -> dict[str, Any]:
    """The SBOM with another purl of bash, whose source in the layer is `bash (5.2.15-2)`."""
    return {"components": [{**SBOM["components"][0], "purl": purl}, *SBOM["components"][1:]]}


@pytest.mark.parametrize(
    ("upstream", "detail"),
    [
        ("", "2 packages, the same as in the files of the image"),  # an SBOM of an earlier builder
        ("?arch=amd64&upstream=bash%405.2.15-2", "2 packages, the same as in the files of the image"),
        (
            "?upstream=bash%405.2.15-1",
            "different source package in the image: bash 5.2.15-2+b8 (source: bash 5.2.15-1)",
        ),
        ("?upstream=dash", "different source package in the image: bash 5.2.15-2+b8 (source: dash 5.2.15-2+b8)"),
    ],
)
def test_the_source_packages_of_the_sbom_are_compared(desk: ClaimsDesk, upstream: str, detail: str) -> None:
    desk.statements = {"cyclonedx": sbom_with(f"pkg:deb/debian/bash@5.2.15-2%2Bb8{upstream}")}
    assert desk.findings()["SBOM"].detail == detail


@pytest.mark.parametrize(
    ("source", "state"),
    [(("bash", "5.2.15-2"), "signed"), (("dash", "5.2.15-2"), "different"), (("bash", "9"), "different")],
)
def test_what_trivy_reads_must_be_the_same_source(desk: ClaimsDesk, source: tuple[str, str], state: str) -> None:
    sbom = sbom_with("pkg:deb/debian/bash@5.2.15-2%2Bb8?upstream=bash%405.2.15-2")
    pairs = zip(sbom_and_provenance.SOURCE_NAMES, source, strict=True)
    sbom["components"][0]["properties"] = [{"name": name, "value": value} for name, value in pairs]
    desk.statements = {"cyclonedx": sbom}
    finding = desk.findings()["SBOM"]
    assert finding.state == state
    assert ("properties of another source package" in finding.detail) == (state == "different")


def test_a_source_package_missing_from_the_sbom_is_reported(desk: ClaimsDesk) -> None:
    """Scanners would look up the advisories of `bash` in the wrong version."""
    named = {"purl": "pkg:deb/debian/libssl3@3?upstream=openssl", "name": "libssl3", "version": "3"}
    desk.statements = {"cyclonedx": {"components": [*SBOM["components"], named]}}
    detail = desk.findings()["SBOM"].detail
    assert detail == (
        "not in the image: libssl3 3; "
        "different source package in the image: bash 5.2.15-2+b8 (source: bash 5.2.15-2+b8)"
    )


def test_a_damaged_layer_is_reported(desk: ClaimsDesk) -> None:
    desk.store.is_damaged = True
    findings = desk.findings()
    assert "its blob is damaged" in findings["os"].detail
    assert findings["SBOM"].state == "different"


def test_the_table_of_contents_is_compared_with_the_layer_whose_packages_are_read(desk: ClaimsDesk) -> None:
    """Both read the whole layer, one after the other."""
    records = {"var/lib/dpkg/status": STATUS, f"{SITE}/a-1.dist-info/METADATA": metadata("a", "1.0")}
    out = io.BytesIO()
    written = splice.write_layer([Entry(path=path, mode=0o644, content=text) for path, text in records.items()], out)
    forged, toc = replace_toc(out.getvalue(), lambda entries: entries[0].update(mode=0o777))
    same = "2 packages, the same as in the files of the image"
    wrong = "the table of contents has wrong data about 'var/lib/dpkg/status'"
    for content, digest, state, detail in (
        (out.getvalue(), written.toc, "signed", ""),
        (forged, toc, "different", wrong),
    ):
        desk.store = Store(content, digest)
        findings = desk.findings()
        assert (findings["os"].state, findings["os"].detail) == (state, detail)
        assert findings["SBOM"].detail == same


def test_the_tag_of_a_release_is_signed_itself(desk: ClaimsDesk) -> None:
    """Whoever can write to the registry could let a stamped tag name an older image."""
    assert desk.findings(f"{FULL}-20261122", fast=True)["signature"].state == "signed"


def test_a_corrected_statement_counts(desk: ClaimsDesk) -> None:
    desk.state_results()
    desk.earlier = [{}]
    assert {finding.state for finding in desk.findings().values()} == {"signed"}


def wheel_of(name: str, sha256: str, kind: str = "pypi", **properties: str) -> dict[str, Any]:
    """A wheel of an SBOM; `properties` are those with the prefix of builder."""
    return {
        "purl": f"pkg:{kind}/{name}@1",
        "name": name,
        "version": "1",
        "hashes": [{"alg": "SHA-256", "content": sha256}],
        "properties": [{"name": f"gpu-images:{key}", "value": value} for key, value in properties.items()],
    }


def test_the_signed_sbom_has_the_index_of_each_wheel(desk: ClaimsDesk) -> None:
    """A wheel that was built from source is in no index."""
    wheels = [
        wheel_of("public", "a" * 64, index="-"),
        wheel_of("of-an-earlier-builder", "e" * 64),  # it may be private
        wheel_of("private", "b" * 64, index="company"),
        wheel_of("built", "c" * 64, source=f"built-1.tar.gz#sha256={'0' * 64}", index="company"),
        wheel_of("committed", "d" * 64, kind="generic", source="git+https://git.example.test/a/b@" + "0" * 40),
    ]
    desk.statements = {"cyclonedx": {"components": [*SBOM["components"], *wheels]}}
    assert desk.attestations().indexes() == {"a" * 64: "", "b" * 64: "company"}


def test_no_statement_takes_back_the_index_of_a_private_package(desk: ClaimsDesk) -> None:
    """A statement that is invalid is reported with the other findings."""
    private, default = wheel_of("private", "b" * 64, index="company"), wheel_of("private", "b" * 64, index="-")
    for earlier, later in ((private, default), (default, private)):
        desk.earlier = [{"components": [earlier]}, {}]
        desk.statements = {"cyclonedx": {"components": [later]}}
        assert desk.attestations().indexes() == {"b" * 64: "company"}


@pytest.mark.parametrize("source", ["git+https://git.example.test/a/b@" + "0" * 40, f"./b#sha256={'0' * 64}"])
def test_a_package_from_a_commit_or_a_folder_is_in_image_and_sbom(desk: ClaimsDesk, source: str) -> None:
    """Its purl has no type of packages, so it was missing from the SBOM, and no such image was valid."""
    records = {
        f"{SITE}/a-1.dist-info/METADATA": metadata("a", "1.0"),
        f"{SITE}/b-1.dist-info/METADATA": metadata("b", "1"),
    }
    desk.store = Store(layer(records).getvalue())
    built = wheel_of("b", "b" * 64, kind="generic", source=source)
    for components, detail in (
        ([SBOM["components"][1], built], "2 packages, the same as in the files of the image"),
        ([SBOM["components"][1], {**built, "name": "c"}], "invalid SBOM: pkg:generic/b@1 is c 1"),
        ([SBOM["components"][1]], "not in the SBOM: b 1"),
    ):
        desk.statements = {"cyclonedx": {"components": components}}
        assert desk.findings()["SBOM"].detail == detail
