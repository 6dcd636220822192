"""Releases of a package on the index, their wheels, and the metadata of a wheel. No wheel is downloaded whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

from packaging.metadata import parse_email
from packaging.utils import InvalidWheelFilename, canonicalize_name, is_normalized_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from builder.common.errors import FetchError
from builder.index.session import DOCTOR, PIECE, IndexSession, fetch_errors
from builder.index.settings import IndexSettings
from builder.index.wheels import LONGEST, PLATFORM

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

LARGEST = 4 << 20  # bytes of a METADATA file; real files have less than 0.1 MB


@dataclass(frozen=True, kw_only=True)
class ListedRelease:
    """One release as listed by the index; `wheels` are file names."""

    version: Version
    wheels: tuple[str, ...] = ()
    requires_python: str = ""
    is_yanked: bool = False

    @property
    def is_stable(self) -> bool:
        """Whether installers select it by default."""
        return not self.is_yanked and not self.version.is_prerelease


@dataclass(frozen=True, kw_only=True)
class ListedPackage:
    """All releases, the oldest first; none if the index does not have the package."""

    name: str
    releases: tuple[ListedRelease, ...] = ()

    def release(self, version: Version) -> ListedRelease | None:
        return next((release for release in self.releases if release.version == version), None)


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Metadata of a wheel: `requires` is Requires-Dist, `extras` is Provides-Extra."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()


class Catalogue(Protocol):
    """Where packages are looked up: an index, or a stored copy of one."""

    def package(self, name: str) -> ListedPackage: ...
    def metadata(self, name: str, version: Version) -> Metadata: ...


class Index:
    """The index that this machine is configured for. Each page and each metadata is requested once."""

    def __init__(self, settings: IndexSettings) -> None:
        self._session = IndexSession(settings, retries=3)
        self._files: dict[str, list[DistributionPackage]] = {}
        self._packages: dict[str, ListedPackage] = {}
        self._metadata: dict[tuple[str, Version], Metadata] = {}

    def package(self, name: str) -> ListedPackage:
        """Raises FetchError if the index cannot be read; a package that it does not have has no releases."""
        name = canonicalize_name(name)
        if name in self._packages:
            return self._packages[name]
        by_version: dict[Version, list[DistributionPackage]] = {}
        for file in self._list(name):
            if (version := _version(file)) is not None:
                by_version.setdefault(version, []).append(file)
        releases = []
        for version, files in sorted(by_version.items()):
            required = (text for file in files if _is_printable(text := file.requires_python))
            release = ListedRelease(
                version=version,
                wheels=tuple(sorted(file.filename for file in files if file.filename.endswith(".whl"))),
                requires_python=next(required, ""),
                is_yanked=all(file.is_yanked for file in files),
            )
            releases.append(release)
        self._packages[name] = ListedPackage(name=name, releases=tuple(releases))
        return self._packages[name]

    def metadata(self, name: str, version: Version) -> Metadata:
        """From the release's wheel for this platform, else from any. Raises FetchError."""
        name = canonicalize_name(name)
        if (name, version) in self._metadata:
            return self._metadata[name, version]
        wheels = [file for file in self._list(name) if file.filename.endswith(".whl") and _version(file) == version]
        if not wheels:
            raise FetchError(f"{name} {version}: no wheel on the index", hint=DOCTOR)
        file = min(wheels, key=lambda file: (not _is_for_platform(file.filename), file.filename))
        with fetch_errors(file.filename):
            text = bytearray()
            if file.has_metadata:  # a file of its own (PEP 658)
                with self._session.get(file.metadata_url, stream=True) as response:
                    response.raise_for_status()
                    for piece in response.iter_content(PIECE):
                        text += piece
                        if len(text) > LARGEST:
                            raise ValueError
            else:  # read out of the remote wheel
                with self._session.open_wheel(file.url) as wheel:
                    infos = [info for info in wheel.infolist() if info.filename.count("/") == 1]
                    info = next((info for info in infos if info.filename.endswith(".dist-info/METADATA")), None)
                    if info is None or info.file_size > LARGEST:
                        raise ValueError
                    text += wheel.read(info)
        self._metadata[name, version] = parse_metadata(file.filename, bytes(text))
        return self._metadata[name, version]

    def _list(self, name: str) -> list[DistributionPackage]:
        if name not in self._files:
            with fetch_errors(name):
                self._files[name] = self._session.files(name)
        return self._files[name]


def parse_metadata(file: str, text: bytes) -> Metadata:
    """A METADATA file (core metadata). Raises FetchError for an invalid one."""
    fields, _ = parse_email(text)
    try:
        name, version = canonicalize_name(fields["name"], validate=True), fields["version"]
        Version(version)
    except (KeyError, ValueError) as error:
        raise FetchError(
            f"{file}: invalid METADATA", hint="Do not use this index until the reason is known."
        ) from error
    extras = (canonicalize_name(extra) for extra in fields.get("provides_extra", ()))
    return Metadata(
        name=name,
        version=version,
        requires=tuple(fields.get("requires_dist", ())),
        extras=tuple(sorted(extra for extra in extras if is_normalized_name(extra))),
    )


def _is_printable(text: str | None) -> TypeGuard[str]:
    """Whether a text may be printed: an index can send anything, even escape sequences of a terminal."""
    return text is not None and 0 < len(text) <= LONGEST and text.isprintable()


def _version(file: DistributionPackage) -> Version | None:
    """The release that a file belongs to; None if it belongs to none."""
    try:
        return Version(file.version) if file.version and _is_printable(file.filename) else None
    except InvalidVersion:
        return None


def _is_for_platform(file: str) -> bool:
    try:
        tags = parse_wheel_filename(file)[3]
    except InvalidWheelFilename:
        return False
    return any(tag.platform == "any" or ("linux" in tag.platform and PLATFORM in tag.platform) for tag in tags)
