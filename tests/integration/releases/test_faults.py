"""Killed commands, faults of the registry, forged and damaged documents: nothing untested gets a tag."""

from __future__ import annotations

import dataclasses
import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from builder.layers.blobs import Descriptor
from builder.registry import artifacts, reports, signing
from builder.registry.client import Registry
from builder.registry.signing import Signer
from tests.integration.checkout import EXTRA, PLAIN, Checkout, Running, today, until
from tests.integration.registry import Fault, Proxy, Trouble
from tests.integration.releases.machines import (
    UNTESTED_GPU,
    damage,
    elsewhere,
    public,
    release,
    repository,
    stage,
    tags,
)

WAIT_S = 120


def subject_of(repository: Registry, digest: str) -> Descriptor:
    """An image in a registry, to attach something to."""
    manifest = repository.manifest(digest)
    assert manifest
    return Descriptor(media_type=manifest.media_type, digest=digest, size=len(manifest.content))


def forge(checkout: Checkout, proxy: Proxy, content: dict[str, Any], cell: str, signature: bytes) -> None:
    """Attaches a report to the staged image of a cell, in place of the one that it has."""
    staged = repository(checkout, proxy, "staging/ty-cuda")
    suffix = "-extra" if cell == EXTRA else ""
    digest = checkout.stored()[checkout.references(suffix)[0]]
    subject = subject_of(staged, digest)
    documents = {reports.TYPE: json.dumps(content).encode(), signing.SIGNATURE_TYPE: signature}
    artifacts.attach(staged, subject, reports.TYPE, documents)
    listed = staged.manifest(digest.replace(":", "-"))
    assert listed
    index = json.loads(listed.content)
    index["manifests"] = index["manifests"][-1:]
    staged.put_manifest(digest.replace(":", "-"), json.dumps(index).encode(), "application/vnd.oci.image.index.v1+json")


@pytest.mark.parametrize("what", ["edited", "another digest", "another key", "an older test suite", "another cell"])
def test_forged_results_are_refused(ours: Checkout, proxy: Proxy, keys: Path, tmp_path: Path, what: str) -> None:
    stage(ours, "--sign", str(keys / "ours.key"))
    staged = repository(ours, proxy, "staging/ty-cuda")
    plain, extra = (ours.stored()[ours.references(suffix)[0]] for suffix in ("", "-extra"))

    def report(digest: str) -> tuple[dict[str, Any], bytes]:
        [artifact] = artifacts.attached(staged, digest, reports.TYPE)
        documents = artifacts.read(staged, artifact, reports.TYPE, digest)
        assert documents
        return json.loads(documents[reports.TYPE]), documents[signing.SIGNATURE_TYPE]

    def signed(content: dict[str, Any], key: str) -> bytes:
        return Signer(key=str(keys / f"{key}.key")).sign(json.dumps(content).encode())

    content, signature = report(plain)
    reason = "no signer listed under `evidence` in matrix.yaml signed it"
    if what == "edited":
        content["evidence"]["gpu"] = "passed"
    elif what == "another key":
        signature = signed(content, "theirs")
    elif what == "an older test suite":
        content["evidence"]["suite"]["tests/images/test_tiny.py"] = "sha256:" + "0" * 64
        signature, reason = signed(content, "ours"), "test suite changed since it was tested: tests/images/test_tiny.py"
    elif what == "another digest":
        content["image"] = content["evidence"]["image_id"] = extra
        signature, reason = signed(content, "ours"), "it is about another image"
    else:
        other, _ = report(extra)
        content["evidence"]["cell"] = other["evidence"]["cell"]
        signature, reason = signed(content, "ours"), f"it is about the cell '{EXTRA}'"
    forge(ours, proxy, content, PLAIN, signature)
    output = release(elsewhere(ours, tmp_path / "other"), proxy, UNTESTED_GPU, code=8)
    assert f"{PLAIN}: no valid test results" in output
    assert reason in output
    assert tags(ours, proxy) == {}


