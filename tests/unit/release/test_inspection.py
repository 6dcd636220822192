"""What a registry has: releases, tags that the matrix does not explain, damage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from threading import Barrier
from typing import Any
from unittest.mock import Mock

import pytest

from builder.common.errors import RegistryError
from builder.common.files import digest_of_bytes
from builder.host import Host
from builder.layers import oci
from builder.layers.blobs import MANIFEST_TYPE, Descriptor
from builder.matrix.project import Project
from builder.registry import artifacts
from builder.release import inspection
from builder.release.inspection import RepositoryCheck
from builder.release.staging import ReleasedImage, ReleaseRecord, StagingArea
from tests.fakes import registry as registry_fakes
from tests.fakes.registry import MemoryRegistry
from tests.unit.registry.test_artifacts import SUBJECT, TAG, attach, document
from tests.unit.release.test_staging import IMAGE, area


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> MemoryRegistry:
    """An image under two tags, with a document attached."""
    served = MemoryRegistry()
    blobs = [b"config", b"layer"]
    served.contents |= {digest_of_bytes(blob): blob for blob in blobs}
    listed = [{"digest": digest_of_bytes(blob), "size": len(blob)} for blob in blobs]
    manifest = json.dumps({"config": listed[0], "layers": listed[1:]}).encode()
    for tag in ("1.0", "1.0-20261122"):
        served.put_manifest(tag, manifest, MANIFEST_TYPE)
    attach(served, "report")
    return served


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> MemoryRegistry:
    """The repository of the documents of releases."""
    memory = MemoryRegistry()
    monkeypatch.setattr(memory, "list_tags", lambda: list(memory.tags))
    return memory


def faults(registry: MemoryRegistry, *, fast: bool = False) -> list[str]:
    return list(RepositoryCheck(repository=registry, fast=fast).faults())


def test_a_registry_without_faults(registry: MemoryRegistry) -> None:
    read: list[int] = []
    check = RepositoryCheck(repository=registry, read=read.append)
    assert list(check.faults()) == []
    assert check.blobs == {digest_of_bytes(blob) for blob in (b"config", b"layer", b"{}", b"report")}
    assert sum(read) == len(b"configlayer{}report"), "each blob once"


def test_an_image_with_many_tags_is_read_once(registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of 2,000 tags read each image, and looked for what is attached to it, once for each of its tags."""
    registry.tags |= {f"1.0-2026112{number}": registry.tags["1.0"] for number in range(3, 10)}
    for method in ("manifest", "referrers"):
        monkeypatch.setattr(registry, method, Mock(wraps=getattr(registry, method)))
    assert faults(registry) == []
    for method in ("manifest", "referrers"):
        read = [call.args[0] for call in getattr(registry, method).call_args_list]
        assert sorted(read) == sorted(set(read))
        assert registry.tags["1.0"] in read


def _meet(barrier: Barrier, calls: Iterator[int], method: Callable[..., Any], *arguments: Any) -> Any:
    if next(calls) < barrier.parties:
        barrier.wait()
    return method(*arguments)


