"""What the index says of a package: its releases, their wheels, and the metadata of one. No file is fetched whole."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import requests
from packaging.metadata import parse_email
from packaging.utils import InvalidWheelFilename, canonicalize_name, is_normalized_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from builder import fetch, lock
from builder.errors import FetchError
from builder.index import IndexSettings

TIMEOUT_S = (10, 30)  # to connect, to be silent
LARGEST = 4 << 20  # bytes of a METADATA file; real ones have less than 0.1 MB
LONGEST = 255  # characters of a file name; to parse one with thousands of tags would take hours
_DOCTOR = "`builder doctor` shows which index is used."
_Told = TypeVar("_Told")


@dataclass(frozen=True, kw_only=True)
class Release:
    """One release as the index lists it; `wheels` are file names."""

    version: Version
    wheels: tuple[str, ...] = ()
    requires_python: str = ""
    is_yanked: bool = False

    @property
    def is_stable(self) -> bool:
        """Whether an installer would pick it without being told to."""
        return not self.is_yanked and not self.version.is_prerelease


@dataclass(frozen=True, kw_only=True)
class Package:
    """All releases, the oldest first; none where the index has no such package."""

    name: str
    releases: tuple[Release, ...] = ()

    def release(self, version: Version) -> Release | None:
        return next((one for one in self.releases if one.version == version), None)


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What a wheel says of itself: `requires` are its Requires-Dist, `extras` its Provides-Extra."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()


class Catalogue(Protocol):
    """Where packages are looked up: an index, or what is stored of one."""

    def package(self, name: str) -> Package: ...
    def metadata(self, name: str, version: Version) -> Metadata: ...


class Index:
    """The index that this machine is set up for. Asks for each page and each metadata once."""

    def __init__(self, settings: IndexSettings) -> None:
        # Not at the top: it takes 0.1 s, which every command would pay.
        from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple  # noqa: PLC0415

        url = settings.url or PYPI_SIMPLE_ENDPOINT
        self._session = fetch.Session(settings)
        retry = Retry(total=3, backoff_factor=0.5, status_forcelist=fetch.RETRIED, allowed_methods=("GET",))
        for scheme in ("https://", "http://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=retry))
        login = urlsplit(url)
        self._origin = fetch.origin_of(url)
        self._login = (unquote(login.username), unquote(login.password or "")) if login.username else None
        self._simple = PyPISimple(url, session=self._session)
        self._pages: dict[str, list[Any]] = {}
        self._packages: dict[str, Package] = {}
        self._metadata: dict[tuple[str, Version], Metadata] = {}

    def package(self, name: str) -> Package:
        """Raises FetchError where the index does not answer; a package that it does not have has no releases."""
        name = canonicalize_name(name)
        if name not in self._packages:
            self._packages[name] = package_of(name, self._page(name))
        return self._packages[name]

    def metadata(self, name: str, version: Version) -> Metadata:
        """Of the release's wheel for this platform, else of any. Raises FetchError."""
        name = canonicalize_name(name)
        if (name, version) not in self._metadata:
            files = [one for one in self._page(name) if one.filename.endswith(".whl") and _version(one) == version]
            if not files:
                raise FetchError(f"{name} {version}: the index has no wheel of it", hint=_DOCTOR)
            file = min(files, key=lambda one: (not _is_for_platform(one.filename), one.filename))
            self._metadata[name, version] = parse(file.filename, self._asked(file.filename, lambda: self._text(file)))
        return self._metadata[name, version]

    def _page(self, name: str) -> list[Any]:
        from pypi_simple import NoSuchProjectError  # noqa: PLC0415

        def ask() -> list[Any]:
            try:
                return list(self._simple.get_project_page(name, timeout=TIMEOUT_S).packages)
            except NoSuchProjectError:
                return []

        if name not in self._pages:
            self._pages[name] = self._asked(name, ask)
        return self._pages[name]

    def _text(self, file: Any) -> bytes:
        """METADATA as a file of its own (PEP 658) where the index has it, else out of the wheel that stays there."""
        from remotezip import RemoteZip  # noqa: PLC0415

        login = self._login if fetch.origin_of(file.url) == self._origin else None
        if file.has_metadata:
            content = bytearray()
            with self._session.get(file.metadata_url, timeout=TIMEOUT_S, auth=login, stream=True) as answer:
                answer.raise_for_status()
                for piece in answer.iter_content(fetch.PIECE):
                    content += piece
                    if len(content) > LARGEST:
                        raise ValueError
            return bytes(content)
        options = {"timeout": TIMEOUT_S, "auth": login, "headers": {"Accept-Encoding": "identity"}}
        with RemoteZip(file.url, session=self._session, **options) as wheel:
            names = [one for one in wheel.infolist() if one.filename.count("/") == 1]
            info = next(one for one in names if one.filename.endswith(".dist-info/METADATA"))
            if info.file_size > LARGEST:
                raise ValueError
            return bytes(wheel.read(info))

    def _asked(self, what: str, ask: Callable[[], _Told]) -> _Told:
        """In words of ours: those of a library have addresses in them, and what is secret in an address."""
        from pypi_simple import UnsupportedContentTypeError, UnsupportedRepoVersionError  # noqa: PLC0415
        from remotezip import RangeNotSupported, RemoteZipError  # noqa: PLC0415

        try:
            return ask()
        except RangeNotSupported as error:
            raise FetchError(
                f"{what}: the index serves neither metadata nor parts of a wheel",
                hint="Use an index that does one of both.",
            ) from error
        except (
            UnsupportedContentTypeError, UnsupportedRepoVersionError, requests.exceptions.InvalidJSONError,
            zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, StopIteration, KeyError, TypeError,
        ) as error:  # fmt: skip
            raise FetchError(f"{what}: what the index serves cannot be read", hint=_DOCTOR) from error
        except (requests.RequestException, RemoteZipError) as error:
            raise FetchError(f"{what}: {_said(error)}", hint=f"Run again; {_DOCTOR}") from error
        except ValueError as error:
            raise FetchError(f"{what}: what the index serves cannot be read", hint=_DOCTOR) from error


