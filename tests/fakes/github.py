"""A stand-in for GitHub's API for packages, which answers as GitHub's documentation describes.

Messages are those that GitHub sends, as users quote them in issues.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast
from urllib.parse import parse_qs, unquote, urlsplit

from requests.structures import CaseInsensitiveDict

from tests.fakes.wire import Reply

LAST = "You cannot delete the last tagged version of a package. You must delete the package instead."
POPULAR = (
    "Publicly visible package versions with more than 5000 downloads cannot be deleted. Contact GitHub support for "
    "further assistance."
)
ALL = ("read:packages", "delete:packages")
_PACKAGE = re.compile(
    r"/(?:orgs/(?P<org>[^/]+)|users/(?P<user>[^/]+)|(?P<own>user))/packages/container/(?P<name>[^/]+)"
    r"/versions(?:/(?P<id>[0-9]+))?"
)


@dataclass
class Token:
    """`login` is empty for the token of a job, which belongs to no account. `sees`, `deletes`: owners of packages."""

    login: str = ""
    scopes: tuple[str, ...] = ALL
    sees: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()


@dataclass
class Package:
    """Its manifests: digest -> tags."""

    manifests: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_public: bool = False
    popular: set[str] = field(default_factory=set)  # downloaded more than 5,000 times

    def versions(self) -> dict[str, tuple[str, ...]]:
        return dict(self.manifests)

    def remove(self, digest: str) -> None:
        del self.manifests[digest]


def version_id(digest: str) -> int:
    return int(digest.removeprefix("sha256:")[:12], 16)


@dataclass
class GitHub:
    """`accounts` are the types of accounts by name, `packages` are by owner and name.

    `first` are answers to the next requests, whatever they are. `prefix` is the path of the API on GitHub Enterprise.
    """

    accounts: Mapping[str, str]
    packages: dict[tuple[str, str], Package]
    tokens: Mapping[str, Token]
    prefix: str = ""
    first: list[Reply] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def answer(self, method: str, url: str, headers: Mapping[str, str]) -> Reply:
        """The answer to a request; `headers` are found whatever their case."""
        parts = urlsplit(url)
        self.requests.append(f"{method} {parts.path}")
        if self.first:
            return self.first.pop(0)
        if not headers.get("User-Agent"):
            return _message(403, "Request forbidden by administrative rules.")
        token = self.tokens.get(headers.get("Authorization", "").removeprefix("Bearer "))
        if token is None:
            return _message(401, "Bad credentials" if "Authorization" in headers else "Requires authentication")
        path = parts.path.removeprefix(self.prefix)
        if path.startswith("/user") and not path.startswith("/users/") and not token.login:
            return _message(403, "Resource not accessible by integration")
        if path == "/user":
            return _json({"login": token.login, "type": "User"})
        if match := re.fullmatch(r"/users/([^/]+)", path):
            kind = self.accounts.get(unquote(match[1]))
            return _json({"login": unquote(match[1]), "type": kind}) if kind else _message(404, "Not Found")
        if match := _PACKAGE.fullmatch(path):
            return self._answer_of_package(method, url, match, token)
        return _message(404, "Not Found")

    def _answer_of_package(self, method: str, url: str, match: re.Match[str], token: Token) -> Reply:
        owner = token.login if match["own"] else unquote(match["org"] or match["user"])
        kind = "Organization" if match["org"] else "User"
        package = self.packages.get((owner, unquote(match["name"])))
        if package is None or self.accounts[owner] != kind or (not package.is_public and owner not in token.sees):
            return _message(404, "Package not found.")
        if "read:packages" not in token.scopes:
            return _message(403, "You need at least read:packages scope to get a package's versions.")
        if not match["id"]:
            return self._page(url, package)
        digests = [digest for digest in package.versions() if version_id(digest) == int(match["id"])]
        if not digests or (method == "DELETE" and owner not in token.deletes):
            return _message(404, "Package not found.")
        if method == "GET":
            return _json(_version(digests[0], package))
        return self._delete(digests[0], package, token)

    def _delete(self, digest: str, package: Package, token: Token) -> Reply:
        if "delete:packages" not in token.scopes:
            return _message(403, "You need at least delete:packages scope to delete a package version.")
        versions = package.versions()
        if versions[digest] and not any(tags for other, tags in versions.items() if other != digest):
            return _message(400, LAST)
        if package.is_public and digest in package.popular:
            return _message(400, POPULAR)
        package.remove(digest)
        return Reply(status=204)

    def _page(self, url: str, package: Package) -> Reply:
        query = parse_qs(urlsplit(url).query)
        size, page = min(int(query.get("per_page", ["30"])[0]), 100), int(query.get("page", ["1"])[0])
        listed = [_version(digest, package) for digest in package.versions()]
        answer = _json(listed[(page - 1) * size : page * size])
        if page * size >= len(listed):
            return answer
        address = url.partition("?")[0]
        links = [f'<{address}?per_page={size}&page={number}>; rel="{name}"'
                 for name, number in (("next", page + 1), ("last", -(-len(listed) // size)))]  # fmt: skip
        return Reply(body=answer.body, headers={"Link": ", ".join(links)})


def _version(digest: str, package: Package) -> dict[str, object]:
    tags = list(package.versions()[digest])
    metadata = {"package_type": "container", "container": {"tags": tags}}
    return {"id": version_id(digest), "name": digest, "url": "", "created_at": "2026-11-24T12:00:00Z",
            "metadata": metadata}  # fmt: skip


def _json(data: object) -> Reply:
    return Reply(body=json.dumps(data).encode())


def _message(status: int, text: str) -> Reply:
    return Reply(status=status, body=json.dumps({"message": text, "documentation_url": "https://docs"}).encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    github: GitHub


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        url = f"http://{self.headers['Host']}{self.path}"
        reply = cast("_Server", self.server).github.answer(self.command, url, CaseInsensitiveDict(self.headers.items()))
        self.send_response_only(reply.status)
        for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)

    do_DELETE = do_GET  # noqa: N815  the name is the base class's

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is the base class's
        """Logs nothing."""


@contextmanager
def serving(github: GitHub) -> Iterator[str]:
    """Serves the stand-in on the loopback; its address."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.github = github
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