def test_manifests_and_blobs_are_read_several_at_a_time(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read waits for the second one to begin."""
    other = {"digest": digest_of_bytes(b"other"), "size": 5}
    registry.contents[digest_of_bytes(b"other")] = b"other"
    registry.put_manifest("2.0", json.dumps({"config": other, "layers": []}).encode(), MANIFEST_TYPE)
    for method in ("digest_of", "manifest", "blob_matches"):
        monkeypatch.setattr(
            registry, method, partial(_meet, Barrier(2, timeout=10), count(), getattr(registry, method))
        )
    assert faults(registry) == []


def test_what_an_index_names_and_what_is_attached_to_it_is_checked(registry: MemoryRegistry) -> None:
    image = registry.tags.pop("1.0")
    del registry.tags["1.0-20261122"]
    index = registry.add_index(amd64=image)
    registry.tags["1.0"] = index
    subject = Descriptor(media_type=oci.INDEX_TYPE, digest=index, size=len(registry.contents[index]))
    registry_fakes.attach(registry, subject, "application/x-test", {"text/plain": b"signature"})
    assert faults(registry) == []
    for blob in (b"layer", b"signature"):
        del registry.contents[digest_of_bytes(blob)]
    damaged = [fault.rpartition(": blob ")[2] for fault in faults(registry)]
    assert damaged == [f"{digest_of_bytes(blob)} is damaged" for blob in (b"layer", b"signature")]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("blob", [b"layer", b"report"])
def test_a_missing_blob(registry: MemoryRegistry, blob: bytes, fast: bool) -> None:
    del registry.contents[digest_of_bytes(blob)]
    [fault] = faults(registry, fast=fast)
    assert f"blob {digest_of_bytes(blob)} is {'missing' if fast else 'damaged'}" in fault


def test_a_damaged_blob_that_is_served_without_an_error(registry: MemoryRegistry) -> None:
    registry.contents[digest_of_bytes(b"layer")] = b"lover"
    [fault] = faults(registry)
    assert fault == f"{registry.name}:1.0: blob {digest_of_bytes(b'layer')} is damaged"
    assert faults(registry, fast=True) == []


def test_an_attached_document_without_its_manifest(registry: MemoryRegistry) -> None:
    [artifact] = artifacts.attached(registry, SUBJECT.digest, "application/x-test")
    del registry.contents[artifact]
    [fault] = faults(registry)
    assert fault.startswith(f"{registry.name}:{TAG}, {artifact}: the manifest is missing")


def test_what_the_api_of_a_registry_lists_is_checked(registry: MemoryRegistry) -> None:
    """It is under no tag."""
    artifact = document("scan")
    artifacts.put_artifact(registry, artifact, [b"scan"])
    entry = {"mediaType": MANIFEST_TYPE, "digest": artifact.digest, "size": len(artifact.content)}
    registry.api = [json.dumps({"manifests": [entry]}).encode()]
    assert faults(registry) == []
    del registry.contents[digest_of_bytes(b"scan")]
    [fault] = faults(registry)
    assert fault.endswith(f"attached {artifact.digest}: blob {digest_of_bytes(b'scan')} is damaged")


def test_an_image_without_a_tag_that_a_release_lists(registry: MemoryRegistry) -> None:
    digest = registry.tags.pop("1.0")
    assert digest == registry.tags.pop("1.0-20261122")
    del registry.contents[digest_of_bytes(b"layer")]
    assert faults(registry) == []
    assert list(RepositoryCheck(repository=registry, also=[digest]).faults()) == [
        f"{registry.name}@{digest}: blob {digest_of_bytes(b'layer')} is damaged"
    ]


def test_a_manifest_that_cannot_be_read(registry: MemoryRegistry) -> None:
    registry.put_manifest("bad", b"[]", MANIFEST_TYPE)
    [fault] = faults(registry)
    assert fault.startswith(f"{registry.name}:bad: invalid manifest")


def test_tags_that_the_matrix_does_not_have(registry: MemoryRegistry) -> None:
    """Only the full tag, here 1.0, gets a stamp."""
    registry.tags |= dict.fromkeys(["1.0-20261122.3", "1-20261122", "0.9", "0.9-20250101", "1.0-jupyter"], "x")
    differences = inspection.compare_tags(registry, {"1.0", "1", "1.1"}, {"1.0", "1.1"}, None)
    assert differences.unknown == ("0.9", "0.9-20250101", "1-20261122", "1.0-jupyter")
    assert differences.unreleased == ()
    assert differences.missing == ("1", "1.1")


def test_stamped_tags_that_no_release_set(registry: MemoryRegistry, documents: MemoryRegistry) -> None:
    """Whoever can push could give any image a tag that looks like a release."""
    digest = registry.tags["1.0"]
    registry.tags |= {"1.0-20261122.1": digest, "1.0-20261123": digest, "1.0-20261121": "sha256:" + "e" * 64}
    place = area(documents)
    for day in ("20261121", "20261122"):
        image = ReleasedImage(cell="c", digest=digest, references=(f"{registry.name}:1.0",), gpu="", signer="")
        place.record(ReleaseRecord(stamp=day, revision="", images=(image,)))
    differences = inspection.compare_tags(registry, {"1.0"}, {"1.0"}, inspection.recorded_tags(place))
    assert differences.unreleased == ("1.0-20261121", "1.0-20261123")
    assert differences.unknown == ()


def test_a_check_of_an_empty_place_fails(tiny: Project, registry: MemoryRegistry, documents: MemoryRegistry) -> None:
    """A misspelt name had no faults."""
    place = area(documents)
    with pytest.raises(RegistryError, match=r"^nothing is staged in registry\.example\.test/staging/releases$"):
        inspection.require_contents([registry], place)
    place.write(tiny, "20261122", "", [IMAGE])
    inspection.require_contents([registry], place)
    registry.tags.clear()
    inspection.require_contents([registry], place)  # nothing is released yet
    with pytest.raises(RegistryError, match=f"^nothing is published in {registry.name}$"):
        inspection.require_contents([registry], None)


def test_the_repositories_of_a_project(tiny: Project) -> None:
    place = StagingArea("other.example.test/staging", "", Host())
    names = [each.name for each in inspection.repositories(tiny, Host(), place, "")]
    assert "registry.example.test:5000/team/quartz-cuda" in names
    assert "other.example.test/staging/quartz-cuda" in names
    assert names[-1] == "other.example.test/staging/releases"
    assert len(names) == len(set(names))
    others = inspection.repositories(tiny, Host(), None, "another.example.test")
    assert {each.name.partition("/")[0] for each in others} == {"another.example.test"}
    path = tiny.root / "matrix.yaml"
    path.write_text(re.sub(r"(?m)^registry: .*", 'registry: ""', path.read_text("utf-8")), encoding="utf-8")
    with pytest.raises(RegistryError, match="names neither a registry nor staging"):
        inspection.repositories(Project(tiny.root), Host(), None, "")
