"""Released images that the examples copy to the registry of a closed network, with oras and skopeo."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from builder.layers import oci
from builder.layers.oci import LAYER_TYPE, Descriptor
from builder.registry import artifacts
from tests.fakes import registry as registry_fakes
from tests.integration import programs
from tests.integration.checkout import Checkout
from tests.integration.registry import Proxy, Server
from tests.integration.releases.machines import UNTESTED_GPU, release, stage, verified
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Server]:
    """The registry of the closed network, which is empty."""
    with Server(folder=tmp_path / "inside").serving() as server:
        yield server


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
    parts = verified(output)
    assert parts["signature"] == parts["provenance"] == parts["test"] == "signed"


def attached(checkout: Checkout, place: Server | Proxy) -> list[set[str]]:
    """The digests of what is attached to each image."""
    there = place.repository(f"{checkout.namespace}/ty-cuda")
    return [set(artifacts.attached(there, digest)) for digest in checkout.stored().values()]


# The registries of the test serve plain http.
PLAIN_HTTP = {
    "oras copy -r --to-oci-layout": "oras copy -r --from-plain-http --to-oci-layout",
    "oras copy --to-oci-layout": "oras copy --from-plain-http --to-oci-layout",
    "oras copy -r --from-oci-layout": "oras copy -r --to-plain-http --from-oci-layout",
    "oras copy --from-oci-layout": "oras copy --to-plain-http --from-oci-layout",
    "oras repo tags": "oras repo tags --plain-http",
    "oras resolve": "oras resolve --plain-http",
    "oras manifest fetch": "oras manifest fetch --plain-http",
    'skopeo copy --all "docker:': 'skopeo copy --all --src-tls-verify=false "docker:',
    'skopeo copy --all "oci:': 'skopeo copy --all --dest-tls-verify=false "oci:',
    "skopeo list-tags": "skopeo list-tags --tls-verify=false",
    "skopeo inspect": "skopeo inspect --tls-verify=false",
}


def copy_release(program: str, folder: Path, repository: str, tags: Sequence[str], source: str, target: str) -> None:
    """Runs the example for this program: with internet, then with nothing but its file."""
    programs.install("jq")
    if program == "oras":
        programs.install_from("trixie", program)
    else:
        programs.install(program)
    names = {
        "2.9 2.9-jupyter": " ".join(tags),
        "org/pt-cuda": repository,
        "registry.example.com": source,
        "registry.internal": target,
    }
    script = (EXAMPLES / f"copy-{program}.sh").read_text("utf-8")
    for old, new in (names | PLAIN_HTTP).items():
        script = script.replace(old, new)
    (folder / "copy.sh").write_text(script, encoding="utf-8")
    for side, action in (("outside", "pack"), ("closed", "unpack")):
        place = folder / side
        place.mkdir()
        if side == "closed":
            shutil.move(folder / "outside/images.tar", place)
            shutil.rmtree(folder / "outside")
        run("sh", "-c", f"cd {place} && sh ../copy.sh {action}")


@pytest.mark.parametrize("program", ["oras", "skopeo"])
def test_a_release_is_copied_with_its_signatures_as_in_the_example(
    ours: Checkout, proxy: Proxy, keys: Path, inside: Server, tmp_path: Path, program: str
) -> None:
    sign = ("--sign", str(keys / "ours.key"))
    release(ours, stage(ours, *sign), UNTESTED_GPU, *sign)
    tags = [ours.references(suffix)[0].rpartition(":")[2] for suffix in ("", "-extra")]
    copy_release(program, tmp_path, f"{ours.namespace}/ty-cuda", tags, proxy.address, inside.address)
    for tag in tags:
        verify(ours, inside, keys, tag)
    assert attached(ours, inside) == attached(ours, proxy)
    assert all(attached(ours, inside))


@pytest.mark.parametrize("program", ["oras", "skopeo"])
def test_an_index_is_copied_with_what_is_attached_to_its_images(
    proxy: Proxy, inside: Server, tmp_path: Path, program: str
) -> None:
    """`oras copy -r` alone fails with `not found`: oras 1.2 copies what is attached to the images, and no index."""
    source, copied = proxy.repository("org/both"), inside.repository("org/both")
    images: dict[str, Descriptor] = {}
    for arch in ("amd64", "arm64"):
        layer = gzip.compress(arch.encode())
        image = artifacts.artifact_manifest("", {LAYER_TYPE: layer})
        artifacts.put_artifact(source, image, [layer])
        images[arch] = Descriptor(media_type=image.media_type, digest=image.digest, size=len(image.content))
        registry_fakes.attach(source, images[arch], "application/x-note", {"text/plain": layer})
        source.put_manifest(f"{image.digest.replace(':', '-')}.sig", image.content, image.media_type)
    index = source.put_manifest("2.9", oci.platform_index(images), oci.INDEX_TYPE)
    copy_release(program, tmp_path, "org/both", ["2.9"], proxy.address, inside.address)
    assert copied.digest_of("2.9") == index
    assert sorted(copied.list_tags()) == sorted(source.list_tags())
    for each in images.values():
        assert artifacts.attached(copied, each.digest) == artifacts.attached(source, each.digest) != {}
