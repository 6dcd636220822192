"""Checks the signature, test results, SBOM and provenance of a released image, without its checkout.

Only documents that a trusted signer signed count. The SBOM is compared with the packages that the image's own files
record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from packageurl import PackageURL
from pydantic import AliasPath, BaseModel, Field

from builder.common.errors import ImageTestError, VerifyError
from builder.common.files import short_digest
from builder.common.reference import ImageRef
from builder.common.text import listed
from builder.debian.control_files import NO_SOURCE, SourcePackage
from builder.evidence import reports, sbom_and_provenance, signing
from builder.evidence.results import Requirement
from builder.evidence.signing import Trust
from builder.layers import oci
from builder.layers.installed import Installed, InstalledPackage, python_package
from builder.matrix import tags
from builder.matrix.tags import ADDED_LABEL, PARENT_LABEL, PLAN_LABEL
from builder.release.image_sources import RegistrySource
from builder.release.verify import Finding

SHOWN = 5  # packages that differ
NO_STATEMENT = "no statement of a trusted signer"


class _Property(BaseModel, frozen=True):
    name: str = Field("", max_length=1000)
    value: str = Field("", max_length=10_000)


class _Hash(BaseModel, frozen=True):
    alg: str = Field("", max_length=100)
    content: str = Field("", max_length=1000)


class _SbomComponent(BaseModel, frozen=True):
    purl: str = Field("", max_length=1000, pattern=r"^pkg:[a-z]+/")
    name: str = Field(max_length=300)
    version: str = Field(max_length=300)
    hashes: tuple[_Hash, ...] = ()
    properties: tuple[_Property, ...] = ()

    @property
    def values(self) -> dict[str, str]:
        """The properties by name."""
        return {each.name: each.value for each in self.properties}

    @property
    def sha256(self) -> str:
        return next((each.content for each in self.hashes if each.alg == "SHA-256"), "")

    @property
    def is_built(self) -> bool:
        """True for a wheel that was built from source. Its purl has the type `generic`, or `pypi` for an sdist."""
        return sbom_and_provenance.SOURCE_PROPERTY in self.values

    @property
    def is_python_package(self) -> bool:
        return self.purl.startswith("pkg:pypi/") or self.is_built


class _SbomPackages(BaseModel, frozen=True):
    components: tuple[_SbomComponent, ...]


class _Provenance(BaseModel, frozen=True):
    """The plan of an image, or the SHA-256 of the parent that `builder add` made it of, whose image has no plan."""

    plan: str = Field("", validation_alias=AliasPath("buildDefinition", "internalParameters", "plan"))
    parent: str = Field(
        "", validation_alias=AliasPath("buildDefinition", "resolvedDependencies", 0, "digest", "sha256")
    )
    revision: str = Field("", validation_alias=AliasPath("buildDefinition", "externalParameters", "revision"))


@dataclass(frozen=True, kw_only=True)
class Attestations:
    """Signatures and statements of trusted signers about an image; `reference` is the name that the user gave."""

    source: RegistrySource
    reference: ImageRef
    trust: Trust

    def signatures(self) -> Iterator[Finding]:
        """The signatures of the index that names the image, if there is one, and of the image as its cell.

        Each must be for the tag of the reference.
        """
        name = self.reference.repository.rpartition("/")[2]
        if self.source.index:
            yield self._signature("signature of the index", self.source.index, {"image": name})
        yield self._signature("signature", self._digest, {"cell": self.source.cell, "image": name})

    def _signature(self, part: str, digest: str, annotations: Mapping[str, str]) -> Finding:
        signer, signatures = signing.signer_of_manifest(self.source.repository, digest, annotations, self.trust)
        if not signer:
            as_cell = f"as cell {annotations['cell'][:100]!a} of" if "cell" in annotations else "as"
            detail = f"no trusted signer signed it {as_cell} {annotations['image']}"
        elif not any(_is_for(signature, self.reference.tag) for signature in signatures):
            signed = sorted({tag for each in signatures for tag in (each.get("tag"), each.get("release")) if tag})
            detail = f"signed for {', '.join(signed) or 'no tag'}, not for {self.reference.tag}"
        else:
            return Finding(layer=part, digest=digest, state="signed", detail=f"by {signer}")
        return Finding(layer=part, digest=digest, state="different", detail=detail)

    def indexes(self) -> dict[str, str]:
        """The names of the indexes of wheels, by SHA-256, from the signed SBOMs; empty for the default index.

        A name in any of them takes precedence. Wheels of an SBOM that an earlier builder wrote are left out: it named
        no indexes, and a private package must not be requested from the default one.
        """
        indexes: dict[str, str] = {}
        for sbom in self._sboms:
            with suppress(VerifyError):  # the finding about the SBOM reports it
                for component in _components(sbom):
                    name = component.values.get(sbom_and_provenance.INDEX_PROPERTY)
                    if name and component.is_python_package and not component.is_built and component.sha256:
                        name = "" if name == sbom_and_provenance.DEFAULT_INDEX else name
                        indexes[component.sha256] = name or indexes.get(component.sha256, "")
        return indexes

    @property
    def _digest(self) -> str:
        return self.source.image.manifest.digest

    def _statements(self, kind: str) -> list[bytes]:
        return signing.statements_of_image(self.source.repository, self._digest, kind, self.trust)

    @cached_property
    def _sboms(self) -> list[bytes]:
        return self._statements(sbom_and_provenance.SBOM)

    def _finding(self, name: str, detail: str, state: Literal["signed", "different"] = "different") -> Finding:
        return Finding(layer=name, digest=self._digest, state=state, detail=detail)

    def test_results(self) -> Finding:
        cell, plan = self.source.cell, self.source.image.labels.get(PLAN_LABEL, "")
        requirement = Requirement(image=self._digest, cell=cell, plan=plan)
        predicates = self._statements(reports.TEST_RESULT)
        if not predicates and ADDED_LABEL in self.source.image.labels:  # its tests are optional
            return self._finding("test results", "not tested: `builder add --test` would do it", "signed")
        if not predicates:
            return self._finding("test results", NO_STATEMENT)
        coverage = reports.stated_coverage(predicates, requirement)
        try:
            coverage.require_pass(cell)
        except ImageTestError as error:
            return self._finding("test results", str(error).removeprefix(f"{cell}: "))
        return self._finding("test results", f"{coverage.tests_status}, gpu: {coverage.gpu_status}", "signed")

    def sbom(self, installed: Installed | None) -> Finding:
        """Compares the signed SBOM with the packages that the layers record, unless `installed` is None."""
        reason = NO_STATEMENT
        for content in self._sboms:  # a later release may have attached a corrected one
            try:
                stated = _packages(content)
            except VerifyError as error:
                reason = str(error)
                continue
            if installed is None:
                return self._finding(
                    "SBOM", f"{len(stated)} packages, not compared with the files of the image", "signed"
                )
            present = installed.packages
            lines = [
                f"{problem}: {_names(packages)}"
                for problem, packages in {
                    "not in the image": _without_sources(stated) - _without_sources(present),
                    "not in the SBOM": _without_sources(present) - _without_sources(stated),
                    "different source package in the image": _other_sources(stated, present),
                }.items()
                if packages
            ]
            if not lines:
                return self._finding("SBOM", f"{len(stated)} packages, the same as in the files of the image", "signed")
            reason = "; ".join(lines)
        return self._finding("SBOM", reason)

    def provenance(self) -> Finding:
        reason, labels = NO_STATEMENT, self.source.image.labels
        parent = labels.get(PARENT_LABEL, "") if ADDED_LABEL in labels else ""
        for content in self._statements(sbom_and_provenance.PROVENANCE):
            try:
                provenance = oci.parse_document(_Provenance, content, "provenance", hint="")
            except VerifyError as error:
                reason = str(error)
                continue
            if parent and f"sha256:{provenance.parent}" == parent:
                return self._finding("provenance", f"parent {short_digest(parent)}", "signed")
            if not parent and provenance.plan == labels.get(PLAN_LABEL):
                revision = f"commit {provenance.revision[:60]}" if provenance.revision else "no commit"
                return self._finding("provenance", revision, "signed")
            reason = f"it is about another {'parent' if parent else 'plan'}"
        return self._finding("provenance", reason)


def _is_for(signature: Mapping[str, str], tag: str) -> bool:
    """True if a signature is for a tag; also for no tag, if the image is named by its digest."""
    if tags.is_stamp(tag.rpartition("-")[2]):
        return signature.get("release") == tag
    return not tag or tags.is_tag_of(tag, signature.get("tag", ""))


def _packages(sbom: bytes) -> set[InstalledPackage]:
    """The components with records in an image. Debian itself and uv's Python have none. Raises VerifyError."""
    return {_package(each) for each in _components(sbom) if each.is_python_package or each.purl.startswith("pkg:deb/")}


