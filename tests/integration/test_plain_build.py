"""A rendered Dockerfile with plain `docker build`, as templates/host/README.md says: the same files as ours."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile

import pytest

from builder import host
from tests.integration.checkout import PLAIN, TIMEOUT_S, Checkout

Entry = tuple[str, int, int, int, int, str, str]


def tree(checkout: Checkout, image: str) -> dict[str, Entry]:
    """Path -> kind, mode, owner, group, size, link and digest of the content, of everything in an image."""
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
    """Id of the image that docker itself builds; only its packages from Debian may come from the cache."""
    base = built.builder("base", "bookworm").splitlines()[-1]
    lent = host.read(built.environ).files("bookworm")
    for name, content in lent.items():
        (built.root / name).write_bytes(content)
    assert "templates/host/index.env" in lent
    name = f"{built.namespace}/plain"
    try:
        done = subprocess.run(
            [
                "docker", "build", "--quiet", "--network", "host", "--build-arg", f"BASE={base}", "--tag", name,
                "--no-cache-filter", "image", "--file", f"images/{PLAIN}/Dockerfile", ".",
            ],
            cwd=built.root, env={**os.environ, "DOCKER_BUILDKIT": "1"}, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    finally:
        for path in lent:
            (built.root / path).unlink()
    assert done.returncode == 0, done.stderr
    image = built.docker("image", "inspect", "--format", "{{.Id}}", name)
    built.docker("tag", image, f"{name}:kept")
    return image


def test_labels_are_those_of_our_build(built: Checkout, plain: str) -> None:
    form = '{{index .Config.Labels "gpu-images.plan"}}'
    ours = built.docker("image", "inspect", "--format", form, built.references()[0])
    assert ours.startswith("sha256:")
    assert built.docker("image", "inspect", "--format", form, plain) == ours


def test_files_are_those_of_our_build(built: Checkout, plain: str) -> None:
    ours, theirs = tree(built, built.references()[0]), tree(built, plain)
    assert "opt/venv/bin/tinyframe" in ours
    assert {name: (ours.get(name), theirs.get(name)) for name in ours.keys() ^ theirs.keys()} == {}
    assert {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]} == {}


def test_it_runs(built: Checkout, plain: str) -> None:
    assert built.docker("run", "--rm", plain, "tinyframe") == built.release
