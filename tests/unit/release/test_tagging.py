"""Tags: none moves back, none that another push changed is set, and the loser of a race fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from builder.common.errors import RegistryError, VerifyError
from builder.common.files import digest_of_bytes
from builder.layers.oci import Manifest
from builder.registry.client import Repository
from builder.registry.failures import RejectedError
from builder.release import tagging
from builder.release.tagging import TagChange
from tests.fakes.registry import MemoryRegistry
from tests.unit.registry.test_push import CONTENT, DIGEST, IMAGE, MANIFEST, OTHERS


def tag(registry: Repository, *names: str) -> list[TagChange]:
    changes: list[TagChange] = []
    tagging.tag_manifest(registry, CONTENT, changes, tagging.read_tags(registry, names))
    return changes


def test_tags_are_set_and_moved_in_order() -> None:
    registry = MemoryRegistry()
    registry.tags = {"a": OTHERS, "b": DIGEST}
    changes = tag(registry, "1.0.0-20261122", "a", "b", "c")
    assert registry.calls == ["put 1.0.0-20261122", "put a", "put c"]
    assert [change.state for change in changes] == ["set", "moved", "unchanged", "set"]
    assert str(changes[0]) == f"{registry.name}:1.0.0-20261122 is {DIGEST}"
    assert str(changes[1]) == f"{registry.name}:a is {DIGEST}, was {OTHERS}"
    assert set(registry.tags.values()) == {DIGEST}


@pytest.mark.parametrize("first", [None, OTHERS])
def test_a_tag_that_changed_since_the_push_began_is_left_alone(first: str | None) -> None:
    """Both of two pushes that crossed ended with 0; the registry had one's full tag and the other's aliases."""
    registry = MemoryRegistry()
    third = digest_of_bytes(b"third")
    registry.tags = {"x": third}
    changes: list[TagChange] = []
    with pytest.raises(RegistryError, match=f"tag x changed from {first or 'unset'} to {third}"):
        tagging.tag_manifest(registry, CONTENT, changes, {"x": first})
    assert (registry.calls, changes) == ([], [])


def test_a_tag_that_another_push_set_to_the_same_image_is_unchanged() -> None:
    registry = MemoryRegistry()
    registry.tags = {"x": DIGEST}
    changes: list[TagChange] = []
    tagging.tag_manifest(registry, CONTENT, changes, {"x": None})
    assert [change.state for change in changes] == ["unchanged"]


def test_all_tags_are_checked_again_at_the_end() -> None:
    registry = MemoryRegistry()
    changes = tag(registry, "a", "b", "c")
    tagging.confirm(registry, changes)
    registry.tags["a"] = OTHERS
    del registry.tags["c"]
    with pytest.raises(RegistryError) as caught:
        tagging.confirm(registry, changes)
    assert f"tag a changed from {DIGEST} to {OTHERS}; tag c changed from {DIGEST} to unset" in str(caught.value)
    assert "tag b" not in str(caught.value)
    assert "Find out who" in caught.value.hint


def test_a_manifest_with_another_digest_is_not_tagged() -> None:
    registry = MemoryRegistry()
    wrong = Manifest(digest=OTHERS, media_type=IMAGE, content=MANIFEST)
    with pytest.raises(VerifyError, match="to tag is not sha256:"):
        tagging.tag_manifest(registry, wrong, [], {"1.0": None})
    assert registry.calls == []


# ---- never back


EMPTY: dict[str, Any] = {"rootfs": {"diff_ids": []}}


def config(version: str, created: str) -> dict[str, Any]:
    labels = {"org.opencontainers.image.version": version, "org.opencontainers.image.created": created}
    return EMPTY | {"config": {"Labels": labels}}


NEW = config("2.9.1", "2026-11-20T00:00:00Z")["config"]["Labels"]


@pytest.mark.parametrize(
    ("version", "created", "way"),
    [
        ("2.9.1", "2026-11-20T00:00:00Z", ""),
        ("2.9.1", "2026-11-01T00:00:00Z", ""),
        ("2.9.0", "2026-11-20T00:00:00Z", ""),
        ("2.9.1", "2026-11-21T00:00:00Z", "from Debian packages of 2026-11-21 to those of 2026-11-20"),
        ("2.9.10", "2026-11-01T00:00:00Z", "from release 2.9.10 to 2.9.1"),
        ("2.9.0", "2026-11-21T00:00:00Z", "from Debian packages of 2026-11-21 to those of 2026-11-20"),
        ("latest", "2027", ""),
    ],
)
def test_a_tag_does_not_move_back(version: str, created: str, way: str) -> None:
    registry = MemoryRegistry()
    old = registry.add_image(config(version, created))
    assert tagging.backward(tagging.named_images(registry, old), {"amd64": NEW}) == way


def test_each_image_of_an_index_is_compared_with_that_for_its_architecture() -> None:
    registry = MemoryRegistry()
    old, newer = config("2.9.0", "2026-11-01T00:00:00Z"), config("2.9.10", "2026-11-01T00:00:00Z")
    amd64, arm64 = registry.add_image(old), registry.add_image(newer | {"architecture": "arm64"})
    index = registry.add_index(amd64=amd64, arm64=arm64)
    named = tagging.named_images(registry, index)
    assert named == {"amd64": old["config"]["Labels"], "arm64": newer["config"]["Labels"]}
    assert tagging.backward(named, {"amd64": NEW}) == ""
    assert tagging.backward(named, {"amd64": NEW, "arm64": NEW}) == "from release 2.9.10 to 2.9.1"
    nested = registry.add_index(amd64=amd64, arm64=registry.add_index(arm64=arm64))
    with pytest.raises(VerifyError):
        tagging.named_images(registry, nested)
    del registry.contents[arm64]
    with pytest.raises(VerifyError, match=f"the manifest {arm64} is missing"):
        tagging.named_images(registry, index)


@pytest.mark.parametrize("content", [EMPTY, EMPTY | {"config": {"Labels": None}}])
def test_an_image_without_an_age_does_not_keep_its_tag(content: object) -> None:
    registry = MemoryRegistry()
    assert tagging.backward(tagging.named_images(registry, registry.add_image(content)), {"amd64": NEW}) == ""


@pytest.mark.parametrize("content", [b"{}", b"[", b"[" * 100_000], ids=lambda content: str(content)[:20])
def test_an_image_with_an_invalid_configuration_cannot_be_read(content: bytes) -> None:
    registry = MemoryRegistry()
    with pytest.raises(VerifyError):
        tagging.named_images(registry, registry.add_image(content))


@pytest.mark.parametrize("config_digest", ["", "x", None, "sha256:" + "0" * 64])
def test_an_image_without_its_configuration_cannot_be_read(config_digest: str | None) -> None:
    """It was taken for an image of unknown age, which any other may replace."""
    registry = MemoryRegistry()
    manifest = json.dumps({"config": {"digest": config_digest, "size": 1}, "layers": []}).encode()
    registry.contents = {digest_of_bytes(manifest): manifest}
    with pytest.raises((VerifyError, RejectedError)):
        tagging.named_images(registry, digest_of_bytes(manifest))
