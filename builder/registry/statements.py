"""What a release says about an image: its packages (SBOM, CycloneDX 1.6) and how it was made (provenance, SLSA 1.0).

The SBOM is a pure function of the plan, the lock of the operating system and the image, so the same image has the same
SBOM on every machine.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from builder.layers.oci import Image
from builder.lock.os_lock import OsLock
from builder.matrix.tags import BASE_LABEL, OCI
from builder.plan.plan import PlannedImage

SBOM_TYPE = "application/vnd.cyclonedx+json"
# The kinds of predicates, as cosign names them.
SBOM, PROVENANCE = "cyclonedx", "slsaprovenance1"
BUILD_TYPE = "urn:gpu-images:assemble:1"
BUILDER = "urn:gpu-images:builder"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The address of the repository, the commit (with `+changes` if files differed from it), and the release."""

    source: str
    revision: str
    stamp: str


def sbom(planned: PlannedImage, name: str, image: Image, system: OsLock) -> bytes:
    """The wheels and Debian packages of an image, each with its SHA-256. `name` is that of its repository."""
    digest = image.manifest.digest
    subject = Component(
        name=name,
        version=digest,
        type=ComponentType.CONTAINER,
        bom_ref=digest,
        purl=PackageURL("oci", None, name.rpartition("/")[2], digest, {"repository_url": name}),
        properties=[Property(name="gpu-images:cell", value=planned.id)],
    )
    components = [*_debian(system), *_interpreter(planned), *_wheels(planned), *_debian_packages(system)]
    bom = Bom(
        components=components,
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, digest),
        metadata=BomMetaData(
            component=subject,
            timestamp=datetime.fromisoformat(image.labels.get(f"{OCI}.created", "1970-01-01T00:00:00Z")),
        ),
    )
    bom.register_dependency(subject, components)
    return JsonV1Dot6(bom).output_as_string().encode()


def _debian(system: OsLock) -> Iterator[Component]:
    """The operating system with its number: without it, scanners may ignore all Debian packages."""
    if base := system.versions.get("base-files"):  # its version begins with the number of the release
        release = base.partition(".")[0]
        yield Component(
            name="debian", version=release, type=ComponentType.OPERATING_SYSTEM, bom_ref=f"debian-{release}"
        )


def _interpreter(planned: PlannedImage) -> Iterator[Component]:
    """uv's own build of Python, if the image has one instead of Debian's."""
    if planned.uv:
        purl = PackageURL("generic", None, "python", planned.uv, {"distribution": "python-build-standalone"})
        yield Component(name="python", version=planned.uv, purl=purl, bom_ref=str(purl))


def _wheels(planned: PlannedImage) -> Iterator[Component]:
    for sha256, wheel in {wheel.sha256: wheel for wheel in planned.wheels}.items():
        yield _component("pypi", wheel.name, wheel.version, sha256)


def _debian_packages(system: OsLock) -> Iterator[Component]:
    for package in system.packages:
        qualifiers = {"arch": package.architecture, "distro": system.debian}
        yield _component("deb", package.name, package.version, package.sha256, "debian", qualifiers)


def _component(
    kind: str,
    name: str,
    version: str,
    sha256: str,
    namespace: str | None = None,
    qualifiers: dict[str, str] | None = None,
) -> Component:
    purl = PackageURL(kind, namespace, name, version, qualifiers)
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=sha256)]
    return Component(name=name, version=version, purl=purl, bom_ref=f"{purl}#{sha256[:12]}", hashes=hashes)


def provenance(planned: PlannedImage, image: Image, system: OsLock, origin: Origin) -> bytes:
    """A predicate: from which commit, plan, base and packages an image was made.

    Source: SLSA specification, "Provenance", version 1.
    """
    dependencies: list[dict[str, Any]] = []
    if origin.revision and "+" not in origin.revision:
        uri = f"git+{origin.source}" if origin.source else "git"
        dependencies.append({"uri": uri, "digest": {"gitCommit": origin.revision}})
    for component in (*_interpreter(planned), *_wheels(planned), *_debian_packages(system)):
        dependency: dict[str, Any] = {"uri": str(component.purl)}
        if component.hashes:
            dependency["digest"] = {"sha256": next(iter(component.hashes)).content}
        dependencies.append(dependency)
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"cell": planned.id, "revision": origin.revision},
            "internalParameters": {
                "plan": planned.digest,
                "operatingSystem": planned.os,
                "base": image.labels.get(BASE_LABEL, ""),
            },
            "resolvedDependencies": dependencies,
        },
        "runDetails": {"builder": {"id": BUILDER}, "metadata": {"invocationId": f"release-{origin.stamp}"}},
    }
    return json.dumps(predicate, indent=1).encode()
