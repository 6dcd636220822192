"""Documents attached to images: with the referrers API, and in an index under a tag."""

from __future__ import annotations

import json
from typing import Any

import pytest

from builder.common.errors import RegistryError, VerifyError
from builder.common.files import digest_of_bytes
from builder.layers import oci
from builder.layers.oci import INDEX_TYPE, MANIFEST_TYPE, Descriptor, Manifest
from builder.registry import artifacts
from builder.registry.client import REFUSALS
from builder.registry.failures import RejectedError, TransientError
from tests.fakes import registry as registry_fakes
from tests.fakes.registry import MemoryRegistry

SUBJECT = Descriptor(media_type=MANIFEST_TYPE, digest=digest_of_bytes(b"image"), size=5)
TAG = SUBJECT.digest.replace(":", "-")
TYPE = "application/x-test"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> MemoryRegistry:
    return MemoryRegistry()


def document(text: str) -> Manifest:
    return artifacts.artifact_manifest(TYPE, {TYPE: text.encode()}, {"note": text}, SUBJECT)


def attach(registry: MemoryRegistry, text: str) -> str:
    registry_fakes.attach(registry, SUBJECT, TYPE, {TYPE: text.encode()}, {"note": text})
    return document(text).digest


def test_without_the_api_an_index_lists_what_is_attached(registry: MemoryRegistry) -> None:
    first, second = attach(registry, "first"), attach(registry, "second")
    assert [*artifacts.attached(registry, SUBJECT.digest, TYPE)] == [first, second]
    assert [*artifacts.attached(registry, SUBJECT.digest, "application/x-other")] == []
    assert registry.listed(TAG)[0] == {
        "mediaType": MANIFEST_TYPE,
        "digest": first,
        "size": len(document("first").content),
        "artifactType": TYPE,
        "annotations": {"note": "first"},
    }
    assert artifacts.read_artifact(registry, second, TYPE, SUBJECT.digest) == {TYPE: b"second"}


def image_at_its_fallback_tag(registry: MemoryRegistry) -> Descriptor:
    """An index of images, which the registry also returns for the fallback tag, as GitLab does."""
    digest = registry.add_index(amd64=registry.add_image({}))
    registry.tags[digest.replace(":", "-")] = digest
    return Descriptor(media_type=INDEX_TYPE, digest=digest, size=1)


def test_the_image_itself_is_no_list_of_attachments(registry: MemoryRegistry) -> None:
    """The error was "invalid index", with the hint to delete it, which would have deleted the image."""
    subject = image_at_its_fallback_tag(registry)
    assert [*artifacts.attached(registry, subject.digest)] == []
    registry_fakes.attach(registry, subject, TYPE, {TYPE: b"x"})
    assert len(artifacts.attached(registry, subject.digest, TYPE)) == 1
    assert subject.digest in registry.contents


def test_the_second_of_two_lists_may_have_the_image_at_its_tag(registry: MemoryRegistry) -> None:
    subject = image_at_its_fallback_tag(registry)
    entry = {**subject.as_data(), "annotations": {artifacts.SIGNATURE: "x"}}
    added = json.loads(oci.artifact(TYPE, [])) | {"layers": [entry]}
    tag = subject.digest.replace(":", "-")
    artifacts.extend_lists(registry, subject.digest, {f"{tag}.att": added, tag: added})
    for name in (f"{tag}.att", tag):
        assert json.loads(registry.contents[registry.tags[name]])["layers"] == [entry]