def _components(sbom: bytes) -> tuple[_SbomComponent, ...]:
    """The components of an SBOM. Raises VerifyError."""
    return oci.parse_document(_SbomPackages, sbom, "SBOM", hint="").components


def _package(component: _SbomComponent) -> InstalledPackage:
    """The package of a component.

    Raises VerifyError unless its purl and its properties, which scanners read, are about this package.
    """
    name, version = component.name, component.version
    try:
        purl = PackageURL.from_string(component.purl)
    except ValueError as error:
        raise VerifyError(f"invalid SBOM: {error}") from error
    if component.is_python_package:
        package, purl_package = python_package(name, version), python_package(purl.name, purl.version or "")
    else:
        package = InstalledPackage(
            "deb", name, version, sbom_and_provenance.source_package(purl) or SourcePackage(name, version)
        )
        purl_package = package._replace(name=purl.name, version=purl.version or "")
    if package != purl_package:
        raise VerifyError(f"invalid SBOM: {component.purl} is {name} {version}")
    if any(
        component.values.get(each, value) != value
        for each, value in zip(sbom_and_provenance.SOURCE_NAMES, package.source, strict=True)
    ):
        raise VerifyError(f"invalid SBOM: {component.purl} has properties of another source package")
    return package


def _without_sources(packages: set[InstalledPackage]) -> set[InstalledPackage]:
    return {package._replace(source=NO_SOURCE) for package in packages}


def _other_sources(listed: set[InstalledPackage], installed: set[InstalledPackage]) -> set[InstalledPackage]:
    """The listed packages that are installed with another source.

    Empty if the SBOM names no sources, as in earlier versions of builder.
    """
    if all(package.source in {(package.name, package.version), NO_SOURCE} for package in listed):
        return set()
    names = _without_sources(installed)
    return {package for package in listed - installed if package._replace(source=NO_SOURCE) in names}


def _names(packages: set[InstalledPackage]) -> str:
    names = [
        f"{package.name} {package.version}" + (f" (source: {' '.join(package.source)})" if package.source.name else "")
        for package in sorted(packages)
    ]
    return listed(names, SHOWN)
