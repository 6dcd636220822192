"""Killed commands, several machines at once and forged results: nothing untested gets a tag.

Faults of the registry: tests/unit/registry. Tags that another release moves:
tests/unit/release.
"""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from builder.evidence import reports
from builder.evidence.signing import Signer
from builder.registry import artifacts
from builder.registry.client import Repository
from tests.fakes import registry as registry_fakes
from tests.integration.checkout import PLAIN, Checkout, Running, today
from tests.integration.registry import Fault, Proxy, Trouble
from tests.integration.releases.machines import (
    UNTESTED_GPU,
    elsewhere,
    release,
    stage,
    tags,
)


def list_only(staged: Repository, digest: str, documents: dict[str, bytes]) -> str:
    """Lists one report of an image, in place of the one that it has; returns its digest."""
    image = staged.manifest(digest)
    assert image
    registry_fakes.attach(staged, image.descriptor, reports.TYPE, documents)
    listed = staged.manifest(digest.replace(":", "-"))
    assert listed
    index = json.loads(listed.content)
    assert len(index["manifests"]) == 2, "the forged report is the same as before"
    index["manifests"] = index["manifests"][-1:]
    staged.put_manifest(digest.replace(":", "-"), json.dumps(index).encode(), listed.media_type)
    return str(index["manifests"][0]["digest"])


def test_forged_results_are_refused(ours: Checkout, proxy: Proxy, keys: Path, tmp_path: Path) -> None:
    """By cosign's check of the signature. Signed results of something else: tests/unit/evidence/test_results.py."""
    stage(ours, "--sign", str(keys / "ours.key"))
    staged = proxy.repository("staging/ty-cuda")
    digest = ours.stored()[ours.references()[0]]
    [artifact] = artifacts.attached(staged, digest, reports.TYPE)
    documents = artifacts.read_artifact(staged, artifact, reports.TYPE, digest)
    assert documents
    not_ours = "no signer listed under `evidence` in matrix.yaml signed it"
    for year, signed_by, reason in (
        (b"3", "nobody", "it is unsigned"),
        (b"4", "the signature of another report", not_ours),
        (b"5", "another key", not_ours),
    ):
        report = documents[reports.TYPE].replace(b'"finished":"2', b'"finished":"' + year)
        forged = list_only(staged, digest, {**documents, reports.TYPE: report})
        if signed_by == "the signature of another report":
            signature = staged.manifest(f"{artifact.replace(':', '-')}.sig")
            assert signature
            staged.put_manifest(f"{forged.replace(':', '-')}.sig", signature.content, signature.media_type)
        elif signed_by == "another key":
            manifest = staged.manifest(forged)
            assert manifest
            Signer(key=str(keys / "theirs.key")).sign_manifest(staged, manifest.descriptor)
        output = release(elsewhere(ours, tmp_path / signed_by), UNTESTED_GPU, code=8)
        assert f"{PLAIN}: no valid test results" in output
        assert reason in output
        assert tags(ours, proxy) == {}


def kill_when_stalled(run: Running, proxy: Proxy) -> None:
    """Kills a command when a request of it stalls."""
    run.reaches(proxy.stalled.is_set)
    run.process.kill()
    run.process.wait(10)
    proxy.heal()


RELEASE_STEPS = {
    "record": ("PUT", r"/releases/manifests/released-"),
    "blob": ("POST", r"/ty-cuda/blobs/uploads/\?mount="),
    "report": ("PUT", r"/ty-cuda/manifests/sha256-[0-9a-f]+$"),
    "statement": ("PUT", r"/ty-cuda/manifests/sha256-[0-9a-f]+\.att$"),
    "signature": ("PUT", r"/ty-cuda/manifests/sha256-[0-9a-f]+\.sig$"),
    "stamped tag": ("PUT", r"/ty-cuda/manifests/[^/]*-[0-9]{8}$"),
    "moving tag": ("PUT", r"/ty-cuda/manifests/1\.0$"),
}


