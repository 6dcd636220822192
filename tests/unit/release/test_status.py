"""Which images are released as planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder.common.errors import VerifyError
from builder.common.reference import ImageRef
from builder.evidence import reports, results
from builder.index.host import Host
from builder.layers import oci
from builder.layers.oci import MANIFEST_TYPE, Descriptor
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.matrix.schema import Trusted
from builder.plan import plan
from builder.plan.plan import Plan, PlannedImage
from builder.registry import artifacts
from builder.registry.failures import RejectedError
from builder.registry.transport import Transport
from builder.release import staging, status
from builder.release.staging import StagingArea
from builder.release.status import NONE, Status, StatusReader
from tests.fakes.registry import MemoryArea, MemoryRegistry
from tests.fakes.run import new_run
from tests.fakes.suites import passing_evidence, write_tests
from tests.unit.evidence.test_signing import Cosign

EMBER, BOARD = "em-1.10-cu1210-py311", "qz-0.5-cu129-py311-board"


def tags_of(image: PlannedImage) -> list[str]:
    """The full tag first."""
    return [ImageRef.parse(text).tag for text in image.references]


def image_of_plan(registry: MemoryRegistry, plan: str, arch: str = "amd64") -> str:
    """Adds an image with the label of a plan; returns its digest."""
    labels = {"config": {"Labels": {"io.github.gpu-images.plan": plan}}, "rootfs": {"diff_ids": []}}
    return registry.add_image({"architecture": arch, **labels})


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> MemoryRegistry:
    """The repository of all public images."""
    registry = MemoryRegistry()
    monkeypatch.setattr(status, "Repository", lambda *_, **__: registry)
    return registry


@pytest.fixture
def area(registry: MemoryRegistry) -> StagingArea:
    """All of its repositories are that of the public images."""
    return MemoryArea("registry.example.test/staging", lambda _: registry)


Read = Callable[..., list[Status]]


@pytest.fixture
def read(tiny: Project, store: Store, area: StagingArea) -> Read:
    """The rows of a plan."""

    def rows(planned: Plan, place: StagingArea | None = area) -> list[Status]:
        return list(StatusReader(new_run(tiny, store=store), place).read(planned))

    return rows


def test_images_whose_tag_is_of_another_plan(tiny: Project, registry: MemoryRegistry, area: StagingArea) -> None:
    images = list(plan.make_locked_plan(tiny, tiny.select([EMBER, BOARD])).images)
    assert status.unreleased(images, area, Host()) == images
    by_cell = {image.id: image for image in images}
    tags = {cell: image.references[0].rpartition(":")[2] for cell, image in by_cell.items()}
    for cell, digest in ((EMBER, by_cell[EMBER].plan), (BOARD, "sha256:other")):
        registry.tags[tags[cell]] = image_of_plan(registry, digest)
    assert status.unreleased(images, area, Host()) == [by_cell[BOARD]]
    registry.put_manifest(tags[EMBER], b"[]", MANIFEST_TYPE)
    assert status.unreleased(images, area, Host()) == images


def test_a_release_that_was_rolled_back_is_not_published_again(
    tiny: Project, registry: MemoryRegistry, area: StagingArea
) -> None:
    """An older stamped tag of the plan does not count: a commit that reverts to this plan is published."""
    [image] = plan.make_locked_plan(tiny, tiny.select([EMBER])).images
    full = tags_of(image)[0]
    ours, other = (image_of_plan(registry, digest) for digest in (image.plan, "sha256:other"))
    registry.tags = {full: other, f"{full}-20261122.9": other, f"{full}-20261122.10": ours, f"{full}-jupyter": other}
    assert status.unreleased([image], area, Host()) == [image], "interrupted after the stamped tag"
    area.mark_rolled_back(["20261122.10"], "20261122.9")
    assert status.unreleased([image], area, Host()) == []
    area.mark_rolled_back([], "20261122.10")
    assert status.unreleased([image], area, Host()) == [image], "someone released it again"
    area.mark_rolled_back(["20261122.10", "20261122.8"], "20261122.9")
    registry.tags[f"{full}-20261123"] = other
    assert status.unreleased([image], area, Host()) == [image]


def test_staged_images_of_this_plan_and_of_another(tiny: Project, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    def image_of(*_: object) -> None:
        raise VerifyError(f"{EMBER}: the manifest is missing\nDetails.")

    monkeypatch.setattr(staging, "image_of", image_of)
    planned = plan.make_locked_plan(tiny, tiny.select([EMBER, BOARD]))
    plans = {image.id: image.plan for image in planned.images} | {BOARD: "sha256:other"}
    images = [SimpleNamespace(cell=cell, plan=digest, digest="sha256:x") for cell, digest in plans.items()]
    place: Any = SimpleNamespace(
        stamps=lambda: ["20261123"],
        read=lambda stamp: SimpleNamespace(stamp=stamp, images=images),
        released_stamps=list,
    )
    rows = {row.cell: (row.staged, row.tested) for row in read(planned, place)}
    assert rows == {EMBER: ("20261123", "the manifest is missing"), BOARD: ("20261123, another plan", NONE)}


def test_staging_that_may_not_be_read(tiny: Project, read: Read) -> None:
    """Its place has a default, and users of public images may not read it."""

    def stamps() -> list[str]:
        raise RejectedError("answered 403")

    place: Any = SimpleNamespace(stamps=stamps)
    [row] = read(plan.make_locked_plan(tiny, tiny.select([EMBER])), place)
    assert row.staged == "not readable"


def test_a_tag_of_several_architectures_is_released_if_all_of_its_images_are(
    tiny: Project, registry: MemoryRegistry, area: StagingArea, read: Read
) -> None:
    [amd64] = plan.make_locked_plan(tiny, tiny.select([EMBER])).images
    arm64 = replace(amd64, cell=replace(amd64.cell, arch="arm64"), plan="sha256:" + "a" * 64)
    digests = {image.cell.arch: image_of_plan(registry, image.plan, image.cell.arch) for image in (amd64, arm64)}
    full, *others = tags_of(amd64)
    registry.tags = dict.fromkeys([full, *others], registry.add_index(**digests))

    def unreleased(*images: PlannedImage) -> list[str]:
        return [image.id for image in status.unreleased(images, area, Host())]

    assert unreleased(amd64, arm64) == []
    assert [row.released for row in read(Plan(images=(amd64, arm64)))] == ["yes", "yes"]
    registry.tags[others[0]] = digests["amd64"]
    assert [row.released for row in read(Plan(images=(arm64,)))] == [f"yes, {others[0]} names another image"]
    registry.put_manifest("invalid", b"{}", oci.INDEX_TYPE)
    index, registry.tags[full] = registry.tags[full], registry.tags["invalid"]
    assert [row.released for row in read(Plan(images=(arm64,)))] == ["invalid index"]
    registry.tags[full] = index
    # A release needs the images of all architectures, also that of the one which has not changed.
    newer = replace(arm64, plan="sha256:" + "b" * 64)
    assert unreleased(amd64, newer) == [amd64.id, newer.id]
    registry.tags[full] = digests["amd64"]
    assert unreleased(amd64) == []
    assert unreleased(amd64, arm64) == [amd64.id, arm64.id]


@pytest.mark.parametrize(("is_planned", "released"), [(True, "yes"), (False, "another image")])
def test_a_released_image_that_is_neither_staged_nor_stored(
    tiny: Project, registry: MemoryRegistry, read: Read, is_planned: bool, released: str
) -> None:
    """After a roll-back, a checkout of that commit showed "another image": staging had a newer release."""
    planned = plan.make_locked_plan(tiny, tiny.select([EMBER]))
    [image] = planned.images
    digest = image_of_plan(registry, image.plan if is_planned else "sha256:other")
    registry.tags = dict.fromkeys(tags_of(image), digest)
    [row] = read(planned)
    assert row.released == released


class ReleasedImage:
    """An image that all of its tags name, with a signature of cosign 2 beside it."""

    def __init__(self, project: Project, registry: MemoryRegistry, read: Read) -> None:
        self.project, self.registry, self.read = project, registry, read
        self.plan = plan.make_locked_plan(project, project.select([EMBER]))
        [self.image] = self.plan.images
        self.full, *self.others = tags_of(self.image)
        self.digest = image_of_plan(registry, self.image.plan)
        self.registry.tags = dict.fromkeys([self.full, *self.others], self.digest)
        self.registry.tags[f"{self.digest.replace(':', '-')}.sig"] = self.digest

    def trust(self, *signers: Trusted) -> None:
        self.project.__dict__["matrix"] = self.project.matrix.model_copy(update={"evidence": signers})

    def row(self) -> Status:
        [row] = self.read(self.plan)
        return row


@pytest.fixture
def released(tiny: Project, registry: MemoryRegistry, read: Read) -> ReleasedImage:
    return ReleasedImage(tiny, registry, read)


def test_results_that_a_release_attached_count_if_the_image_is_neither_staged_nor_built_here(
    released: ReleasedImage,
) -> None:
    """A release has only what changed; the other images showed no tests."""
    assert released.row().tested == "not tested"
    root = released.project.root
    passed = write_tests(root, released.image.components)
    evidence = passing_evidence(root, released.image, released.digest, finished="2026-11-22T10:00:00Z")
    image = Descriptor(media_type=MANIFEST_TYPE, digest=released.digest, size=1)
    with artifacts.attaching(released.registry, image) as attachments:
        report = attachments.add(reports.TYPE, {reports.TYPE: evidence.model_dump_json().encode()})
    assert "it is unsigned" in released.row().tested
    results.write_evidence(released.project.state, evidence)
    assert released.row().tested == f"{len(passed)} passed"
    released.trust(Trusted(key="keys/none.pub"))
    released.registry.tags[f"{report.digest.replace(':', '-')}.sig"] = report.digest
    assert released.row().tested == "keys/none.pub is missing"


def test_a_tag_that_was_moved_to_another_image_is_shown(released: ReleasedImage) -> None:
    """An image was shown as released after one of its tags was moved to a forged one."""
    assert released.row().released == "yes"
    first, *_, last = released.others
    released.registry.tags[first] = released.registry.add_image({"rootfs": {"diff_ids": []}})
    del released.registry.tags[last]
    row = released.row()
    assert row.released == f"yes, {first} names another image, {last} missing"
    assert row.tags == (released.full, *released.others[1:-1])


@pytest.mark.parametrize(
    ("signer", "changes", "expected"),
    [
        ("keys/ci.pub", {}, "yes"),
        ("keys/other.pub", {}, "untrusted"),
        ("keys/ci.pub", {"cell": "another"}, "untrusted"),
        ("keys/ci.pub", {"image": "another"}, "untrusted"),
        ("keys/ci.pub", {"tag": "another"}, "untrusted"),
    ],
)
def test_a_signature_is_checked(
    released: ReleasedImage,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    signer: str,
    changes: dict[str, str],
    expected: str,
) -> None:
    """Any signature was shown as one, with a key that signed nothing."""
    name = ImageRef.parse(released.image.references[0]).repository.rpartition("/")[2]
    notes = {"cell": EMBER, "image": name, "tag": released.full} | changes
    cosign = Cosign(monkeypatch, tmp_path)
    cosign.programs.answer = lambda command: (
        (0, json.dumps([{"optional": notes}]), "")
        if f"--key={released.project.root}/{signer}" in command
        else (12, "", "Error: no matching signatures")
    )
    assert released.row().signature == "listed", "nobody is trusted"
    released.trust(Trusted(key="keys/ci.pub"))
    (released.project.root / "keys").mkdir()
    (released.project.root / "keys/ci.pub").write_text("public")
    # The repository in memory has no connection that cosign could use.
    monkeypatch.setattr(MemoryRegistry, "check_stop", lambda _: None)
    released.registry.transport = Transport.of("registry.example.test", Host())
    assert released.row().signature == expected


def test_a_signature_that_cannot_be_checked_is_not_shown_as_one(released: ReleasedImage) -> None:
    released.trust(Trusted(key="keys/none.pub"))
    assert released.row().signature == "not checked: keys/none.pub is missing"
    del released.registry.tags[f"{released.digest.replace(':', '-')}.sig"]
    assert released.row().signature == "no"
