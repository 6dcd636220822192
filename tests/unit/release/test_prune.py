"""What is needed in staging, and what goes. Images are named by letters."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from builder.common.console import View
from builder.common.errors import RegistryError, VerifyError
from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.evidence.reports import TYPE
from builder.layers.oci import MANIFEST_TYPE, Descriptor, Manifest
from builder.registry import artifacts
from builder.release import prune, staging
from builder.release.prune import Item, RegistryContents, RepositoryContents
from builder.release.staging import StagedImage, StagedRelease, plan_tag
from tests.fakes import registry as registry_fakes
from tests.fakes.registry import MemoryArea, MemoryRegistry
from tests.fakes.wire import connect
from tests.unit.registry.test_artifacts import SUBJECT


def digest(name: str) -> str:
    return digest_of_bytes(name.encode())


def tag(image: str, suffix: str = "") -> str:
    return digest(image).replace(":", "-") + suffix


def repository(images: Collection[str], tags: dict[str, str], missing: str = "", **attached: str) -> RepositoryContents:
    """`attached` are names of manifests by the name of an image; what is in `tags` are names too."""
    return RepositoryContents(
        repository=connect(),
        tags={name: digest(manifest) for name, manifest in tags.items()},
        images=[digest(image) for image in images],
        missing=[digest(image) for image in missing],
        attached={digest(image): tuple(map(digest, manifests.split())) for image, manifests in attached.items()},
    )


def release(stamp: str, images: str) -> StagedRelease:
    listed = [
        StagedImage(cell=f"cell-{name}", repository="pt", digest=digest(name), plan=digest("")) for name in images
    ]
    return StagedRelease(stamp=stamp, revision="", images=tuple(listed))


IMAGES = "abcde"
some_images = st.sets(st.sampled_from(IMAGES), max_size=3)


@st.composite
def stagings(draw: st.DrawFn) -> RegistryContents:
    """Any releases and tags of a few images, each with a report and a list of what is attached."""
    stamps = ["20261103", "20261102", "20261101"][: draw(st.integers(0, 3))]
    documents = {f"release-{stamp}": stamp for stamp in stamps}
    documents |= {"released-20261101": "record 20261101", "release-zzz": "x"}
    releases = [release(stamp, "".join(draw(some_images))) for stamp in stamps]
    missing = draw(some_images)
    tags = {plan_tag(digest(f"plan {name}")): name for name in draw(some_images) - missing}
    tags |= {f"mine-{name}": name for name in draw(some_images) - missing}
    tags |= {tag(name): f"list-{name}" for name in IMAGES}
    attached = {name: f"report-{name} list-{name}" for name in IMAGES}
    return RegistryContents(
        documents=repository("", documents),
        releases=releases,
        staged=[repository(set(IMAGES) - missing, tags, "".join(missing), **attached)],
        published={digest(name) for name in draw(some_images)},
        plans={plan_tag(digest(f"plan {name}")) for name in draw(some_images)},
    )


def listed(whole: RegistryContents, keep: int) -> tuple[set[str], set[str]]:
    """The tags and the images of the documents that are needed."""
    tags, images, wanted = set[str](), set[str](), set(whole.published)
    for number, each in enumerate(whole.releases):
        digests = {image.digest for image in each.images}
        if number < keep or digests & wanted:
            tags, images, wanted = tags | {f"release-{each.stamp}"}, images | digests, wanted - digests
    return tags, images


@given(stagings(), st.integers(1, 3))
def test_what_is_needed_stays_and_all_else_goes(whole: RegistryContents, keep: int) -> None:
    """Records of what was published stay too: they prevent the publication of older releases."""
    tags, needed = listed(whole, keep)
    [staged], items = whole.staged, prune.unneeded(whole, keep)
    ours = {name for name in whole.documents.tags if re.fullmatch(r"release-[0-9]+", name)}
    assert {item.text for item in items if item.kind == "document"} == ours - tags
    needed |= {d for name, d in staged.tags.items() if name in whole.plans or name.startswith("mine-")}
    gone = set(staged.images) - needed
    assert {item.digest for item in items if item.kind == "image"} == gone
    attached = {each for subject in gone | set(staged.missing) for each in staged.attached[subject]}
    assert {item.digest for item in items if item.repository is staged.repository} - gone == attached
    kinds = [item.kind for item in items]
    order = ["document", "image", "attachment"]
    assert kinds == sorted(kinds, key=order.index), "no document lists an image that is gone"


def test_what_two_images_share_stays_with_one_of_them() -> None:
    """Two lists of attachments without entries are one manifest. Whoever can push may list any image as attached."""
    staged = repository("abc", {"mine": "a"}, a="list", b="list c")
    whole = RegistryContents(
        documents=repository("", {}), releases=[release("20261103", "c")], staged=[staged],
        published=set(), plans=set(),
    )  # fmt: skip
    assert [item.digest for item in prune.unneeded(whole, 1)] == [digest("b")]


def test_how_images_are_described() -> None:
    documents = {"release-20261101": "20261101", "release-20261102": "20261102", "released-20261102": "record"}
    staged = repository("ab", {}, "d", a="report-a list-a", d="report-d")
    whole = RegistryContents(
        documents=repository("", documents),
        releases=[release("20261103", ""), release("20261102", "a"), release("20261101", "a")],
        staged=[staged],
        published=set(),
        plans=set(),
    )
    items = prune.unneeded(whole, 1)
    assert [item.text for item in items] == [
        "release-20261101",
        "release-20261102",
        "cell-a  staged 20261102, 20261101, released",
        "in no release",
        *[f"attached to {digest('a')[7:19]}"] * 2,
        f"attached to {digest('d')[7:19]}, which no longer exists",
    ]
    assert str(items[-1]) == f"{staged.repository.name}@{digest('report-d')}  {items[-1].text}"


# ---- reading and deleting


class Place:
    """A repository of staged images, that of the lists, and a public one."""

    def __init__(self) -> None:
        self.images, self.documents, self.public = MemoryRegistry(), MemoryRegistry(), MemoryRegistry()
        self.public.name = "registry.example.test/team/pt"
        self.area = MemoryArea("registry.example.test/staging", self.open)

    def open(self, reference: ImageRef) -> MemoryRegistry:
        return self.documents if reference.repository.endswith("/releases") else self.images

    def read(self, *plans: str) -> RegistryContents:
        return prune.read_registries(self.area, [self.public], plans, View(Console(quiet=True)))

    def unneeded(self, *plans: str) -> set[str]:
        return {item.digest for item in prune.unneeded(self.read(*plans), 1)}


@pytest.fixture
def place() -> Place:
    return Place()


def test_what_a_tag_of_several_architectures_names_is_published(place: Place) -> None:
    memory = place.public
    images = {arch: memory.add_image({"architecture": arch}) for arch in ("amd64", "arm64")}
    memory.tags["2.9-20261101"] = memory.add_index(**images)
    assert not place.read().published, "a tag with a stamp keeps no staged release"
    memory.tags["2.9"] = memory.tags["2.9-20261101"]
    assert set(images.values()) < set(place.read().published)


def sign(registry: MemoryRegistry, signed: Manifest, cosign: int) -> list[str]:
    """What version 2 of cosign stores under a tag, or version 3 attaches."""
    if cosign == 3:
        subject = Descriptor(media_type=MANIFEST_TYPE, digest=signed.digest, size=len(signed.content))
        registry_fakes.attach(registry, subject, "application/x-bundle", {"text/plain": b""})
        return [*artifacts.attached(registry, signed.digest), registry.tags[signed.digest.replace(":", "-")]]
    return [registry.put_manifest(f"{signed.digest.replace(':', '-')}.sig", b"signature", MANIFEST_TYPE)]


@pytest.mark.parametrize("cosign", [2, 3])
def test_an_image_goes_with_its_reports_and_their_signatures_with_the_next_run(place: Place, cosign: int) -> None:
    memory, plan = place.images, plan_tag(digest("plan"))
    memory.put_manifest(plan, b"image", MANIFEST_TYPE)
    memory.tags[SUBJECT.digest] = SUBJECT.digest
    with artifacts.attaching(memory, SUBJECT) as attachments:
        report = attachments.add(TYPE, {TYPE: b"{}"})
    memory.tags[report.digest] = report.digest
    index, of_report = memory.tags[SUBJECT.digest.replace(":", "-")], sign(memory, report, cosign)
    assert place.unneeded(plan) == set(), "a signed report was taken for an image"
    assert place.unneeded() == {SUBJECT.digest, report.digest, index}
    for name in [name for name, named in memory.tags.items() if named in place.unneeded()]:
        del memory.tags[name]
    assert place.unneeded() == set(of_report)


@pytest.mark.parametrize("cosign", [2, 3])
def test_a_list_goes_with_its_signature(place: Place, cosign: int) -> None:
    content, documents = release("20261122", "").model_dump_json().encode(), place.documents
    document = artifacts.artifact_manifest(staging.TYPE, {staging.TYPE: content})
    artifacts.put_artifact(documents, document, [content])
    documents.put_manifest("release-20261122", document.content, document.media_type)
    documents.put_manifest("released-20261122", b"record", MANIFEST_TYPE)
    documents.tags[document.digest] = document.digest
    signature, whole = sign(documents, document, cosign), place.read()
    assert prune.unneeded(whole, 1) == []
    newer = replace(whole, releases=[release("20261123", ""), *whole.releases])
    items = prune.unneeded(newer, 1)
    assert [item.digest for item in items] == [document.digest, *signature]
    assert {item.text for item in items[1:]} == {f"attached to {document.digest[7:19]}"}


def test_a_release_that_cannot_be_read_stops_everything(place: Place) -> None:
    place.documents.put_manifest("release-20261122", b"{}", MANIFEST_TYPE)
    with pytest.raises(VerifyError, match=r"release 20261122 cannot be read, .*; nothing was deleted") as caught:
        place.read()
    assert "registry.example.test/staging/releases:release-20261122 " in caught.value.hint


def test_an_interrupted_deletion_shows_how_far_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False])

    def delete(_: str) -> bool:
        if (answer := next(answers, None)) is None:
            raise RegistryError("no")
        return answer

    registry = MemoryRegistry()
    monkeypatch.setattr(registry, "delete_manifest", delete)
    console = Console(record=True, width=100)
    items = [Item(repository=registry, digest=digest(name), kind="image", text="") for name in "abc"]
    with pytest.raises(RegistryError, match="no"):
        prune.delete(items, View(console))
    assert "1 of 3 manifests deleted" in console.export_text()