def test_a_registry_that_keeps_no_list_of_attachments_is_named(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = image_at_its_fallback_tag(registry)
    monkeypatch.setattr(registry, "put_manifest_once", lambda *_: None)
    with pytest.raises(RegistryError) as caught:
        registry_fakes.attach(registry, subject, TYPE, {TYPE: b"x"})
    assert "elete" not in caught.value.hint


def test_a_manifest_that_is_no_list_may_be_an_image(registry: MemoryRegistry) -> None:
    """The hint was to delete it."""
    registry.tags[TAG] = registry.add_image({})
    with pytest.raises(VerifyError, match=f"list registry.example.test/a/b:{TAG}") as caught:
        artifacts.attached(registry, SUBJECT.digest)
    assert caught.value.hint.startswith("Look for other tags of this manifest before you delete it")


def test_attaching_it_again_writes_nothing(registry: MemoryRegistry) -> None:
    attach(registry, "first")
    registry.calls.clear()
    attach(registry, "first")
    assert registry.calls == []
    assert len(registry.listed(TAG)) == 1


def test_with_the_api_there_is_no_index(registry: MemoryRegistry) -> None:
    entry = {"mediaType": MANIFEST_TYPE, "digest": document("first").digest, "size": 1, "artifactType": TYPE}
    pages = [b'{"manifests": []}', json.dumps({"manifests": [entry]}).encode()]
    registry.api, registry.on_put = pages[:1], lambda _: setattr(registry, "api", pages)
    artifact = attach(registry, "first")
    assert TAG not in registry.tags
    assert [*artifacts.attached(registry, SUBJECT.digest, TYPE)] == [artifact]


def test_an_api_that_lists_nothing_does_not_hide_the_index(registry: MemoryRegistry) -> None:
    """There were "no valid test results"."""
    registry.api = [b'{"manifests": []}']
    artifact = attach(registry, "first")
    assert [*artifacts.attached(registry, SUBJECT.digest, TYPE)] == [artifact]


@pytest.mark.parametrize("status", [400, 405])
def test_a_registry_without_oci_1_1_gets_the_subject_as_an_annotation(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    original, source = registry.put_manifest, MemoryRegistry()
    copied = attach(source, "second")

    def put(reference: str, content: bytes, media_type: str) -> str:
        if "subject" in json.loads(content):
            raise RejectedError("no", status=status)
        return original(reference, content, media_type)

    monkeypatch.setattr(registry, "put_manifest", put)
    with artifacts.attaching(registry, SUBJECT) as attachments:
        attachments.add(TYPE, {TYPE: b"first"}, {"note": "first"})
        attachments.copy(source, copied)
    digests = [*artifacts.attached(registry, SUBJECT.digest, TYPE)]
    documents = [artifacts.read_artifact(registry, each, TYPE, SUBJECT.digest) for each in digests]
    assert documents == [{TYPE: b"first"}, {TYPE: b"second"}]
    with pytest.raises(VerifyError, match=f"is attached to {SUBJECT.digest}"):
        artifacts.read_artifact(registry, digests[0], TYPE, digest_of_bytes(b"another"))


@pytest.mark.parametrize("listed", [{}, {"artifactType": oci.EMPTY_TYPE}])
def test_a_type_that_is_not_listed_is_read(registry: MemoryRegistry, listed: dict[str, str]) -> None:
    first, second = attach(registry, "first"), attach(registry, "second")
    foreign, damaged = digest_of_bytes(b"{}"), digest_of_bytes(b"damaged")
    registry.contents[foreign] = b"{}"
    original = registry.manifest

    def manifest(reference: str) -> Manifest | None:
        if reference == damaged:
            raise RejectedError("damaged")
        return original(reference)

    registry.manifest = manifest  # type: ignore[method-assign]
    others = [foreign, damaged]
    entries = [{"mediaType": MANIFEST_TYPE, "digest": each, "size": 1} | listed for each in (*others, first, second)]
    registry.api = [json.dumps({"manifests": entries}).encode()]
    assert [*artifacts.attached(registry, SUBJECT.digest, TYPE)] == [first, second]
    assert [*artifacts.attached(registry, SUBJECT.digest, TYPE, {"note": "second"})] == [second]
    assert [*artifacts.attached(registry, SUBJECT.digest, "application/x-other")] == []
    assert [*artifacts.attached(registry, SUBJECT.digest)] == [*others, first, second]


@pytest.mark.parametrize("listed", [{}, {"annotations": {"note": "second"}}])
def test_annotations_are_listed_or_read(registry: MemoryRegistry, listed: dict[str, Any]) -> None:
    attach(registry, "first")
    second = attach(registry, "second")
    entry = {"mediaType": MANIFEST_TYPE, "digest": second, "size": 1, "artifactType": TYPE} | listed
    del registry.tags[TAG]
    registry.api = [json.dumps({"manifests": [entry]}).encode()]
    assert [*artifacts.attached(registry, SUBJECT.digest, TYPE, {"note": "second"})] == [second]
    assert [*artifacts.attached(registry, SUBJECT.digest, TYPE, {"note": "first"})] == []


def test_an_entry_that_another_writer_removed_is_added_again(registry: MemoryRegistry) -> None:
    """The other writer read the index before, and replaces it after."""
    other = attach(registry, "other")
    stale = registry.contents[registry.tags[TAG]]
    original = registry.put_manifest_once
    crossed: list[str] = []

    def put(reference: str, content: bytes, media_type: str) -> None:
        original(reference, content, media_type)
        if reference == TAG and not crossed:
            crossed.append(reference)
            original(TAG, stale, media_type)

    registry.put_manifest_once = put  # type: ignore[method-assign]
    ours = attach(registry, "ours")
    assert [entry["digest"] for entry in registry.listed(TAG)] == [other, ours]
    assert crossed


def test_an_index_is_read_again_after_a_failure(registry: MemoryRegistry) -> None:
    """Another attempt with the old index would remove what was added meanwhile."""
    first, added = attach(registry, "first"), document("added").digest

    def fail() -> None:
        attach(registry, "added")
        raise TransientError("no response")

    registry.before_put = [fail]
    ours = attach(registry, "ours")
    assert [entry["digest"] for entry in registry.listed(TAG)] == [first, added, ours]


def refuse() -> None:
    """What docker-registry answers while another client writes a listed manifest again."""
    raise RejectedError("an unknown manifest is listed", status=400, code="MANIFEST_BLOB_UNKNOWN")


def test_an_index_that_is_refused_for_a_moment_is_written_again(registry: MemoryRegistry) -> None:
    first = attach(registry, "first")
    registry.before_put = [refuse] * (REFUSALS - 1)
    ours = attach(registry, "ours")
    assert [entry["digest"] for entry in registry.listed(TAG)] == [first, ours]


def test_an_index_that_stays_refused_is_an_error(registry: MemoryRegistry) -> None:
    registry.before_put = [refuse] * REFUSALS
    with pytest.raises(RejectedError):
        attach(registry, "ours")


def test_writers_that_never_stop(registry: MemoryRegistry) -> None:
    def fail() -> None:
        raise TransientError("no response")

    registry.before_put = [fail] * 1000
    with pytest.raises(RegistryError):
        attach(registry, "ours")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"artifactType": "application/x-other"}, "does not have the type application/x-test"),
        ({"subject": {**SUBJECT.as_data(), "digest": digest_of_bytes(b"another")}}, "expected sha256"),
        ({"subject": None}, "expected sha256"),
        ({"layers": "x"}, "invalid artifact"),
        ({"layers": [{"mediaType": "x", "digest": "../../etc", "size": 1}]}, "invalid artifact"),
    ],
    ids=str,
)
def test_an_artifact_of_something_else(registry: MemoryRegistry, change: dict[str, Any], message: str) -> None:
    content = json.dumps({**json.loads(document("x").content), **change}).encode()
    registry.put_manifest("tag", content, MANIFEST_TYPE)
    with pytest.raises(VerifyError, match=message):
        artifacts.read_artifact(registry, "tag", TYPE, SUBJECT.digest)


