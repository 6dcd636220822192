"""Tags of images for several architectures: engines, cosign and `builder` read the index that they name.

The image for arm64 has the layers of that for amd64: an engine pulls it, but cannot run it here.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from builder.common.console import View
from builder.engine.run import Run
from builder.evidence.results import Coverage
from builder.evidence.signing import Signer
from builder.index.host import Host
from builder.layers import oci, stored_images
from builder.layers.oci import CONFIG_TYPE, Manifest
from builder.layers.store import Store
from builder.matrix import tags
from builder.matrix.project import Project
from builder.matrix.tags import CELL_LABEL
from builder.plan import plan
from builder.release import staging, tagging
from builder.release.staging import Candidate
from builder.release.tagging import TagChange
from tests.integration import programs
from tests.integration.checkout import PLAIN, Checkout, today
from tests.integration.registry import Proxy
from tests.integration.releases.machines import UNTESTED_GPU, public, release, stage, status
from tests.integration.releases.test_release import documented

TWIN = f"{PLAIN}-arm64"


def run_of(checkout: Checkout) -> Run:
    view = View(Console(quiet=True))
    return Run(checkout=Project(checkout.root), host=Host(), store=Store(checkout.store), view=view)


def images_of_both(checkout: Checkout) -> list[Candidate]:
    """The image of the store, and the same for arm64."""
    run = run_of(checkout)
    project, store = run.project, run.store
    [planned] = plan.make_locked_plan(project, project.select([PLAIN])).images
    built = stored_images.find_stored_image(store, planned)
    assert built
    amd64 = Candidate(planned=planned, stored=built, coverage=Coverage())
    config = json.loads(store.read(amd64.stored.config.digest))
    config["architecture"] = "arm64"
    config["config"]["Labels"][CELL_LABEL] = TWIN
    blob = store.put(json.dumps(config).encode(), CONFIG_TYPE)
    manifest = Manifest.of(oci.manifest(blob, amd64.stored.layers))
    store.put(manifest.content, manifest.media_type)
    stored = replace(amd64.stored, config=blob, manifest=manifest)
    twin = replace(amd64.planned, cell=replace(amd64.planned.cell, arch="arm64"))
    return [amd64, replace(amd64, planned=twin, stored=stored)]


def publish_signed(checkout: Checkout, both: list[Candidate], signer: Signer) -> list[TagChange]:
    """Publishes images as a release does, signed but without documents; returns the tags that changed."""
    run = run_of(checkout)
    run.project.__dict__["cells"] = [image.planned.cell for image in both]  # as if the matrix had both
    [group] = tagging.group_by_tags(run, both)
    tagging.check_tags([group], run.view, roll_back=False, allow_missing_arch=False)
    stamp = tagging.free_stamp([group], tags.stamps(today()))
    annotations = {"image": "ty-cuda", "tag": both[0].references[0].tag, "release": group.stamped(stamp)}
    for image in both:
        staging.push_image(run, group.repository, image, ())
        signer.sign_manifest(group.repository, image.stored.manifest.descriptor, {"cell": image.cell} | annotations)
    group.repository.put_manifest(group.manifest.digest, group.manifest.content, group.manifest.media_type)
    signer.sign_manifest(group.repository, group.manifest.descriptor, {"cell": PLAIN} | annotations)
    changes: list[TagChange] = []
    tagging.set_tags([group], stamp, changes)
    return [change for change in changes if change.is_change]


def test_a_tag_of_several_architectures(ours: Checkout, proxy: Proxy, keys: Path) -> None:
    """It was that of the image for amd64 before, and becomes an index of both."""
    stage(ours, PLAIN, "--sign", str(keys / "ours.key"))
    release(ours, UNTESTED_GPU, "--sign", str(keys / "ours.key"))
    both = images_of_both(ours)
    changes = publish_signed(ours, both, Signer(key=str(keys / "ours.key")))
    full, *aliases = [name.rpartition(":")[2] for name in ours.references()]
    assert {change.tag for change in changes} == {f"{full}-{today()}.1", full, *aliases}
    registry = public(ours, proxy)
    assert registry.digest_of(f"{full}-{today()}") == both[0].digest, "the stamped tag of the first release"
    index = registry.manifest(full)
    assert index
    assert index == registry.manifest(f"{full}-{today()}.1")
    assert oci.read_platforms(index.content) == {image.arch: image.digest for image in both}

    # An engine pulls the image for its own architecture, unless --platform names another one.
    name = f"{proxy.address}/{ours.references()[0]}"
    for image, options in zip(both, ((), ("--platform", "linux/arm64")), strict=True):
        ours.docker("pull", "--quiet", *options, name)
        # The engine may also have the image from the registry of another test.
        described = ours.docker("image", "inspect", "--format", '{{.Architecture}} {{join .RepoDigests " "}}', name)
        architecture, *digests = described.split()
        assert architecture == image.arch
        assert f"{name.rpartition(':')[0]}@{index.digest}" in digests
        ours.docker("image", "rm", name)
    programs.install("skopeo")
    command = ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{name}"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=True).stdout == index.content

    # cosign, and `builder verify`: with the signature of the index, and all that the first release attached.
    assert index.digest in documented("cosign verify ", name, PLAIN, keys)
    output = ours.builder("verify", name, "--key", str(keys / "ours.pub"))
    assert "signed" in output.partition("signature of the index")[0].splitlines()[-1]
    assert "test results  (" in output
    output = ours.builder("verify", name, "--arch", "all", "--key", str(keys / "ours.pub"), code=15)
    assert f"{name} ({TWIN}): " in output, "it has no test results"
    assert f"{name} ({PLAIN}): " not in output
    assert status(ours)[PLAIN]["released"].startswith("yes")

    # What an index names is no garbage.
    listed = json.loads(ours.builder("prune", "--format", "json").partition("{")[2].join(["{", ""]))
    assert listed["items"] == []

    # An index that lost an image, and was not signed: an engine for it gets a clear error.
    registry.put_manifest(full, oci.platform_index({"amd64": both[0].stored.manifest.descriptor}), oci.INDEX_TYPE)
    output = ours.builder("verify", name, "--key", str(keys / "ours.pub"), code=15)
    assert "no trusted signer signed it as ty-cuda" in output
    pulled = subprocess.run(
        ["docker", "pull", "--quiet", "--platform", "linux/arm64", name],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert pulled.returncode != 0
    assert "no matching manifest for linux/arm64" in pulled.stderr
