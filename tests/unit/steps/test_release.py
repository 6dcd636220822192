"""What may be released, and in which order a release writes."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, cast

import pytest

from builder.build.outcomes import Report
from builder.common.errors import (
    BuilderError,
    ImageTestError,
    RefusedError,
    RegistryError,
    StaleError,
    UsageError,
    VerifyError,
)
from builder.common.files import digest_of_bytes, write_atomically
from builder.common.reference import ImageRef
from builder.evidence import reports, results, signing
from builder.evidence.signing import Signer
from builder.evidence.suite import GPU_TESTS
from builder.layers import oci
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, Descriptor, Image, Layer, Manifest
from builder.layers.store import Store
from builder.matrix import tags
from builder.matrix.project import Project
from builder.matrix.schema import Trusted
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.plan.settings import built_labels
from builder.registry import artifacts
from builder.registry.client import Repository
from builder.registry.failures import StoppedError
from builder.registry.transfer import Sent
from builder.release import expected, staging, tagging
from builder.release.release_checks import ReleaseOptions
from builder.release.staging import StagedImage, StagedRelease
from builder.steps.release import release, roll_back
from tests.fakes.engine import MemoryConsole
from tests.fakes.registry import MemoryArea, MemoryRegistry, Registries
from tests.fakes.run import new_run
from tests.fakes.scanners import with_scanner
from tests.fakes.suites import passing_evidence, write_tests
from tests.fakes.wire import Wire

CELL = "qz-0.5-cu129-py311"
STAMP = "20261122"
TAG = "0.5.3-cu129-py311"
TODAY = date(2026, 11, 22)


class ReleaseDesk:
    """A checkout, a repository in staging that has the image of a cell, with a report that this machine wrote, and a
    public repository that can mount its blobs. `calls` are the changes to both.
    """

    def __init__(self, project: Project, store: Store) -> None:
        self.project, self.store = project, store
        self.registry = MemoryRegistry()
        self.public = MemoryRegistry(others={"staging/quartz-cuda": []})
        self.public.name = "registry.example.test:5000/team/quartz-cuda"
        self.calls = self.public.calls = self.registry.calls
        self.area = MemoryArea("registry.example.test:5000/staging", lambda _: self.registry)
        [self.planned] = plan.make_locked_plan(project, project.select([CELL])).images
        write_tests(project.root, self.planned.components)
        self.passed_on_gpu = write_tests(project.root, ["quartz"], GPU_TESTS)
        self.console = MemoryConsole()
        self.image = self.add_image(self.planned)
        self.report()

    @property
    def tags(self) -> dict[str, str]:
        """The public tags of images."""
        return {tag: digest for tag, digest in self.public.tags.items() if not tag.startswith("sha256")}

    @property
    def puts(self) -> list[str]:
        """The manifests that were stored in both repositories, in order, without those of artifacts."""
        names = [call.removeprefix("put ") for call in self.calls if call.startswith("put ")]
        artifacts = {digest for digest, content in self.contents.items() if b'"artifactType"' in content}
        return [name for name in names if not (name in artifacts or name.startswith("sha256-"))]

    @property
    def contents(self) -> dict[str, bytes]:
        return {**self.registry.contents, **self.public.contents}

    def add_image(self, planned: PlannedImage, **labels: str) -> Image:
        """An image as planned, with other labels."""
        promised_layers = expected.expected_layers(self.project, KnownLayers(self.project.root), planned)
        layers = []
        for number in range(len(planned.layers)):
            promised = promised_layers.get(number)
            layers.append(promised or Layer(digest=f"sha256:{number:064x}", diff_id=f"sha256:{number:064x}", size=1))
        history = [oci.history_line(layer) for layer in planned.layers]
        built = {**built_labels(planned.plan, "2026-11-01T00:00:00Z"), **labels}
        config = oci.config(planned.settings, layers, history, created="2026-11-01T00:00:00Z", labels=built)
        blob = Descriptor(media_type=CONFIG_TYPE, digest=digest_of_bytes(config), size=len(config))
        manifest = oci.manifest(blob, layers)
        self.registry.contents[blob.digest] = config
        self.registry.put_manifest("staged", manifest, MANIFEST_TYPE)
        self.public.others["staging/quartz-cuda"] |= {blob.digest, *(layer.digest for layer in layers)}
        assert LAYER_TYPE.encode() in manifest
        return Image(
            config=blob,
            manifest=Manifest.of(manifest),
            layers=tuple(layers),
        )

    def report(self, *, gpu: bool = True, **changes: Any) -> None:
        """Attaches this machine's results of the image tests and, with `gpu`, of the GPU tests."""
        self.report_image(self.planned, self.image.manifest, gpu=gpu, **changes)

    def report_image(self, planned: PlannedImage, image: Manifest, *, gpu: bool = True, **changes: Any) -> None:
        on_gpu = {"kind": "gpu", "passed": self.passed_on_gpu}
        for each in ({}, on_gpu) if gpu else ({},):
            evidence = passing_evidence(self.project.root, planned, image.digest, **{**each, **changes})
            results.write_evidence(self.project.state, evidence)
            reports.attach_evidence(self.registry, image.descriptor, [evidence], None)

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
            "plan": self.planned.plan,
        }
        return StagedRelease(stamp=STAMP, revision="abc", images=(StagedImage(**{**values, **changes}),))

    def staged_and(self, planned: PlannedImage, image: Image) -> StagedRelease:
        """The staged release with a second image."""
        digest = image.manifest.digest
        other = StagedImage(cell=planned.id, repository="quartz-cuda", digest=digest, plan=planned.plan)
        return self.staged().model_copy(update={"images": (*self.staged().images, other)})

    def release(
        self,
        staged: StagedRelease | None = None,
        planned: Mapping[str, PlannedImage] | None = None,
        *,
        is_own: bool = True,
        **options: Any,
    ) -> Report:
        """Raises the error that ended it. With `is_own`, this checkout staged the release."""
        staged = staged or self.staged()
        if is_own:
            write_atomically(staging._own(self.project, staged.model_dump_json().encode()), "")
        public = options.pop("public", self.public)
        self.calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tagging, "Repository", lambda *_, **__: public)
            self.result = release(
                new_run(self.project, store=self.store, console=self.console),
                self.area,
                staged,
                planned or {CELL: self.planned},
                ReleaseOptions(**options),
            )
        if self.result.error:
            raise self.result.error
        return self.result

    def released(self) -> StagedRelease:
        """What the release has recorded."""
        record = self.area.released(STAMP)
        assert record
        return record

    def refused(self, kind: type[BuilderError], staged: StagedRelease | None = None, **options: Any) -> str:
        with pytest.raises(kind) as caught:
            self.release(staged, **options)
        assert self.calls == []
        assert self.public.tags == {}
        assert f"released-{STAMP}" not in self.registry.tags
        return str(caught.value)


