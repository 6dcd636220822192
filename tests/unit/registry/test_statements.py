"""SBOM and provenance: what an image consists of, and what it was made from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from builder.layers.blobs import CONFIG_TYPE, MANIFEST_TYPE, Descriptor
from builder.layers.oci import Image
from builder.lock import os_lock
from builder.lock.os_lock import OsLock
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.registry import statements
from builder.registry.statements import Origin

NAME = "registry.example.test/team/quartz-cuda"
CELL = "qz-0.5-cu129-py311-board"
MANIFEST = Descriptor(media_type=MANIFEST_TYPE, digest="sha256:" + "a" * 64, size=1)
IMAGE = Image(
    config=Descriptor(media_type=CONFIG_TYPE, digest="sha256:" + "b" * 64, size=1),
    manifest=MANIFEST,
    layers=(),
    labels={"org.opencontainers.image.created": "2026-11-16T10:17:40Z"},
)


@pytest.fixture
def planned(tiny: Project) -> PlannedImage:
    [image] = plan.make_locked(tiny, tiny.select([CELL])).images
    return image


@pytest.fixture
def system(tiny: Project, planned: PlannedImage) -> OsLock:
    lock = os_lock.read(tiny.root, planned.system)
    assert lock
    return lock


def test_the_sbom_has_every_wheel_and_every_debian_package(planned: PlannedImage, system: OsLock) -> None:
    data = json.loads(statements.sbom(planned, NAME, IMAGE, system))
    assert (data["bomFormat"], data["specVersion"]) == ("CycloneDX", "1.6")
    subject = data["metadata"]["component"]
    assert (subject["name"], subject["version"], subject["type"]) == (NAME, MANIFEST.digest, "container")
    assert subject["purl"].startswith("pkg:oci/quartz-cuda@sha256")
    assert data["metadata"]["timestamp"].startswith("2026-11-16T10:17:40")
    hashes = {component["purl"]: component["hashes"][0]["content"] for component in data["components"]}
    wheels = {f"pkg:pypi/{wheel.name}@{wheel.version}": wheel.sha256 for wheel in planned.wheels}
    packages = {
        f"pkg:deb/debian/{each.name}@{each.version}?arch={each.architecture}&distro={system.debian}": each.sha256
        for each in system.packages
    }
    assert hashes == wheels | packages
    assert wheels
    assert packages


def test_the_sbom_names_the_release_of_debian(planned: PlannedImage, system: OsLock) -> None:
    """Scanners ignore Debian packages without it."""
    base = replace(system.packages[0], name="base-files", version="12.4+deb12u15")
    data = json.loads(statements.sbom(planned, NAME, IMAGE, replace(system, packages=(*system.packages, base))))
    [debian] = [each for each in data["components"] if each["type"] == "operating-system"]
    assert (debian["name"], debian["version"]) == ("debian", "12")


def test_the_statements_of_an_image_are_the_same_everywhere(planned: PlannedImage, system: OsLock) -> None:
    assert statements.sbom(planned, NAME, IMAGE, system) == statements.sbom(planned, NAME, IMAGE, system)
    other = replace(IMAGE, manifest=replace(MANIFEST, digest="sha256:" + "c" * 64))
    assert statements.sbom(planned, NAME, other, system) != statements.sbom(planned, NAME, IMAGE, system)


@pytest.mark.parametrize(("revision", "commit"), [("f" * 40, "f" * 40), ("f" * 40 + "+changes", ""), ("", "")], ids=str)
def test_the_provenance(planned: PlannedImage, system: OsLock, revision: str, commit: str) -> None:
    address = "https://example.test/org/images"
    predicate: dict[str, Any] = json.loads(
        statements.provenance(planned, IMAGE, system, Origin(source=address, revision=revision, stamp="20261122"))
    )
    definition = predicate["buildDefinition"]
    assert definition["externalParameters"] == {"cell": CELL, "revision": revision}
    assert definition["internalParameters"]["plan"] == planned.digest
    uris = {each["uri"]: each["digest"] for each in definition["resolvedDependencies"]}
    assert uris.get(f"git+{address}", {}).get("gitCommit", "") == commit
    assert len(uris) == len(planned.wheels) + len(system.packages) + bool(commit)
    assert predicate["runDetails"]["metadata"]["invocationId"] == "release-20261122"
