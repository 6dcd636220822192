"""Which images are released as planned."""

from __future__ import annotations

import pytest

from builder.index.host import Host
from builder.layers.blobs import MANIFEST_TYPE
from builder.matrix.project import Project
from builder.plan import plan
from builder.registry import status
from tests.unit.registry.test_artifacts import Memory

EMBER, BOARD = "em-1.10-cu1210-py311", "qz-0.5-cu129-py311-board"


def test_images_whose_tag_is_of_another_plan(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Memory()
    monkeypatch.setattr(status, "Registry", lambda *_, **__: registry)
    images = list(plan.make_locked(tiny, tiny.select([EMBER, BOARD])).images)
    assert status.unreleased(images, Host()) == images
    by_cell = {image.id: image for image in images}
    tags = {cell: image.references[0].rpartition(":")[2] for cell, image in by_cell.items()}
    for cell, digest in ((EMBER, by_cell[EMBER].digest), (BOARD, "sha256:other")):
        labels = {"config": {"Labels": {"gpu-images.plan": digest}}, "rootfs": {"diff_ids": []}}
        registry.tags[tags[cell]] = registry.add_image(labels)
    assert status.unreleased(images, Host()) == [by_cell[BOARD]]
    registry.put_manifest(tags[EMBER], b"[]", MANIFEST_TYPE)
    assert status.unreleased(images, Host()) == images