@pytest.fixture
def desk(tiny: Project, store: Store) -> ReleaseDesk:
    return ReleaseDesk(tiny, store)


def test_a_covered_image_is_released_under_the_stamp_of_its_staging(desk: ReleaseDesk) -> None:
    digest = desk.image.manifest.digest
    [pushed] = desk.release().sent
    assert (pushed.image.id, pushed.digest) == (CELL, digest)
    assert pushed.sent
    assert pushed.sent == Sent(sent=0, mounted=pushed.sent.mounted, present=0)
    names = [ImageRef.parse(reference).tag for reference in desk.planned.references]
    assert desk.puts == [f"released-{STAMP}", digest, f"{names[0]}-{STAMP}", *names], "recorded before its first tag"
    assert desk.tags == dict.fromkeys([f"{names[0]}-{STAMP}", *names], digest)
    assert desk.released().allowed == ()
    assert [image.digest for image in desk.released().images] == [digest]
    assert [(image.signer, image.scan) for image in desk.released().images] == [("own results, unsigned", "unscanned")]


def test_a_stamp_that_another_release_has_taken_is_followed_by_the_next(desk: ReleaseDesk) -> None:
    desk.public.tags[f"{TAG}-{STAMP}"] = "sha256:theirs"
    desk.release()
    assert desk.tags[f"{TAG}-{STAMP}.1"] == desk.image.manifest.digest
    assert desk.tags[f"{TAG}-{STAMP}"] == "sha256:theirs"


