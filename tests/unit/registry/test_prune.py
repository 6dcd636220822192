"""What staging and the public repositories need, and what goes. Images are named by letters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from builder.common.console import View
from builder.common.digest import of_bytes
from builder.common.errors import RegistryError, VerifyError
from builder.index.host import Host
from builder.layers.blobs import MANIFEST_TYPE
from builder.registry import artifacts, prune, reports, staging
from builder.registry.evidence import Evidence
from builder.registry.prune import Contents, Item, Repository
from builder.registry.staging import Place, Release, StagedImage, plan_tag
from tests.fakes.wire import connect
from tests.unit.registry.test_artifacts import SUBJECT, Memory

NOW = datetime(2026, 11, 22, tzinfo=UTC)
REGISTRY = connect()


def digest(name: str) -> str:
    return of_bytes(name.encode())


def tag(image: str, suffix: str = "") -> str:
    return digest(image).replace(":", "-") + suffix


def proof(finished: str) -> Evidence:
    return Evidence(image_id="", cell="c", plan="", suite={}, passed=(), failed=(), gpu="not run", finished=finished)


OLD, NEW = (proof((NOW - timedelta(days=days)).isoformat()) for days in (7, 6))


def repository(images: Mapping[str, Evidence | None], tags: Mapping[str, str], **attached: str) -> Repository:
    """`attached` are names of manifests by the name of an image; what is in `tags` are names too."""
    return Repository(
        registry=REGISTRY,
        tags={name: digest(manifest) for name, manifest in tags.items()},
        images={digest(image): evidence for image, evidence in images.items()},
        attached={digest(image): tuple(map(digest, manifests.split())) for image, manifests in attached.items()},
    )


def release(stamp: str, images: str) -> Release:
    listed = [
        StagedImage(cell=f"cell-{name}", repository="pt", digest=digest(name), plan=digest("")) for name in images
    ]
    return Release(stamp=stamp, revision="", images=tuple(listed))


def contents(**changes: Any) -> Contents:
    """Three releases: of image a, of a and b, and of c. All are old, and have a report in a list under a tag."""
    stamps = {"20261103": "c", "20261102": "ab", "20261101": "a"}
    documents = {f"release-{stamp}": stamp for stamp in stamps}
    documents |= {f"released-{stamp}": f"record {stamp}" for stamp in ("20261031", "20261101", "20261102")}
    tags = {plan_tag(digest(f"plan {name}")): name for name in "abc"} | {tag(name): f"list-{name}" for name in "abc"}
    attached = {name: f"report-{name} list-{name}" for name in "abc"}
    whole = Contents(
        documents=repository({}, {**documents, "release-zzz": "x"}),
        releases=[release(stamp, images) for stamp, images in stamps.items()],
        lists={},
        staged=[repository(dict.fromkeys("abc", OLD), tags, **attached)],
        public=[],
        published=set(),
        plans=set(),
    )
    return replace(whole, **changes)


def unneeded(whole: Contents, keep: int = 1) -> list[str]:
    """The names of the manifests that go, in order."""
    names = [*"abcdex", *(f"{kind}-{name}" for kind in ("report", "list", "sig") for name in "abcdex")]
    names += [f"{kind}202611{day}" for kind in ("", "record ") for day in ("01", "02", "03")] + ["record 20261031"]
    known = {digest(name): name for name in names}
    return [known[item.digest] for item in prune.unneeded(whole, keep, NOW)]


@pytest.mark.parametrize(
    ("keep", "images", "documents"),
    [
        (1, "ab", ["20261102", "20261101"]),
        (2, "", ["20261101"]),
        (3, "", []),
        (9, "", []),
    ],
)
def test_the_newest_releases_are_kept_with_their_images_and_reports(
    keep: int, images: str, documents: list[str]
) -> None:
    """Documents go first, then images, then what is attached to them. An image in a kept release too is kept."""
    attached = [f"{kind}-{name}" for name in images for kind in ("report", "list")]
    assert unneeded(contents(), keep) == [*documents, *images, *attached]


def test_the_newest_release_with_an_image_that_a_public_tag_names_is_kept_whole() -> None:
    """An image that never changes does not keep all releases that list it."""
    unneeded_items = unneeded(contents(published={digest("a")}))
    assert unneeded_items == ["20261101"]
    assert "20261101" in unneeded(contents(published={digest("b")}))
    assert not {"a", "b"} & {*unneeded(contents(published={digest("b")}))}


def test_records_of_what_was_published_are_never_deleted() -> None:
    """They name the checks that a release skipped, and prevent the publication of older releases."""
    documents = repository({}, {"released-20261001": "record 20261101", "released-20260901": "record 20261031"})
    assert unneeded(contents(documents=documents, releases=[], staged=[])) == []


@pytest.mark.parametrize("finished", ["", "soon", "2026-11-22T00:00:00"])
def test_an_image_that_may_still_be_listed_is_kept(finished: str) -> None:
    """Images d and e are in no release, and the report of an image x without a plan tag cannot be read."""
    tags = {plan_tag(digest("plan d")): "d", plan_tag(digest("plan e")): "e"}
    attached = {"d": "report-d", "e": "report-e"}

    def with_proofs(d: Evidence | None, e: Evidence | None) -> list[str]:
        return unneeded(contents(releases=[], documents=repository({}, {}), staged=[
            repository({"d": d, "e": e, "x": None}, tags, **attached)
        ]))  # fmt: skip

    assert with_proofs(NEW, OLD) == ["e", "x", "report-e"]
    assert with_proofs(None, proof(finished)) == ["x"]


@pytest.mark.parametrize(("day", "is_kept"), [("20261115", True), ("20261114", False)])
def test_an_image_that_was_staged_without_a_release_is_kept_for_some_days(day: str, is_kept: bool) -> None:
    """Its test results may be older than that."""
    tag = f"images-{day}-0123456789ab"
    whole = contents(lists={tag: release(day, "a")})
    documents = replace(whole.documents, tags={**whole.documents.tags, tag: digest("list of images")})
    items = prune.unneeded(replace(whole, documents=documents), 1, NOW)
    assert (digest("a") not in {item.digest for item in items}) is is_kept
    assert (tag not in {item.text for item in items}) is is_kept


def test_images_of_the_plan_and_of_unknown_tags_are_kept() -> None:
    plans = {plan_tag(digest("plan a"))}
    assert {"a", "b", "list-a"} & {*unneeded(contents(plans=plans))} == {"b"}
    [staged] = contents().staged
    tagged = replace(staged, tags={**staged.tags, "mine": digest("a"), "other": digest("list-b")})
    assert unneeded(contents(staged=[tagged]))[-2:] == ["b", "report-b"], "a digest that an unknown tag names stays"


def test_what_is_attached_to_what_is_attached() -> None:
    """A kept image has a report with a signature; another list names that report too."""
    tags = {tag("c"): "list-c", tag("report-c"): "sig-c", tag("d", ".sig"): "sig-d"}
    attached = {"c": "report-c list-c", "report-c": "sig-c", "d": "report-c sig-d"}
    staged = repository({"c": OLD, "report-c": None}, tags, **attached)
    assert unneeded(contents(staged=[staged]))[2:] == ["sig-d"]


def test_public_repositories_lose_only_what_is_attached_to_missing_images() -> None:
    tags = {"1.0": "a", "1.0-20200101": "b", "0.1": "c", tag("a"): "list-a", tag("d"): "list-d", tag("d", ".att"): "a"}
    public = repository({"a": None}, tags, a="report-a list-a", d="report-a report-d list-d a b")
    whole = contents(releases=[], documents=repository({}, {}), staged=[], public=[public])
    items = prune.unneeded(whole, 1, NOW)
    assert [item.digest for item in items] == [digest("report-d"), digest("list-d")]
    assert str(items[0]).endswith(f"a/b@{digest('report-d')}  attached to {digest('d')[7:19]}, which no longer exists")


def test_how_images_are_described() -> None:
    items = [item for item in prune.unneeded(contents(), 1, NOW) if item.kind == "image"]
    assert [item.text for item in items] == [
        "cell-a  staged 20261102, 20261101, released",
        "cell-b  staged 20261102, released",
    ]
    unlisted = contents(releases=[], documents=repository({}, {}))
    assert prune.unneeded(unlisted, 1, NOW)[0].text == "c  in no release"
    assert prune.summary(prune.unneeded(contents(), 1, NOW)) == "2 documents, 2 images, 4 attachments"


# ---- reading and deleting


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """All repositories in one."""
    memory = Memory()
    monkeypatch.setattr(artifacts, "CONFIRM_S", 0)
    monkeypatch.setattr(staging, "Registry", lambda *_, **__: memory)
    monkeypatch.setattr(memory, "list_tags", lambda: [name for name in memory.tags if ":" not in name])
    return memory


def read(*public: Memory) -> Contents:
    view = View(Console(quiet=True))
    return prune.read(Place("registry.example.test/staging", "", Host()), public, (), 1, view)


def test_a_public_repository_that_is_a_staged_one_is_not_read_again(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Memory()
    other.name = "registry.example.test/team/pt"
    monkeypatch.setattr(other, "list_tags", list)
    whole = read(memory, other)
    assert {each.registry.name for each in whole.staged} == {memory.name}
    assert [each.registry.name for each in whole.public] == [other.name]


def test_a_report_that_cannot_be_read_makes_an_image_count_as_new(memory: Memory) -> None:
    memory.put_manifest(plan_tag(digest("plan")), b"image", MANIFEST_TYPE)
    memory.tags[SUBJECT.digest] = SUBJECT.digest
    for content in (b"", b"{}", reports.Report(image=SUBJECT.digest, evidence=OLD).model_dump_json().encode()):
        [staged] = read(memory).staged
        assert staged.images == {SUBJECT.digest: None}
        artifacts.attach(memory, SUBJECT, reports.TYPE, {reports.TYPE: content})
    [staged] = read(memory).staged
    assert staged.images == {SUBJECT.digest: OLD}
    assert len(staged.attached[SUBJECT.digest]) == 3 + 1, "the reports and their list"


@pytest.mark.parametrize(
    ("tag", "name"),
    [("release-20261122", "release 20261122"), ("images-20261122-0123456789ab", "images-20261122-0123456789ab")],
)
def test_a_release_that_cannot_be_read_stops_everything(memory: Memory, tag: str, name: str) -> None:
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

    registry = Memory()
    monkeypatch.setattr(registry, "delete_manifest", delete)
    console = Console(record=True, width=100)
    items = [Item(registry=registry, digest=digest(name), kind="image", text="") for name in "abc"]
    with pytest.raises(RegistryError, match="no"):
        prune.delete(items, View(console))
    assert "1 of 3 manifests deleted" in console.export_text()
