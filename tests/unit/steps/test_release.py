"""What may be released, and in which order a release writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from itertools import islice
from typing import Any, cast

import pytest

from builder.common.console import View
from builder.common.errors import BuilderError, ImageTestError, RefusedError, RegistryError, StaleError, VerifyError
from builder.common.files import digest_of_bytes
from builder.evidence import reports, results, signing
from builder.evidence.results import Coverage, Evidence, Requirement
from builder.evidence.signing import Signer
from builder.evidence.suite import GPU_TESTS, Suite
from builder.host import Host
from builder.layers import oci
from builder.layers.blobs import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, WHEEL_TYPE, Descriptor, wheel_file
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Image, Layer, Manifest
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.matrix.schema import Trusted
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.plan.settings import built_labels
from builder.registry import artifacts, transfer
from builder.registry.client import Repository
from builder.release import expected, publish, scan, staging
from builder.release.publish import PublishableImage, Publisher, Released
from builder.release.scan import ImageScan, ScanRecord
from builder.release.staging import ReleasedImage, ReleaseRecord, StagedImage, StagedRelease, StagingArea
from builder.steps.release import Releaser
from tests.fakes.engine import MemoryConsole
from tests.fakes.registry import MemoryRegistry
from tests.fakes.scanners import with_scanner
from tests.fakes.suites import write_tests

CELL = "qz-0.5-cu129-py311"
STAMP = "20261122"
TODAY = date(2026, 11, 22)


class ReleaseDesk:
    """A checkout, and a registry that has the image of a cell, staged, with a report that this machine wrote."""

    def __init__(self, project: Project, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project, self.store = project, store
        self.registry = MemoryRegistry()
        self.place = StagingArea(
            "registry.example.test:5000/staging", "", Host(), new_registry=lambda *_, **__: self.registry
        )
        [self.planned] = plan.make_locked_plan(project, project.select([CELL])).images
        self.passed = write_tests(project.root, self.planned.components)
        self.passed_on_gpu = write_tests(project.root, ["quartz"], GPU_TESTS)
        self.console = MemoryConsole()
        self.published: list[tuple[list[PublishableImage], Publisher]] = []
        self.order: list[str] = []

        def publish(publisher: Publisher, chosen: Sequence[PublishableImage]) -> Released:
            return self._publish(publisher, chosen)

        monkeypatch.setattr(Publisher, "publish", publish)
        self.image = self.add_image(self.planned)
        self.report()

    def _publish(self, publisher: Publisher, chosen: Sequence[PublishableImage]) -> Released:
        self.published.append((list(chosen), publisher))
        assert publisher.documents
        publisher.documents.record()
        self.order.append("published" if f"released-{STAMP}" in self.registry.tags else "published before the record")
        return Released(images=(), tags=(), error=None)

    def add_image(self, planned: PlannedImage, **labels: str) -> Image:
        """An image as planned, with other labels."""
        root = expected.of_plan(self.project.root, KnownLayers(self.project.root), planned)
        layers = []
        for number in range(len(planned.layers)):
            promised, _ = root.layers.get(number, (None, ""))
            layers.append(promised or Layer(digest=f"sha256:{number:064x}", diff_id=f"sha256:{number:064x}", size=1))
        history = [oci.history_line(layer) for layer in planned.layers]
        built = {**built_labels(planned.digest, "2026-11-01T00:00:00Z"), **labels}
        config = oci.config(planned.settings, layers, history, created="2026-11-01T00:00:00Z", labels=built)
        blob = Descriptor(media_type=CONFIG_TYPE, digest=digest_of_bytes(config), size=len(config))
        manifest = oci.manifest(blob, layers)
        self.registry.contents[blob.digest] = config
        self.registry.put_manifest("staged", manifest, MANIFEST_TYPE)
        assert LAYER_TYPE.encode() in manifest
        return Image(
            config=blob,
            manifest=Manifest.of(manifest),
            layers=tuple(layers),
        )

    def report(self, *, gpu: bool = True, **changes: Any) -> None:
        """Attaches this machine's results of the image tests and, with `gpu`, of the GPU tests."""
        values = {
            "image": self.image.manifest.digest,
            "cell": CELL,
            "plan": self.planned.digest,
            "suite": Suite.of(self.project.root).files,
            "kind": "image",
            "passed": self.passed,
            "failed": (),
        }
        on_gpu = {"kind": "gpu", "passed": self.passed_on_gpu}
        for each in ({}, on_gpu) if gpu else ({},):
            proof = Evidence(**{**values, **each, **changes})
            results.write_evidence(self.project.state, proof)
            reports.attach_evidence(self.registry, self.image.manifest.descriptor, [proof], None)

    def report_without_gpu(self, **changes: Any) -> None:
        """In place of all reports: this machine's results of the image tests."""
        digest = self.image.manifest.digest
        del self.registry.tags[digest.replace(":", "-")]
        for path in (self.project.state / "evidence").glob("*.gpu*.json"):
            path.unlink()
        self.report(gpu=False, **changes)

    def staged(self, **changes: str) -> StagedRelease:
        values = {
            "cell": CELL,
            "repository": "quartz-cuda",
            "digest": self.image.manifest.digest,
            "plan": self.planned.digest,
        }
        return StagedRelease(stamp=STAMP, revision="abc", images=(StagedImage(**{**values, **changes}),))

    def release(self, staged: StagedRelease | None = None, **options: bool) -> Released:
        releaser = Releaser(
            project=self.project,
            place=self.place,
            release=staged or self.staged(),
            planned={CELL: self.planned},
            today=TODAY,
            **options,  # type: ignore[arg-type]
        )
        return releaser.publish(Host(), View(MemoryConsole()), self.store, releaser.check(View(self.console)))

    def refused(self, kind: type[BuilderError], staged: StagedRelease | None = None, **options: bool) -> str:
        with pytest.raises(kind) as caught:
            self.release(staged, **options)
        assert self.published == []
        assert f"released-{STAMP}" not in self.registry.tags
        return str(caught.value)