def test_a_staged_image_that_differs_from_the_plan_is_refused(ours: Checkout, proxy: Proxy, tmp_path: Path) -> None:
    """Its labels say one thing, and the tag would say another."""
    stage(ours)
    staged = repository(ours, proxy, "staging/releases")
    manifest = artifacts.read(staged, f"release-{today()}", "application/vnd.gpu-images.release.v1+json")
    assert manifest
    [content] = manifest.values()
    listed = json.loads(content)
    listed["images"][0]["digest"] = listed["images"][1]["digest"]
    kind, content = "application/vnd.gpu-images.release.v1+json", json.dumps(listed).encode()
    artifact = artifacts.manifest(kind, {kind: content})
    artifacts.put(staged, artifact, [content])
    staged.put_manifest(f"release-{today()}", artifact.content, artifact.media_type)
    output = release(ours, proxy, UNTESTED_GPU, code=15)
    assert f"{PLAIN}: the staged image differs from the plan" in output
    assert tags(ours, proxy) == {}


def test_a_release_that_stopped_is_finished_by_running_it_again(ours: Checkout, proxy: Proxy) -> None:
    stage(ours)
    full = ours.references()[1].rpartition(":")[2]
    proxy.troubles.append(
        Trouble(fault=Fault.STATUS_500, method="PUT", path=rf"/ty-cuda/manifests/{full}$", times=10**6)
    )
    release(ours, proxy, UNTESTED_GPU, code=14)
    half = tags(ours, proxy)
    assert f"{ours.references()[0].rpartition(':')[2]}-{today()}" in half
    assert full not in half
    proxy.heal()
    release(ours, proxy, UNTESTED_GPU)
    assert full in tags(ours, proxy)
    assert "0 tags changed" in release(ours, proxy, UNTESTED_GPU)


def test_writers_at_the_same_time_lose_nothing(ours: Checkout, proxy: Proxy) -> None:
    """docker-registry 2.8 has no referrers API: eight writers share one index."""
    stage(ours)
    staged = repository(ours, proxy, "staging/ty-cuda")
    digest = ours.stored()[ours.references()[0]]
    subject = subject_of(staged, digest)

    def attach(number: int) -> None:
        registry = repository(ours, proxy, "staging/ty-cuda")
        artifacts.attach(registry, subject, "application/x-test", {"text/plain": f"document {number}".encode()})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attach, range(8)))
    assert len(artifacts.attached(staged, digest, "application/x-test")) == 8
    assert len(artifacts.attached(staged, digest, reports.TYPE)) == 1


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
        with ours.running("release", "--to", proxy.address, UNTESTED_GPU, key) as run:
            kill_when_stalled(run, proxy)
        half = tags(ours, proxy)
        assert set(half.values()) <= set(expected.values()), step
        if step != "moving tag":
            assert not [tag for tag in half if not tag.endswith(today())], f"{step}: moving tags before stamped ones"
    release(ours, proxy, UNTESTED_GPU, key)
    complete = tags(ours, proxy)
    assert len(complete) == 2 * 5
    assert set(complete.values()) == set(expected.values())
    for suffix in ("", "-extra"):
        ours.builder("verify", f"{proxy.address}/{ours.references(suffix)[0]}", "--fast", f"--key={keys}/ours.pub")


def test_one_release_from_three_machines_at_once(ours: Checkout, proxy: Proxy, keys: Path, tmp_path: Path) -> None:
    """All publish and sign the same images, so all succeed, and nothing is lost."""
    key = f"--sign={keys}/ours.key"
    stage(ours, key)
    copies = [ours, *(dataclasses.replace(ours, root=elsewhere(ours, tmp_path / name).root) for name in ("a", "b"))]
    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda each: release(each, proxy, UNTESTED_GPU, key), copies))
    assert all("2 images" in output for output in outputs)
    assert set(tags(ours, proxy).values()) == set(ours.stored().values())
    assert len(tags(ours, proxy)) == 2 * 5
    for suffix in ("", "-extra"):
        ours.builder("verify", f"{proxy.address}/{ours.references(suffix)[0]}", "--fast", f"--key={keys}/ours.pub")


