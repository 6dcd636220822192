"""Where images are staged, and the documents of releases."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import RegistryError, UsageError, VerifyError
from builder.evidence import signing
from builder.evidence.signing import Signer
from builder.index.host import Host
from builder.layers.oci import Descriptor
from builder.matrix.project import Project
from builder.matrix.schema import Trusted
from builder.registry import artifacts
from builder.registry.client import Repository
from builder.release import staging
from builder.release.staging import INDEX, StagedImage, StagedRelease, StagingArea
from tests.fakes.registry import MemoryArea, MemoryRegistry

Edit = Callable[[str, str], Project]
DIGEST = "sha256:" + "a" * 64
IMAGE = StagedImage(cell="c", repository="pt-cuda", digest=DIGEST, plan=DIGEST)


@pytest.mark.parametrize(
    ("text", "registry", "expected"),
    [
        ("registry.example.test/staging", "", "registry.example.test/staging/pt-cuda"),
        ("registry.example.test:5000", "", "registry.example.test:5000/pt-cuda"),
        ("staging", "registry.example.test", "registry.example.test/staging/pt-cuda"),
        ("a/b", "registry.example.test", "registry.example.test/a/b/pt-cuda"),
        ("docker.io/org/new-", "", "docker.io/org/new-pt-cuda"),
    ],
)
def test_the_repository_of_an_image(text: str, registry: str, expected: str) -> None:
    assert str(StagingArea(text, registry, Host()).repository("pt-cuda")) == expected


def test_the_default_place_is_beside_the_images(tiny: Project, edit: Edit) -> None:
    """With no further level: Docker Hub has names of two."""
    images = StagingArea.of(tiny, Host())
    assert str(images.repository("pt-cuda")) == "registry.example.test:5000/team/staging-pt-cuda"
    assert str(images.repository(INDEX)) == "registry.example.test:5000/team/staging-releases"
    project = edit("registry: registry.example.test:5000", 'registry: ""')
    with pytest.raises(UsageError, match=r"^no registry in matrix\.yaml$"):
        StagingArea.of(project, Host())
    project = edit('registry: ""', 'registry: ""\nstaging: staging')
    with pytest.raises(UsageError, match=r"^no registry in matrix\.yaml$"):
        StagingArea.of(project, Host())


@pytest.mark.parametrize(
    ("registry", "place"),
    [
        ("registry.example.test:5000", "registry.example.test:5000/team"),
        ("registry.example.test:5000", "team"),
        ("other.example.test", "Other.example.test:443/team"),
    ],
)
def test_the_place_of_the_public_images_is_refused(edit: Edit, registry: str, place: str) -> None:
    project = edit("registry: registry.example.test:5000", f"registry: {registry}\nstaging: {place}")
    with pytest.raises(UsageError, match=r"/team/[a-z-]+ is the place of public images$"):
        StagingArea.of(project, Host())


@pytest.fixture
def registry() -> MemoryRegistry:
    """The repository of the documents."""
    return MemoryRegistry()


@pytest.fixture
def place(registry: MemoryRegistry) -> StagingArea:
    return area(registry)


def area(registry: MemoryRegistry) -> StagingArea:
    """A staging area whose repositories are all the same one."""
    return MemoryArea("registry.example.test/staging", lambda _: registry)


def test_stamps_count_up_unless_the_release_is_the_same(tiny: Project, place: StagingArea) -> None:
    first = place.write(tiny, "20261122", "abc", [IMAGE])
    assert first == StagedRelease(stamp="20261122", revision="abc", images=(IMAGE,))
    assert place.write(tiny, "20261122", "abc", [IMAGE]) == first
    for number in range(1, 12):
        assert place.write(tiny, "20261122", f"abc{number}", [IMAGE]).stamp == f"20261122.{number}"
    assert place.stamps()[:2] == ["20261122.11", "20261122.10"]
    assert place.read().stamp == "20261122.11"
    assert place.read("20261122") == first


def test_the_stamp_of_a_deleted_release_is_not_used_again(
    tiny: Project, place: StagingArea, registry: MemoryRegistry
) -> None:
    """It would be older than the newest release."""
    for revision in ("abc", "def"):
        place.write(tiny, "20261122", revision, [IMAGE])
    del registry.tags["release-20261122"]
    assert place.write(tiny, "20261122", "ghi", [IMAGE]).stamp == "20261122.2"


def test_a_release_follows_a_stamp_of_a_later_day(tiny: Project, place: StagingArea, registry: MemoryRegistry) -> None:
    """A machine whose clock was a day ahead had staged: until then, its images stayed the newest release."""
    other = IMAGE.model_copy(update={"cell": "d"})
    place.write(tiny, "20261201", "abc", [IMAGE])
    newer = place.write(tiny, "20261122", "def", [other])
    assert newer.stamp == "20261201.1"
    assert place.read() == newer
    # Deleted in staging, but published: its tags are taken.
    place.record(StagedRelease(stamp="20261203.2", revision="abc", images=()))
    assert place.write(tiny, "20261122", "ghi", [IMAGE]).stamp == "20261203.3"
    assert place.write(tiny, "20261204", "ghi", [IMAGE]).stamp == "20261204"


@dataclass(frozen=True, kw_only=True)
class NamedSigner(Signer):
    """`signed` are the keys and the manifests that they signed."""

    signed: list[tuple[str, str]]

    def sign_manifest(self, repository: Repository, subject: Descriptor, *_: Any, **__: Any) -> None:
        assert repository.manifest(subject.digest), "cosign signs what is in the repository"
        self.signed.append((self.key, subject.digest))


def test_a_list_that_nobody_trusted_signed_is_signed_again(
    tiny: Project, place: StagingArea, registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with another key: release advised to run stage again, which changed nothing."""
    tiny.__dict__["matrix"] = tiny.matrix.model_copy(update={"evidence": [Trusted(key="keys/ci.pub")]})
    signed: list[tuple[str, str]] = []
    monkeypatch.setattr(
        signing, "signer_of_manifest", lambda _, digest, __, ___: ("ci" * (("ci", digest) in signed), [])
    )
    monkeypatch.setattr(signing, "has_signature", lambda _, digest: digest in [each for _, each in signed])
    first = place.write(tiny, "20261122", "abc", [IMAGE], NamedSigner(key="old", signed=signed))
    tag = registry.tags["release-20261122"]
    (tiny.root / ".builder/staged").rename(tiny.root / "elsewhere")
    with pytest.raises(VerifyError, match="no signer listed under"):
        place.require_signed(tiny, first)
    assert place.write(tiny, "20261122", "abc", [IMAGE], NamedSigner(key="ci", signed=signed)) == first
    assert registry.tags["release-20261122"] == tag
    (tiny.root / ".builder/staged").rename(tiny.root / "again")
    place.require_signed(tiny, first)


