"""`builder stage`, `builder test --staged` and `builder release`, with a real registry and real signatures.

A machine is a copy of the checkout with a store of its own and without evidence.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from packageurl import PackageURL

from builder.evidence import reports
from builder.registry import artifacts
from tests.integration.checkout import EXTRA, PLAIN, Checkout, today
from tests.integration.registry import Proxy
from tests.integration.releases.machines import (
    UNTESTED_GPU,
    elsewhere,
    public,
    release,
    stage,
    status,
    tags,
    verified,
)
from tests.paths import ROOT


def test_what_was_tested_on_one_machine_is_released_by_another(
    ours: Checkout, proxy: Proxy, keys: Path, tmp_path: Path
) -> None:
    stamp = stage(ours, "--sign", str(keys / "ours.key"))
    assert stamp == today()
    assert tags(ours, proxy) == {}, "staging sets no tag"
    other = elsewhere(ours, tmp_path / "other")
    output = release(other, code=8)
    assert f"{PLAIN}: GPU tests have not passed (gpu: not run (" in output
    assert "Write tests/gpu/test_tiny.py, then test again." in output
    assert "To release it untested, add --allow-untested-gpu." in output
    assert tags(ours, proxy) == {}

    proxy.heal()
    output = release(other, UNTESTED_GPU, "--sign", str(keys / "ours.key"))
    asked = proxy.asked.total()
    digests = ours.stored()
    expected: dict[str, str | None] = {}
    for suffix in ("", "-extra"):
        full, *aliases = [name.rpartition(":")[2] for name in ours.references(suffix)]
        expected |= dict.fromkeys([full, f"{full}-{today()}", *aliases], digests[ours.references(suffix)[0]])
    assert tags(ours, proxy) == expected
    assert not list((Path(other.environ["GPU_IMAGES_STORE"]) / "blobs/sha256").iterdir()), "nothing is downloaded"
    for suffix, cell in (("", PLAIN), ("-extra", EXTRA)):
        full = ours.references(suffix)[0]
        assert digests[full] in documented("cosign verify ", f"{proxy.address}/{full}", cell, keys)
        with pytest.raises(subprocess.CalledProcessError):
            documented("cosign verify ", f"{proxy.address}/{full}", "another-cell", keys)
        assert len(artifacts.attached(public(ours, proxy), digests[ours.references(suffix)[0]], reports.TYPE)) == 1
    check_sbom(ours, proxy, keys)
    recorded = artifacts.read_artifact(
        proxy.repository("staging/releases"),
        f"released-{today()}",
        "application/vnd.gpu-images.released.v1+json",
    )
    assert recorded
    [document] = map(json.loads, recorded.values())
    assert document["allowed"] == ["untested-gpu"]
    assert {image["signer"] for image in document["images"]} == {"keys/ours.pub"}
    assert all(image["gpu"].startswith("not run") for image in document["images"])
    check_catalog(other, proxy, ours)
    assert asked <= 145, (
        "for two images: more if each blob, tag and document is confirmed by itself, or cosign attaches"
    )


def check_catalog(machine: Checkout, proxy: Proxy, builder: Checkout) -> None:
    """A machine without test results lists those of the registry."""
    sections = machine.builder("catalog").split("\n## ")
    [plain] = [section for section in sections if section.startswith(f"{PLAIN}\n")]
    name, _, tag = builder.references()[0].partition(":")
    assert f"docker pull {proxy.address}/{name}@{builder.stored()[f'{name}:{tag}']}" in plain
    assert f"**Release**: {tag}-{today()}." in plain
    assert "**Signature**: signed by keys/ours" in plain
    assert " passed; GPU tests: not run" in plain


def documented(pattern: str, image: str, cell: str, keys: Path, *, kind: str = "") -> str:
    """The output of a command of docs/verify.md, for this image, key and kind of statement."""
    [line] = re.findall(rf"^{pattern}.*$", (ROOT / "docs/verify.md").read_text(encoding="utf-8"), re.MULTILINE)
    name, _, tag = image.rpartition("/")[2].rpartition(":")
    line = re.sub(r"registry\.example\.com/\S+", f"--allow-http-registry {image}", line)
    for option, value in (("cell", cell), ("image", name), ("tag", tag)):
        line = re.sub(rf"-a {option}=\S+", f"-a {option}={value}", line)
    command = shlex.split(line.replace("keys/ci.pub", f"{keys}/ours.pub").replace("TYPE", kind))
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def check_sbom(checkout: Checkout, proxy: Proxy, keys: Path) -> None:
    """The statements of an image are signed, and its SBOM has what its own files say is installed."""
    image = f"{proxy.address}/{checkout.references('-extra')[0]}"
    kinds = {"cyclonedx": "components", "slsaprovenance1": "buildDefinition", reports.TEST_RESULT: "passedTests"}
    for kind, field in kinds.items():
        output = documented("cosign verify-attestation ", image, "", keys, kind=kind)
        statement = json.loads(base64.b64decode(json.loads(output)["payload"]))
        assert field in statement["predicate"]
        if kind == "cyclonedx":
            sbom = statement["predicate"]
    digest = checkout.stored()[checkout.references("-extra")[0]]
    [artifact] = artifacts.attached(public(checkout, proxy), digest, "application/vnd.cyclonedx+json")
    documents = artifacts.read_artifact(public(checkout, proxy), artifact, "application/vnd.cyclonedx+json", digest)
    assert documents
    assert json.loads(documents["application/vnd.cyclonedx+json"]) == sbom
    [debian] = [each for each in sbom["components"] if each["type"] == "operating-system"]
    assert (debian["name"], debian["version"]) == ("debian", "12")
    packages = [each for each in sbom["components"] if each != debian]
    listed = {(each["purl"].split(":")[1].split("/")[0], each["name"], each["version"]) for each in packages}
    run = ("run", "--rm", checkout.references("-extra")[0])
    fields = "${Package} ${Version} ${source:Package} ${source:Version}\\n"
    debs = [line.split() for line in checkout.docker(*run, "dpkg-query", "-W", "-f", fields).splitlines()]
    wheels = json.loads(checkout.docker(*run, "python", "-m", "pip", "list", "--format", "json"))
    installed = {("deb", name, version) for name, version, *_ in debs}
    installed |= {("pypi", wheel["name"].lower().replace("_", "-"), wheel["version"]) for wheel in wheels}
    assert installed <= listed
    assert {each for each in listed if each[0] == "deb"} <= installed
    sources = {}
    for each in (each for each in packages if each["purl"].startswith("pkg:deb/")):
        source, _, version = PackageURL.from_string(each["purl"]).qualifiers.get("upstream", "").partition("@")
        sources[each["name"]] = (source or each["name"], version or each["version"])
    assert sources == {name: (source, version) for name, _, source, version in debs}
    assert sources["libc6"][0] == "glibc"
    [pip] = [each for each in packages if each["name"] == "pip"]
    assert (pip["licenses"], pip["supplier"]["name"]) == ([{"license": {"id": "MIT"}}], "The pip developers")


def test_a_released_image_is_verified_without_a_checkout(ours: Checkout, proxy: Proxy, keys: Path) -> None:
    stage(ours, "--sign", str(keys / "ours.key"))
    release(ours, UNTESTED_GPU, "--sign", str(keys / "ours.key"))
    consumer = dataclasses.replace(
        ours, root=keys, environ={**ours.environ, "GPU_IMAGES_STORE": str(ours.root / "other-store")}
    )
    plain, extra = (f"{proxy.address}/{ours.references(suffix)[-1]}" for suffix in ("", "-extra"))
    output = consumer.builder("verify", extra, "--key", str(keys / "ours.pub"))
    parts = verified(output)
    assert parts == dict.fromkeys(("signature", "test", "provenance"), "signed")
    assert re.search(r"test results  \([0-9]+ passed, gpu: not run", output)

    assert "no trusted signer signed it as cell" in consumer.builder(
        "verify", extra, "--key", str(keys / "theirs.pub"), code=15
    )
    assert "neither a signer nor a plan" in consumer.builder("verify", extra, code=15)
    there = public(ours, proxy)
    stored = there.manifest(plain.rpartition(":")[2])
    assert stored
    there.put_manifest(extra.rpartition(":")[2], stored.content, stored.media_type)
    output = consumer.builder("verify", extra, "--key", str(keys / "ours.pub"), code=15)
    full = ours.references()[0].rpartition(":")[2]
    assert f"signed for {full}, {full}-{today()}, not for {extra.rpartition(':')[2]}" in output
    key = ("--key", str(keys / "ours.pub"))
    repository_name = plain.rpartition(":")[0]
    consumer.builder("verify", f"{repository_name}:{full}-{today()}", *key)
    there.put_manifest(f"{full}-20200101", stored.content, stored.media_type)
    output = consumer.builder("verify", f"{repository_name}:{full}-20200101", *key, code=15)
    assert f"not for {full}-20200101" in output
    assert "images of the store are not signed" in consumer.builder("verify", ours.references()[0], *key, code=2)


def test_the_status_of_a_release(ours: Checkout, proxy: Proxy, keys: Path, tmp_path: Path) -> None:
    stage(ours, PLAIN)
    other = elsewhere(ours, tmp_path / "other")

    assert status(ours)[EXTRA]["staged"] == "-"
    plain = status(ours)[PLAIN]
    assert (plain["built"], plain["gpu"], plain["staged"], plain["released"]) == ("yes", "not run", today(), "no")
    assert plain["tested"].endswith(" passed")
    plain = status(other)[PLAIN]
    assert (plain["built"], plain["tested"]) == ("no", "no valid test results")
    release(ours, UNTESTED_GPU, "--sign", str(keys / "ours.key"))
    plain = status(other)[PLAIN]
    assert plain["released"] == "yes, untested-gpu allowed, own results, unsigned"
    assert plain["signature"] == "yes"
    assert plain["packages"] == 0 or plain["packages"] == 1


def test_an_image_of_known_layers_is_staged_without_an_engine(
    ours: Checkout, proxy: Proxy, keys: Path, tmp_path: Path
) -> None:
    """Its plain files are made here; all other layers are public. It needs all tests before it is released."""
    sign = ("--sign", str(keys / "ours.key"))
    stage(ours, *sign)
    release(ours, UNTESTED_GPU, *sign)
    other = elsewhere(ours, tmp_path / "other")
    other.use_registry(proxy.address, "new")
    assert "not built" in other.builder("stage", code=8)
    proxy.heal()
    output = other.builder("stage", "--untested", DOCKER_HOST="tcp://127.0.0.1:1")
    assert re.search(rf"{PLAIN}: staged in .*, not tested", output), output
    assert "2 images staged" in output
    assert len(list((other.store / "blobs/sha256").iterdir())) == 5, "plain files, and two images"
    there = proxy.repository("new/ty-cuda")
    for suffix in ("", "-extra"):
        digest = ours.stored()[ours.references(suffix)[0]]
        assert there.digest_of(digest) == digest, "the same image as one that was built"
    assert "no valid test results" in release(other, UNTESTED_GPU, code=8)
    output = other.builder("test", "--staged")
    assert "2 images: 2 loaded from the store, 2 tested" in output, output
    release(other, UNTESTED_GPU)

    layers = other.root / "locks/layers.json"
    layers.unlink()
    other.use_registry(proxy.address, "third")
    output = other.builder("stage", "--untested", code=7)
    assert "is not listed in locks/layers.json" in output
