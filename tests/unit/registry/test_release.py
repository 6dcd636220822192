"""What may be released, and in which order a release writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import pytest

from builder.common import digest as digests
from builder.common.console import View
from builder.common.errors import BuilderError, ImageTestError, RefusedError, RegistryError, StaleError, VerifyError
from builder.index.host import Host
from builder.layers import oci
from builder.layers.blobs import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, Descriptor
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Image, Layer
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.matrix.schema import Scan
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.plan.settings import built_labels
from builder.registry import artifacts, evidence, expected, publish, pull, reports, scan, scan_results, staging
from builder.registry.client import Registry
from builder.registry.evidence import Evidence
from builder.registry.publish import Published, Publisher, Target
from builder.registry.release import Releaser
from builder.registry.reports import Report
from builder.registry.scan import Finding, Result
from builder.registry.staging import Place, Release, Released, ReleasedImage, StagedImage
from tests.fakes.engine import MemoryConsole
from tests.unit.registry.test_artifacts import Memory

CELL = "qz-0.5-cu129-py311"
STAMP = "20261122"


class Desk:
    """A checkout, and a registry that has the image of a cell, staged, with a report that this machine wrote."""

    def __init__(self, project: Project, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project, self.store = project, store
        self.registry = Memory()
        self.place = Place("registry.example.test:5000/staging", "", Host())
        [self.planned] = plan.make_locked(project, project.select([CELL])).images
        self.published: list[tuple[list[Target], Publisher]] = []
        self.order: list[str] = []
        monkeypatch.setattr(artifacts, "CONFIRM_S", 0)
        monkeypatch.setattr(staging, "Registry", lambda *_, **__: self.registry)
        monkeypatch.setattr(self.registry, "list_tags", lambda: list(self.registry.tags))

        def publish(publisher: Publisher, chosen: Sequence[Target]) -> Published:
            return self._publish(publisher, chosen)

        monkeypatch.setattr(Publisher, "publish", publish)
        self.image = self.add_image(self.planned)
        self.report()

    def _publish(self, publisher: Publisher, chosen: Sequence[Target]) -> Published:
        self.published.append((list(chosen), publisher))
        publisher.record()
        self.order.append("published" if f"released-{STAMP}" in self.registry.tags else "published before the record")
        return Published(images=(), tags=(), error=None)

    def add_image(self, planned: PlannedImage, **labels: str) -> Image:
        """An image as planned, with other labels."""
        root = expected.of_known(self.project.root, KnownLayers(self.project.root), planned, "")
        layers = []
        for number, layer in enumerate(planned.layers):
            promised = root.layers.get(number)
            digest = promised.digest if promised else f"sha256:{number:064x}"
            diff_id = promised.diff_id if promised else f"sha256:{number:064x}"
            layers.append(Layer(digest=digest, diff_id=diff_id, size=1, created_by=oci.describe(layer)))
        built = {**built_labels(planned.digest, "debian:test", "2026-11-01T00:00:00Z"), **labels}
        config = oci.config(planned.settings, layers, created="2026-11-01T00:00:00Z", labels=built)
        blob = Descriptor(media_type=CONFIG_TYPE, digest=digests.of_bytes(config), size=len(config))
        manifest = oci.manifest(blob, layers)
        self.registry.contents[blob.digest] = config
        digest = self.registry.put_manifest("staged", manifest, MANIFEST_TYPE)
        assert LAYER_TYPE.encode() in manifest
        return Image(
            config=blob,
            manifest=Descriptor(media_type=MANIFEST_TYPE, digest=digest, size=len(manifest)),
            layers=tuple(layers),
        )

    def report(self, **changes: Any) -> None:
        values = {
            "image_id": self.image.config.digest,
            "cell": CELL,
            "plan": self.planned.digest,
            "suite": evidence.suite(self.project.root),
            "passed": ("test_it",),
            "failed": (),
            "gpu": "passed",
        }
        proof = Evidence(**{**values, **changes})
        evidence.write(self.project.state, proof)
        reports.write(
            self.project, self.registry, self.image, Report(image=self.image.manifest.digest, evidence=proof), None
        )

    def staged(self, **changes: str) -> Release:
        values = {
            "cell": CELL,
            "repository": "quartz-cuda",
            "digest": self.image.manifest.digest,
            "plan": self.planned.digest,
        }
        return Release(stamp=STAMP, revision="abc", images=(StagedImage(**{**values, **changes}),))

    def release(self, staged: Release | None = None, **options: bool) -> Published:
        releaser = Releaser(
            project=self.project,
            place=self.place,
            release=staged or self.staged(),
            planned={CELL: self.planned},
            **options,  # type: ignore[arg-type]
        )
        return releaser.publish(Host(), View(MemoryConsole()), self.store, releaser.check())

    def refused(self, kind: type[BuilderError], staged: Release | None = None, **options: bool) -> str:
        with pytest.raises(kind) as caught:
            self.release(staged, **options)
        assert self.published == []
        assert f"released-{STAMP}" not in self.registry.tags
        return str(caught.value)


@pytest.fixture
def desk(tiny: Project, store: Store, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tiny, store, monkeypatch)


def test_a_covered_image_is_released_under_the_stamp_of_its_staging(desk: Desk) -> None:
    desk.release()
    [([target], publisher)] = desk.published
    assert (target.cell, target.digest) == (CELL, desk.image.manifest.digest)
    assert target.source == "staging/quartz-cuda"
    assert tuple(map(str, target.references)) == desk.planned.references
    assert list(islice(publisher.stamps, 2)) == [STAMP, f"{STAMP}.1"]
    assert desk.order == ["published"], "what is published is recorded before its first tag"
    released = desk.place.released(STAMP)
    assert released
    assert released.allowed == ()
    assert [image.digest for image in released.images] == [target.digest]


def test_a_second_stamp_of_the_day_does_not_take_the_first(desk: Desk) -> None:
    desk.release(desk.staged().model_copy(update={"stamp": f"{STAMP}.3"}))
    assert next(iter(desk.published[0][1].stamps)) == f"{STAMP}.3"


def test_without_a_gpu_test(desk: Desk) -> None:
    desk.report(gpu="not run", gpu_reason="no driver", finished="2026-11-23T00:00:00Z")
    assert desk.refused(ImageTestError) == f"{CELL}: GPU tests have not passed (gpu: not run (no driver))"
    desk.release(allow_untested_gpu=True)
    released = desk.place.released(STAMP)
    assert released
    assert released.allowed == ("untested-gpu",)
    assert released.images[0].gpu == "not run (no driver)"


def test_what_was_allowed_is_not_forgotten(desk: Desk) -> None:
    """By a later run that finishes the release."""
    desk.release(allow_untested_gpu=True)
    desk.release(allow_unsigned=True)
    released = desk.place.released(STAMP)
    assert released
    assert released.allowed == ("untested-gpu", "unsigned")


def test_a_failure(desk: Desk) -> None:
    desk.report(passed=(), failed=("test_it",), finished="2026-11-23T00:00:00Z")
    assert desk.refused(ImageTestError) == f"{CELL}: tests failed"


def test_another_plan(desk: Desk) -> None:
    assert "staged from a different plan" in desk.refused(StaleError, desk.staged(plan="sha256:" + "e" * 64))
    assert "staged from a different plan" in desk.refused(StaleError, desk.staged(cell="unknown"))


def test_a_digest_that_is_not_there(desk: Desk) -> None:
    assert "has no sha256:eee" in desk.refused(RegistryError, desk.staged(digest="sha256:" + "e" * 64))


@pytest.mark.parametrize(
    "labels",
    [{"org.opencontainers.image.version": "9.9"}, {"gpu-images.cuda": "13.0"}, {"gpu-images.plan": "x"}],
    ids=str,
)
def test_a_label_that_the_tag_would_contradict(desk: Desk, labels: dict[str, str]) -> None:
    desk.image = desk.add_image(desk.planned, **labels)
    desk.report()
    assert "the staged image differs from the plan" in desk.refused(VerifyError)


def test_other_files_than_those_of_the_checkout(desk: Desk) -> None:
    """The layer of files is made again from the checkout."""
    planned = desk.planned
    number = next(n for n, layer in enumerate(planned.layers) if layer.kind == "files" and not layer.compiled)
    manifest = json.loads(desk.registry.contents[desk.image.manifest.digest])
    manifest["layers"][number]["digest"] = "sha256:" + "d" * 64
    content = json.dumps(manifest).encode()
    digest = desk.registry.put_manifest("other", content, MANIFEST_TYPE)
    desk.image = replace(desk.image, manifest=Descriptor(media_type=MANIFEST_TYPE, digest=digest, size=len(content)))
    desk.report()
    assert "layer files is dddddddddddd, expected" in desk.refused(VerifyError)


def test_a_newer_release_is_not_replaced(desk: Desk) -> None:
    other = ReleasedImage(cell=CELL, digest="sha256:" + "e" * 64, references=(), gpu="", signer="")
    desk.place.record(Released(stamp="20261123", revision="def", images=(other,)))
    assert f"release 20261123 is newer and has other images of {CELL}" in desk.refused(RegistryError)
    desk.release(roll_back=True)
    assert desk.published


def test_a_newer_release_of_the_same_image(desk: Desk) -> None:
    same = ReleasedImage(cell=CELL, digest=desk.image.manifest.digest, references=(), gpu="", signer="")
    desk.place.record(Released(stamp="20261123", revision="def", images=(same,)))
    desk.place.record(Released(stamp="20261121", revision="def", images=()))
    desk.release()
    assert desk.published


@pytest.mark.parametrize(
    ("registry", "source"), [("other.example.test", ""), ("registry.example.test:5000", "staging/quartz-cuda")]
)
def test_blobs_are_mounted_or_downloaded_from_staging(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, registry: str, source: str
) -> None:
    """They are downloaded where the registry cannot mount them."""
    fetched: list[str] = []
    monkeypatch.setattr(pull, "fetch", lambda _, __, blobs: fetched.extend(blob.digest for blob in blobs))
    desk.place = Place(f"{registry}/staging", "", Host())
    desk.release()
    [target] = desk.published[0][0]
    assert target.source == source
    blobs = publish.blobs_of(desk.store, target.stored, target.fetch)
    assert [blob.path for blob in blobs] == [None] * len(blobs)
    assert blobs[0].fetch
    assert blobs[0].fetch() == desk.store.path(desk.image.config.digest)
    assert fetched == [desk.image.config.digest]


HIGH = Finding(id="CVE-1", package="libtls", version="1.1", severity="high")


@pytest.fixture
def scanning(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What the scanner of this checkout finds; it fails while that is empty."""
    path = desk.project.root / "matrix.yaml"
    path.write_text(f'scan: {{command: [scanner, "{{sbom}}"]}}\n{path.read_text("utf-8")}', encoding="utf-8")
    desk.project = Project(desk.project.root)
    there: list[Finding] = []

    def run(_: Scan, image: str, sbom: bytes) -> Result:
        assert scan.subject(sbom) == image
        if not there:
            raise VerifyError("scanner: exit status 1", hint="Repair it.")
        return Result(image=image, scanner="", time="2026-11-23T00:00:00Z", findings=tuple(there))

    monkeypatch.setattr(scan, "scan", run)
    return there