def test_without_a_gpu_test(desk: ReleaseDesk) -> None:
    desk.report_without_gpu(no_gpu="no driver")
    assert desk.refused(ImageTestError) == f"{CELL}: GPU tests have not passed (gpu: not run (no driver))"
    desk.release(allowed=["untested-gpu"])
    released = desk.released()
    assert released.allowed == ("untested-gpu",)
    assert released.images[0].gpu == "not run (no driver)"


def test_without_a_file_of_gpu_tests(desk: ReleaseDesk) -> None:
    """The hint named a machine with a GPU, which would not have helped."""
    (desk.project.root / "tests/gpu/test_quartz.py").unlink()
    desk.report_without_gpu()
    with pytest.raises(ImageTestError) as caught:
        desk.release()
    assert caught.value.hint.startswith(
        "Write tests/gpu/test_quartz.py, then test again.   To release it untested, add "
    )


def test_a_release_that_is_repeated_changes_nothing(desk: ReleaseDesk) -> None:
    """Not even its record, which took five requests."""
    desk.release()
    tags = dict(desk.tags)
    desk.release()
    assert (desk.puts, desk.tags) == ([desk.image.manifest.digest], tags)


def test_what_was_allowed_is_not_forgotten(desk: ReleaseDesk) -> None:
    """By a later run that finishes the release."""
    desk.release(allowed=["untested-gpu"])
    desk.release(allowed=["unsigned"])
    released = desk.released()
    assert released.allowed == ("untested-gpu", "unsigned")


BESIDE = f"{CELL}-board"


@dataclass(kw_only=True)
class Pair:
    """A desk with a staged release of two images; nobody has tested the second one."""

    desk: ReleaseDesk
    staged: StagedRelease
    planned: dict[str, PlannedImage]

    def release(self, **options: Any) -> Report:
        return self.desk.release(self.staged, self.planned, **options)

    @property
    def other(self) -> StagedImage:
        return self.staged.images[1]

    def report(self) -> None:
        """Attaches this machine's passes of image tests and GPU tests to the second image."""
        manifest = Manifest.of(self.desk.registry.contents[self.other.digest])
        self.desk.report_image(self.planned[self.other.cell], manifest)


@pytest.fixture
def pair(desk: ReleaseDesk) -> Pair:
    """Of two variants."""
    both = plan.make_locked_plan(desk.project, desk.project.select([CELL, BESIDE])).images
    planned = {image.id: image for image in both}
    return Pair(desk=desk, staged=desk.staged_and(planned[BESIDE], desk.add_image(planned[BESIDE])), planned=planned)


def test_all_images_that_may_not_be_released_are_named(pair: Pair) -> None:
    with pytest.raises(ImageTestError, match=f"^{BESIDE}: no valid test results"):
        pair.release(check_only=True)
    pair.desk.report(passed=(), failed=("test_it",), finished="2026-11-23T00:00:00Z")
    with pytest.raises(ImageTestError) as caught:
        pair.release()
    assert str(caught.value).splitlines()[:3] == [
        "2 images cannot be released", f"{CELL}: tests failed", f"{BESIDE}: no valid test results"
    ]  # fmt: skip
    assert pair.desk.calls == []


def test_an_image_goes_with_that_for_another_architecture(twins: Pair) -> None:
    with pytest.raises(ImageTestError, match=r"^2 images cannot be released\n") as caught:
        twins.release()
    assert f"{TWIN}: no valid test results" in str(caught.value)
    assert f"{CELL}: {TWIN} would not be released with it, and has the same tags" in str(caught.value)


