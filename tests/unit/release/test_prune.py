"""What staging and the public repositories need, and what goes. Images are named by letters."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from builder.common.console import View
from builder.common.errors import RegistryError, VerifyError
from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.evidence.reports import TYPE
from builder.evidence.results import Evidence
from builder.host import Host
from builder.layers.blobs import MANIFEST_TYPE, Descriptor
from builder.layers.oci import Manifest
from builder.registry import artifacts
from builder.release import prune, staging
from builder.release.prune import Item, RegistryContents, RepositoryContents
from builder.release.staging import StagedImage, StagedRelease, StagingArea, plan_tag
from tests.fakes import registry as registry_fakes
from tests.fakes.registry import MemoryRegistry
from tests.fakes.wire import connect
from tests.unit.registry.test_artifacts import SUBJECT
from tests.unit.release.test_staging import area

NOW = datetime(2026, 11, 22, tzinfo=UTC)
REGISTRY = connect()


def digest(name: str) -> str:
    return digest_of_bytes(name.encode())


def tag(image: str, suffix: str = "") -> str:
    return digest(image).replace(":", "-") + suffix


def proof(finished: str) -> Evidence:
    return Evidence(image="", cell="c", plan="", suite={}, kind="image", passed=(), failed=(), finished=finished)


OLD, NEW = (proof(f"{NOW - timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}") for days in (7, 6))


def repository(images: Mapping[str, Evidence | None], tags: Mapping[str, str], **attached: str) -> RepositoryContents:
    """`attached` are names of manifests by the name of an image; what is in `tags` are names too."""
    return RepositoryContents(
        repository=REGISTRY,
        tags={name: digest(manifest) for name, manifest in tags.items()},
        images={digest(image): evidence for image, evidence in images.items()},
        attached={digest(image): tuple(map(digest, manifests.split())) for image, manifests in attached.items()},
    )


def release(stamp: str, images: str) -> StagedRelease:
    listed = [
        StagedImage(cell=f"cell-{name}", repository="pt", digest=digest(name), plan=digest("")) for name in images
    ]
    return StagedRelease(stamp=stamp, revision="", images=tuple(listed))


AGES = {"old": OLD, "new": NEW, "no time": proof(""), "the 13th month": proof("2026-13-22T00:00:00Z"), "unread": None}
IMAGES = "abcde"
SUBJECTS = [*IMAGES, *(f"report-{name}" for name in "abc")]
ATTACHMENTS = [f"{kind}-{name}" for kind in ("report", "list", "sig") for name in "abc"]
some_images = st.sets(st.sampled_from(IMAGES), max_size=3)


@st.composite
def stagings(draw: st.DrawFn) -> RegistryContents:
    """Any releases, tags, ages and attachments of a few images."""
    stamps = ["20261103", "20261102", "20261101"][: draw(st.integers(0, 3))]
    lists = {f"images-{day}-0123456789ab": release(day, "".join(draw(some_images))) for day in ("20261115", "20261114")}
    documents = {f"release-{stamp}": stamp for stamp in stamps} | {tag: each.stamp for tag, each in lists.items()}
    documents |= {"released-20261101": "record 20261101", "release-zzz": "x"}
    tags = {plan_tag(digest(f"plan {name}")): name for name in draw(some_images)}
    tags |= {f"mine-{name}": name for name in draw(st.sets(st.sampled_from([*IMAGES, *ATTACHMENTS]), max_size=2))}
    tags |= {tag(name): f"list-{name}" for name in "abc"}
    attached = {name: " ".join(draw(st.sets(st.sampled_from(ATTACHMENTS), max_size=3))) for name in SUBJECTS}
    images = {name: AGES[draw(st.sampled_from([*AGES]))] for name in draw(st.sets(st.sampled_from(IMAGES)))}
    public = repository(dict.fromkeys(draw(some_images)), {"1.0": "a", tag("b"): "list-b"}, **attached)
    return RegistryContents(
        documents=repository({}, documents),
        releases=[release(stamp, "".join(draw(some_images))) for stamp in stamps],
        lists=lists,
        staged=[repository(images, tags, **attached)],
        public=[public],
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
    for name, each in whole.lists.items():
        if each.stamp >= "20261115":
            tags, images = tags | {name}, images | {image.digest for image in each.images}
    return tags, images


def needed_of(each: RepositoryContents, whole: RegistryContents, images: set[str]) -> set[str]:
    """What a repository of staging keeps: images, and all that is attached to what it keeps."""
    for name, manifest in each.tags.items():
        is_planned, evidence = name.startswith("plan-"), each.images.get(manifest)
        if name in whole.plans or name.startswith("mine-"):
            images = images | {manifest}
        if is_planned and manifest in each.images and evidence in (None, AGES["no time"], AGES["the 13th month"]):
            images = images | {manifest}
    images = images | {image for image, evidence in each.images.items() if evidence == NEW}
    return reached(each, images)


def reached(each: RepositoryContents, roots: set[str]) -> set[str]:
    below = {manifest for root in roots for manifest in each.attached.get(root, ())}
    return roots if below <= roots else reached(each, roots | below)


@given(stagings(), st.integers(1, 3))
def test_what_is_needed_stays_and_all_else_goes(whole: RegistryContents, keep: int) -> None:
    """Records of what was published stay too: they prevent the publication of older releases."""
    tags, images = listed(whole, keep)
    [staged], [public], items = whole.staged, whole.public, prune.unneeded(whole, keep, NOW)
    of_kind = {kind: {item.text if kind == "document" else item.digest for item in items if item.kind == kind}
               for kind in ("document", "image", "attachment")}  # fmt: skip
    ours = {name for name in whole.documents.tags if re.fullmatch(r"release-[0-9]+|images-.*", name)}
    assert of_kind["document"] == ours - tags
    needed = needed_of(staged, whole, images)
    public_roots = {*public.images, digest("a")}
    gone = set(staged.images) - needed
    assert of_kind["image"] == gone
    attached = {each for subject in staged.attached if subject not in needed for each in staged.attached[subject]}
    lost = {each for subject in public.attached if subject not in reached(public, public_roots)
            for each in public.attached[subject]} - reached(public, public_roots)  # fmt: skip
    assert of_kind["attachment"] == (attached - needed) | lost
    kinds = [item.kind for item in items]
    order = ["document", "image", "attachment"]
    assert kinds == sorted(kinds, key=order.index), "no document lists an image that is gone"


def test_how_images_are_described() -> None:
    documents = {"release-20261101": "20261101", "release-20261102": "20261102", "released-20261102": "record"}
    staged = repository({"a": OLD, "b": OLD}, {}, a="report-a list-a")
    whole = RegistryContents(
        documents=repository({}, documents),
        releases=[release("20261103", ""), release("20261102", "a"), release("20261101", "a")],
        lists={},
        staged=[staged],
        public=[repository({}, {}, d="report-d")],
        published=set(),
        plans=set(),
    )
    items = prune.unneeded(whole, 1, NOW)
    assert [item.text for item in items] == [
        "release-20261101",
        "release-20261102",
        "cell-a  staged 20261102, 20261101, released",
        "c  in no release",
        *[f"attached to {digest('a')[7:19]}"] * 2,
        f"attached to {digest('d')[7:19]}, which no longer exists",
    ]
    assert str(items[-1]) == f"{REGISTRY.name}@{digest('report-d')}  {items[-1].text}"
    assert prune.summary(items) == "2 documents, 2 images, 3 attachments"


# ---- reading and deleting


@pytest.fixture
def memory() -> MemoryRegistry:
    """All repositories in one."""
    return MemoryRegistry()


def read(*public: MemoryRegistry) -> RegistryContents:
    """The contents of public repositories, and of staging, all of whose repositories are the first of them."""
    return prune.read_registries(area(public[0]), public, (), 1, View(Console(quiet=True)))


def test_a_public_repository_that_is_a_staged_one_is_not_read_again(
    memory: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = MemoryRegistry()
    other.name = "registry.example.test/team/pt"
    whole = read(memory, other)
    assert {each.repository.name for each in whole.staged} == {memory.name}
    assert [each.repository.name for each in whole.public] == [other.name]


def test_what_a_tag_of_several_architectures_names_is_needed(memory: MemoryRegistry) -> None:
    """Only the index has a tag of a release. The repository is a public and a staged one."""
    images: dict[str, str] = {}
    for arch in ("amd64", "arm64"):
        images[arch] = memory.put_manifest(plan_tag(digest(arch)), arch.encode(), MANIFEST_TYPE)
        memory.tags[images[arch]] = images[arch]
        subject = Descriptor(media_type=MANIFEST_TYPE, digest=images[arch], size=len(arch))
        registry_fakes.attach(memory, subject, TYPE, {TYPE: OLD.model_dump_json().encode()})
    unneeded = {item.digest for item in prune.unneeded(read(memory), 1, NOW)}
    assert set(images.values()) < unneeded
    memory.tags["2.9-20261101"] = memory.add_index(**images)
    assert prune.unneeded(read(memory), 1, NOW) == []
    memory.tags["2.9"] = memory.tags["2.9-20261101"]
    assert set(images.values()) < set(read(memory).published), "their staged release is kept, too"


def test_a_report_that_cannot_be_read_makes_an_image_count_as_new(memory: MemoryRegistry) -> None:
    memory.put_manifest(plan_tag(digest("plan")), b"image", MANIFEST_TYPE)
    memory.tags[SUBJECT.digest] = SUBJECT.digest
    for content in (b"", b"{}", OLD.model_dump_json().encode()):
        [staged] = read(memory).staged
        assert staged.images == {SUBJECT.digest: None}
        registry_fakes.attach(memory, SUBJECT, TYPE, {TYPE: content})
    [staged] = read(memory).staged
    assert staged.images == {SUBJECT.digest: OLD}
    assert len(staged.attached[SUBJECT.digest]) == 3 + 1, "the reports and their list"


def sign(registry: MemoryRegistry, signed: Manifest, cosign: int) -> list[str]:
    """What version 2 of cosign stores under a tag, or version 3 attaches."""
    if cosign == 3:
        subject = Descriptor(media_type=MANIFEST_TYPE, digest=signed.digest, size=len(signed.content))
        registry_fakes.attach(registry, subject, "application/x-bundle", {"text/plain": b""})
        return [*artifacts.attached(registry, signed.digest), registry.tags[signed.digest.replace(":", "-")]]
    return [registry.put_manifest(f"{signed.digest.replace(':', '-')}.sig", b"signature", MANIFEST_TYPE)]


@pytest.mark.parametrize("cosign", [2, 3])
def test_the_signatures_of_reports_and_lists_go_with_them(memory: MemoryRegistry, cosign: int) -> None:
    memory.put_manifest(plan_tag(digest("plan")), b"image", MANIFEST_TYPE)
    memory.tags[SUBJECT.digest] = SUBJECT.digest
    with artifacts.attaching(memory, SUBJECT) as attachments:
        report = attachments.add(TYPE, {TYPE: OLD.model_dump_json().encode()})
    memory.tags[report.digest] = report.digest
    content, documents = release("20261122", "").model_dump_json().encode(), MemoryRegistry()
    document = artifacts.manifest(staging.TYPE, {staging.TYPE: content})
    artifacts.put_artifact(documents, document, [content])
    documents.put_manifest("release-20261122", document.content, document.media_type)
    documents.put_manifest("released-20261122", b"record", MANIFEST_TYPE)
    of_report, of_document = sign(memory, report, cosign), sign(documents, document, cosign)

    def open_(reference: ImageRef, **_: object) -> MemoryRegistry:
        return documents if reference.repository.endswith("/releases") else memory

    def unneeded(plans: Collection[str], *newer: StagedRelease) -> list[Item]:
        place = StagingArea("registry.example.test/staging", "", Host(), new_registry=open_)
        whole = prune.read_registries(place, [memory], plans, 1, View(Console(quiet=True)))
        assert {*whole.staged[0].images} == {SUBJECT.digest}, "a signed report was taken for an image"
        return prune.unneeded(replace(whole, releases=[*newer, *whole.releases]), 1, NOW)

    assert unneeded([plan_tag(digest("plan"))]) == []
    assert {item.digest for item in unneeded([])} == {
        SUBJECT.digest, report.digest, memory.tags[SUBJECT.digest.replace(":", "-")], *of_report
    }  # fmt: skip
    items = unneeded([plan_tag(digest("plan"))], release("20261123", ""))
    assert [item.digest for item in items] == [document.digest, *of_document]
    assert {item.text for item in items[1:]} == {f"attached to {document.digest[7:19]}"}


@pytest.mark.parametrize(
    ("tag", "name"),
    [("release-20261122", "release 20261122"), ("images-20261122-0123456789ab", "images-20261122-0123456789ab")],
)
def test_a_release_that_cannot_be_read_stops_everything(memory: MemoryRegistry, tag: str, name: str) -> None:
    memory.put_manifest(tag, b"{}", MANIFEST_TYPE)
    with pytest.raises(
        VerifyError,
        match=f"{name} cannot be read, so it is unknown which images are needed; nothing was deleted",
    ) as caught:
        read(memory)
    assert f"registry.example.test/staging/releases:{tag} " in caught.value.hint


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