@pytest.mark.parametrize(
    ("first", "codes"),
    [("older", {"older": (0,), "newer": (14,)}), ("newer", {"older": (14,), "newer": (0,)}), ("", {})],
    ids=["the older ends first", "the newer ends first", "both go on"],
)
def test_the_newer_of_two_parallel_releases_gets_the_moving_tags(
    ours: Checkout, proxy: Proxy, tmp_path: Path, first: str, codes: dict[str, tuple[int]]
) -> None:
    """Releases of different images of the same cells: both set their stamped tags, then go on to the moving tags.

    A release fails if the other one has already moved a tag. After another run of the newer release, its images have
    the moving tags.
    """
    machines = {"older": elsewhere(ours, tmp_path / "older"), "newer": ours}
    stamps = {"older": today(), "newer": f"{today()}.1"}
    digests = {}
    for name, stamp in stamps.items():
        if name == "newer":
            (ours.root / "templates/base/files/etc/notes").write_text("new\n", encoding="utf-8")
            ours.builder("render")
            ours.builder("images")
        assert stage(ours) == stamp
        digests[name] = [ours.stored()[ours.references(suffix)[0]] for suffix in ("", "-extra")]
    assert not set(digests["older"]) & set(digests["newer"])
    runs: dict[str, Running] = {}
    documents = repository(ours, proxy, "staging/releases")
    both_have_stamped_tags = Barrier(2, timeout=WAIT_S)

    def pause(name: str) -> None:
        both_have_stamped_tags.wait()
        if first not in ("", name):
            runs[first].process.wait(WAIT_S)

    full = [ours.references(suffix)[0].rpartition(":")[2] for suffix in ("", "-extra")]
    for name, stamp in stamps.items():
        path = rf"/ty-cuda/manifests/{re.escape(f'{full[1]}-{stamp}')}$"
        trouble = Trouble(fault=Fault.MEANWHILE, method="PUT", path=path, meanwhile=partial(pause, name))
        proxy.troubles.append(trouble)
    with ExitStack() as stack:
        for name, stamp in stamps.items():
            command = ["release", stamp, "--to", proxy.address, UNTESTED_GPU, "--allow-unsigned"]
            runs[name] = stack.enter_context(machines[name].running(*command))
            # An older release does not begin after a newer one.
            until(partial(documents.digest_of, f"released-{stamp}"), f"release {stamp} to begin")
        for name, run in runs.items():
            assert run.process.wait(2 * WAIT_S) in codes.get(name, (0, 14)), run.output
    release(ours, proxy, UNTESTED_GPU, "--allow-unsigned")
    expected = {
        f"{tag}-{stamps[name]}": image for name in stamps for tag, image in zip(full, digests[name], strict=True)
    }
    for suffix, image in zip(("", "-extra"), digests["newer"], strict=True):
        expected |= {reference.rpartition(":")[2]: image for reference in ours.references(suffix)}
    assert tags(ours, proxy) == expected


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
        there = {name: repository(ours, proxy, f"{place}/{name}") for name in ("ty-cuda", "releases")}
        return {name: {tag: each.digest_of(tag) for tag in each.list_tags()} for name, each in there.items()}

    stage(ours, "--staging", f"{proxy.address}/undisturbed")
    for step, (cells, method, path, after) in STAGE_STEPS.items():
        proxy.troubles.append(Trouble(fault=Fault.STALLS, method=method, path=path, after=after))
        with ours.running("stage", *cells) as run:
            kill_when_stalled(run, proxy)
        half = staged("staging")
        assert half["releases"] == {}, step
        images = repository(ours, proxy, "staging/ty-cuda")
        for tag, digest in half["ty-cuda"].items():
            if tag.startswith("plan-"):
                assert len(artifacts.attached(images, str(digest), reports.TYPE)) == 1, step
    assert stage(ours) == today()
    assert staged("staging") == staged("undisturbed")
    ours.builder("registry", "check", "--to", proxy.address)