def test_what_an_earlier_run_published_stays_in_the_record(pair: Pair) -> None:
    """Its tags are set; without the record, an older release could move them back."""
    other = pair.other
    pair.desk.area.record(StagedRelease(stamp=STAMP, revision="abc", images=(other,)))
    pair.desk.release()
    assert [image.cell for image in pair.desk.released().images] == [CELL, BESIDE]


def test_no_tag_is_set_before_all_images_are_complete(pair: Pair) -> None:
    """An interrupted release left stamped tags, which never move or disappear, of images that were not released."""
    desk = pair.desk
    pair.report()
    pair.release()
    images = {image.digest for image in pair.staged.images}
    tags = [ImageRef.parse(text).tag for image in pair.planned.values() for text in image.references]
    full = [ImageRef.parse(image.references[0]).tag for image in pair.planned.values()]
    stamped = [f"{tag}-{STAMP}" for tag in full]
    assert desk.puts[0] == f"released-{STAMP}", "recorded before anything changes, once"
    assert set(desk.puts[1:3]) == images
    assert desk.puts[3:] == [*stamped, *tags]
    first_tag = desk.calls.index(f"put {stamped[0]}")
    for image in images:
        artifact = json.loads(desk.public.contents[desk.public.tags[image.replace(":", "-")]])["manifests"]
        assert {entry["digest"] for entry in artifact} <= {call[4:] for call in desk.calls[:first_tag]}


def test_a_failed_release_lists_the_tags_that_it_changed(desk: ReleaseDesk) -> None:
    def fail(tag: str) -> None:
        if tag == TAG:
            raise RegistryError("no response", hint="again")

    desk.public.on_put = fail
    with pytest.raises(RegistryError) as caught:
        desk.release()
    head, title, line = str(caught.value).splitlines()
    assert (head, title) == ("no response", "tags changed before the failure:")
    assert line.startswith(f"  {desk.public.name}:{TAG}-{STAMP} is sha256:")
    assert caught.value.hint == "again"


