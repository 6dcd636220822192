"""The commands about the store and this machine: gc, verify, doctor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from builder.build import doctor
from builder.common.files import digest_of_bytes, short_digest
from builder.layers.blobs import CONFIG_TYPE
from builder.layers.store import Store
from builder.matrix import tags
from builder.matrix.project import Project
from builder.release.attestations import Finding, State
from builder.release.image_sources import ImageSource
from tests.unit.cli.conftest import CELL, Run, store_of


def test_gc_deletes_only_unused_blobs(run: Run, tiny: Project) -> None:
    store = store_of(tiny, "example/image:1")
    manifest = store.images()["example/image:1"].digest
    stray = store.put(b"stray", CONFIG_TYPE)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    preview = run("gc", "--dry-run")
    assert preview.code == 0
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == before
    assert preview.out.splitlines()[0].split() == ["IMAGE", "MANIFEST", "SIZE", "OWN"]
    assert preview.out.splitlines()[1].split()[:2] == ["example/image:1", short_digest(manifest)]
    assert "would be freed: 5 B (1 unused blob, 0 leftovers)" in preview.err
    assert store.path(stray.digest).exists()
    assert "\nfreed: 5 B (1 unused blob, 0 leftovers)" in run("gc").err
    assert not store.path(stray.digest).exists()
    assert store.read(manifest)


def test_images_are_removed_by_name_or_pattern(run: Run, tiny: Project) -> None:
    store = store_of(tiny, "example/image:1", "example/image:1.untested", "example/other:1", "example/kept:1")
    preview = run("gc", "--dry-run", "--forget", "*.untested")
    assert preview.code == 0
    assert "would be removed: example/image:1.untested\n" in preview.err
    names = [line.split()[0] for line in preview.out.splitlines()[1:]]
    assert names == ["example/image:1", "example/kept:1", "example/other:1"]
    assert len(store.images()) == 4
    result = run("gc", "--forget", "*.untested", "--forget", "example/[io]*:1")
    assert result.code == 0
    assert "removed: example/image:1.untested\nremoved: example/image:1\nremoved: example/other:1\n" in result.err
    assert list(store.images()) == ["example/kept:1"]


def test_no_image_is_removed_if_a_name_is_unknown(run: Run, tiny: Project) -> None:
    store = store_of(tiny, "example/image:1", "example/other:1")
    result = run("gc", "--forget", "example/image:1", "--forget", "example/none:*")
    assert result.code == 2
    assert "the store has no image 'example/none:*'" in result.err
    assert len(store.images()) == 2


def damage(store: Store, name: str) -> str:
    manifest = store.images()[name].digest
    store.path(manifest).write_bytes(b"{}")
    return manifest


def test_a_check_of_the_store_removes_damaged_blobs(run: Run, tiny: Project) -> None:
    store = store_of(tiny, "example/image:1", "example/kept:1")
    result = run("gc", "--check")
    assert result.code == 0
    assert re.search(r": 4 blobs, [0-9]+ B, all match their digests\n", result.err)
    manifest = damage(store, "example/image:1")
    refused = run("gc")
    assert refused.code == 12
    assert "nothing was freed, because images of the store are damaged\n  example/image:1: " in refused.err
    result = run("gc", "--check")
    assert result.code == 12
    assert f"{manifest} did not match its digest and was removed\n" in result.err
    assert "1 of 4 blobs damaged, 1 image incomplete" in result.err
    assert run("gc", "--forget", "example/image:1").code == 0
    assert run("gc", "--check").code == 0
    assert run("gc", "--check", "--dry-run").code == 2


# ---- verify


@pytest.fixture
def findings(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What `verify` finds in `example/image:1`; a test fills the list."""
    findings: list[Finding] = []
    monkeypatch.setattr("builder.steps.verify.verify_image", lambda *_, **__: iter(findings))
    store_of(tiny, "example/image:1")
    return findings


@pytest.mark.parametrize(
    ("states", "code", "message"),
    [
        (["signed", "same", "known"], 0, "verified: 1 signed, 1 same, 1 known"),
        (["signed", "different", "known"], 15, "1 of 3 parts are not as expected"),
        ([], 15, "neither a signer nor a plan to check it with"),
    ],
    ids=str,
)
def test_every_part_is_shown_and_counts_for_the_exit_code(
    run: Run, findings: list[Finding], states: list[State], code: int, message: str
) -> None:
    findings += [Finding(part=f"part-{state}", digest="sha256:0", state=state, detail="why") for state in states]
    result = run("verify", "example/image:1")
    assert result.code == code
    assert message in result.err
    for state in states:
        assert re.search(rf"^{state} +0  part-{state}  \(why\)$", result.out, re.MULTILINE)


@pytest.mark.parametrize(("state", "code"), [("known", 0), ("different", 15)])
def test_the_result_of_verify_is_printed_as_json(run: Run, findings: list[Finding], state: State, code: int) -> None:
    findings.append(Finding(part="x", digest="sha256:0", state=state, detail="why"))
    result = run("verify", "example/image:1", "--format", "json")
    assert result.code == code
    error = "example/image:1: 1 of 1 parts are not as expected" if code else None
    part = {"part": "x", "digest": "sha256:0", "state": state, "detail": "why"}
    assert json.loads(result.out) == {"image": "example/image:1", "parts": [part], "error": error}


@pytest.mark.usefixtures("findings")
def test_an_image_that_is_not_in_the_store_is_refused(run: Run) -> None:
    result = run("verify", "example/image:2")
    assert result.code == 2
    assert "has no image 'example/image:2'" in result.err
    assert "example/image:1" in result.err


def test_a_cell_is_its_tested_image(run: Run, tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests: list[bytes] = []

    def verify_image(_: object, source: ImageSource, *__: object, **___: Any) -> Iterator[Finding]:
        manifests.append(source.manifest)
        return iter([Finding(part="x", digest="sha256:0", state="known")])

    monkeypatch.setattr("builder.steps.verify.verify_image", verify_image)
    full = str(tags.compute(tiny.matrix, tiny.cells)[CELL][0])
    for name in (f"{full}.untested", full):
        store = store_of(tiny, name)
        assert run("verify", CELL).code == 0
        assert digest_of_bytes(manifests[-1]) == store.images()[name].digest


# ---- doctor


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("note", 0), ("missing", 6)])
def test_doctor_fails_only_if_something_is_missing(
    run: Run, monkeypatch: pytest.MonkeyPatch, state: doctor.State, code: int
) -> None:
    finding = doctor.MachineFinding(name="thing", state=state, detail="[detail]")
    monkeypatch.setattr(doctor, "examine", lambda *_: [finding])
    result = run("doctor")
    assert result.code == code
    assert result.out.split() == [state, "thing", "[detail]"]
    assert ("missing: thing" in result.err) is bool(code)
