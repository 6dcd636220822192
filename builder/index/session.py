"""The HTTP client of the package index: its login, proxy, CA bundle, retries and errors.

It also downloads from Debian's archives, without a login.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import requests
import urllib3
from packaging.utils import canonicalize_name
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from builder.common.errors import FetchError
from builder.common.http import PIECE, TRANSIENT, UNCOMPRESSED, Fault, failure_of, failure_sentence
from builder.index import logins
from builder.index.settings import IndexSettings, origin_of

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

TIMEOUT_S = (10.0, 30.0)  # to connect, between two bytes
REFUSED = (401, 403)  # without a login, or with a wrong one
LONGEST_WAIT_S = 30  # the longest Retry-After of the index that is obeyed
POOL = 8  # connections kept open to one host
DOCTOR = "`builder doctor` checks the index."


class IndexSession(requests.Session):
    """Requests to the package index that this machine is configured for, and to the files that it lists.

    The login in the index's address is sent to that origin only, even for links without it. `timeout` applies to every
    request: seconds to connect and between two bytes. `retries` repeats requests that may succeed later. The login of a
    named index is that of `builder.index.logins`, and no request to another origin has one. `server` is its name in
    messages; without it, that of the index.
    """

    def __init__(
        self,
        settings: IndexSettings,
        *,
        timeout: tuple[float, float] = TIMEOUT_S,
        retries: int = 0,
        server: str = "",
    ) -> None:
        """Raises UsageError for a login that would be sent without encryption."""
        from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple  # noqa: PLC0415  slow to import: 0.1 s

        super().__init__()
        retry = Retry(
            retries,
            backoff_factor=0.5,
            status_forcelist=TRANSIENT,
            raise_on_status=False,
            retry_after_max=LONGEST_WAIT_S,
        )
        for scheme in ("https://", "http://"):
            self.mount(scheme, HTTPAdapter(max_retries=retry if retries else 0, pool_maxsize=POOL))
        if settings.proxy:
            self.proxies = {"http": settings.proxy, "https": settings.proxy}
        url = settings.url or PYPI_SIMPLE_ENDPOINT
        self.settings = settings
        self.server = server or settings.label  # in messages
        self._login: tuple[str | bytes, str | bytes] | None
        if settings.name:
            login = logins.find_login(settings)
            # As bytes: requests takes text for Latin-1.
            self._login = (os.fsencode(login[0]), os.fsencode(login[1])) if login else None
        else:
            parts = urlsplit(url)
            self._login = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
        self._origin = origin_of(url)
        self._ca_bundle = settings.ca_bundle
        self._timeout = timeout
        self._simple = PyPISimple(url, session=self)

    def prepare_request(self, request: requests.Request) -> requests.PreparedRequest:
        """As in requests, with the index's login if the request goes to the index's own origin."""
        prepared = super().prepare_request(request)
        self._set_login(prepared)
        return prepared

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """As in requests for the default index. A redirect of a named index has its login only at its own origin."""
        if self.settings.name:
            self._set_login(prepared_request)
        else:
            super().rebuild_auth(prepared_request, response)  # type: ignore[no-untyped-call]

    def _set_login(self, request: requests.PreparedRequest) -> None:
        """Adds the login if a request goes to the index's own origin.

        Decided by the address after requests has prepared it: of `https://a\\@b/`, requests connects to a, but urlsplit
        takes b for the host.
        """
        if self.settings.name:  # no login of the host, or of `default`, in netrc, and none in a listed address
            request.headers.pop("Authorization", None)
        if self._login and origin_of(str(request.url)) == self._origin:
            request.prepare_auth(self._login)

    def hint(self, error: BaseException | None, otherwise: str) -> str:
        """A hint after a failed request: how to supply the missing login or certificate authority, or `otherwise`."""
        if error and failure_of(error).has_unknown_authority:
            return authority_hint(self._ca_bundle)
        if not (self.settings.name and isinstance(error, requests.HTTPError) and error.response.status_code in REFUSED):
            return otherwise
        if origin_of(error.response.url) != self._origin:
            return (
                f"The index {self.settings.name} refers to files on another host, which requires a login. Logins are "
                "sent only to the index itself: use an index that serves its own files."
            )
        if self._login:
            return f"The login is wrong, or has no access to this package. {logins.how_to_give(self.settings)}"
        return logins.how_to_give(self.settings)

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """As in requests, but the settings take precedence over $REQUESTS_CA_BUNDLE."""
        if self._ca_bundle:
            options["verify"] = self._ca_bundle
        options["timeout"] = options.get("timeout") or self._timeout
        try:
            return super().send(request, **options)
        except requests.RequestException:
            raise
        except ValueError as error:  # a redirect to an invalid address
            raise requests.exceptions.InvalidURL from error

    def files(self, project: str) -> list[DistributionPackage]:
        """All files that the index lists for a project; none if it does not have the project."""
        if self.settings.folder:
            return list(_wheels_in(self.settings.folder, project))
        from pypi_simple import NoSuchProjectError, UnsupportedContentTypeError, UnsupportedRepoVersionError  # noqa: PLC0415

        try:
            return self._simple.get_project_page(project).packages
        except NoSuchProjectError:
            return []
        except requests.RequestException:
            raise
        except (UnsupportedContentTypeError, UnsupportedRepoVersionError, ValueError, KeyError, TypeError) as error:
            raise requests.exceptions.InvalidJSONError from error

    def file_size(self, url: str) -> int:
        """The bytes of a file, from the response to a GET request for its first byte.

        Without HEAD: an address that an object store has signed for GET answers HEAD with 403. Raises ValueError for an
        invalid response.
        """
        with self.get(url, headers=UNCOMPRESSED | {"Range": "bytes=0-0"}, stream=True) as response:
            response.raise_for_status()
            if response.status_code == requests.codes.partial_content:
                return int(response.headers.get("Content-Range", "").rpartition("/")[2])
            if length := response.headers.get("Content-Length"):
                return int(length)
            return sum(len(piece) for piece in response.iter_content(PIECE))  # the whole file, in chunks

    def open_wheel(self, url: str) -> zipfile.ZipFile:
        """A wheel of a folder; or one whose files are read by HTTP range requests, without downloading all of it."""
        if self.settings.folder:
            return zipfile.ZipFile(url)
        from remotezip import RemoteZip  # noqa: PLC0415

        wheel: zipfile.ZipFile = RemoteZip(url, session=self, headers=UNCOMPRESSED)
        return wheel


def _wheels_in(folder: Path, project: str) -> Iterator[DistributionPackage]:
    """The wheels of a project in a folder; their addresses are paths."""
    from pypi_simple import DistributionPackage  # noqa: PLC0415

    for path in sorted(folder.glob("*.whl")):
        if canonicalize_name(path.name.partition("-")[0]) == project:
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                size = file.tell()
            listed = {"filename": path.name, "url": str(path), "hashes": {"sha256": sha256}, "size": size}
            yield DistributionPackage.from_json_data(listed, project)


def authority_hint(ca_bundle: str) -> str:
    """A hint to trust a server's certificate authority. `ca_bundle` is the present file of authorities, if any."""
    hint = "Set SSL_CERT_FILE, or pip's `cert`, to a PEM file with the certificate of its authority."
    return f"{hint} The current file, {ca_bundle}, does not contain it." if ca_bundle else hint


@contextmanager
def fetch_errors(what: str, session: IndexSession) -> Iterator[None]:
    """Turns errors of requests to an index, and of reading its responses, into a FetchError about `what`."""
    from remotezip import RemoteZipError  # noqa: PLC0415

    server, again = session.server, f"Run again. {DOCTOR}"
    try:
        yield
    except RemoteZipError as error:  # the reason is its context
        reason = error.__context__ or error
        raise FetchError(f"{what}: {failure_sentence(reason, server)}", hint=session.hint(reason, again)) from error
    except (OSError, urllib3.exceptions.HTTPError) as error:
        raise FetchError(f"{what}: {failure_sentence(error, server)}", hint=session.hint(error, again)) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise FetchError(f"{what}: {Fault.INVALID.sentence.format(server)}", hint=DOCTOR) from error
