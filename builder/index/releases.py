"""Releases of a package on the index, their wheels, and the metadata of a wheel. No wheel is downloaded whole."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from email.utils import getaddresses
from functools import cache
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, TypeGuard
from zipfile import BadZipFile, ZipFile

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from builder.common.errors import FetchError
from builder.common.http import PIECE
from builder.index.session import IndexSession, fetch_errors
from builder.index.settings import IndexSettings
from builder.index.wheels import LONGEST, PLATFORMS
from builder.matrix.cells import Cell
from builder.matrix.schema import Arch

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

LARGEST = 4 << 20  # bytes of a METADATA file; real files have less than 0.1 MB
RETRIES = 4  # of a request for a page or for metadata: for 7 s
LONGEST_LINE = 100  # characters of a licence or supplier
UNKNOWN = "UNKNOWN"  # what older tools write for an empty field
LONGEST_REQUIREMENT = 2000  # characters of a Requires-Dist; real requirements have less than 300
UPLOAD_AGAIN = "Upload the wheel to the index again, or pin another version in matrix.yaml."


@dataclass(frozen=True, kw_only=True)
class ListedRelease:
    """One release as listed by the index; `wheels` are file names."""

    version: Version
    wheels: tuple[str, ...] = ()
    requires_python: str = ""
    is_yanked: bool = False
    day: date | None = None  # of its first file

    @property
    def is_stable(self) -> bool:
        """True if installers select it by default."""
        return not self.is_yanked and not self.version.is_prerelease


@dataclass(frozen=True, kw_only=True)
class ListedPackage:
    """All releases, the oldest first; none if the index does not have the package."""

    name: str
    releases: tuple[ListedRelease, ...] = ()

    @property
    def newest(self) -> ListedRelease | None:
        """The release that installers select by default, for any system."""
        return next((release for release in reversed(self.releases) if release.is_stable), None)

    def release(self, version: Version) -> ListedRelease | None:
        """The release that an installer takes for `==version`: with the highest local version, such as 2.9.1+cpu."""
        for release in reversed(self.releases):
            # Without a local version, `==` admits all local versions.
            if release.version == version or (not version.local and Version(release.version.public) == version):
                return release
        return None


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Metadata of a wheel: `requires` is Requires-Dist.

    `license` and `supplier` are empty if it names none in one short line.
    """

    requires: tuple[str, ...] = ()
    license: str = ""
    supplier: str = ""

    def requirements(self, cell: Cell, extras: Iterable[str]) -> list[Requirement]:
        """The requirements that apply on Linux to the cell's Python and architecture with these extras."""
        names = ["", *sorted(extras)]
        requirements = filter(None, map(_parse_requirement, self.requires))
        return [item for item in requirements if any(applies(item, cell.python, cell.arch, name) for name in names)]


class Index:
    """The index that this machine is configured for, and the named indexes. Each page and metadata is requested once.

    `index` is the name of the index that a package comes from, and it is looked up nowhere else; empty for the default.
    """

    def __init__(self, settings: IndexSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._sessions: dict[tuple[str, int], IndexSession] = {}
        self._page_locks: dict[tuple[str, str], threading.Lock] = {}
        self._files: dict[tuple[str, str], list[DistributionPackage]] = {}
        self._packages: dict[tuple[str, str], ListedPackage] = {}
        self._texts: dict[str, bytes] = {}

    def package(self, name: str, index: str = "") -> ListedPackage:
        """The releases of a package; none if the index does not have it. Raises FetchError for an unreadable index."""
        name = canonicalize_name(name)
        key = index, name
        if key in self._packages:
            return self._packages[key]
        by_version: dict[Version, list[DistributionPackage]] = {}
        for file in self.files(name, index):
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
                day=min((file.upload_time.date() for file in files if file.upload_time), default=None),
            )
            releases.append(release)
        self._packages[key] = ListedPackage(name=name, releases=tuple(releases))
        return self._packages[key]

    def metadata_text(self, file: DistributionPackage, index: str = "", *, whole: bool = True) -> bytes:
        """The METADATA of a wheel. Raises FetchError.

        Downloads all of the wheel if the index does not support range requests; without `whole`, raises FetchError.
        """
        from remotezip import OutOfBound  # noqa: PLC0415

        if file.url in self._texts:
            return self._texts[file.url]
        session = self.session(index)
        with fetch_errors(file.filename, session):
            text = bytearray()
            if file.has_metadata:  # a file of its own (PEP 658)
                with session.get(file.metadata_url, stream=True) as response:
                    response.raise_for_status()
                    for piece in response.iter_content(PIECE):
                        text += piece
                        if len(text) > LARGEST:
                            raise ValueError
            else:
                try:
                    text += _metadata_in_wheel(session, file.url, whole=whole)
                except (BadZipFile, zlib.error, EOFError, OutOfBound) as error:  # though all responses were complete
                    raise FetchError(
                        f"{file.filename}: the file on {session.server} is damaged or incomplete",
                        hint=UPLOAD_AGAIN,
                    ) from error
        self._texts[file.url] = bytes(text)
        return self._texts[file.url]

    def files(self, name: str, index: str = "") -> list[DistributionPackage]:
        """All files of a package, by its canonical name. Raises FetchError."""
        key = index, name
        with self._lock:
            page_lock = self._page_locks.setdefault(key, threading.Lock())
        with page_lock:
            if key not in self._files:
                session = self.session(index)
                with fetch_errors(name, session):
                    self._files[key] = session.files(name)
            return self._files[key]

    def session(self, index: str, *, retries: int = RETRIES) -> IndexSession:
        """Requests to an index. Raises LookupError if there is none of this name, UsageError."""
        with self._lock:
            if (index, retries) not in self._sessions:
                self._sessions[index, retries] = IndexSession(self._settings.of(index), retries=retries)
            return self._sessions[index, retries]


