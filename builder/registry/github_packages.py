"""Deletes manifests on ghcr.io, with GitHub's API for packages: its registry answers 405 to every DELETE.

A repository is a package of the type `container`, a manifest one version of it: its name is the digest, and all tags of
the manifest go with it. Source: GitHub's documentation, "REST API endpoints for packages", "About permissions for
GitHub Packages" and "Best practices for using the REST API". Not tested with GitHub itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import quote

from pydantic import BaseModel, RootModel

from builder.common.errors import RegistryError, UsageError
from builder.common.files import short_digest
from builder.common.reference import ImageRef
from builder.common.tasks import RetryPolicy
from builder.index import settings as index
from builder.index.host import Host
from builder.layers import oci
from builder.layers.oci import Digest
from builder.registry.auth import TokenLogin, credentials
from builder.registry.failures import RejectedError
from builder.registry.http import DEFAULT_POLICY, Answer, Connection, Request
from builder.registry.transport import Transport

REGISTRY, ADDRESS = "ghcr.io", "https://api.github.com"
PAGE, PAGES = 100, 1000  # versions in a page, and pages, at most
PAUSE_S = 1.0  # GitHub: "wait at least one second between each" DELETE
_HEADERS = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}


class _Account(BaseModel, frozen=True):
    login: str
    type: str = ""


class _Version(BaseModel, frozen=True):
    id: int
    name: Digest


class _Versions(RootModel[list[_Version]], frozen=True):
    """A page of the list."""


class RefusedDeletionError(RegistryError):
    """GitHub does not delete this version for anybody, such as the last one with a tag."""


class GitHubApi:
    """The API, with the login of a registry."""

    def __init__(
        self, address: str, registry: str, host: Host, *, policy: RetryPolicy = DEFAULT_POLICY, pause_s: float = PAUSE_S
    ) -> None:
        """`pause_s` are the seconds before each deletion. Raises UsageError, RegistryError without a login."""
        parts = index.split(address)
        transport = Transport.of(parts.netloc, host)
        is_allowed = parts.scheme == "https" or (parts.scheme == "http" and transport.is_plain)
        if not is_allowed or not parts.hostname or "@" in parts.netloc or parts.query or parts.fragment:
            raise UsageError(
                f"invalid address of GitHub's API: {ascii(address)[1:101]}",
                hint="Use e.g. --github-api https://github.example.com/api/v3",
            )
        self.address = address.rstrip("/")
        self.registry = registry
        self.pause_s = pause_s
        self.hint = (
            f"`docker login {registry}` with a personal access token (classic) of an administrator of the package, "
            "which has the scopes read:packages and delete:packages. A job of GitHub Actions needs `packages: write`, "
            "and the role Admin in the package's settings, under `Manage Actions access`."
        )
        login = credentials(registry)
        if login is None or not login.password:
            raise RegistryError(f"{registry}: no token, which GitHub's API needs to delete packages", hint=self.hint)
        token = TokenLogin(parts.netloc, login.password)
        self._http = Connection(self.address, "", transport, policy, host.say, token)

    def send(self, method: str, url: str, action: str, *expect: int) -> Answer:
        """Raises RegistryError, with a hint about the rights of the login if they do not suffice."""
        try:
            return self._http.send(Request(action=action, method=method, url=url, expect=expect, headers=_HEADERS))
        except RejectedError as error:
            if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise RegistryError(str(error), hint=self.hint) from error
            raise

    def package(self, repository: ImageRef) -> GitHubPackage:
        """The package of a repository. Raises RegistryError, VerifyError for an invalid answer."""
        owner, _, name = repository.repository.partition("/")
        tail = f"packages/container/{quote(name, safe='')}"
        action = f"looking for the account {owner}"
        answer = self.send("GET", f"{self.address}/users/{quote(owner, safe='')}", action, 200)
        if oci.parse_document(_Account, answer.body, "account", hint="").type == "Organization":
            paths = [f"{self.address}/orgs/{quote(owner, safe='')}/{tail}"]
        else:
            paths = [f"{self.address}/users/{quote(owner, safe='')}/{tail}"]
            # Under a user's name, only public packages are certain to be listed; a user's own are under `/user` too.
            # That is the package of whoever logged in, so never without this check: a fork has the same digests.
            answer = self.send("GET", f"{self.address}/user", "reading the account of the login", 200, 403)
            if answer.status == HTTPStatus.OK:  # 403: the token of a job belongs to no account
                account = oci.parse_document(_Account, answer.body, "account", hint="")
                if account.login.lower() == owner.lower():
                    paths.insert(0, f"{self.address}/user/{tail}")
        action = f"listing the versions of {repository.name}"
        for path in paths:
            if (versions := self._versions(path, action)) is not None:
                return GitHubPackage(api=self, name=repository.name, path=path, versions=versions)
        raise RegistryError(
            f"{self._http.registry}: {action}: answered 404: no such package, or the login may not read it",
            hint=self.hint,
        )

    def _versions(self, path: str, action: str) -> Mapping[str, int] | None:
        """The id of each version by digest; None if the login sees no such package."""
        versions: dict[str, int] = {}
        url = f"{path}/versions?per_page={PAGE}"
        for _ in range(PAGES):
            answer = self.send("GET", url, action, 200, 404)
            if answer.status == HTTPStatus.NOT_FOUND:
                return None
            page = oci.parse_document(_Versions, answer.body, "list of versions", hint="")
            versions |= {version.name: version.id for version in page.root}
            if not (url := self._http.next_page(answer)):
                return versions
        raise RegistryError(f"{self._http.registry}: {action}: the list has more than {PAGES} pages")


@dataclass(frozen=True, kw_only=True)
class GitHubPackage:
    """`path` is its address in the API, `versions` are the ids of its versions by digest, when they were listed."""

    api: GitHubApi = field(repr=False)
    name: str
    path: str
    versions: Mapping[str, int]

    def delete_version(self, digest: str) -> bool:
        """Deletes the version of a manifest, and with it all its tags; False if there is none.

        Raises RefusedDeletionError if nobody may delete it, else RegistryError.
        """
        if digest not in self.versions:
            return False
        time.sleep(self.api.pause_s)
        url = f"{self.path}/versions/{self.versions[digest]}"
        action = f"deleting {self.name}@{short_digest(digest)}"
        try:
            answer = self.api.send("DELETE", url, action, 204, 404)
        except RejectedError as error:
            if error.status == HTTPStatus.BAD_REQUEST:
                raise RefusedDeletionError(str(error)) from error
            raise
        if answer.status == HTTPStatus.NO_CONTENT:
            return True
        # GitHub answers 404 instead of 403, so that nobody learns which private packages exist.
        if self.api.send("GET", url, action, 200, 404).status == HTTPStatus.OK:
            raise RegistryError(
                f"{action}: GitHub answered 404, but has this version: the login may not delete it", hint=self.api.hint
            )
        return False


def read_packages(names: Iterable[str], address: str, host: Host) -> Mapping[str, GitHubPackage]:
    """The packages of the repositories that are on GitHub, by name of the repository.

    `address` is that of the API if these repositories are on GitHub Enterprise; if empty, only ghcr.io is on GitHub.
    Raises RegistryError, VerifyError, UsageError.
    """
    apis: dict[str, GitHubApi] = {}
    packages: dict[str, GitHubPackage] = {}
    for name in dict.fromkeys(names):
        repository = ImageRef.parse(name)
        registry = repository.registry.lower()
        if address or registry == REGISTRY:
            if registry not in apis:
                apis[registry] = GitHubApi(address or ADDRESS, registry, host)
            packages[name] = apis[registry].package(repository)
    return packages
