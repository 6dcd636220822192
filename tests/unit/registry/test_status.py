"""Which images are released as planned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder.common.errors import VerifyError
from builder.index.host import Host
from builder.layers.blobs import MANIFEST_TYPE
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan import plan
from builder.registry import staging, status
from builder.registry.status import NONE, StatusReader
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


def test_staged_images_of_this_plan_and_of_another(
    tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def image_of(*_: object) -> None:
        raise VerifyError(f"{EMBER}: the manifest is missing\nDetails.")

    monkeypatch.setattr(staging, "image_of", image_of)
    planned = plan.make_locked(tiny, tiny.select([EMBER, BOARD]))
    plans = {image.id: image.digest for image in planned.images} | {BOARD: "sha256:other"}
    images = [SimpleNamespace(cell=cell, plan=digest, digest="sha256:x") for cell, digest in plans.items()]
    place: Any = SimpleNamespace(
        stamps=lambda: ["20261123"],
        read=lambda stamp: SimpleNamespace(stamp=stamp, images=images),
        released_stamps=list,
    )
    store = Store(tmp_path / "store")
    store.prepare()
    reader = StatusReader(project=tiny, store=store, host=Host(), place=place, here=True)  # no tags are looked up
    rows = {row.cell: (row.staged, row.tested) for row in reader.read(planned)}
    assert rows == {EMBER: ("20261123", "the manifest is missing"), BOARD: ("20261123, another plan", NONE)}
