"""The commands about the store, this machine and registries: gc, verify, doctor, prune, catalog."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builder.build import doctor
from builder.common.files import digest_of_bytes, short_digest
from builder.layers.oci import CONFIG_TYPE
from builder.matrix import tags
from builder.matrix.project import Project
from builder.release import prune, staging, status
from builder.release.attestations import Finding, State
from builder.release.image_sources import ImageSource
from builder.release.prune import Item
from tests.fakes.registry import MemoryRegistry
from tests.unit.cli.conftest import CELL, UNLOCKED, Run, store_of


def test_gc_deletes_unused_blobs_and_images_by_name_or_pattern(run: Run, tiny: Project) -> None:
    """What is unused, and which names match: tests/unit/layers."""
    store = store_of(tiny, "example/image:1", "example/image:1.untested", "example/other:1", "example/kept:1")
    stray = store.put(b"stray", CONFIG_TYPE)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    forget = ("--forget", "*.untested", "--forget", "example/[io]*:1")
    preview = run("gc", "--dry-run", *forget)
    assert preview.code == 0
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == before
    assert "would be removed: example/image:1.untested\n" in preview.err
    assert re.search(r"would be freed: [0-9]+ B \(7 unused blobs, 0 leftovers\)", preview.err)
    head, kept = preview.out.splitlines()
    assert head.split() == ["IMAGE", "MANIFEST", "SIZE", "UNIQUE"]
    manifest = store.images()["example/kept:1"].digest
    assert kept.split()[:2] == ["example/kept:1", short_digest(manifest)]
    result = run("gc", *forget)
    assert result.code == 0
    assert "removed: example/image:1.untested\nremoved: example/image:1\nremoved: example/other:1\n" in result.err
    assert list(store.images()) == ["example/kept:1"]
    assert not store.path(stray.digest).exists()


# ---- verify


@pytest.mark.parametrize(
    ("states", "code", "message"),
    [
        (["signed", "same", "as planned"], 0, "image:1: verified: 1 signed, 1 same, 1 as planned\n"),
        (["as planned"], 0, "image:1: verified: 1 as planned; no signature was checked\n"),
        (["signed", "different", "as planned"], 15, "example/image:1: 1 of 3 parts are not as expected"),
        ([], 15, "example/image:1: neither a signer nor a plan to check it with"),
    ],
    ids=str,
)
def test_every_part_is_shown_and_counts_for_the_exit_code(
    run: Run, tiny: Project, monkeypatch: pytest.MonkeyPatch, states: list[State], code: int, message: str
) -> None:
    findings = [Finding(part=f"part-{state}", digest="sha256:0", state=state, detail="why") for state in states]
    monkeypatch.setattr("builder.steps.verify.verify_image", lambda *_, **__: iter(findings))
    store_of(tiny, "example/image:1")
    result = run("verify", "example/image:1")
    assert result.code == code
    assert message in result.err
    assert [line.split() for line in result.out.splitlines()] == [
        [*state.split(), "0", *f"part-{state}".split(), "(why)"] for state in states
    ]


def test_a_cell_is_its_tested_image(run: Run, tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests: list[bytes] = []

    def verify_image(_: object, source: ImageSource, *__: object, **___: Any) -> Iterator[Finding]:
        manifests.append(source.manifest)
        return iter([Finding(part="x", digest="sha256:0", state="as planned")])

    monkeypatch.setattr("builder.steps.verify.verify_image", verify_image)
    full = str(tags.compute(tiny.matrix, tiny.cells)[CELL][0])
    for name in (f"{full}.untested", full):
        store = store_of(tiny, name)
        assert run("verify", CELL).code == 0
        assert digest_of_bytes(manifests[-1]) == store.images()[name].digest


# ---- doctor


@pytest.mark.parametrize(
    ("name", "state", "code"),
    [("thing", "ok", 0), ("thing", "note", 0), ("thing", "missing", 6), ("index", "missing", 13)],
)
def test_doctor_fails_only_if_something_is_missing(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, state: doctor.State, code: int
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: iter([(name, state, "[detail]")]))
    result = run("doctor")
    assert result.code == code
    assert result.out.split() == [state, name, "[detail]"]
    assert (f"missing: {name}" in result.err) is bool(code)


def test_doctor_needs_no_checkout(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "examine", lambda run: iter([("checkout", "ok", str(run.checkout))]))
    monkeypatch.chdir(tmp_path)
    assert run("doctor").out.split() == ["ok", "checkout", "None"]


def test_what_is_not_needed_in_staging_is_printed_as_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    item = Item(repository=MemoryRegistry(), digest=f"sha256:{'1' * 64}", kind="image", text="plan-1")
    monkeypatch.setattr(prune, "read_registries", lambda *_: None)
    monkeypatch.setattr(prune, "unneeded", lambda *_: [item])
    monkeypatch.setattr(prune, "delete", lambda items, _: len(items))
    data = {"repository": item.repository.name, "digest": item.digest, "kind": "image", "text": "plan-1"}
    for options, deleted in ([], 0), (["--delete"], 1):
        result = run("prune", "--format", "json", *options)
        assert json.loads(result.out) == {"items": [data], "deleted": deleted}


def test_the_catalog_is_printed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "Repository", lambda *_, **__: MemoryRegistry())
    monkeypatch.setattr(staging, "Repository", lambda *_, **__: MemoryRegistry())
    result = run("catalog", CELL, UNLOCKED)
    assert result.out.startswith("# Images\n\n1 image on 2026-11-22.")
    assert result.err == f"left out, not locked: {UNLOCKED}   (builder lock {UNLOCKED})\n"