@pytest.fixture
def desk(tiny: Project, store: Store, monkeypatch: pytest.MonkeyPatch) -> ReleaseDesk:
    return ReleaseDesk(tiny, store, monkeypatch)


def test_a_covered_image_is_released_under_the_stamp_of_its_staging(desk: ReleaseDesk) -> None:
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
    assert [image.signer for image in released.images] == ["own results, unsigned"]


def test_a_second_stamp_of_the_day_does_not_take_the_first(desk: ReleaseDesk) -> None:
    desk.release(desk.staged().model_copy(update={"stamp": f"{STAMP}.3"}))
    assert next(iter(desk.published[0][1].stamps)) == f"{STAMP}.3"


def test_without_a_gpu_test(desk: ReleaseDesk) -> None:
    desk.report_without_gpu(no_gpu="no driver")
    assert desk.refused(ImageTestError) == f"{CELL}: GPU tests have not passed (gpu: not run (no driver))"
    desk.release(allow_untested_gpu=True)
    released = desk.place.released(STAMP)
    assert released
    assert released.allowed == ("untested-gpu",)
    assert released.images[0].gpu == "not run (no driver)"


def test_an_image_that_only_an_emulation_has_run(desk: ReleaseDesk) -> None:
    """It cannot have passed GPU tests either: one option is enough."""
    emulated = {"machine": {"emulated": "arm64"}, "no_gpu": "this machine emulates arm64"}
    desk.report_without_gpu(**emulated)
    state = f"built, not run ({len(desk.passed)} tests passed under emulation)"
    assert desk.refused(ImageTestError, allow_untested_gpu=True) == f"{CELL}: {state}"
    desk.release(allow_not_run=True)
    released = desk.place.released(STAMP)
    assert released
    assert released.allowed == ("not-run",)
    assert released.images[0].gpu == "built, not run"
    [listed] = desk.registry.listed(desk.image.manifest.digest.replace(":", "-"))
    assert listed["annotations"]["gpu-images.tests"] == "built, not run"