def _said(error: Exception) -> str:
    """remotezip's errors hold what went wrong as their context."""
    cause = error if isinstance(error, requests.RequestException) else error.__context__
    if isinstance(cause, requests.HTTPError):
        return f"the index answers {cause.response.status_code}"
    return fetch.words_of(cause) if isinstance(cause, Exception) else "the index does not serve a part of it"


def package_of(name: str, files: list[Any]) -> Package:
    """Files of a package's page by release. A release is yanked when all of its files are."""
    by_version: dict[Version, list[Any]] = {}
    for file in files:
        if (version := _version(file)) is not None:
            by_version.setdefault(version, []).append(file)
    releases = (
        Release(
            version=version,
            wheels=tuple(sorted(file.filename for file in found if file.filename.endswith(".whl"))),
            requires_python=next((file.requires_python for file in found if _is_plain(file.requires_python)), ""),
            is_yanked=all(file.is_yanked for file in found),
        )
        for version, found in by_version.items()
    )
    return Package(name=name, releases=tuple(sorted(releases, key=lambda one: one.version)))


def parse(file: str, text: bytes) -> Metadata:
    """A METADATA file (core metadata). Raises FetchError for what is none."""
    found, _ = parse_email(text)
    try:
        name, version = canonicalize_name(found["name"], validate=True), found["version"]
        Version(version)
    except (KeyError, ValueError) as error:
        raise FetchError(
            f"{file}: its METADATA cannot be read", hint="Do not use this index until that is explained."
        ) from error
    extras = (canonicalize_name(extra) for extra in found.get("provides_extra", ()))
    return Metadata(
        name=name,
        version=version,
        requires=tuple(found.get("requires_dist", ())),
        extras=tuple(sorted(extra for extra in extras if is_normalized_name(extra))),
    )


def _is_plain(text: str | None) -> bool:
    """Whether it may be shown: an index can send anything, escape sequences of a terminal too."""
    return text is not None and 0 < len(text) <= LONGEST and text.isprintable()


def _version(file: Any) -> Version | None:
    """The release that a file belongs to; None for a file that is of no release."""
    try:
        return Version(file.version) if file.version and _is_plain(file.filename) else None
    except InvalidVersion:
        return None


def _is_for_platform(file: str) -> bool:
    try:
        tags = parse_wheel_filename(file)[3]
    except InvalidWheelFilename:
        return False
    return any(tag.platform == "any" or ("linux" in tag.platform and lock.PLATFORM in tag.platform) for tag in tags)