def parse_metadata(file: str, text: bytes) -> Metadata:
    """A METADATA file (core metadata). Raises FetchError for an invalid one."""
    fields, _ = parse_email(text)
    try:
        canonicalize_name(fields["name"], validate=True)
        Version(fields["version"])
    except (KeyError, ValueError) as error:
        raise FetchError(
            f"{file}: invalid METADATA", hint="Do not use this index until the reason is known."
        ) from error
    classifiers = (text[11:] for text in fields.get("classifiers", ()) if text.startswith("License :: "))
    people = getaddresses([fields.get("author_email", ""), fields.get("maintainer_email", "")])
    return Metadata(
        requires=tuple(fields.get("requires_dist", ())),
        license=_first_line([fields.get("license_expression"), fields.get("license"), *classifiers]),
        supplier=_first_line([fields.get("author"), fields.get("maintainer"), *(name for name, _ in people)]),
    )


def _first_line(texts: Iterable[str | None]) -> str:
    """The first text in one short line: some packages have the whole text of their licence in `License`."""
    lines = (text for text in texts if text and len(text) < LONGEST_LINE and text.isprintable() and text != UNKNOWN)
    return next(lines, "")


def applies(requirement: Requirement, python: str, arch: Arch, extra: str = "") -> bool:
    """True if the marker of a requirement, if it has one, is for Linux with this Python and architecture."""
    environment = {
        "extra": extra,
        "platform_machine": PLATFORMS[arch],
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    try:
        return not requirement.marker or requirement.marker.evaluate(environment)
    except (ValueError, KeyError, RecursionError):  # an invalid comparison, or an unknown variable
        return False


@cache
def _parse_requirement(text: str) -> Requirement | None:
    """The requirement in a text; None for one that no installer can read: old metadata has such requirements."""
    if len(text) > LONGEST_REQUIREMENT or not text.replace("\t", " ").isprintable():
        return None
    try:
        return Requirement(text)
    except (InvalidRequirement, RecursionError):
        return None


def _metadata_in_wheel(session: IndexSession, url: str, *, whole: bool) -> bytes:
    """The METADATA in a remote wheel. Raises errors of requests, of zipfile and of remotezip, and ValueError."""
    from remotezip import RangeNotSupported  # noqa: PLC0415

    with ExitStack() as stack:
        try:
            wheel: ZipFile = stack.enter_context(session.open_wheel(url))
        except RangeNotSupported:
            if not whole:
                raise
            copy_of_wheel = stack.enter_context(TemporaryFile())
            response = stack.enter_context(session.get(url, stream=True))
            response.raise_for_status()
            for piece in response.iter_content(PIECE):
                copy_of_wheel.write(piece)
            wheel = stack.enter_context(ZipFile(copy_of_wheel))
        infos = [info for info in wheel.infolist() if info.filename.count("/") == 1]
        info = next((info for info in infos if info.filename.endswith(".dist-info/METADATA")), None)
        if info is None or info.file_size > LARGEST:
            raise ValueError
        return wheel.read(info)


def _is_printable(text: str | None) -> TypeGuard[str]:
    """True if a text may be printed: an index can send anything, even escape sequences of a terminal."""
    return text is not None and 0 < len(text) <= LONGEST and text.isprintable()


def _version(file: DistributionPackage) -> Version | None:
    """The release that a file belongs to; None if it belongs to none."""
    try:
        return Version(file.version) if file.version and _is_printable(file.filename) else None
    except InvalidVersion:
        return None
