"""`builder prune`, with a registry in memory."""

from __future__ import annotations

import json

import pytest

from builder.common.files import digest_of_bytes
from builder.release import prune
from builder.release.prune import Item
from tests.fakes.registry import MemoryRegistry
from tests.unit.cli.conftest import Run

DIGEST = digest_of_bytes(b"image")


def test_what_would_be_deleted_is_printed_as_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    item = Item(repository=MemoryRegistry(), digest=DIGEST, kind="image", text="plan-1")
    monkeypatch.setattr(prune, "read_registries", lambda *_: None)
    monkeypatch.setattr(prune, "unneeded", lambda *_: [item])
    monkeypatch.setattr(prune, "delete", lambda items, _: len(items))
    data = {"repository": item.repository.name, "digest": DIGEST, "kind": "image", "text": "plan-1"}
    for options, deleted in ([], 0), (["--delete"], 1):
        result = run("prune", "--format", "json", *options)
        assert json.loads(result.out) == {"items": [data], "deleted": deleted}
