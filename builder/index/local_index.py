"""Several indexes as one, for uv: a server on the loopback that takes each package from its own index.

uv applies its own explicit indexes to direct requirements only. It would look up a package of a named index that only
another package requires on the default index, where anybody may publish that name. This server sends the logins; uv
gets none. It also has the wheels of an image that another one is made from.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import TYPE_CHECKING, cast
from urllib.parse import quote, unquote

from builder.common.errors import BuilderError, FetchError
from builder.index.releases import Index
from builder.index.wheels import InstalledWheel

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

JSON = "application/vnd.pypi.simple.v1+json"  # PEP 691
METADATA = "text/plain; charset=utf-8"


class LocalIndex:
    """The answers of the server. `indexes` are the names of the indexes of packages.

    `failures` are the failures of the indexes, `absent` the packages that their index does not have.

    The wheels in `installed` are listed with the wheels of the index. For a package in `held`, or if the index does not
    have the same file, only the wheel in `installed` is listed. Thread-safe.
    """

    def __init__(
        self,
        catalogue: Index,
        indexes: Mapping[str, str],
        installed: Mapping[str, InstalledWheel] = MappingProxyType({}),
        held: Collection[str] = (),
    ) -> None:
        self._catalogue = catalogue
        self._indexes = indexes
        self._installed = installed
        self._held = held
        self.failures: list[BuilderError] = []
        self.absent: list[str] = []

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Type and content of `simple/<package>/`, or of `files/<package>/<wheel>.metadata`; None if there is none."""
        kind, _, rest = path.partition("/")
        name, _, file = rest.partition("/")
        index = self._indexes.get(name, "")
        try:
            installed = self._installed.get(name)
            if installed and kind == "files" and unquote(file) == f"{installed.wheel.file}.metadata":
                return METADATA, installed.metadata
            if kind == "simple":
                files = [] if name in self._held else self._catalogue.files(name, index)
                # Anybody may publish the name of a private package on PyPI: another package, however new it is.
                if installed and (installed.wheel.file, installed.wheel.sha256) not in [
                    (file.filename, file.digests.get("sha256")) for file in files
                ]:
                    files = []
                listed = [
                    _listed(name, file.filename, file.digests, file)
                    | ({"size": file.size} if file.size else {})
                    | ({"upload-time": file.upload_time.isoformat()} if file.upload_time else {})
                    for file in files
                    if not (installed and file.filename == installed.wheel.file)
                ]
                if installed:  # not as yanked, if it is now: the image has it
                    listed.append(_listed(name, installed.wheel.file, {"sha256": installed.wheel.sha256}, None))
                if listed:
                    return JSON, json.dumps({"meta": {"api-version": "1.0"}, "name": name, "files": listed}).encode()
                self.absent.append(name)
            if kind == "files" and name not in self._held:
                by_name = {file.filename: file for file in self._catalogue.files(name, index)}
                if wheel := by_name.get(unquote(file).removesuffix(".metadata")):
                    if not file.endswith(".metadata"):  # uv downloads a wheel only to compute its hash
                        raise FetchError(
                            f"{wheel.filename}: {self._catalogue.session(index).server} has no SHA-256 for it",
                            hint="Use an index that has hashes.",
                        )
                    return METADATA, self._catalogue.metadata_text(wheel, index)
        except BuilderError as error:
            self.failures.append(error)
        return None


def _listed(name: str, file: str, hashes: Mapping[str, str], source: DistributionPackage | None) -> dict[str, object]:
    """A file as the page of its package lists it. Source: PEP 691."""
    return {
        "filename": file,
        "url": f"../../files/{name}/{quote(file)}",
        "hashes": hashes,
        "requires-python": source and source.requires_python,
        "yanked": (source.yanked_reason or True) if source and source.is_yanked else False,
        "core-metadata": file.endswith(".whl"),
    }


class _IndexServer(ThreadingHTTPServer):
    daemon_threads = True
    secret = ""  # a part of all paths: other users of this machine must not read what a login gives access to
    local: LocalIndex

    def handle_error(self, request: object, client_address: object) -> None:
        """Reports an error of the handler as one of the index, unless uv has closed the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            self.local.failures.append(FetchError("the local index for uv failed", hint="Run again."))


class _IndexHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as in builder/engine/endpoint.py

    def do_GET(self) -> None:
        server = cast("_IndexServer", self.server)
        secret, _, path = self.path.removeprefix("/").partition("/")
        is_known = secrets.compare_digest(secret.encode(), server.secret.encode())
        kind, content = (server.local.answer(path) if is_known else None) or ("", b"")
        self.send_response(200 if kind else 404)
        self.send_header("Content-Type", kind or "text/plain")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is the base class's
        """Logs nothing."""


@contextmanager
def serve_index(
    catalogue: Index, indexes: Mapping[str, str], installed: Mapping[str, InstalledWheel], held: Collection[str]
) -> Iterator[tuple[str, LocalIndex]]:
    """Serves packages, each from its own index, on the loopback; yields the address for uv."""
    with _IndexServer(("127.0.0.1", 0), _IndexHandler) as server:
        server.local, server.secret = LocalIndex(catalogue, indexes, installed, held), secrets.token_hex(16)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/{server.secret}/simple/", server.local
        finally:
            server.shutdown()
            thread.join()