def test_without_a_file_of_gpu_tests(desk: ReleaseDesk) -> None:
    """The hint named a machine with a GPU, which would not have helped."""
    (desk.project.root / "tests/gpu/test_quartz.py").unlink()
    desk.report_without_gpu()
    with pytest.raises(ImageTestError) as caught:
        desk.release()
    assert caught.value.hint.startswith("Write tests/gpu/test_quartz.py, then test again.   To release it untested: ")


def test_what_was_allowed_is_not_forgotten(desk: ReleaseDesk) -> None:
    """By a later run that finishes the release."""
    desk.release(allow_untested_gpu=True)
    desk.release(allow_unsigned=True)
    released = desk.place.released(STAMP)
    assert released
    assert released.allowed == ("untested-gpu", "unsigned")


BESIDE = f"{CELL}-board"


@pytest.fixture
def pair(desk: ReleaseDesk) -> Releaser:
    """A staged release with a second image, which nobody has tested."""
    both = plan.make_locked_plan(desk.project, desk.project.select([CELL, BESIDE])).images
    planned = {image.id: image for image in both}
    digest = desk.add_image(planned[BESIDE]).manifest.digest
    other = StagedImage(cell=BESIDE, repository="quartz-cuda", digest=digest, plan=planned[BESIDE].digest)
    staged = desk.staged().model_copy(update={"images": (*desk.staged().images, other)})
    return Releaser(
        project=desk.project, place=desk.place, release=staged, planned=planned, today=TODAY, skip_incomplete=True
    )


def test_an_image_that_is_not_ready_is_left_out(desk: ReleaseDesk, pair: Releaser) -> None:
    with pytest.raises(ImageTestError, match=f"^{BESIDE}: no valid test results"):
        replace(pair, skip_incomplete=False).check(View(desk.console))
    candidates = pair.check(View(desk.console))
    assert [candidate.target.cell for candidate in candidates] == [CELL]
    assert [str(error) for error in pair.left_out] == [f"{BESIDE}: no valid test results"]
    pair.publish(Host(), View(desk.console), desk.store, candidates)
    [([target], _)] = desk.published
    assert target.cell == CELL


def test_a_release_without_any_image_that_is_ready_fails(desk: ReleaseDesk, pair: Releaser) -> None:
    desk.report(passed=(), failed=("test_it",), finished="2026-11-23T00:00:00Z")
    with pytest.raises(ImageTestError, match=f"^2 images cannot be released\n{CELL}: tests failed"):
        pair.check(View(desk.console))