def test_a_vulnerable_image(desk: Desk, scanning: list[Finding]) -> None:
    scanning.append(HIGH)
    assert desk.refused(RefusedError).splitlines() == [
        f"{CELL}: 1 vulnerability of severity high or higher, or unknown",
        "  CVE-1 in libtls 1.1 (high)",
    ]
    desk.release(allow_vulnerable=True)
    released = desk.place.released(STAMP)
    assert released
    assert (released.allowed, released.images[0].scan) == (("vulnerable",), "1 high")
    attach_all(desk)
    assert scan_results.state(desk.project, desk.registry, desk.image.manifest.digest) == "1 high 2026-11-23, unsigned"


def attach_all(desk: Desk) -> None:
    """What a release attaches when the image is in the registry."""
    [([target], publisher)] = desk.published
    assert publisher.attach
    publisher.attach(cast("Registry", desk.registry), target, "")


def test_a_scan_that_failed(desk: Desk, scanning: list[Finding]) -> None:
    assert desk.refused(VerifyError) == f"{CELL}: scan failed: scanner: exit status 1"
    desk.release(allow_vulnerable=True)
    released = desk.place.released(STAMP)
    assert released
    assert released.images[0].scan == "scan failed"
    attach_all(desk)
    assert scan_results.state(desk.project, desk.registry, desk.image.manifest.digest) == "unscanned"


def test_an_exception_releases_the_image(desk: Desk, scanning: list[Finding]) -> None:
    scanning.append(HIGH.model_copy(update={"excepted": "not reachable"}))
    desk.release()
    released = desk.place.released(STAMP)
    assert released
    assert (released.allowed, released.images[0].scan) == ((), "clean, 1 excepted")


def test_without_a_scanner_an_image_is_unscanned(desk: Desk) -> None:
    desk.release()
    released = desk.place.released(STAMP)
    assert released
    assert released.images[0].scan == "unscanned"
    old = {name: value for name, value in released.images[0].model_dump().items() if name != "scan"}
    assert ReleasedImage.model_validate_json(json.dumps(old)).scan == "unscanned", "a record of an earlier version"


def test_a_time_that_cannot_be_read(desk: Desk) -> None:
    desk.image = desk.add_image(desk.planned, **{"org.opencontainers.image.created": "yesterday"})
    desk.report()
    assert "invalid creation time 'yesterday'" in desk.refused(VerifyError)
