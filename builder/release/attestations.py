"""Checks the signature, test results, SBOM and provenance of a released image, without its checkout.

Only documents that a trusted signer signed count. The SBOM is compared with the packages that the image's own files
record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import BinaryIO, Literal

from packageurl import PackageURL
from pydantic import AliasPath, BaseModel, Field

from builder.common.errors import ImageTestError, VerifyError
from builder.common.reference import ImageRef
from builder.common.text import listed
from builder.debian.control_files import NO_SOURCE, SourcePackage
from builder.evidence import reports, sbom_and_provenance, signing
from builder.evidence.results import Requirement
from builder.evidence.signing import Trust
from builder.layers import oci
from builder.layers.installed import Installed, InstalledPackage, python_package
from builder.layers.oci import Image
from builder.matrix import tags
from builder.matrix.tags import CELL_LABEL, PLAN_LABEL
from builder.registry.client import Repository
from builder.release import verify
from builder.release.verify import Check, Finding, ImageSource

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
        """Whether it is a wheel that was built from source. Its purl has the type `generic`, or `pypi` for an sdist."""
        return sbom_and_provenance.SOURCE_PROPERTY in self.values

    @property
    def is_python_package(self) -> bool:
        return self.purl.startswith("pkg:pypi/") or self.is_built


class _SbomPackages(BaseModel, frozen=True):
    components: tuple[_SbomComponent, ...]


class _Provenance(BaseModel, frozen=True):
    plan: str = Field(validation_alias=AliasPath("buildDefinition", "internalParameters", "plan"))
    revision: str = Field("", validation_alias=AliasPath("buildDefinition", "externalParameters", "revision"))


@dataclass(frozen=True, kw_only=True)
class Attestations:
    """The claims about an image in a registry. `reference` is the name that the user gave, `index` the digest of the
    index that names the image, empty without one.
    """

    registry: Repository
    reference: ImageRef
    image: Image
    trust: Trust
    index: str = ""
    _installed: Installed = field(default_factory=Installed)

    def signatures(self) -> Iterator[Finding]:
        """Whether a trusted signer signed the image as its cell, and for the tag of the reference; and first, the same
        for the index that names it.
        """
        cell, name = self.image.labels.get(CELL_LABEL, ""), self.reference.repository.rpartition("/")[2]
        if self.index:
            yield self._signature("signature of the index", self.index, {"image": name})
        yield self._signature("signature", self._digest, {"cell": cell, "image": name})

    def _signature(self, part: str, digest: str, annotations: Mapping[str, str]) -> Finding:
        signer, signatures = signing.signer_of_manifest(self.registry, digest, annotations, self.trust)
        if not signer:
            as_cell = f"as cell {annotations['cell'][:100]!a} of" if "cell" in annotations else "as"
            detail = f"no trusted signer signed it {as_cell} {annotations['image']}"
        elif not any(_is_for(signature, self.reference.tag) for signature in signatures):
            signed = sorted({tag for each in signatures for tag in (each.get("tag"), each.get("release")) if tag})
            detail = f"signed for {', '.join(signed) or 'no tag'}, not for {self.reference.tag}"
        else:
            return Finding(layer=part, digest=digest, state="signed", detail=f"by {signer}")
        return Finding(layer=part, digest=digest, state="different", detail=detail)

    @cached_property
    def _sboms(self) -> list[bytes]:
        return signing.statements_of_image(self.registry, self._digest, sbom_and_provenance.SBOM, self.trust)

    def indexes(self) -> dict[str, str]:
        """The names of the indexes of wheels, by SHA-256, from the signed SBOMs; empty for the default index.

        A name in any of them takes precedence. Wheels of an SBOM that an earlier builder wrote are left out: it named
        no indexes, and the default one must not be asked for a private package.
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

    def recording_source(self, source: ImageSource) -> ImageSource:
        """The image's source, which also reads the packages in layers that are opened. Open them in their order."""

        def open_layer(digest: str, size: int, read: Callable[[int], None]) -> BinaryIO | None:
            file = source.open_layer(digest, size, read)
            if file is not None:
                self._installed.add(file)
                file.seek(0)
            return file

        return dataclasses.replace(source, open_layer=open_layer)

    def attachments(self, *, has_read_layers: bool) -> Iterator[Finding]:
        """Test results, SBOM, provenance. `has_read_layers`: the SBOM is compared with the layers."""
        yield self._test_results()
        yield self._statement("SBOM", self._sboms, self._check_sbom if has_read_layers else _count_packages)
        provenance = signing.statements_of_image(
            self.registry, self._digest, sbom_and_provenance.PROVENANCE, self.trust
        )
        yield self._statement("provenance", provenance, self._check_provenance)

    @property
    def _digest(self) -> str:
        return self.image.manifest.digest

    def _finding(self, name: str, detail: str, state: Literal["signed", "different"] = "different") -> Finding:
        return Finding(layer=name, digest=self._digest, state=state, detail=detail)

    def _test_results(self) -> Finding:
        labels = self.image.labels
        cell = labels.get(CELL_LABEL, "")
        requirement = Requirement(image=self._digest, cell=cell, plan=labels.get(PLAN_LABEL, ""))
        predicates = signing.statements_of_image(self.registry, self._digest, reports.TEST_RESULT, self.trust)
        if not predicates:
            return self._finding("test results", NO_STATEMENT)
        coverage = reports.stated_coverage(predicates, requirement)
        try:
            coverage.require_pass(cell)
        except ImageTestError as error:
            return self._finding("test results", str(error).removeprefix(f"{cell}: "))
        return self._finding("test results", f"{coverage.tests_status}, gpu: {coverage.gpu_status}", "signed")

    def _statement(self, name: str, contents: Sequence[bytes], check: Callable[[bytes], str]) -> Finding:
        """A finding for the signed statements of one kind; `check` returns the detail, or raises VerifyError."""
        # A later release may have attached a corrected one.
        reason = NO_STATEMENT
        for content in contents:
            try:
                return self._finding(name, check(content), "signed")
            except VerifyError as error:
                reason = str(error)
        return self._finding(name, reason)

    def _check_sbom(self, content: bytes) -> str:
        listed, installed = _packages(content), self._installed.packages
        lines = [
            f"{problem}: {_names(packages)}"
            for problem, packages in {
                "not in the image": _without_sources(listed) - _without_sources(installed),
                "not in the SBOM": _without_sources(installed) - _without_sources(listed),
                "different source package in the image": _other_sources(listed, installed),
            }.items()
            if packages
        ]
        if lines:
            raise VerifyError("; ".join(lines))
        return f"{len(listed)} packages, the same as in the files of the image"

    def _check_provenance(self, content: bytes) -> str:
        provenance = oci.parse_document(_Provenance, content, "provenance", hint="")
        if provenance.plan != self.image.labels.get(PLAN_LABEL, ""):
            raise VerifyError("it is about another plan")
        return f"commit {provenance.revision[:60]}" if provenance.revision else "no commit"


