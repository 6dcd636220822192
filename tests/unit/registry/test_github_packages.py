"""Versions of packages on GitHub, with a stand-in for its API."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from builder.common.console import View
from builder.common.errors import RegistryError, UsageError, VerifyError
from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.index.host import Host
from builder.registry import failures, prune
from builder.registry.github_packages import GitHubApi, GitHubPackage, RefusedDeletionError, read_packages
from builder.registry.prune import Item
from tests.fakes.github import LAST, POPULAR, GitHub, Package, Token
from tests.fakes.registry import MemoryRegistry
from tests.fakes.wire import QUICK, Reply, Sent, Wire

TEAM, ALICE, BOB = "ghcr.io/team/staging/pt-cuda", "ghcr.io/alice/pt-cuda", "ghcr.io/bob/pt-cuda"
IMAGE, INDEX, REPORT = (digest_of_bytes(name.encode()) for name in ("image", "index", "report"))
CONTENTS = {IMAGE: ("plan-1",), INDEX: ("sha256-1",), REPORT: ()}


@pytest.fixture
def github() -> GitHub:
    """A package of an organization and one of each user. The same images are in all of them."""
    return GitHub(
        accounts={"team": "Organization", "alice": "User", "bob": "User"},
        packages={
            ("team", "staging/pt-cuda"): Package(dict(CONTENTS)),
            ("alice", "pt-cuda"): Package(dict(CONTENTS)),
            ("bob", "pt-cuda"): Package(dict(CONTENTS)),
        },
        tokens={
            "of-alice": Token(login="alice", sees=("team", "alice"), deletes=("team", "alice")),
            "of-a-job": Token(sees=("team", "alice"), deletes=("team", "alice")),
            "reads": Token(login="alice", sees=("team",)),
            "no-scope": Token(login="alice", scopes=("read:packages",), sees=("team",), deletes=("team",)),
        },
    )


class Client:
    """The API as a user sees it, with the token of a login."""

    def __init__(self, github: GitHub, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.github, self._folder = github, folder
        self.wire = Wire.install(monkeypatch, self._answer)
        monkeypatch.setenv("DOCKER_CONFIG", str(folder))
        self.log_in("of-alice")

    def _answer(self, sent: Sent) -> Reply:
        return self.github.answer(sent.method, sent.url, sent.headers)

    def log_in(self, token: str) -> None:
        entry = base64.b64encode(f"somebody:{token}".encode()).decode()
        (self._folder / "config.json").write_text(json.dumps({"auths": {"ghcr.io": {"auth": entry}}}))

    def package(self, name: str = TEAM, address: str = "https://api.github.com") -> GitHubPackage:
        return GitHubApi(address, "ghcr.io", Host(), policy=QUICK, pause_s=0).package(ImageRef.parse(name))


@pytest.fixture
def client(github: GitHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Client:
    return Client(github, monkeypatch, tmp_path)


def test_a_version_goes_with_its_tags_and_no_other_one(client: Client, github: GitHub) -> None:
    package = client.package()
    assert package.delete_version(IMAGE)
    assert package.delete_version(REPORT), "without a tag"
    assert github.packages["team", "staging/pt-cuda"].manifests == {INDEX: CONTENTS[INDEX]}
    assert not package.delete_version(digest_of_bytes(b"another")), "none was there when they were listed"
    assert not package.delete_version(IMAGE), "somebody else deleted it meanwhile"
    assert github.requests[0] == "GET /users/team"
    assert github.requests[1] == "GET /orgs/team/packages/container/staging%2Fpt-cuda/versions"
    assert {sent.headers["Authorization"] for sent in client.wire.seen} == {"Bearer of-alice"}


@pytest.mark.parametrize(
    ("name", "token", "path"),
    [
        (TEAM, "of-a-job", "/orgs/team/packages/container/staging%2Fpt-cuda"),
        (ALICE, "of-alice", "/user/packages/container/pt-cuda"),
        (ALICE, "of-a-job", "/users/alice/packages/container/pt-cuda"),
    ],
)
def test_where_the_package_of_an_owner_is(client: Client, name: str, token: str, path: str) -> None:
    client.log_in(token)
    package = client.package(name)
    assert package.path == f"https://api.github.com{path}"
    assert package.delete_version(IMAGE)


def test_the_own_package_is_never_taken_for_that_of_another_user(client: Client, github: GitHub) -> None:
    """A fork has a package of the same name with the same digests."""
    with pytest.raises(RegistryError, match=r"ghcr\.io/bob/pt-cuda: answered 404: no such package, or the login"):
        client.package(BOB)
    assert not [line for line in github.requests if line.startswith("GET /user/")]
    github.packages["bob", "pt-cuda"].is_public = True
    with pytest.raises(RegistryError, match="GitHub answered 404, but has this version: the login may not delete it"):
        client.package(BOB).delete_version(IMAGE)
    assert github.packages["alice", "pt-cuda"].manifests == github.packages["bob", "pt-cuda"].manifests == CONTENTS


def test_all_pages_of_the_list_are_read(client: Client, github: GitHub) -> None:
    manifests = {digest_of_bytes(str(number).encode()): () for number in range(205)}
    github.packages["team", "staging/pt-cuda"] = Package(dict(manifests))
    assert client.package().versions.keys() == manifests.keys()
    assert len([line for line in github.requests if line.endswith("/versions")]) == 3


def test_the_last_version_with_a_tag_is_refused(client: Client, github: GitHub) -> None:
    package = client.package()
    package.delete_version(IMAGE)
    with pytest.raises(RefusedDeletionError, match=LAST):
        package.delete_version(INDEX)
    github.packages["team", "staging/pt-cuda"] = Package(dict(CONTENTS), is_public=True, popular={IMAGE})
    with pytest.raises(RefusedDeletionError, match=POPULAR):
        package.delete_version(IMAGE)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("unknown", "login not accepted"),
        ("no-scope", "You need at least delete:packages scope"),
        ("reads", "GitHub answered 404, but has this version: the login may not delete it"),
    ],
)
def test_a_login_that_is_not_enough(client: Client, github: GitHub, token: str, message: str) -> None:
    client.log_in(token)
    with pytest.raises(RegistryError, match=message) as caught:
        client.package().delete_version(IMAGE)
    assert "delete:packages" in caught.value.hint
    assert "docker login ghcr.io" in caught.value.hint
    assert token not in str(caught.value) + caught.value.hint
    assert github.packages["team", "staging/pt-cuda"].manifests == CONTENTS


def test_without_a_login_nothing_is_requested(client: Client, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RegistryError, match=r"ghcr\.io: no token") as caught:
        client.package()
    assert "docker login ghcr.io" in caught.value.hint
    assert client.wire.seen == []


SOON = {"Retry-After": "1"}


@pytest.mark.parametrize("status", [403, 429])
def test_a_rate_limit_that_ends_soon_is_waited_for(
    client: Client, github: GitHub, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    waits: list[float] = []

    def wait(_: threading.Event, seconds: float = 0) -> bool:
        waits.append(seconds)
        return False

    monkeypatch.setattr(threading.Event, "wait", wait)
    reset = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(int(time.time()) + 3)}
    package = client.package()
    github.first = [Reply(status=status, headers=SOON), Reply(status=status, headers=reset)]
    assert package.delete_version(IMAGE)
    assert len(waits) == 2
    assert waits[0] >= 1
    assert 1 <= waits[1] <= 3


def test_a_rate_limit_that_ends_late_is_an_error(client: Client, github: GitHub) -> None:
    package = client.package()
    reset = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(int(time.time()) + 1800)}
    github.first = [Reply(status=403, headers=reset, body=b'{"message": "API rate limit exceeded"}')]
    with pytest.raises(RegistryError, match=r"API rate limit exceeded.*asks to retry after 1[78][0-9]{2} s"):
        package.delete_version(IMAGE)


@pytest.mark.parametrize(
    ("status", "headers", "message", "expected"),
    [
        (403, {}, "You have exceeded a secondary rate limit.", 60),
        (403, {}, "You need at least delete:packages scope", 0),
        (403, {"x-ratelimit-remaining": "10", "x-ratelimit-reset": "200"}, "", 0),
        (403, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "200"}, "", 100),
        (429, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "50"}, "", 1),
        (429, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "soon"}, "", 0),
        (400, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "200"}, "", 0),
        (403, {"Retry-After": "7", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "200"}, "", 7),
    ],
)
def test_how_long_a_limit_lasts(status: int, headers: Mapping[str, str], message: str, expected: float) -> None:
    assert failures.rate_limit(status, headers, message, 100) == expected


@pytest.mark.parametrize("body", [b"[{}]", b"{}", b"[", b'[{"id": "x", "name": "latest"}]', b"[" * 100_000])
def test_an_invalid_list_is_an_error(client: Client, github: GitHub, body: bytes) -> None:
    github.first = [Reply(body=b'{"login": "team", "type": "Organization"}'), Reply(body=body)]
    with pytest.raises(VerifyError, match="invalid list of versions"):
        client.package()


@pytest.mark.parametrize(
    "address", ["", "api.example.test", "http://api.example.test", "https://u:p@x.test", "ftp://x", "https://x.test/?a"]
)
def test_an_address_that_is_not_of_an_api(client: Client, address: str) -> None:
    with pytest.raises(UsageError, match="invalid address of GitHub's API") as caught:
        client.package(address=address)
    assert "--github-api https://" in caught.value.hint
    assert client.wire.seen == []


def test_the_address_of_github_enterprise(client: Client, github: GitHub) -> None:
    github.prefix = "/api/v3"
    package = client.package(address="https://github.example.test/api/v3/")
    assert package.delete_version(IMAGE)
    assert {sent.url.split("/users")[0].split("/orgs")[0] for sent in client.wire.seen} == {
        "https://github.example.test/api/v3"
    }


def test_only_repositories_on_github_are_packages(client: Client) -> None:
    assert read_packages(["registry.example.test/a/b"], "", Host()) == {}
    assert client.wire.seen == []
    assert read_packages([TEAM, "registry.example.test/a/b", TEAM], "", Host()).keys() == {TEAM}


def test_prune_goes_on_after_a_refusal(client: Client, github: GitHub) -> None:
    registry = MemoryRegistry()
    registry.name = TEAM
    items = [Item(registry=registry, digest=digest, kind="image", text="") for digest in (IMAGE, INDEX, REPORT)]
    result = prune.delete(items, {TEAM: client.package()}, View(Console(quiet=True)))
    assert result.deleted == 2
    [reason] = result.refused
    assert f"deleting {TEAM}@{INDEX[7:19]}" in reason
    assert LAST in reason
    assert github.packages["team", "staging/pt-cuda"].manifests == {INDEX: CONTENTS[INDEX]}
