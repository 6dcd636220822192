"""`builder registry`, with a registry in memory."""

from __future__ import annotations

import json

import pytest

from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.host import Host
from builder.matrix import tags
from builder.matrix.project import Project
from builder.release import prune, staging
from builder.release.prune import Item
from builder.release.staging import ReleasedImage, ReleaseRecord, StagingArea
from tests.fakes.registry import MemoryRegistry
from tests.unit.cli.conftest import CELL, Run
from tests.unit.release.test_staging import IMAGE

STAGING = "registry.example.test/staging"


PUBLIC = "registry.example.test:5000/team/quartz-cuda"
DIGEST = digest_of_bytes(b"image")


class Repositories(dict[str, MemoryRegistry]):
    """Repositories in memory, by name. They exist when they are asked for."""

    def __missing__(self, name: str) -> MemoryRegistry:
        served = self[name] = MemoryRegistry()
        served.name = name
        return served


@pytest.fixture
def repositories(monkeypatch: pytest.MonkeyPatch) -> Repositories:
    repositories = Repositories()

    def open_memory(reference: ImageRef, **_: object) -> MemoryRegistry:
        return repositories[reference.name]

    for module in ("builder.release.staging", "builder.release.inspection", "builder.cli.registry"):
        monkeypatch.setattr(f"{module}.Repository", open_memory)
    return repositories


def test_staging_without_a_release_is_not_without_faults(run: Run, repositories: Repositories) -> None:
    """A misspelt place had 0 blobs, all of them present."""
    repositories[PUBLIC].tags["1.0"] = DIGEST
    result = run("registry", "check", "--fast", "--staging", "registry.example.test/stagging")
    assert (result.code, result.out) == (14, "")
    assert "nothing is staged in registry.example.test/stagging/releases" in result.err
    assert "builder stage" in result.err


def test_repositories_without_anything_are_named(tiny: Project, run: Run, repositories: Repositories) -> None:
    StagingArea(STAGING, "", Host()).write(tiny, "20261122", "abc", [IMAGE])
    result = run("registry", "check", "--fast", "--staging", STAGING, "--format", "json")
    assert f"{PUBLIC}: done" in result.err
    assert "nothing there" in result.err
    by_repository = {each["repository"]: each for each in json.loads(result.out)}
    assert by_repository[f"{STAGING}/releases"] == {
        "repository": f"{STAGING}/releases", "blobs": 2, "hashed": False, "faults": [],
    }  # fmt: skip
    assert result.code == 0


def test_faults_are_printed_as_json(tiny: Project, run: Run, repositories: Repositories) -> None:
    """The command fails all the same."""
    StagingArea(STAGING, "", Host()).write(tiny, "20261122", "abc", [IMAGE])
    repositories[PUBLIC].tags["1.0"] = DIGEST
    result = run("registry", "check", "--staging", STAGING, "--format", "json")
    assert result.code == 15
    faults = {each["repository"]: each["faults"] for each in json.loads(result.out)}
    assert faults[PUBLIC] == [f"{PUBLIC}:1.0: the manifest is missing"]


def test_a_stamped_tag_of_a_stranger_is_listed(run: Run, repositories: Repositories, tiny: Project) -> None:
    full = next(iter(tags.compute(tiny.matrix, tiny.select([CELL])).values()))[0]
    repositories[PUBLIC].tags |= dict.fromkeys([full.tag, f"{full.tag}-20261122", f"{full.tag}-20261123"], DIGEST)
    image = ReleasedImage(cell=CELL, digest=DIGEST, references=(str(full),), gpu="", signer="")
    StagingArea(STAGING, "", Host()).record(ReleaseRecord(stamp="20261122", revision="", images=(image,)))
    result = run("registry", "diff", "--staging", STAGING)
    assert [line for line in result.out.splitlines() if "release" in line] == [
        f"{PUBLIC}:{full.tag}-20261123 was not set by a recorded release"
    ]
    [differences] = [
        each
        for each in json.loads(run("registry", "diff", "--staging", STAGING, "--format", "json").out)
        if each["repository"] == PUBLIC
    ]
    assert differences["unreleased"] == [f"{full.tag}-20261123"]
    assert differences["unknown"] == []


def test_staged_releases_are_listed_with_the_checks_that_their_publication_skipped(
    tiny: Project, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryRegistry()
    monkeypatch.setattr(staging, "Repository", lambda *_, **__: memory)
    place = StagingArea(STAGING, "", Host())
    place.write(tiny, "20261122", "abc", [IMAGE])
    place.write(tiny, "20261122", "", [IMAGE, IMAGE])
    place.record(ReleaseRecord(stamp="20261122", revision="abc", images=(), allowed=("unsigned",)))
    result = run("registry", "ls", "--staging", STAGING)
    assert [line.split() for line in result.out.splitlines()[1:]] == [
        ["20261122.1", "2", "no", "-"],
        ["20261122", "1", "yes,", "unsigned", "allowed", "abc"],
    ]
    listed = json.loads(run("registry", "ls", "--staging", STAGING, "--format", "json").out)
    assert [(each["stamp"], len(each["images"]), each["released"] is None) for each in listed] == [
        ("20261122.1", 2, True),
        ("20261122", 1, False),
    ]
    assert listed[1]["released"]["allowed"] == ["unsigned"]


def test_what_prune_would_delete_is_printed_as_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    item = Item(repository=MemoryRegistry(), digest=DIGEST, kind="image", text="plan-1")
    monkeypatch.setattr(prune, "read_registries", lambda *_: None)
    monkeypatch.setattr(prune, "unneeded", lambda *_: [item])
    monkeypatch.setattr(prune, "delete", lambda items, _: len(items))
    data = {"repository": item.repository.name, "digest": DIGEST, "kind": "image", "text": "plan-1"}
    for options, deleted in ([], 0), (["--delete"], 1):
        result = run("registry", "prune", "--staging", STAGING, "--format", "json", *options)
        assert json.loads(result.out) == {"items": [data], "deleted": deleted}