def test_a_list_that_nobody_signed_is_refused_even_if_images_may_be_left_out(
    desk: ReleaseDesk, pair: Releaser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise VerifyError("images may be missing")

    monkeypatch.setattr(StagingArea, "require_signed", refuse)
    with pytest.raises(VerifyError, match="images may be missing"):
        pair.check(View(desk.console))


def test_an_image_is_not_left_out_because_the_registry_fails(
    desk: ReleaseDesk, pair: Releaser, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, beside = pair.release.images
    read = reports.registry_coverage

    def fail_for_one(registry: Repository, requirement: Requirement, *rest: Any, **options: Any) -> Coverage:
        if requirement.image == beside.digest:
            raise RegistryError("503")
        return read(registry, requirement, *rest, **options)

    monkeypatch.setattr(reports, "registry_coverage", fail_for_one)
    with pytest.raises(RegistryError, match="503"):
        pair.check(View(desk.console))


def test_an_image_needs_the_thorough_tests_of_one_that_is_left_out(desk: ReleaseDesk, pair: Releaser) -> None:
    """Otherwise nobody would have run them for what is released."""
    test = desk.project.root / "tests/images/test_quartz.py"
    test.write_text(f"import pytest\n{test.read_text('utf-8')}\n\n@pytest.mark.thorough\ndef test_deep(): ...\n")
    pair = replace(pair)  # reads the tests
    _, board = pair.release.images
    write_tests(desk.project.root, ["board"])
    suite = Suite.of(desk.project.root)
    passed = suite.of_image(pair.planned[BESIDE].components, "tests/images", thorough={"board"})
    on_gpu = {"kind": "gpu", "passed": desk.passed_on_gpu}
    values = {
        "image": board.digest,
        "cell": BESIDE,
        "plan": board.plan,
        "suite": suite.files,
        "kind": "image",
        "failed": (),
    }
    manifest = desk.registry.contents[board.digest]
    image = Descriptor(media_type=MANIFEST_TYPE, digest=board.digest, size=len(manifest))
    for each in ({"passed": tuple(passed)}, on_gpu):
        proof = Evidence(**{**values, **each})
        results.write_evidence(desk.project.state, proof)
        reports.attach_evidence(desk.registry, image, [proof], None)
    pair = replace(pair)
    desk.report(passed=(), failed=("tests/images/test_quartz.py::test_deep",), finished="2026-11-23T00:00:00Z")
    with pytest.raises(ImageTestError) as caught:
        pair.check(View(desk.console))
    assert f"{CELL}: tests failed" in str(caught.value)
    assert "it lacks results of tests: tests/images/test_quartz.py::test_deep" in str(caught.value)


def test_what_an_earlier_run_published_stays_in_the_record(desk: ReleaseDesk, pair: Releaser) -> None:
    """Its tags are set; without the record, an older release could move them back."""
    other = ReleasedImage(cell=BESIDE, digest=pair.release.images[1].digest, references=(), gpu="passed", signer="")
    desk.place.record(ReleaseRecord(stamp=STAMP, revision="abc", images=(other,)))
    pair.publish(Host(), View(desk.console), desk.store, pair.check(View(desk.console)))
    released = desk.place.released(STAMP)
    assert released
    assert [image.cell for image in released.images] == [CELL, BESIDE]


TWIN = f"{CELL}-arm64"


@pytest.fixture
def twins(desk: ReleaseDesk, edit: Callable[[str, str], Project]) -> Releaser:
    """A staged release with images of a cell for two architectures; nobody has tested that for arm64."""
    desk.project = edit('python: ["3.11"]}', 'python: ["3.11"], arch: [amd64, arm64]}')
    [cell] = desk.project.select([TWIN])
    planned = {CELL: desk.planned, TWIN: replace(desk.planned, cell=cell, digest="sha256:" + "a" * 64)}
    digest = desk.add_image(planned[TWIN]).manifest.digest
    other = StagedImage(cell=TWIN, repository="quartz-cuda", digest=digest, plan=planned[TWIN].digest)
    staged = desk.staged().model_copy(update={"images": (*desk.staged().images, other)})
    return Releaser(project=desk.project, place=desk.place, release=staged, planned=planned, today=TODAY)


def test_an_image_is_not_released_without_another_architecture_of_the_matrix(
    desk: ReleaseDesk, twins: Releaser
) -> None:
    with pytest.raises(ImageTestError) as caught:
        desk.release()
    assert str(caught.value) == f"{CELL}: {TWIN} would not be released with it, and has the same tags"
    hints = caught.value.hint.split("   ")
    assert hints[0] == (
        f"On a machine of that architecture: builder images {TWIN} && builder stage --images-only {TWIN}"
    )
    assert hints[1] == f"Then list them together: builder stage {CELL} {TWIN}"
    assert hints[2].startswith("To release it alone: builder release --allow-missing-arch (on machines")
    desk.release(allow_missing_arch=True)
    released = desk.place.released(STAMP)
    assert released
    assert released.allowed == ("missing-arch",)
    [([target], publisher)] = desk.published
    assert publisher.allow_missing_arch
    assert released.images[0].tagged == publish.tagged_manifest([target]).digest != target.digest


def test_what_is_allowed_and_not_needed_is_not_recorded(desk: ReleaseDesk) -> None:
    desk.release(allow_missing_arch=True)
    released = desk.place.released(STAMP)
    assert released
    assert released.allowed == ()
    assert released.images[0].tagged == desk.image.manifest.digest


def test_an_image_is_left_out_with_that_for_another_architecture(desk: ReleaseDesk, twins: Releaser) -> None:
    twins = replace(twins, skip_incomplete=True)
    with pytest.raises(ImageTestError, match=r"^2 images cannot be released\n") as caught:
        twins.check(View(desk.console))
    assert f"{TWIN}: no valid test results" in str(caught.value)
    assert f"{CELL}: {TWIN} would not be released with it, and has the same tags" in str(caught.value)
    alone = replace(twins, allow_missing_arch=True)
    assert [candidate.target.cell for candidate in alone.check(View(desk.console))] == [CELL]


def test_the_index_of_several_architectures_is_signed_as_the_cell_without_one(
    desk: ReleaseDesk, twins: Releaser
) -> None:
    signed: list[tuple[str, Mapping[str, str]]] = []

    class RecordingSigner(Signer):
        def sign_manifest(self, registry: Repository, digest: str, annotations: Mapping[str, str] = {}) -> None:
            signed.append((digest, annotations))

    _, other = twins.release.images
    desk.image = replace(desk.image, manifest=replace(desk.image.manifest, digest=other.digest))
    desk.report(cell=TWIN, plan=other.plan)
    twins = replace(twins, signer=RecordingSigner(key="key"))
    candidates = twins.check(View(desk.console))
    assert [candidate.target.cell for candidate in candidates] == [CELL, TWIN]
    twins.publish(Host(), View(desk.console), desk.store, candidates)
    [(targets, _)] = desk.published
    index = publish.tagged_manifest(targets).digest
    released = desk.place.released(STAMP)
    assert released
    assert [(image.cell, image.tagged) for image in released.images] == [(CELL, index), (TWIN, index)]
    assert released.allowed == ()
    twins.sign_index(desk.registry, index, targets, f"0.5.3-cu129-py311-{STAMP}")
    tag = "0.5.3-cu129-py311"
    annotations = {"cell": CELL, "image": "quartz-cuda", "tag": tag, "release": f"{tag}-{STAMP}"}
    assert signed == [(index, annotations)]


def test_a_failure(desk: ReleaseDesk) -> None:
    desk.report(passed=(), failed=("test_it",), finished="2026-11-23T00:00:00Z")
    assert desk.refused(ImageTestError) == f"{CELL}: tests failed"


def test_another_plan(desk: ReleaseDesk) -> None:
    assert "staged from a different plan" in desk.refused(StaleError, desk.staged(plan="sha256:" + "e" * 64))
    assert "staged from a different plan" in desk.refused(StaleError, desk.staged(cell="unknown"))


def test_a_digest_that_is_not_there(desk: ReleaseDesk) -> None:
    assert "has no sha256:eee" in desk.refused(RegistryError, desk.staged(digest="sha256:" + "e" * 64))


@pytest.mark.parametrize(
    "labels",
    [{"org.opencontainers.image.version": "9.9"}, {"gpu-images.cuda": "13.0"}, {"gpu-images.plan": "x"}],
    ids=str,
)
def test_a_label_that_the_tag_would_contradict(desk: ReleaseDesk, labels: dict[str, str]) -> None:
    desk.image = desk.add_image(desk.planned, **labels)
    desk.report()
    assert "the staged image differs from the plan" in desk.refused(VerifyError)


def test_other_files_than_those_of_the_checkout(desk: ReleaseDesk) -> None:
    """The layer of files is made again from the checkout."""
    planned = desk.planned
    number = next(n for n, layer in enumerate(planned.layers) if layer.kind == "files" and not layer.compiled)
    manifest = json.loads(desk.registry.contents[desk.image.manifest.digest])
    manifest["layers"][number]["digest"] = "sha256:" + "d" * 64
    content = json.dumps(manifest).encode()
    desk.registry.put_manifest("other", content, MANIFEST_TYPE)
    desk.image = replace(desk.image, manifest=Manifest.of(content))
    desk.report()
    assert "layer files is dddddddddddd, expected" in desk.refused(VerifyError)


def test_a_newer_release_is_not_replaced(desk: ReleaseDesk) -> None:
    other = ReleasedImage(cell=CELL, digest="sha256:" + "e" * 64, references=(), gpu="", signer="")
    desk.place.record(ReleaseRecord(stamp="20261123", revision="def", images=(other,)))
    assert f"release 20261123 is newer and has other images of {CELL}" in desk.refused(RegistryError)
    desk.release(roll_back=True)
    assert desk.published


def test_a_newer_release_of_the_same_image(desk: ReleaseDesk) -> None:
    same = ReleasedImage(cell=CELL, digest=desk.image.manifest.digest, references=(), gpu="", signer="")
    desk.place.record(ReleaseRecord(stamp="20261123", revision="def", images=(same,)))
    desk.place.record(ReleaseRecord(stamp="20261121", revision="def", images=()))
    desk.release()
    assert desk.published


def test_an_image_that_is_taken_out_of_a_staged_release_prevents_it(
    desk: ReleaseDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write to staging chose which tags move, for example none of the image with a security fix."""
    signed: list[str] = []
    monkeypatch.setattr(signing, "has_signature", lambda *_: True)
    monkeypatch.setattr(signing, "signer_of_manifest", lambda _, digest, __, ___: ("ci" * (digest in signed), []))
    evidence = [Trusted(key="keys/ci.pub")]
    desk.project.__dict__["matrix"] = desk.project.matrix.model_copy(update={"evidence": evidence})
    [image] = desk.staged().images
    other = image.model_copy(update={"cell": f"{CELL}-board"})
    desk.place.write(desk.project, STAMP, "abc", [image, other])
    part = desk.staged().model_dump_json().encode()
    artifact = artifacts.manifest(staging.TYPE, {staging.TYPE: part})
    artifacts.put_artifact(cast("Repository", desk.registry), artifact, [part])
    desk.registry.put_manifest(f"release-{STAMP}", artifact.content, artifact.media_type)
    with pytest.raises(VerifyError, match="signed the list of its images") as caught:
        desk.release(desk.place.read(STAMP))
    assert "builder stage --sign KEY" in caught.value.hint
    signed.append(artifact.digest)
    desk.release(desk.place.read(STAMP))
    signed.clear()
    desk.place.write(desk.project, STAMP, "abc", [image])
    desk.release(desk.place.read(STAMP))


@pytest.mark.parametrize(
    ("registry", "source"), [("other.example.test", ""), ("registry.example.test:5000", "staging/quartz-cuda")]
)
def test_blobs_are_mounted_or_downloaded_from_staging(
    desk: ReleaseDesk, monkeypatch: pytest.MonkeyPatch, registry: str, source: str
) -> None:
    """They are downloaded where the registry cannot mount them."""
    fetched: list[str] = []
    monkeypatch.setattr(transfer, "fetch_blobs", lambda _, __, blobs: fetched.extend(blob.digest for blob in blobs))
    desk.place = StagingArea(f"{registry}/staging", "", Host(), new_registry=lambda *_, **__: desk.registry)
    desk.release()
    [target] = desk.published[0][0]
    assert target.source == source
    blobs = publish.blobs_of(desk.store, target.stored)
    assert set(blobs.values()) == {None}
    assert target.fetch
    assert target.fetch(next(iter(blobs))) == desk.store.path(desk.image.config.digest)
    assert fetched == [desk.image.config.digest]


def attach_all(desk: ReleaseDesk, registry: MemoryRegistry | None = None) -> None:
    """What a release attaches when the image is in the registry, by default the one with staging."""
    [([target], publisher)] = desk.published
    assert publisher.documents
    publisher.documents.attach(cast("Repository", registry or desk.registry), target, "")


@pytest.mark.parametrize("is_staged", [True, False])
def test_a_wheel_from_source_is_attached_to_the_published_image(desk: ReleaseDesk, is_staged: bool) -> None:
    """Mounted from staging, unless the image was staged without it."""
    content = b"a wheel"
    digest = digest_of_bytes(content)
    built, *others = desk.planned.wheels
    built = replace(
        built, source=f"a-1.0.tar.gz#sha256={'0' * 64}", sha256=digest.removeprefix("sha256:"), size=len(content)
    )
    desk.planned = replace(desk.planned, wheels=(built, *others))
    if is_staged:
        desk.registry.contents[digest] = content
    desk.release()
    public = MemoryRegistry(others={"staging/quartz-cuda": [wheel_file(built)]})
    public.name = "registry.example.test/team/quartz-cuda"
    attach_all(desk, public)
    attached = artifacts.attached(cast("Repository", public), desk.image.manifest.digest, WHEEL_TYPE)
    layers = [json.loads(public.contents[artifact])["layers"] for artifact in attached]
    assert layers == ([[{"mediaType": WHEEL_TYPE, "digest": digest, "size": len(content)}]] if is_staged else [])
    assert ("mount from staging/quartz-cuda" in public.calls) == is_staged


@pytest.mark.usefixtures("programs")
def test_an_image_that_the_scanner_accepts_is_released_with_its_scan(desk: ReleaseDesk) -> None:
    desk.project = with_scanner(
        desk.project, "import json, sys; print(json.load(open(sys.argv[1][5:]))['metadata']['component']['bom-ref'])"
    )
    desk.release()
    released = desk.place.released(STAMP)
    assert released
    assert (released.allowed, released.images[0].scan) == ((), "passed")
    assert desk.console.text.rstrip().endswith(": gpu: passed, scan: passed")
    digest = desk.image.manifest.digest
    attach_all(desk)
    [documents] = artifacts.documents(cast("Repository", desk.registry), digest, scan.TYPE)
    assert documents[scan.OUTPUT_TYPE].decode() == f"{digest}\n", "the SBOM was of this image"


@pytest.mark.usefixtures("programs")
def test_an_image_that_the_scanner_refuses_is_not_released_even_with_a_scan_that_passed(desk: ReleaseDesk) -> None:
    """Anybody who can write to staging or the registry can attach one: a release runs the scanner itself."""
    record = ScanRecord(
        image=desk.image.manifest.digest,
        command=("scanner",),
        exit_status=0,
        time="2999-01-31T00:00:00Z",
        output=desk.image.manifest.digest,
    )
    with artifacts.attaching(cast("Repository", desk.registry), desk.image.manifest.descriptor) as attachments:
        ImageScan(record=record, output=b"").add_to(attachments)
    desk.project = with_scanner(desk.project, "print('CVE-1 in libtls'); raise SystemExit(1)")
    message = desk.refused(RefusedError)
    assert message.startswith(f"{CELL}: refused by ")
    assert message.endswith(" (exit status 1)\n  | CVE-1 in libtls")


@pytest.mark.usefixtures("programs")
def test_an_image_whose_scan_crashes_is_not_released(desk: ReleaseDesk) -> None:
    desk.project = with_scanner(desk.project, "import os; os.kill(os.getpid(), 11)")
    assert desk.refused(VerifyError).endswith(": ended by signal 11")


def test_without_a_scanner_an_image_is_unscanned(desk: ReleaseDesk) -> None:
    desk.release()
    released = desk.place.released(STAMP)
    assert released
    assert released.images[0].scan == "unscanned"
    old = {name: value for name, value in released.images[0].model_dump().items() if name not in ("scan", "tagged")}
    assert ReleasedImage.model_validate_json(json.dumps(old)).scan == "unscanned", "a record of an earlier version"


@pytest.mark.usefixtures("programs")
def test_several_images_are_checked_at_a_time_with_progress(desk: ReleaseDesk) -> None:
    """Each scan waits for the other one."""
    code = (
        "import pathlib, time, uuid\n"
        "pathlib.Path(f'{uuid.uuid4()}.scan').touch()\n"
        "end = time.monotonic() + 10\n"
        "while len(list(pathlib.Path().glob('*.scan'))) < 2 and time.monotonic() < end: time.sleep(0.02)\n"
        "raise SystemExit(time.monotonic() >= end)\n"
    )
    desk.project = with_scanner(desk.project, code, parallel=2)
    staged = desk.staged()
    twice = staged.model_copy(update={"images": staged.images * 2})
    releaser = Releaser(
        project=desk.project, place=desk.place, release=twice, planned={CELL: desk.planned}, today=TODAY
    )
    assert len(releaser.check(View(desk.console))) == 2
    assert f"{CELL}: checking" in desk.console.text
    assert f"{CELL}: scanning" in desk.console.text


def test_a_time_that_cannot_be_read(desk: ReleaseDesk) -> None:
    desk.image = desk.add_image(desk.planned, **{"org.opencontainers.image.created": "yesterday"})
    desk.report()
    assert "invalid creation time 'yesterday'" in desk.refused(VerifyError)
