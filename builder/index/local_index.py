"""Several indexes as one, for uv: a server on the loopback that takes each package from its own index.

uv applies its own explicit indexes to direct requirements only. It would look up a package of a named index that only
another package requires on the default index, where anybody may publish that name. This server sends the logins; uv
gets none.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast
from urllib.parse import quote, unquote

from builder.common.errors import BuilderError, FetchError
from builder.index.releases import Index

JSON = "application/vnd.pypi.simple.v1+json"  # PEP 691


class LocalIndex:
    """The answers of the server. `failures` are those of the indexes; `absent` are packages that they do not have.

    Thread-safe.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self.failures: list[BuilderError] = []
        self.absent: list[str] = []

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Type and content of `simple/<package>/`, or of `files/<package>/<wheel>.metadata`; None if there is none."""
        kind, _, rest = path.partition("/")
        name, _, file = rest.partition("/")
        try:
            if kind == "simple" and (files := self._index.files(name)):
                listed = [
                    {
                        "filename": file.filename,
                        "url": f"../../files/{name}/{quote(file.filename)}",
                        "hashes": file.digests,
                        "requires-python": file.requires_python,
                        "yanked": (file.yanked_reason or True) if file.is_yanked else False,
                        "core-metadata": file.filename.endswith(".whl"),
                    }
                    | ({"upload-time": file.upload_time.isoformat()} if file.upload_time else {})
                    for file in files
                ]
                page = {"meta": {"api-version": "1.0"}, "name": name, "files": listed}
                return JSON, json.dumps(page).encode()
            if kind == "simple":
                self.absent.append(name)
            if kind == "files":
                by_name = {f"{file.filename}.metadata": file for file in self._index.files(name)}
                if wheel := by_name.get(unquote(file)):
                    return "text/plain; charset=utf-8", self._index.metadata_text(name, wheel, whole=True)
        except BuilderError as error:
            self.failures.append(error)
        return None


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
def serve_index(index: Index) -> Iterator[tuple[str, LocalIndex]]:
    """Serves an index, its packages from their own indexes, on the loopback; gives the address for uv."""
    with _IndexServer(("127.0.0.1", 0), _IndexHandler) as server:
        server.local, server.secret = LocalIndex(index), secrets.token_hex(16)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/{server.secret}/simple/", server.local
        finally:
            server.shutdown()
            thread.join()