def test_missing_artifacts(registry: MemoryRegistry) -> None:
    assert artifacts.read_artifact(registry, "tag", TYPE) is None
    artifact = attach(registry, "first")
    del registry.contents[digest_of_bytes(b"first")]
    with pytest.raises(RejectedError):
        artifacts.read_artifact(registry, artifact, TYPE, SUBJECT.digest)


def test_a_copy_has_the_same_digest(registry: MemoryRegistry) -> None:
    artifact = attach(registry, "first")
    target = MemoryRegistry()
    with artifacts.attaching(target, SUBJECT) as attachments:
        attachments.copy(registry, artifact)
        with pytest.raises(RegistryError):
            attachments.copy(registry, digest_of_bytes(b"unknown"))
    assert [*artifacts.attached(target, SUBJECT.digest, TYPE)] == [artifact]
    assert artifacts.read_artifact(target, artifact, TYPE, SUBJECT.digest) == {TYPE: b"first"}


def test_several_are_listed_in_one_change(registry: MemoryRegistry) -> None:
    """Each change of the list needs a wait. Those that are listed already stay where they are."""
    attach(registry, "second")
    registry.calls.clear()
    with artifacts.attaching(registry, SUBJECT) as attachments:
        for text in ("first", "second", "third"):
            attachments.add(TYPE, {TYPE: text.encode()}, {"note": text})
    assert registry.calls.count(f"put {TAG}") == 1
    expected = [document(text).digest for text in ("second", "first", "third")]
    assert [entry["digest"] for entry in registry.listed(TAG)] == expected


def test_after_an_error_nothing_is_listed(registry: MemoryRegistry) -> None:
    def attach_two() -> None:
        with artifacts.attaching(registry, SUBJECT) as attachments:
            attachments.add(TYPE, {TYPE: b"first"})
            attachments.copy(MemoryRegistry(), digest_of_bytes(b"unknown"))

    with pytest.raises(RegistryError):
        attach_two()
    assert TAG not in registry.tags
