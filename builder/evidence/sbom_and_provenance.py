"""The statements of a release about an image: packages (SBOM, CycloneDX 1.6) and origin (provenance, SLSA 1.0).

The SBOM is a pure function of the plan, the lock of the operating system and the image, so the same image has the same
SBOM on every machine.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.contact import OrganizationalEntity
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from builder import __version__
from builder.debian.control_files import NO_SOURCE, InstalledPackage, SourcePackage
from builder.debian.os_lock import OsLock
from builder.index.wheels import LockedWheel
from builder.layers.oci import Image
from builder.matrix.tags import OCI, PARENT_CELL_LABEL
from builder.plan.plan import PlannedImage

SBOM_TYPE = "application/vnd.cyclonedx+json"
# The kinds of predicates, as cosign names them.
SBOM, PROVENANCE = "cyclonedx", "slsaprovenance1"
BUILD_TYPE, ADD_TYPE = "urn:gpu-images:assemble:1", "urn:gpu-images:add:1"
BUILDER = "urn:gpu-images:builder"
# The qualifier of a purl that names the source package, as syft writes it and grype reads it: NAME or NAME@VERSION.
_UPSTREAM = "upstream"
SOURCE_NAMES = ("aquasecurity:trivy:SrcName", "aquasecurity:trivy:SrcVersion")  # properties, for trivy


def sbom(planned: PlannedImage, name: str, image: Image) -> bytes:
    """The wheels and Debian packages of an image with their SHA-256. `name` is the name of its repository."""
    debian, wheels = _debian_packages(planned.os_lock), _wheels(planned.wheels)
    release = _release_number(planned.os_lock.versions)
    return _sbom(name, image, planned.id, [*_debian(release), *_archives(planned), *wheels, *debian])


def sbom_of_additions(
    name: str,
    image: Image,
    kept: Iterable[LockedWheel],
    added: Iterable[LockedWheel],
    debian: Iterable[InstalledPackage],
) -> bytes:
    """The SBOM of an image with additions; `kept` are the wheels of its parent, which also has the Debian packages.

    The SHA-256 of Debian packages is not known: dpkg does not record it.
    """
    packages = sorted(debian)
    release = _release_number({package.name: package.version for package in packages})
    of_debian = [
        _debian_package(package.name, package.version, package.source, f"debian-{release}") for package in packages
    ]
    wheels = [*_wheels(kept), *_wheels(added)]
    return _sbom(name, image, image.labels.get(PARENT_CELL_LABEL, ""), [*_debian(release), *wheels, *of_debian])


def _sbom(name: str, image: Image, cell: str, components: Iterable[Component]) -> bytes:
    digest, listed = image.manifest.digest, list(components)
    subject = Component(
        name=name,
        version=digest,
        type=ComponentType.CONTAINER,
        bom_ref=digest,
        purl=PackageURL("oci", None, name.rpartition("/")[2], digest, {"repository_url": name}),
        properties=[Property(name="gpu-images:cell", value=cell)],
    )
    bom = Bom(
        components=listed,
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, digest),
        metadata=BomMetaData(
            tools=ToolRepository(
                components=[Component(name="gpu-images", version=__version__, type=ComponentType.APPLICATION)]
            ),
            component=subject,
            timestamp=datetime.fromisoformat(image.labels.get(f"{OCI}.created", "1970-01-01T00:00:00Z")),
        ),
    )
    bom.register_dependency(subject, listed)
    return JsonV1Dot6(bom).output_as_string().encode()


def _debian(release: str) -> Iterator[Component]:
    """The operating system with its number: without it, scanners may ignore all Debian packages."""
    if release:
        yield Component(
            name="debian", version=release, type=ComponentType.OPERATING_SYSTEM, bom_ref=f"debian-{release}"
        )


def _release_number(versions: Mapping[str, str]) -> str:
    """The number of the Debian release, e.g. 12; empty if `base-files` is not among the packages."""
    return versions.get("base-files", "").partition(".")[0]


def _archives(planned: PlannedImage) -> Iterator[Component]:
    """uv's own build of Python, if the image has one instead of Debian's."""
    if planned.locked_python:
        purl = PackageURL("generic", None, "python", planned.uv, {"distribution": "python-build-standalone"})
        yield _component(purl, planned.locked_python.sha256)


def _wheels(wheels: Iterable[LockedWheel]) -> Iterator[Component]:
    for sha256, wheel in {wheel.sha256: wheel for wheel in wheels}.items():
        component = _component(PackageURL("pypi", None, wheel.name, wheel.version), sha256)
        if wheel.license:
            component.licenses.add(LicenseFactory().make_from_string(wheel.license))
        if wheel.supplier:
            component.supplier = OrganizationalEntity(name=wheel.supplier)
        yield component


def _debian_packages(system: OsLock) -> Iterator[Component]:
    release = f"debian-{_release_number(system.versions) or system.debian}"
    for package in system.packages:
        source = package.source_package if package.source else NO_SOURCE
        yield _debian_package(package.name, package.version, source, release, package.architecture, package.sha256)


def _debian_package(
    name: str, version: str, source: SourcePackage, release: str, architecture: str = "", sha256: str = ""
) -> Component:
    """The component of a Debian package.

    A source package with another name or version is in the purl (for grype) and in properties (for trivy).
    """
    qualifiers = ({"arch": architecture} if architecture else {}) | {"distro": release}
    properties = []
    if source not in (NO_SOURCE, (name, version)):
        qualifiers[_UPSTREAM] = f"{source.name}{'' if source.version == version else f'@{source.version}'}"
        # trivy ignores the qualifier. Without both properties, it takes the binary package's name or version.
        properties = [Property(name=name, value=value) for name, value in zip(SOURCE_NAMES, source, strict=True)]
    return _component(PackageURL("deb", "debian", name, version, qualifiers), sha256, properties)


def _component(purl: PackageURL, sha256: str, properties: Iterable[Property] = ()) -> Component:
    return Component(
        name=purl.name,
        version=purl.version,
        purl=purl,
        bom_ref=f"{purl}#{sha256[:12]}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else [],
        properties=properties,
    )


def provenance(planned: PlannedImage, *, source: str, revision: str) -> bytes:
    """A predicate that names the commit, the plan and the packages that an image was made from.

    `source` is the address of the repository, `revision` the commit (with `+changes` if files differed from it).
    Source: SLSA specification, "Provenance", version 1.
    """
    dependencies: list[dict[str, Any]] = []
    if revision and "+" not in revision:
        dependencies.append(({"uri": f"git+{source}"} if source else {}) | {"digest": {"gitCommit": revision}})
    components = (*_archives(planned), *_wheels(planned.wheels), *_debian_packages(planned.os_lock))
    return _provenance(
        BUILD_TYPE,
        {"cell": planned.id, "revision": revision},
        {"plan": planned.plan, "operatingSystem": planned.os_inputs},
        [*dependencies, *map(_dependency, components)],
    )


def provenance_of_additions(request: Any, parent: str, digest: str, wheels: Iterable[LockedWheel]) -> bytes:
    """A predicate: what `builder add` put on the image `parent`, which has this digest."""
    dependencies = [{"uri": f"oci:{parent}", "digest": {"sha256": digest.removeprefix("sha256:")}}]
    return _provenance(ADD_TYPE, {"request": request}, {}, [*dependencies, *map(_dependency, _wheels(wheels))])


def _dependency(component: Component) -> dict[str, Any]:
    sha256 = next((digest.content for digest in component.hashes), "")
    return {"uri": str(component.purl), **({"digest": {"sha256": sha256}} if sha256 else {})}


def _provenance(build: str, external: Any, internal: Any, dependencies: list[dict[str, Any]]) -> bytes:
    predicate = {
        "buildDefinition": {
            "buildType": build,
            "externalParameters": external,
            "internalParameters": internal,
            "resolvedDependencies": dependencies,
        },
        # Empty: cosign 2 adds `metadata` and renames its fields, so the attached statement would differ from ours.
        "runDetails": {"builder": {"id": BUILDER}, "metadata": {}},
    }
    return json.dumps(predicate, indent=1).encode()