def test_a_release_that_is_killed_at_each_step(ours: Checkout, proxy: Proxy, keys: Path) -> None:
    """No tag names anything but a released image, and the next run continues, up to the next step."""
    key = f"--sign={keys}/ours.key"
    stage(ours, key)
    expected = ours.stored()
    for step, (method, path) in RELEASE_STEPS.items():
        proxy.troubles.append(Trouble(fault=Fault.STALLS, method=method, path=path))
        with ours.running("release", UNTESTED_GPU, key) as run:
            kill_when_stalled(run, proxy)
        half = tags(ours, proxy)
        assert set(half.values()) <= set(expected.values()), step
        if step != "moving tag":
            assert not [tag for tag in half if not tag.endswith(today())], f"{step}: moving tags before stamped ones"
    release(ours, UNTESTED_GPU, key)
    complete = tags(ours, proxy)
    assert len(complete) == 2 * 5
    assert set(complete.values()) == set(expected.values())
    for suffix in ("", "-extra"):
        ours.builder("verify", f"{proxy.address}/{ours.references(suffix)[0]}", f"--key={keys}/ours.pub")


def test_one_release_from_three_machines_at_once(ours: Checkout, proxy: Proxy, keys: Path, tmp_path: Path) -> None:
    """All publish and sign the same images, so all succeed, and nothing is lost."""
    key = f"--sign={keys}/ours.key"
    stage(ours, key)
    copies = [ours, *(dataclasses.replace(ours, root=elsewhere(ours, tmp_path / name).root) for name in ("a", "b"))]
    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda each: release(each, UNTESTED_GPU, key), copies))
    assert all("2 images" in output for output in outputs)
    assert set(tags(ours, proxy).values()) == set(ours.stored().values())
    assert len(tags(ours, proxy)) == 2 * 5
    for suffix in ("", "-extra"):
        ours.builder("verify", f"{proxy.address}/{ours.references(suffix)[0]}", f"--key={keys}/ours.pub")


# Cells, and the request to stall, after some others. With one cell, it is clear which request is the second.
STAGE_STEPS = {
    "blob": ((), "POST", r"/staging/ty-cuda/blobs/uploads/", 0),
    "image": ((), "PUT", r"/staging/ty-cuda/manifests/sha256:", 0),
    "report": ((PLAIN,), "PUT", r"/staging/ty-cuda/manifests/sha256:", 1),
    "list of reports": ((), "PUT", r"/staging/ty-cuda/manifests/sha256-", 0),
    "plan of the second": ((), "PUT", r"/staging/ty-cuda/manifests/plan-", 1),
    "document": ((), "PUT", r"/staging/releases/manifests/sha256:", 0),
    "tag of the release": ((), "PUT", r"/staging/releases/manifests/release-", 0),
}


def test_a_stage_that_is_killed_at_each_step(ours: Checkout, proxy: Proxy) -> None:
    """No tag names an image without a report, no release is listed, and the next run continues, up to the next step."""

    def staged(place: str) -> dict[str, dict[str, str | None]]:
        there = {name: proxy.repository(f"{place}/{name}") for name in ("ty-cuda", "releases")}
        return {name: {tag: each.digest_of(tag) for tag in each.list_tags()} for name, each in there.items()}

    ours.use_registry(proxy.address, "undisturbed")
    stage(ours)
    ours.use_registry(proxy.address)
    for step, (cells, method, path, after) in STAGE_STEPS.items():
        proxy.troubles.append(Trouble(fault=Fault.STALLS, method=method, path=path, after=after))
        with ours.running("stage", *cells) as run:
            kill_when_stalled(run, proxy)
        half = staged("staging")
        assert half["releases"] == {}, step
        images = proxy.repository("staging/ty-cuda")
        for tag, digest in half["ty-cuda"].items():
            if tag.startswith("plan-"):
                assert len(artifacts.attached(images, str(digest), reports.TYPE)) == 1, step
    assert stage(ours) == today()
    assert staged("staging") == staged("undisturbed")