def test_tags_go_back_to_the_state_after_a_release(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of an image that this release left as it was. Nothing is staged."""
    registries = Registries()
    Wire.install(monkeypatch, registries)
    names = tags.compute(tiny.matrix, tiny.select(["qz-0.5-cu129-py311", "qz-0.5-cu129-py311-board"]))
    there = registries[next(iter(names.values()))[0].name]
    first, second = there.add_image({"n": 1}), there.add_image({"n": 2})
    (full, *others), (board, *more) = names.values()
    there.tags |= dict.fromkeys((name.tag for name in (full, *others, board, *more)), second)
    there.tags |= {f"{full.tag}-20261120": first, f"{full.tag}-20261123": second, f"{board.tag}-20261122": second}
    run, marks = new_run(tiny), MemoryRegistry()
    area = MemoryArea("registry.example.test/staging", lambda _: marks)
    assert roll_back(run, area, "20261119") is None
    with pytest.raises(UsageError, match="invalid stamp"):
        roll_back(run, area, "20261122.x")
    assert marks.tags == {}
    report = roll_back(run, area, "20261122")
    assert report
    assert [tag for tag in marks.tags if tag.startswith("rolled-back-")] == ["rolled-back-20261123"]
    assert {change.tag for change in report.changed} == {full.tag, *(other.tag for other in others)}
    assert {there.tags[change.tag] for change in report.changed} == {first}
    report = roll_back(run, area, "20261120")
    assert report
    assert report.changed == []


def test_an_interrupted_release_is_no_state_to_go_back_to(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its images had their stamped tag, and only their tags moved."""
    registries = Registries()
    Wire.install(monkeypatch, registries)
    cells = ["qz-0.5-cu129-py311", "qz-0.5-cu129-py311-board"]
    fulls = [names[0] for names in tags.compute(tiny.matrix, tiny.select(cells)).values()]
    there = registries[fulls[0].name]
    first, second = there.add_image({"n": 1}), there.add_image({"n": 2})
    there.tags |= dict.fromkeys([f"{full.tag}-20261120" for full in fulls], first)
    there.tags[f"{fulls[0].tag}-20261122"] = second
    documents = MemoryRegistry()
    area = MemoryArea("registry.example.test/staging", lambda _: documents)
    images = [
        StagedImage(
            cell=cell, repository="quartz-cuda", digest=second, plan=second, tagged=second, references=(str(full),)
        )
        for cell, full in zip(cells, fulls, strict=True)
    ]
    area.record(StagedRelease(stamp=STAMP, revision="abc", images=tuple(images)))
    assert roll_back(new_run(tiny), area, STAMP) is None
    there.tags[f"{fulls[1].tag}-20261122"] = second
    report = roll_back(new_run(tiny), area, STAMP)
    assert report
    assert report.changed


def test_an_interrupted_release_lists_the_tags_that_it_changed(desk: ReleaseDesk) -> None:
    def interrupt(tag: str) -> None:
        if tag == TAG:
            raise KeyboardInterrupt

    desk.public.on_put = interrupt
    with pytest.raises(KeyboardInterrupt):
        desk.release()
    assert f"changed before the interruption: {desk.public.name}:{TAG}-{STAMP} is sha256:" in desk.console.text


@pytest.mark.parametrize("number", [0, 1])
def test_an_image_that_cannot_be_sent_prevents_all_tags(pair: Pair, number: int) -> None:
    desk, digest = pair.desk, pair.staged.images[number].digest
    pair.report()

    def fail(reference: str) -> None:
        if reference == digest:
            raise RegistryError("no response")

    desk.public.on_put = fail
    with pytest.raises(RegistryError, match="no response"):
        pair.release()
    assert desk.tags == {}
    assert f"{pair.staged.images[number].cell}: failed" in desk.console.text


def test_a_release_whose_tags_would_move_back_is_not_recorded(desk: ReleaseDesk) -> None:
    newer = {"org.opencontainers.image.version": "9.9", "org.opencontainers.image.created": "2026-11-20T00:00:00Z"}
    desk.public.tags[TAG] = desk.public.add_image({"config": {"Labels": newer}, "rootfs": {"diff_ids": []}})
    with pytest.raises(RegistryError, match=f":{TAG} would move back from release 9.9 to "):
        desk.release()
    assert desk.calls == []
    desk.release(roll_back=True)
    assert desk.tags[TAG] == desk.image.manifest.digest


@pytest.mark.usefixtures("programs")
def test_an_interrupt_stops_what_is_attached(pair: Pair) -> None:
    """No tag is set."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not set in background jobs of a shell
    pair.report()

    class InterruptedSigner(Signer):
        def sign_manifest(self, repository: Repository, subject: Descriptor, *_: Any, **__: Any) -> None:
            if subject.digest == pair.other.digest:
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)
                assert cast("MemoryRegistry", repository).stop.wait(10)
                raise StoppedError("stopped")

    with pytest.raises(KeyboardInterrupt):
        pair.release(signer=InterruptedSigner(key="key"))
    assert pair.desk.tags == {}
    assert "changed before the interruption" not in pair.desk.console.text


TWIN = f"{CELL}-arm64"


@pytest.fixture
def twins(desk: ReleaseDesk, edit: Callable[[str, str], Project]) -> Pair:
    """Of two architectures."""
    desk.project = edit('python: ["3.11"]}', 'python: ["3.11"], arch: [amd64, arm64]}')
    [cell] = desk.project.select([TWIN])
    planned = {CELL: desk.planned, TWIN: replace(desk.planned, cell=cell, plan="sha256:" + "a" * 64)}
    return Pair(desk=desk, staged=desk.staged_and(planned[TWIN], desk.add_image(planned[TWIN])), planned=planned)


@pytest.mark.usefixtures("twins")
def test_an_image_is_not_released_without_another_architecture_of_the_matrix(desk: ReleaseDesk) -> None:
    with pytest.raises(ImageTestError) as caught:
        desk.release()
    assert str(caught.value) == f"{CELL}: {TWIN} would not be released with it, and has the same tags"
    desk.release(allowed=["missing-arch"])
    assert desk.released().allowed == ("missing-arch",)
    [image] = desk.released().images
    assert list(oci.read_platforms(desk.contents[image.tagged])) == ["amd64"]
    assert set(desk.tags.values()) == {image.tagged}


def test_what_is_allowed_and_not_needed_is_not_recorded(desk: ReleaseDesk) -> None:
    desk.release(allowed=["missing-arch"])
    assert desk.released().allowed == ()
    assert desk.released().images[0].tagged == desk.image.manifest.digest


@pytest.mark.usefixtures("programs")
def test_an_index_of_several_architectures_is_signed_before_its_tags_as_the_cell_without_one(twins: Pair) -> None:
    desk = twins.desk
    signed: list[tuple[str, Mapping[str, str], bool]] = []

    class RecordingSigner(Signer):
        def sign_manifest(
            self, repository: Repository, subject: Descriptor, annotations: Mapping[str, str] = {}, *_: Any, **__: Any
        ) -> None:
            signed.append((subject.digest, annotations, bool(desk.tags)))

    twins.report()
    released = twins.release(signer=RecordingSigner(key="key"))
    assert [outcome.image.id for outcome in released.sent] == [CELL, TWIN]
    [index] = set(desk.tags.values())
    assert [(image.cell, image.tagged) for image in desk.released().images] == [(CELL, index), (TWIN, index)]
    assert desk.released().allowed == ()
    annotations = {"image": "quartz-cuda", "tag": TAG, "release": f"{TAG}-{STAMP}"}
    assert sorted(signed, key=str) == sorted(
        [
            (desk.image.manifest.digest, {"cell": CELL, **annotations}, False),
            (twins.other.digest, {"cell": TWIN, **annotations}, False),
            (index, {"cell": CELL, **annotations}, False),
        ],
        key=str,
    )
    assert signed[-1][0] == index


def test_another_plan(desk: ReleaseDesk) -> None:
    assert "staged from a different plan" in desk.refused(StaleError, desk.staged(plan="sha256:" + "e" * 64))
    assert "staged from a different plan" in desk.refused(StaleError, desk.staged(cell="unknown"))


def test_a_digest_that_is_not_there(desk: ReleaseDesk) -> None:
    assert "has no sha256:eee" in desk.refused(RegistryError, desk.staged(digest="sha256:" + "e" * 64))


def test_a_label_that_the_tag_would_contradict(desk: ReleaseDesk) -> None:
    """Other differences from the plan: test_expected.py."""
    desk.image = desk.add_image(desk.planned, **{"org.opencontainers.image.version": "9.9"})
    desk.report()
    assert "the image differs from the plan" in desk.refused(VerifyError)


def test_other_files_than_those_of_the_checkout(desk: ReleaseDesk) -> None:
    """The layer of files is made again from the checkout."""
    number = next(n for n, layer in enumerate(desk.planned.layers) if layer.kind == "files")
    manifest = json.loads(desk.registry.contents[desk.image.manifest.digest])
    manifest["layers"][number]["digest"] = "sha256:" + "d" * 64
    content = json.dumps(manifest).encode()
    desk.registry.put_manifest("other", content, MANIFEST_TYPE)
    desk.image = replace(desk.image, manifest=Manifest.of(content))
    desk.report()
    assert "layer files is dddddddddddd, expected" in desk.refused(VerifyError)


def test_a_newer_release_is_not_replaced(desk: ReleaseDesk) -> None:
    other = StagedImage.of(desk.planned, "sha256:" + "e" * 64)
    desk.area.record(StagedRelease(stamp="20261123", revision="def", images=(other,)))
    assert f"release 20261123 is newer and has other images of {CELL}" in desk.refused(RegistryError)
    desk.release(roll_back=True)
    assert desk.tags
    assert desk.area.is_rolled_back("20261123")


def test_a_newer_release_of_the_same_image(desk: ReleaseDesk) -> None:
    same = StagedImage.of(desk.planned, desk.image.manifest.digest)
    desk.area.record(StagedRelease(stamp="20261123", revision="def", images=(same,)))
    desk.area.record(StagedRelease(stamp="20261121", revision="def", images=()))
    desk.release()
    assert desk.tags


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
    desk.area.write(desk.project, STAMP, "abc", [image, other])
    part = desk.staged().model_dump_json().encode()
    artifact = artifacts.artifact_manifest(staging.TYPE, {staging.TYPE: part})
    artifacts.put_artifact(cast("Repository", desk.registry), artifact, [part])
    desk.registry.put_manifest(f"release-{STAMP}", artifact.content, artifact.media_type)
    with pytest.raises(VerifyError, match="signed the list of its images"):
        desk.release(desk.area.read(STAMP), is_own=False)
    signed.append(artifact.digest)
    desk.release(desk.area.read(STAMP), is_own=False)
    signed.clear()
    desk.area.write(desk.project, STAMP, "abc", [image])
    desk.release(desk.area.read(STAMP), is_own=False)


def test_without_signers_only_a_list_of_this_checkout_counts(desk: ReleaseDesk) -> None:
    """Whoever can write to staging would choose what gets public tags."""
    with pytest.raises(VerifyError, match="images may be missing: this checkout did not stage it"):
        desk.release(is_own=False)
    desk.release(is_own=False, allowed=["unsigned"])
    assert desk.released().allowed == ("unsigned",)
    desk.release()
    assert desk.console.text.count("this release is unsigned") == 2


def test_blobs_are_mounted_from_staging_or_else_downloaded(desk: ReleaseDesk) -> None:
    """They are downloaded where the registry cannot mount them."""
    layers = {layer.digest for layer in desk.image.layers}
    config = desk.image.config
    desk.release()
    assert "mount from staging/quartz-cuda" in desk.calls
    assert not desk.store.has(config.digest, config.size)

    desk.area = MemoryArea("other.example.test/staging", lambda _: desk.registry)
    public = MemoryRegistry()
    public.has |= layers
    public.name = desk.public.name
    desk.release(public=public)
    assert not [call for call in public.calls if "mount" in call]
    assert desk.store.has(config.digest, config.size)
    assert public.contents[config.digest] == desk.registry.contents[config.digest]


@pytest.mark.usefixtures("programs")
def test_an_image_that_the_scanner_accepts_is_released(desk: ReleaseDesk) -> None:
    desk.project = with_scanner(
        desk.project, "import json, sys; print(json.load(open(sys.argv[1][5:]))['metadata']['component']['bom-ref'])"
    )
    desk.release()
    released = desk.released()
    assert (released.allowed, released.images[0].scan) == ((), "passed")
    assert ": gpu: passed, scan: passed\n" in desk.console.text
    log = (desk.project.logs / f"{CELL}.scan.log").read_text("utf-8")
    assert log.strip() == desk.image.manifest.digest, "the SBOM was of this image"


@pytest.mark.usefixtures("programs")
def test_an_image_that_the_scanner_refuses_is_not_released(desk: ReleaseDesk) -> None:
    desk.project = with_scanner(desk.project, "print('CVE-1 in libtls'); raise SystemExit(1)")
    message = desk.refused(RefusedError)
    assert message.startswith(f"{CELL}: refused by ")
    assert message.endswith(" (exit status 1)\n  | CVE-1 in libtls")


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
    assert len(desk.release(twice, check_only=True).outcomes) == 2
    assert f"{CELL}: checking" in desk.console.text
    assert f"{CELL}: scanning" in desk.console.text