def findings(source: ImageSource, check: Check, claims: Attestations | None) -> Iterator[Finding]:
    """Findings for an image: for its signature, then those of `verify.verify_image`, then for its attachments.

    Without a trusted signature, reads nothing else: an unknown author would choose what this machine downloads.
    `claims` is None without trusted signers. Raises VerifyError, RegistryError, SigningError.
    """
    if claims is None:
        yield from verify.verify_image(source, check)
        return
    for signature in claims.signatures():
        yield signature
        if signature.state != "signed":
            return
    if not check.fast:
        source = claims.recording_source(source)
    yield from verify.verify_image(source, dataclasses.replace(check, is_signed=True, indexes=claims.indexes()))
    yield from claims.attachments(has_read_layers=not check.fast)


def _is_for(signature: Mapping[str, str], tag: str) -> bool:
    """Whether a signature is for a tag; also for no tag, if the image is named by its digest."""
    if tags.is_stamp(tag.rpartition("-")[2]):
        return signature.get("release") == tag
    return not tag or tags.is_tag_of(tag, signature.get("tag", ""))


def _count_packages(sbom: bytes) -> str:
    return f"{len(_packages(sbom))} packages, not compared with the files of the image"


def _packages(sbom: bytes) -> set[InstalledPackage]:
    """The components with records in an image. Debian itself and uv's Python have none. Raises VerifyError."""
    return {_package(each) for each in _components(sbom) if each.is_python_package or each.purl.startswith("pkg:deb/")}


def _components(sbom: bytes) -> tuple[_SbomComponent, ...]:
    """Raises VerifyError."""
    return oci.parse_document(_SbomPackages, sbom, "SBOM", hint="").components


def _package(component: _SbomComponent) -> InstalledPackage:
    """Raises VerifyError unless what scanners read, the purl and properties, is about this package."""
    name, version = component.name, component.version
    try:
        purl = PackageURL.from_string(component.purl)
    except ValueError as error:
        raise VerifyError(f"invalid SBOM: {error}") from error
    if component.is_python_package:
        package, of_purl = python_package(name, version), python_package(purl.name, purl.version or "")
    else:
        package = InstalledPackage(
            "deb", name, version, sbom_and_provenance.source_package(purl) or SourcePackage(name, version)
        )
        of_purl = package._replace(name=purl.name, version=purl.version or "")
    if package != of_purl:
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
