"""Plain `docker build` of a rendered Dockerfile (templates/host/README.md) gives the same files as `builder`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tarfile

import pytest

from builder import host
from builder.layers.estargz import RESERVED
from builder.plan import settings
from tests.integration.checkout import PLAIN, TIMEOUT_S, Checkout

Entry = tuple[str, int, int, int, int, str, str]


def tree(checkout: Checkout, image: str) -> dict[str, Entry]:
    """Kind, mode, owner, group, size, link and digest of everything in an image, by path."""
    container = checkout.docker("create", "--label", f"gpu-images.run={checkout.root}", image)
    entries = {}
    with (
        subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for item in archive:
            content = archive.extractfile(item) if item.isfile() else None
            digest = hashlib.sha256(content.read()).hexdigest() if content else ""
            entries[item.name] = (
                item.type.decode(), item.mode, item.uid, item.gid, item.size, item.linkname, digest,
            )  # fmt: skip
    checkout.docker("rm", container)
    return entries


@pytest.fixture(scope="module")
def plain(built: Checkout) -> str:
    """The id of an image that `docker build` builds; only Debian packages may be cached."""
    base = built.base_image()
    host_files = host.read_host(built.environ).files("bookworm")
    for name, content in host_files.items():
        (built.root / name).write_bytes(content)
    assert "templates/host/index.env" in host_files
    name = f"{built.namespace}/plain"
    try:
        result = subprocess.run(
            [
                "docker", "build", "--quiet", "--network", "host", "--build-arg", f"BASE={base}", "--tag", name,
                "--no-cache-filter", "image", "--file", f"images/{PLAIN}/plain.Dockerfile", ".",
            ],
            cwd=built.root, env={**os.environ, "DOCKER_BUILDKIT": "1"}, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    finally:
        for path in host_files:
            (built.root / path).unlink()
    assert result.returncode == 0, result.stderr
    image = built.docker("image", "inspect", "--format", "{{.Id}}", name)
    built.docker("tag", image, f"{name}:kept")
    return image


def test_labels_are_those_of_builder(built: Checkout, plain: str) -> None:
    """Except those that `builder` sets during the build."""
    form = "{{json .Config.Labels}}"
    expected, actual = (
        json.loads(built.docker("image", "inspect", "--format", form, name)) for name in (built.references()[0], plain)
    )
    build_labels = {name: expected.pop(name) for name in settings.built_labels("", "")}
    assert build_labels["gpu-images.plan"].startswith("sha256:")
    assert expected == actual


def test_files_are_those_of_builder(built: Checkout, plain: str) -> None:
    expected, actual = tree(built, built.references()[0]), tree(built, plain)
    assert "opt/venv/bin/tinyframe" in expected
    # Only the builder's layers are eStargz.
    for name in RESERVED:
        del expected[name]
    assert {name: (expected.get(name), actual.get(name)) for name in expected.keys() ^ actual.keys()} == {}
    assert {name: (expected[name], actual[name]) for name in expected if expected[name] != actual[name]} == {}


def test_it_runs(built: Checkout, plain: str) -> None:
    assert built.docker("run", "--rm", plain, "tinyframe") == built.release
