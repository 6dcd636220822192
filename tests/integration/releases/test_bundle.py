"""A bundle of released images, which skopeo and oras copy to the registry of a closed network."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.common.reference import ImageRef
from builder.index.host import Host
from builder.layers import oci
from builder.registry import artifacts
from builder.registry.client import Registry
from tests.integration import programs
from tests.integration.checkout import EXTRA, Checkout
from tests.integration.registry import Proxy, Server
from tests.integration.releases.machines import UNTESTED_GPU, damage, public, release, stage
from tests.paths import ROOT

GUIDE = ROOT / "docs/closed-networks.md"


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Server]:
    """The registry of the closed network, which is empty."""
    with Server(folder=tmp_path / "inside").serving() as server:
        yield server


@pytest.fixture
def bundle(ours: Checkout, proxy: Proxy, keys: Path, tmp_path: Path) -> Path:
    """A bundle of a signed release of both images."""
    sign = ("--sign", str(keys / "ours.key"))
    release(ours, proxy, stage(ours, *sign), UNTESTED_GPU, *sign)
    file = tmp_path / "images.tar"
    store = str(tmp_path / "empty store")
    output = ours.builder("--store", store, "bundle", "all", "--released", "--to", proxy.address, "-o", str(file))
    assert f"written: {file}, 2 images" in output
    return file


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def verify(checkout: Checkout, inside: Server, keys: Path, tag: str) -> None:
    """Checks all signatures of an image, with cosign and as users of the image do."""
    image = f"{inside.address}/{checkout.namespace}/ty-cuda:{tag}"
    key = ("--key", str(keys / "ours.pub"))
    ignored = ("--insecure-ignore-tlog=true", "--allow-insecure-registry")
    run("cosign", "verify", *key, *ignored, "-a", "image=ty-cuda", image)
    for kind in ("cyclonedx", "slsaprovenance1"):
        run("cosign", "verify-attestation", *key, *ignored, "--type", kind, image)
    output = checkout.builder("verify", image, *key)
    parts = {line.split()[2]: line.split()[0] for line in output.splitlines() if line[:1].islower()}
    assert parts["signature"] == parts["SBOM"] == parts["provenance"] == parts["test"] == "signed"


def attached(checkout: Checkout, address: str) -> list[set[str]]:
    """The digests of what is attached to each image."""
    there = Registry(ImageRef(registry=address, repository=f"{checkout.namespace}/ty-cuda"), host=Host(), write=False)
    return [set(artifacts.attached(there, digest)) for digest in checkout.stored().values()]


def follow_guide(program: str, folder: Path, changes: dict[str, str]) -> None:
    """Runs the block of commands in the guide that has this program and jq, in a folder."""
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    [script] = [block for block in blocks if "jq" in block and f"{program} copy" in block]
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    run("sh", "-euc", f"cd {folder}\n{script}")


def test_skopeo_copies_a_release_with_its_signatures_as_the_guide_says(
    ours: Checkout, proxy: Proxy, keys: Path, bundle: Path, inside: Server
) -> None:
    programs.install("skopeo")
    programs.install("jq")
    changes = {"registry.example.com": inside.address, "copy --all": "copy --all --dest-tls-verify=false"}
    follow_guide("skopeo", bundle.parent, changes)
    for suffix in ("", "-extra"):
        for reference in ours.references(suffix):
            verify(ours, inside, keys, reference.rpartition(":")[2])
    assert attached(ours, inside.address) == attached(ours, proxy.address)
    assert all(attached(ours, inside.address))
    # The file itself is read, too.
    source = f"oci-archive:{bundle}:{ours.references()[0]}"
    assert json.loads(run("skopeo", "inspect", source))["Digest"] == ours.stored()[ours.references()[0]]


def test_oras_copies_an_image_with_what_is_attached_as_the_guide_says(
    ours: Checkout, proxy: Proxy, keys: Path, bundle: Path, inside: Server
) -> None:
    programs.install_from("trixie", "oras")
    programs.install("jq")
    full = ours.references()[0]
    changes = {
        "org/pt-cuda:2.9": full,
        "oras copy": "oras copy --to-plain-http",
        "registry.example.com": inside.address,
    }
    follow_guide("oras", bundle.parent, changes)
    assert attached(ours, inside.address)[0] == attached(ours, proxy.address)[0]
    # The tags of cosign 2 are manifests of their own.
    with tarfile.open(bundle) as tar:
        index = tar.extractfile("index.json")
        assert index
        digests = {name: manifest.digest for name, manifest in oci.read_index(index.read()).items()}
    repository, tag = full.split(":")
    for suffix in ("sig", "att"):
        name = f"{repository}:{digests[full].replace(':', '-')}.{suffix}"
        copy = ("oras", "copy", "--to-plain-http", "--from-oci-layout")
        run(*copy, f"{bundle}@{digests[name]}", f"{inside.address}/{name}")
    verify(ours, inside, keys, tag)


def test_a_release_can_be_built_from_its_bundle(ours: Checkout, bundle: Path, tmp_path: Path) -> None:
    again = ours.builder("--store", str(tmp_path / "new"), "build", "all", "--from", str(bundle))
    assert "bundle: done" in again
    assert "fetched" not in again


def test_damaged_and_missing_images_are_refused(ours: Checkout, proxy: Proxy, bundle: Path, tmp_path: Path) -> None:
    before = bundle.read_bytes()
    arguments = ("bundle", "all", "--released", "--to", proxy.address, "-o", str(bundle))
    signature = f"{ours.stored()[ours.references()[0]].replace(':', '-')}.sig"
    manifest = public(ours, proxy).manifest(signature)
    assert manifest
    damage(proxy, json.loads(manifest.content)["layers"][0]["digest"])
    output = ours.builder("--store", str(tmp_path / "another"), *arguments, code=14)
    assert "content does not match its digest" in output
    there = public(ours, proxy)
    there.delete_manifest(str(there.digest_of(ours.references("-extra")[0].rpartition(":")[2])))
    output = ours.builder(*arguments, code=14)
    assert f"{EXTRA}: {proxy.address}/{ours.references('-extra')[0]} is not in the registry" in output
    assert bundle.read_bytes() == before
