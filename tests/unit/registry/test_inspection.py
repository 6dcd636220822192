"""What a registry has: releases, tags that the matrix does not explain, damage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from builder.common.digest import is_digest, of_bytes
from builder.common.errors import RegistryError
from builder.index.host import Host
from builder.layers.blobs import MANIFEST_TYPE
from builder.matrix.project import Project
from builder.registry import artifacts, inspection
from builder.registry.client import Manifest
from builder.registry.inspection import Check
from builder.registry.staging import Place
from tests.unit.registry.test_artifacts import SUBJECT, TAG, Memory, attach, document


class Served(Memory):
    """Answers questions about blobs by their bytes, and keeps the types of manifests."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, str] = {}

    def put_manifest_once(self, reference: str, content: bytes, media_type: str) -> None:
        super().put_manifest_once(reference, content, media_type)
        self.types[of_bytes(content)] = media_type

    def manifest(self, reference: str) -> Manifest | None:
        stored = super().manifest(reference)
        return replace(stored, media_type=self.types[stored.digest]) if stored else None

    def has_blob(self, digest: str) -> bool:
        return digest in self.contents

    def blob_matches(self, digest: str, size: int, read: Callable[[int], None]) -> bool:
        content = self.contents.get(digest, b"")
        read(len(content))
        return of_bytes(content) == digest and len(content) == size

    def list_tags(self) -> list[str]:
        return [tag for tag in self.tags if not is_digest(tag)]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Served:
    """An image under two tags, with a document attached."""
    monkeypatch.setattr(artifacts, "CONFIRM_S", 0)
    served = Served()
    blobs = [b"config", b"layer"]
    served.contents |= {of_bytes(blob): blob for blob in blobs}
    listed = [{"digest": of_bytes(blob), "size": len(blob)} for blob in blobs]
    manifest = json.dumps({"config": listed[0], "layers": listed[1:]}).encode()
    for tag in ("1.0", "1.0-20261122"):
        served.put_manifest(tag, manifest, MANIFEST_TYPE)
    attach(served, "report")
    return served


def faults(registry: Served, *, fast: bool = False) -> list[str]:
    return list(Check(registry=registry, fast=fast).faults())


def test_a_registry_without_faults(registry: Served) -> None:
    read: list[int] = []
    check = Check(registry=registry, read=read.append)
    assert list(check.faults()) == []
    assert check.blobs == {of_bytes(blob) for blob in (b"config", b"layer", b"{}", b"report")}
    assert sum(read) == len(b"configlayer{}report"), "each blob once"


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("blob", [b"layer", b"report"])
def test_a_missing_blob(registry: Served, blob: bytes, fast: bool) -> None:
    del registry.contents[of_bytes(blob)]
    [fault] = faults(registry, fast=fast)
    assert f"blob {of_bytes(blob)} is {'missing' if fast else 'damaged'}" in fault


def test_a_damaged_blob_that_is_served_without_an_error(registry: Served) -> None:
    registry.contents[of_bytes(b"layer")] = b"lover"
    [fault] = faults(registry)
    assert fault == f"{registry.name}:1.0: blob {of_bytes(b'layer')} is damaged"
    assert faults(registry, fast=True) == []


def test_an_attached_document_without_its_manifest(registry: Served) -> None:
    [artifact] = artifacts.attached(registry, SUBJECT.digest, "application/x-test")
    del registry.contents[artifact]
    [fault] = faults(registry)
    assert fault.startswith(f"{registry.name}:{TAG}, {artifact}: the manifest is missing")


def test_what_the_api_of_a_registry_lists_is_checked(registry: Served) -> None:
    """It is under no tag."""
    artifact = document("scan")
    artifacts.put(registry, artifact, [b"scan"])
    entry = {"mediaType": MANIFEST_TYPE, "digest": artifact.digest, "size": len(artifact.content)}
    registry.api = [json.dumps({"manifests": [entry]}).encode()]
    assert faults(registry) == []
    del registry.contents[of_bytes(b"scan")]
    [fault] = faults(registry)
    assert fault.endswith(f"attached {artifact.digest}: blob {of_bytes(b'scan')} is damaged")


def test_an_image_without_a_tag_that_a_release_lists(registry: Served) -> None:
    digest = registry.tags.pop("1.0")
    assert digest == registry.tags.pop("1.0-20261122")
    del registry.contents[of_bytes(b"layer")]
    assert faults(registry) == []
    assert list(Check(registry=registry, also=[digest]).faults()) == [
        f"{registry.name}@{digest}: blob {of_bytes(b'layer')} is damaged"
    ]


def test_a_manifest_that_cannot_be_read(registry: Served) -> None:
    registry.put_manifest("bad", b"[]", MANIFEST_TYPE)
    [fault] = faults(registry)
    assert fault.startswith(f"{registry.name}:bad: invalid manifest")


def test_tags_that_the_matrix_does_not_have(registry: Served) -> None:
    registry.tags |= dict.fromkeys(["1.0-20261122.3", "0.9", "0.9-20250101", "1.0-jupyter"], "x")
    assert inspection.unknown_tags(registry.list_tags(), {"1.0", "1.1"}) == ["0.9", "0.9-20250101", "1.0-jupyter"]


def test_the_repositories_of_a_project(tiny: Project) -> None:
    place = Place("other.example.test/staging", "", Host())
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
