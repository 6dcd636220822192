"""`builder prune` with a real registry. Without a signature, the results of this machine count."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from builder.registry import artifacts
from builder.registry.client import Repository
from builder.release.staging import TYPE
from tests.integration.checkout import EXTRA, PLAIN, Checkout, today
from tests.integration.registry import Server

PRUNE = ("prune", "--keep", "1")


@pytest.fixture
def ours(released: Checkout, server: Server) -> Checkout:
    """Two staged releases. The image of PLAIN is in both."""
    settings = f"registry: {server.address}\nstaging: {server.address}/staging"
    released.edit("matrix.yaml", 'registry: ""', settings)
    released.builder("stage")
    file = released.root / "templates/extra/files/etc/newer"
    file.parent.mkdir(parents=True)
    file.touch()
    released.builder("render")
    released.builder("images")
    released.builder("stage")
    return released


def tags(registry: Repository) -> dict[str, str | None]:
    return {tag: registry.digest_of(tag) for tag in registry.list_tags()}


def lines(output: str) -> list[tuple[str, ...]]:
    """The repositories of what is listed, with what it is."""
    return re.findall(r"^127\.0\.0\.1:[0-9]+/(\S+)@sha256:[0-9a-f]{64}  (.+)$", output, re.MULTILINE)


def test_an_old_release_is_removed_and_the_newest_still_works(ours: Checkout, server: Server, tmp_path: Path) -> None:
    staged, documents = server.repository("staging/ty-cuda"), server.repository("staging/releases")
    before, [old] = tags(staged), images_of(documents, today(), EXTRA)
    output = ours.builder(*PRUNE)
    assert tags(staged) == before, "without --delete, nothing is changed"
    assert "Run again with --delete" in output
    short = old.removeprefix("sha256:")[:12]
    assert lines(output) == [
        ("staging/releases", f"release-{today()}"),
        ("staging/ty-cuda", f"{EXTRA}  staged {today()}, not released"),
        *[("staging/ty-cuda", f"attached to {short}")] * 2,
    ]
    assert lines(ours.builder(*PRUNE, "--delete")) == lines(output)
    assert list(tags(documents)) == [f"release-{today()}.1"]
    assert {tag for tag, digest in before.items() if tag not in tags(staged)} == {
        old.replace(":", "-"), *(tag for tag, digest in before.items() if digest == old)
    }  # fmt: skip
    assert "nothing to delete" in ours.builder(*PRUNE, "--delete")

    ours.builder("release", "--allow-untested-gpu")
    ours.builder("stage", PLAIN)
    assert f"release-{today()}.2" in tags(documents), "a stamp is not used again"
    assert "nothing to delete" in ours.builder(*PRUNE), "public tags name images of the release before"


def images_of(documents: Repository, stamp: str, cell: str) -> list[str]:
    """The digests of a cell's images in a release."""
    release = artifacts.read_artifact(documents, f"release-{stamp}", TYPE) or {}
    return [image["digest"] for image in json.loads(release[TYPE])["images"] if image["cell"] == cell]