def test_an_unsigned_list_is_refused_without_cosign(tiny: Project, place: StagingArea) -> None:
    """And without the key, which this machine need not have."""
    tiny.__dict__["matrix"] = tiny.matrix.model_copy(update={"evidence": [Trusted(key="keys/none.pub")]})
    release = place.write(tiny, "20261122", "abc", [IMAGE])
    (tiny.root / ".builder/staged").rename(tiny.root / "elsewhere")
    with pytest.raises(VerifyError, match="no signer listed under"):
        place.require_signed(tiny, release)


def test_a_list_has_its_signature_before_its_tag(tiny: Project, place: StagingArea, registry: MemoryRegistry) -> None:
    """A release that reads it in between would be refused."""
    signed: list[tuple[str, str]] = []
    before: list[list[tuple[str, str]]] = []
    registry.on_put = lambda reference: before.append([*signed]) if reference.startswith("release-") else None
    place.write(tiny, "20261122", "abc", [IMAGE], NamedSigner(key="ci", signed=signed))
    assert before == [[("ci", registry.tags["release-20261122"])]]


def test_a_stamp_that_another_machine_sets_at_the_same_time(
    tiny: Project, place: StagingArea, registry: MemoryRegistry
) -> None:
    other = "sha256:" + "b" * 64

    def set_by_the_other(tag: str) -> None:
        if tag == "release-20261122":
            registry.tags[tag] = other

    registry.on_put = set_by_the_other
    assert place.write(tiny, "20261122", "abc", [IMAGE]).stamp == "20261122.1"
    assert registry.tags["release-20261122"] == other


def test_tags_that_are_no_stamps_are_ignored(place: StagingArea, registry: MemoryRegistry) -> None:
    registry.tags |= dict.fromkeys(
        ["release-zzz", "release-20261122.0", "release-2026.5", "release-20261122.99999"], "x"
    )
    registry.tags["release-" + "9" * 5000] = "x"
    with pytest.raises(RegistryError, match="nothing is staged"):
        place.read()
    for stamp in ("zzz", "20261122\n", "٢٠٢٦١١٢٢"):
        with pytest.raises(UsageError, match="invalid stamp"):
            place.read(stamp)
    with pytest.raises(UsageError, match="no staged release 20261122"):
        place.read("20261122")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b"[" * 100_000,
        json.dumps({"stamp": "20261122", "revision": "", "images": [vars(IMAGE) | {"repository": "A+"}]}).encode(),
        b'{"stamp": "20261122", "revision": "x\\ny", "images": []}',
        b'{"stamp": "20261123", "revision": "", "images": []}',
    ],
)  # fmt: skip
def test_a_document_that_cannot_be_read(place: StagingArea, registry: MemoryRegistry, content: bytes) -> None:
    artifact = artifacts.artifact_manifest(staging.TYPE, {staging.TYPE: content})
    artifacts.put_artifact(registry, artifact, [content])
    registry.put_manifest("release-20261122", artifact.content, artifact.media_type)
    with pytest.raises(VerifyError):
        place.read("20261122")


def test_only_what_writes_requests_the_right_to_push(registry: MemoryRegistry) -> None:
    rights: list[bool] = []

    class Place(StagingArea):
        def open(self, name: str, *, write: bool = False) -> Repository:
            rights.append(write)
            return registry

    place = Place("registry.example.test/staging", "", Host())
    place.stamps()
    assert rights == [False]
    place.record(StagedRelease(stamp="20261122", revision="abc", images=()))
    assert rights == [False, True]


def test_what_was_released(place: StagingArea, tmp_path: Path) -> None:
    assert place.released("20261122") is None
    released = StagedRelease(stamp="20261122", revision="abc", images=(), allowed=("unsigned",))
    place.record(released)
    assert place.released("20261122") == released
    assert place.released_stamps() == ["20261122"]
    assert place.stamps() == []


def test_the_record_of_a_release_with_control_characters_cannot_be_read(place: StagingArea) -> None:
    """`status` prints it."""
    document = {"stamp": "20261122", "revision": "abc", "images": [], "allowed": ["\x1b[2J"]}
    place._put("released-20261122", staging.RELEASED_TYPE, json.dumps(document).encode())
    with pytest.raises(VerifyError, match="allowed"):
        place.released("20261122")
