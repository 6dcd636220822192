"""`builder registry`, with a registry in memory."""

from __future__ import annotations

import pytest

from builder.index.host import Host
from builder.registry import artifacts, staging
from builder.registry.staging import Place, Released
from tests.unit.cli.conftest import Run
from tests.unit.registry.test_artifacts import Memory
from tests.unit.registry.test_staging import IMAGE

STAGING = "registry.example.test/staging"


def test_staged_releases_are_listed_with_the_checks_that_their_publication_skipped(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    monkeypatch.setattr(memory, "list_tags", lambda: list(memory.tags))
    monkeypatch.setattr(artifacts, "CONFIRM_S", 0)
    monkeypatch.setattr(staging, "Registry", lambda *_, **__: memory)
    place = Place(STAGING, "", Host())
    place.write("20261122", "abc", [IMAGE])
    place.write("20261122", "", [IMAGE, IMAGE])
    place.record(Released(stamp="20261122", revision="abc", images=(), allowed=("unsigned",)))
    result = run("registry", "ls", "--staging", STAGING)
    assert [line.split() for line in result.out.splitlines()[1:]] == [
        ["20261122.1", "2", "no", "-"],
        ["20261122", "1", "yes,", "unsigned", "allowed", "abc"],
    ]