LAST_PUT = {"stage": "/releases/manifests/release-", "release": "/ty-cuda/manifests/1.0-extra$"}


@pytest.mark.parametrize("command", ["stage", "release"])
@pytest.mark.parametrize("fault", [Fault.STATUS_401, Fault.STATUS_500, Fault.ANSWER_LOST], ids=lambda fault: fault.name)
def test_a_fault_of_the_last_request_that_passes(ours: Checkout, proxy: Proxy, command: str, fault: Fault) -> None:
    if command == "release":
        stage(ours)
    trouble = Trouble(fault=fault, method="PUT", path=LAST_PUT[command])
    proxy.troubles.append(trouble)
    if command == "stage":
        assert stage(ours) == today(), "a lost answer leads to no second release"
        assert repository(ours, proxy, "staging/releases").list_tags() == [f"release-{today()}"]
    else:
        release(ours, proxy, UNTESTED_GPU)
        assert len(tags(ours, proxy)) == 2 * 5
    assert trouble.times == 0


@pytest.mark.parametrize("command", ["stage", "release"])
@pytest.mark.parametrize("fault", [Fault.STATUS_401, Fault.STATUS_507], ids=lambda fault: fault.name)
def test_a_fault_of_the_last_request_that_stays(ours: Checkout, proxy: Proxy, command: str, fault: Fault) -> None:
    stage(ours, "--images-only") if command == "stage" else stage(ours)
    proxy.troubles.append(Trouble(fault=fault, method="PUT", path=LAST_PUT[command], times=10**6))
    arguments = [command, *(["--to", proxy.address, UNTESTED_GPU] if command == "release" else [])]
    output = ours.builder(*arguments, code=14)
    assert ("the registry's disk is full" if fault is Fault.STATUS_507 else f"docker login {proxy.address}") in output
    if command == "release":
        assert "tags changed before the failure" in output
    proxy.heal()
    ours.builder(*arguments)
    assert proxy.got["PATCH"] == 0, "no blob is sent again"


@pytest.mark.parametrize(("what", "code"), [("configuration", 14), ("report", 8)])
def test_a_damaged_blob_of_a_staged_image_prevents_the_release(
    ours: Checkout, proxy: Proxy, what: str, code: int
) -> None:
    """The registry serves it without an error."""
    stage(ours)
    staged, image = repository(ours, proxy, "staging/ty-cuda"), ours.stored()[ours.references()[0]]
    [artifact] = artifacts.attached(staged, image, reports.TYPE)
    manifest = staged.manifest(artifact if what == "report" else image)
    assert manifest
    content = json.loads(manifest.content)
    blob = (content["layers"][0] if what == "report" else content["config"])["digest"]
    damage(proxy, blob)
    output = release(ours, proxy, UNTESTED_GPU, code=code)
    assert f"reading blob {blob.removeprefix('sha256:')[:12]}" in output
    assert "content does not match its digest" in output
    assert tags(ours, proxy) == {}


def test_a_tag_that_moves_during_a_release(ours: Checkout, proxy: Proxy) -> None:
    """Another push sets it after this release has read it."""
    stage(ours)
    full = ours.references()[0].rpartition(":")[2]
    other = artifacts.manifest("application/x-test", {})

    def move() -> None:
        artifacts.put(public(ours, proxy), other, [])
        public(ours, proxy).put_manifest(full, other.content, other.media_type)

    record = Trouble(fault=Fault.MEANWHILE, method="PUT", path="/releases/manifests/released-", meanwhile=move)
    proxy.troubles.append(record)
    output = release(ours, proxy, UNTESTED_GPU, code=14)
    assert f"tag {full} changed from unset to {other.digest}" in output
    assert tags(ours, proxy)[full] == other.digest
