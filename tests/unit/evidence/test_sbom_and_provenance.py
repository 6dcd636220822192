"""SBOM and provenance: what an image consists of, and what it was made from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from packageurl import PackageURL

from builder.debian.os_lock import DebianPackage
from builder.evidence import sbom_and_provenance
from builder.layers.oci import CONFIG_TYPE, MANIFEST_TYPE, Descriptor, Image, Manifest
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage
from tests.fakes.locks import python_lock_of

NAME = "registry.example.test/team/quartz-cuda"
CELL = "qz-0.5-cu129-py311-board"
MANIFEST = Manifest(media_type=MANIFEST_TYPE, digest="sha256:" + "a" * 64, content=b"{}")
IMAGE = Image(
    config=Descriptor(media_type=CONFIG_TYPE, digest="sha256:" + "b" * 64, size=1),
    manifest=MANIFEST,
    layers=(),
    labels={"org.opencontainers.image.created": "2026-11-16T10:17:40Z"},
)


@pytest.fixture
def planned(tiny: Project) -> PlannedImage:
    [image] = plan.make_locked_plan(tiny, tiny.select([CELL])).images
    return image


def with_packages(planned: PlannedImage, *packages: DebianPackage) -> PlannedImage:
    return replace(planned, os_lock=replace(planned.os_lock, packages=packages))


def test_the_sbom_has_every_wheel_and_every_debian_package(planned: PlannedImage) -> None:
    data = json.loads(sbom_and_provenance.sbom(planned, NAME, IMAGE))
    assert (data["bomFormat"], data["specVersion"]) == ("CycloneDX", "1.6")
    subject = data["metadata"]["component"]
    assert (subject["name"], subject["version"], subject["type"]) == (NAME, MANIFEST.digest, "container")
    assert subject["purl"].startswith("pkg:oci/quartz-cuda@sha256")
    assert data["metadata"]["timestamp"].startswith("2026-11-16T10:17:40")
    hashes = {component["purl"]: component["hashes"][0]["content"] for component in data["components"]}
    wheels = {f"pkg:pypi/{wheel.name}@{wheel.version}": wheel.sha256 for wheel in planned.wheels}
    packages = {
        f"pkg:deb/debian/{each.name}@{each.version}?arch={each.architecture}&distro=debian-newbird": each.sha256
        for each in planned.os_lock.packages
    }
    assert hashes == wheels | packages
    assert wheels
    assert packages


@pytest.mark.parametrize(
    ("text", "license_"),
    [
        ("MIT OR Apache-2.0", {"expression": "MIT OR Apache-2.0"}),
        ("BSD-3-Clause", {"license": {"id": "BSD-3-Clause"}}),
        ("OSI Approved :: x", {"license": {"name": "OSI Approved :: x"}}),
    ],
)
def test_the_sbom_has_licences_and_suppliers_of_wheels(planned: PlannedImage, text: str, license_: Any) -> None:
    [wheel, *others] = planned.wheels
    planned = replace(planned, wheels=(replace(wheel, license=text, supplier="The team"), *others))
    data = json.loads(sbom_and_provenance.sbom(planned, NAME, IMAGE))
    [tool] = data["metadata"]["tools"]["components"]
    assert tool["name"] == "gpu-images"
    described = [each for each in data["components"] if {"licenses", "supplier"} & each.keys()]
    assert [(each["name"], each["licenses"], each["supplier"]) for each in described] == [
        (wheel.name, [license_], {"name": "The team"})
    ]


def test_uvs_build_of_python_has_its_hash_in_sbom_and_provenance(planned: PlannedImage) -> None:
    python = python_lock_of("3.11.15")
    image = replace(planned, uv=python.release, locked_python=python)
    purl = "pkg:generic/python@3.11.15?distribution=python-build-standalone"
    data = json.loads(sbom_and_provenance.sbom(image, NAME, IMAGE))
    [component] = [each for each in data["components"] if each.get("purl") == purl]
    assert [each["content"] for each in component["hashes"]] == [python.sha256]
    statement = json.loads(sbom_and_provenance.provenance(image, source="", revision=""))
    dependency = {"uri": purl, "digest": {"sha256": python.sha256}}
    assert dependency in statement["buildDefinition"]["resolvedDependencies"]


def test_the_sbom_names_source_packages_as_scanners_read_them(planned: PlannedImage) -> None:
    """Debian's advisories are by release and source package. grype reads the purl, trivy the properties."""
    first, second, third = (
        replace(planned.os_lock.packages[0], name=name, version=version, source=source)
        for name, version, source in (
            ("base-files", "12.4+deb12u15", ""),
            ("libssl3", "3.0.17-1~deb12u2", "openssl"),
            ("libss2", "1.47.0-2+b2", "e2fsprogs (1.47.0-2)"),
        )
    )
    data = json.loads(sbom_and_provenance.sbom(with_packages(planned, first, second, third), NAME, IMAGE))
    [debian] = [each for each in data["components"] if each["type"] == "operating-system"]
    assert (debian["name"], debian["version"]) == ("debian", "12"), "without it, scanners ignore Debian packages"
    components = {each["name"]: each for each in data["components"] if each.get("purl", "").startswith("pkg:deb/")}
    qualifiers = {name: dict(PackageURL.from_string(each["purl"]).qualifiers) for name, each in components.items()}
    common = {"arch": "amd64", "distro": "debian-12"}
    assert qualifiers == {
        "base-files": common,
        "libssl3": common | {"upstream": "openssl"},
        "libss2": common | {"upstream": "e2fsprogs@1.47.0-2"},
    }
    properties = {
        name: {each["name"]: each["value"] for each in component.get("properties", [])}
        for name, component in components.items()
    }
    prefix = "aquasecurity:trivy:Src"
    assert properties == {
        "base-files": {},
        "libssl3": {f"{prefix}Name": "openssl", f"{prefix}Version": "3.0.17-1~deb12u2"},
        "libss2": {f"{prefix}Name": "e2fsprogs", f"{prefix}Version": "1.47.0-2"},
    }


def test_the_statements_of_an_image_are_the_same_everywhere(planned: PlannedImage) -> None:
    assert sbom_and_provenance.sbom(planned, NAME, IMAGE) == sbom_and_provenance.sbom(planned, NAME, IMAGE)
    other = replace(IMAGE, manifest=replace(MANIFEST, digest="sha256:" + "c" * 64))
    assert sbom_and_provenance.sbom(planned, NAME, other) != sbom_and_provenance.sbom(planned, NAME, IMAGE)


@pytest.mark.parametrize(("revision", "commit"), [("f" * 40, "f" * 40), ("f" * 40 + "+changes", ""), ("", "")], ids=str)
def test_the_provenance(planned: PlannedImage, revision: str, commit: str) -> None:
    address = "https://example.test/org/images"
    predicate: dict[str, Any] = json.loads(sbom_and_provenance.provenance(planned, source=address, revision=revision))
    definition = predicate["buildDefinition"]
    assert definition["externalParameters"] == {"cell": CELL, "revision": revision}
    assert definition["internalParameters"]["plan"] == planned.plan
    uris = {each["uri"]: each["digest"] for each in definition["resolvedDependencies"]}
    assert uris.get(f"git+{address}", {}).get("gitCommit", "") == commit
    assert len(uris) == len(planned.wheels) + len(planned.os_lock.packages) + bool(commit)
    unnamed = json.loads(sbom_and_provenance.provenance(planned, source="", revision="f" * 40))
    assert unnamed["buildDefinition"]["resolvedDependencies"][0] == {"digest": {"gitCommit": "f" * 40}}
