"""What a release says about an image: its packages (SBOM, CycloneDX 1.6) and how it was made (provenance, SLSA 1.0).

Both are pure functions of the plan, the lock of the operating system and the image's labels, so the same image has the
same statements on every machine.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from builder.layers.oci import Image
from builder.lock.os_lock import OsLock
from builder.matrix.tags import OCI
from builder.plan.plan import PlannedImage

SBOM_TYPE = "application/vnd.cyclonedx+json"
PROVENANCE_TYPE = "application/vnd.in-toto.provenance+json"
# The kinds of predicates, as cosign names them.
SBOM, PROVENANCE = "cyclonedx", "slsaprovenance1"
BUILD_TYPE = "urn:gpu-images:assemble:1"
BUILDER = "urn:gpu-images:builder"


def sbom(planned: PlannedImage, image: Image, system: OsLock) -> bytes:
    """The wheels and Debian packages of an image, each with its SHA-256."""
    digest = image.manifest.digest
    subject = Component(
        name=planned.references[0].rpartition(":")[0],
        version=digest,
        type=ComponentType.CONTAINER,
        bom_ref=digest,
        purl=PackageURL("oci", name=planned.references[0].rpartition(":")[0].rpartition("/")[2], version=digest),
        properties=[Property(name="gpu-images:cell", value=planned.id)],
    )
    components = [*_wheels(planned), *_debian_packages(system)]
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


def provenance(planned: PlannedImage, system: OsLock, *, source: str, revision: str, stamp: str) -> bytes:
    """A predicate: from which commit, plan and packages an image was made. `source` is the address of the repository.

    Source: SLSA specification, "Provenance", version 1.
    """
    commit = revision.partition("+")[0]
    dependencies: list[dict[str, Any]] = []
    if commit:
        dependencies.append({"uri": f"git+{source}" if source else "git", "digest": {"gitCommit": commit}})
    for component in (*_wheels(planned), *_debian_packages(system)):
        sha256 = next(iter(component.hashes)).content
        dependencies.append({"uri": str(component.purl), "digest": {"sha256": sha256}})
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"cell": planned.id, "revision": revision},
            "internalParameters": {"plan": planned.digest, "operatingSystem": planned.os},
            "resolvedDependencies": dependencies,
        },
        "runDetails": {"builder": {"id": BUILDER}, "metadata": {"invocationId": f"release-{stamp}"}},
    }
    return json.dumps(predicate, indent=1).encode()
