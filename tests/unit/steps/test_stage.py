"""What is staged: images of this machine and of others, with and without test results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from builder.build.layer_lookup import LayerLookup
from builder.build.outcomes import Report
from builder.common import git
from builder.common.errors import ImageTestError
from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.evidence import reports, results
from builder.evidence.signing import Signer
from builder.layers import oci
from builder.layers.oci import CONFIG_TYPE, MANIFEST_TYPE, Descriptor, Image
from builder.matrix.project import Project
from builder.plan.plan import PlannedImage
from builder.registry import artifacts
from builder.release import staging
from builder.release.staging import INDEX, StagedImage, plan_tag
from builder.steps.stage import stage
from tests.fakes.registry import MemoryArea, MemoryRegistry
from tests.fakes.suites import passing_evidence
from tests.unit.release.test_tag_groups import BOARD, DAY, EMBER, REGISTRY, PublishBench


class Known(LayerLookup):
    """Makes images from the layers of a public repository."""

    def __init__(self, image: Image) -> None:
        self.image = image

    def references(self) -> Iterator[ImageRef]:
        yield ImageRef.parse(f"{REGISTRY}/public/known")

    def assemble_known(self, image: PlannedImage) -> Image:
        return self.image

    def fetch(self, blob: Descriptor) -> Path:
        raise AssertionError(blob)


@dataclass
class Yard:
    """The bench, and the repositories of its staging by name."""

    bench: PublishBench
    repositories: dict[str, MemoryRegistry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.area = MemoryArea(f"{REGISTRY}/staging", self.open)

    def open(self, reference: ImageRef) -> MemoryRegistry:
        memory = self.repositories.setdefault(staging.name_of(reference), MemoryRegistry())
        memory.name = reference.name
        return memory

    def repository(self, cell: str) -> MemoryRegistry:
        return self.open(ImageRef.parse(self.bench.image(cell).references[0]))

    def stage(self, **options: Any) -> Report:
        return stage(self.bench.context, self.area, self.bench.plan, **options)

    def reports(self, cell: str, digest: str) -> int:
        return len(artifacts.attached(self.repository(cell), digest, reports.TYPE))


def images_of(report: Report) -> list[StagedImage]:
    return [StagedImage.of(outcome.image, outcome.digest) for outcome in report.outcomes]


@pytest.fixture
def yard(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    monkeypatch.setattr(git, "state", lambda _: "abc")
    return Yard(PublishBench(tiny, tmp_path / "store", monkeypatch))


def test_images_are_staged_with_their_reports_and_the_tags_of_their_plans(yard: Yard) -> None:
    staged = yard.stage()
    assert [outcome.image.id for outcome in staged.sent] == [EMBER, BOARD]
    assert (staged.stamp, yard.repositories[INDEX].list_tags()) == (DAY, [f"release-{DAY}"]), "no list of images"
    release = yard.area.read()
    assert (release.stamp, release.revision, list(release.images)) == (DAY, "abc", images_of(staged))
    assert set(yard.repositories) == {"ember-cuda", "quartz-cuda", INDEX}
    for image in release.images:
        assert image.digest == yard.bench.stored[image.cell].manifest.digest
        assert yard.repository(image.cell).tags[plan_tag(image.plan)] == image.digest
        assert yard.reports(image.cell, image.digest) == 1
        assert f"{image.cell}: staged" in yard.bench.console.text
    assert yard.bench.console.text.count(" sent, gpu: not run\n") == 2
    assert staged.bytes


def test_edited_evidence_is_not_staged(yard: Yard) -> None:
    """It was signed and attached. Which evidence does not count: test_results.py."""
    bench = yard.bench
    digest = bench.stored[EMBER].manifest.digest
    [path] = (bench.project.state / "evidence").glob(f"{digest.replace(':', '-')}.image.json")
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"passed": ["invented"]}), encoding="utf-8")
    with pytest.raises(ImageTestError) as caught:
        yard.stage(signer=Signer(key="unused"))
    assert str(caught.value).startswith(f"{EMBER}: it has results of tests that this image does not have: invented")
    assert caught.value.hint == f"builder images {EMBER}"
    assert not [call for memory in yard.repositories.values() for call in memory.calls], "nothing is sent"


def test_an_image_that_another_machine_staged_is_listed_too(yard: Yard) -> None:
    digest = staged_elsewhere(yard, with_tag=False)
    with pytest.raises(ImageTestError, match=f"{EMBER}: not built"):
        yard.stage(images_only=True)
    assert not [call for memory in yard.repositories.values() for call in memory.calls], "nothing is sent"
    yard.repository(EMBER).tags[plan_tag(yard.bench.image(EMBER).plan)] = digest
    staged = yard.stage(images_only=True)
    assert yard.reports(EMBER, digest) == 0, "this machine has not tested it"
    assert [(outcome.image.id, outcome.digest) for outcome in staged.outcomes if not outcome.sent] == [(EMBER, digest)]
    assert [outcome.image.id for outcome in staged.sent] == [BOARD]
    assert staged.stamp == ""
    assert yard.area.stamps() == []


@pytest.mark.parametrize("failed", [(), ("tests/images/test_base.py::test_it",)], ids=["a pass", "a failure"])
def test_results_of_this_machine_are_attached_to_an_image_that_another_one_staged(
    yard: Yard, failed: tuple[str, ...]
) -> None:
    """A job without rights runs the tests; this one, which runs no code of an image, signs and attaches the results."""
    digest = staged_elsewhere(yard)
    evidence = passing_evidence(yard.bench.project.root, yard.bench.image(EMBER), digest)
    passed = tuple(name for name in evidence.passed if name not in failed)
    changes = {"passed": passed, "failed": failed}
    results.write_evidence(yard.bench.project.state, evidence.model_copy(update=changes))
    staged = yard.stage()
    assert [outcome.digest for outcome in staged.outcomes if not outcome.sent] == [digest]
    assert yard.reports(EMBER, digest) == 1
    assert f"{EMBER}: staged" in yard.bench.console.text
    yard.stage()
    assert yard.reports(EMBER, digest) == 1, "once"


def test_results_for_another_plan_are_not_attached(yard: Yard) -> None:
    digest = staged_elsewhere(yard)
    evidence = passing_evidence(yard.bench.project.root, yard.bench.image(EMBER), digest, plan="sha256:" + "e" * 64)
    results.write_evidence(yard.bench.project.state, evidence)
    yard.stage()
    assert yard.reports(EMBER, digest) == 0


def test_nothing_is_staged_unless_all_images_passed(yard: Yard) -> None:
    for number, cell in enumerate((EMBER, BOARD), 1):
        yard.bench.prove(yard.bench.image(cell), passed=(), failed=("tests/images/test_base.py::test_it",))
        with pytest.raises(ImageTestError, match=f"{cell}: tests failed") as caught:
            yard.stage()
        assert str(caught.value).count("tests failed") == number
    assert not [call for memory in yard.repositories.values() for call in memory.calls], "nothing is sent"


def staged_elsewhere(yard: Yard, *, with_tag: bool = True) -> str:
    """Another machine staged an image of EMBER, which this one has not built; returns its digest."""
    del yard.bench.stored[EMBER]
    memory, planned = yard.repository(EMBER), yard.bench.image(EMBER)
    content = oci.config(planned.settings, [], [], created="2026-11-01T00:00:00Z", labels={})
    config = Descriptor(media_type=CONFIG_TYPE, digest=digest_of_bytes(content), size=len(content))
    memory.contents[config.digest] = content
    tag = plan_tag(planned.plan)
    digest = memory.put_manifest(tag, oci.manifest(config, []), MANIFEST_TYPE)
    memory.calls.clear()
    if not with_tag:
        del memory.tags[tag]
    return digest


def test_an_image_of_known_layers_is_staged_without_test_results(yard: Yard) -> None:
    """Only its layers are in the public repositories."""
    image = yard.bench.stored.pop(EMBER)
    assert [outcome.image.id for outcome in yard.stage(lookup=Known(image)).sent] == [EMBER, BOARD]
    assert yard.reports(EMBER, image.manifest.digest) == 0
    assert " sent, not tested here\n" in yard.bench.console.text
    assert "mount from public/known" in yard.repository(EMBER).calls
    assert "mount from public/known" not in yard.repository(BOARD).calls
