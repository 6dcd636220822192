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

import pytest

from builder.evidence import reports
from builder.evidence.signing import Signer
from builder.layers.blobs import Descriptor
from builder.registry import artifacts
from builder.registry.client import Repository
from tests.fakes import registry as registry_fakes
from tests.integration.checkout import PLAIN, Checkout, Running, today, until
from tests.integration.registry import Fault, Proxy, Trouble
from tests.integration.releases.machines import (
    UNTESTED_GPU,
    elsewhere,
    public,
    release,
    repository,
    stage,
    tags,
)

WAIT_S = 120


def subject_of(repository: Repository, digest: str) -> Descriptor:
    """An image in a registry, to attach something to."""
    manifest = repository.manifest(digest)
    assert manifest
    return Descriptor(media_type=manifest.media_type, digest=digest, size=len(manifest.content))


def list_only(staged: Repository, digest: str, documents: dict[str, bytes]) -> str:
    """Lists one report of an image, in place of the one that it has; returns its digest."""
    registry_fakes.attach(staged, subject_of(staged, digest), reports.TYPE, documents)
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
    staged = repository(ours, proxy, "staging/ty-cuda")
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
            Signer(key=str(keys / "theirs.key")).sign_manifest(staged, forged)
        output = release(elsewhere(ours, tmp_path / signed_by), proxy, UNTESTED_GPU, code=8)
        assert f"{PLAIN}: no valid test results" in output
        assert reason in output
        assert tags(ours, proxy) == {}


def test_writers_at_the_same_time_lose_nothing(ours: Checkout, proxy: Proxy) -> None:
    """docker-registry 2.8 has no referrers API: eight writers share one index."""
    stage(ours)
    staged = repository(ours, proxy, "staging/ty-cuda")
    digest = ours.stored()[ours.references()[0]]
    subject = subject_of(staged, digest)

    def attach(number: int) -> None:
        registry = repository(ours, proxy, "staging/ty-cuda")
        registry.confirm_s = 3  # longer than the registry takes to write a list on a busy disk
        registry_fakes.attach(registry, subject, "application/x-test", {"text/plain": f"document {number}".encode()})

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
        ours.builder("verify", f"{proxy.address}/{ours.references(suffix)[0]}", f"--key={keys}/ours.pub")


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
        ours.builder("verify", f"{proxy.address}/{ours.references(suffix)[0]}", f"--key={keys}/ours.pub")


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


LAST_PUT = {"stage": "/releases/manifests/release-", "release": "/ty-cuda/manifests/1.0-extra$"}


def test_a_lost_answer_to_the_last_request_of_a_stage_leads_to_no_second_release(ours: Checkout, proxy: Proxy) -> None:
    trouble = Trouble(fault=Fault.ANSWER_LOST, method="PUT", path=LAST_PUT["stage"])
    proxy.troubles.append(trouble)
    assert stage(ours) == today()
    assert repository(ours, proxy, "staging/releases").list_tags() == [f"release-{today()}"]
    assert trouble.times == 0


@pytest.mark.parametrize("command", ["stage", "release"])
def test_a_command_that_failed_at_its_last_request_can_be_repeated(ours: Checkout, proxy: Proxy, command: str) -> None:
    stage(ours, "--images-only") if command == "stage" else stage(ours)
    proxy.troubles.append(Trouble(fault=Fault.STATUS_507, method="PUT", path=LAST_PUT[command], times=10**6))
    arguments = [command, *(["--to", proxy.address, UNTESTED_GPU] if command == "release" else [])]
    output = ours.builder(*arguments, code=14)
    assert "the registry's disk is full" in output
    if command == "release":
        assert "tags changed before the failure" in output
    proxy.heal()
    ours.builder(*arguments)
    assert proxy.got["PATCH"] == 0, "no blob is sent again"
    if command == "release":
        assert "0 tags changed" in release(ours, proxy, UNTESTED_GPU)


def test_a_tag_that_moves_during_a_release(ours: Checkout, proxy: Proxy) -> None:
    """Another push sets it after this release has read it."""
    stage(ours)
    full = ours.references()[0].rpartition(":")[2]
    other = artifacts.manifest("application/x-test", {})

    def move() -> None:
        artifacts.put_artifact(public(ours, proxy), other, [])
        public(ours, proxy).put_manifest(full, other.content, other.media_type)

    record = Trouble(fault=Fault.MEANWHILE, method="PUT", path="/releases/manifests/released-", meanwhile=move)
    proxy.troubles.append(record)
    output = release(ours, proxy, UNTESTED_GPU, code=14)
    assert f"tag {full} changed from unset to {other.digest}" in output
    assert tags(ours, proxy)[full] == other.digest
