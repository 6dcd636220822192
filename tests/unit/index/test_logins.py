"""Where the login of a named index comes from, and what is not said about it."""

from __future__ import annotations

import subprocess
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import UsageError
from builder.index import logins
from builder.index.settings import IndexSettings

URL = "https://python.example.test/team/simple"
ENVIRON = {"UV_INDEX_MY_TEAM_USERNAME": "env", "UV_INDEX_MY_TEAM_PASSWORD": "of-env"}


def index(login_from: str = "", url: str = URL) -> IndexSettings:
    return IndexSettings().with_index("my-team", url, login_from).of("my-team")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with a netrc and a configuration of pip."""
    (tmp_path / ".netrc").write_text(
        "machine other.example.test login x password y\n"
        "machine python.example.test login net password of-netrc\n"
        "default login d password of-default\n"
    )
    folder = tmp_path / ".config/pip"
    folder.mkdir(parents=True)
    (folder / "pip.conf").write_text(
        "[global]\nindex-url = https://d:of-default@pypi.example.test/simple\n"
        "extra-index-url =\n  https://x:y@python.example.test:8443/simple\n  https://p%40q:of%2Fpip@python.example.test/simple\n"
    )
    return {"HOME": str(tmp_path)}


def test_the_first_of_environment_netrc_and_pip(home: dict[str, str]) -> None:
    assert logins.find_login(index(), home | ENVIRON) == ("env", "of-env")
    assert logins.find_login(index(), home) == ("net", "of-netrc")
    Path(home["HOME"], ".netrc").unlink()
    assert logins.find_login(index(), home) == ("p@q", "of/pip")
    Path(home["HOME"], ".config/pip/pip.conf").unlink()
    assert logins.find_login(index(), home) is None
    both = {"PIP_EXTRA_INDEX_URL": f"https://a:b@other.test/ {URL.replace('//', '//c:d@')}"}
    assert logins.find_login(index(), home | both) == ("c", "d")


@pytest.mark.parametrize("url", [URL.replace("/team", ":443/team"), URL.replace("python.example", "PYTHON.Example")])
def test_a_host_is_the_same_in_all_its_spellings(home: dict[str, str], url: str) -> None:
    assert logins.find_login(index("netrc", url), home) == ("net", "of-netrc")
    assert logins.find_login(index("pip", url), home) == ("p@q", "of/pip")


@pytest.mark.parametrize("machine", ["::1", "[::1]"])
def test_the_entry_of_an_ipv6_address(home: dict[str, str], machine: str) -> None:
    """uv looks it up in brackets, other programs without them."""
    Path(home["HOME"], ".netrc").write_text(f"machine {machine} login net password of-v6\n")
    assert logins.find_login(index(url="https://[::1]:8443/simple"), home) == ("net", "of-v6")
    assert logins.find_login(index(url="https://[::2]:8443/simple"), home) is None


@pytest.mark.parametrize(
    ("source", "login"),
    [("environment", ("env", "of-env")), ("netrc", ("net", "of-netrc")), ("pip", ("p@q", "of/pip"))],
)
def test_the_only_place_that_the_matrix_names(home: dict[str, str], source: str, login: tuple[str, str]) -> None:
    assert logins.find_login(index(source), home | ENVIRON) == login
    with pytest.raises(UsageError, match=f"the index my-team has no login: matrix.yaml takes it from {source}"):
        logins.find_login(index(source), {"HOME": "/nonexistent"})


def test_a_token_needs_no_user(home: dict[str, str]) -> None:
    assert logins.find_login(index(), home | {"UV_INDEX_MY_TEAM_PASSWORD": "t"}) == ("__token__", "t")


def test_the_default_entry_of_netrc_belongs_to_no_index(home: dict[str, str]) -> None:
    assert logins.find_login(index(url="https://third.example.test/simple"), home) is None


def test_no_login_is_sent_unencrypted_except_to_this_machine(home: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="would be sent unencrypted"):
        logins.find_login(index(url="http://python.example.test/simple"), home)
    assert logins.find_login(index(url="http://127.0.0.1:3141/simple"), home | ENVIRON) == ("env", "of-env")


def test_a_broken_netrc_is_named_without_its_contents(home: dict[str, str]) -> None:
    path = Path(home["HOME"], ".netrc")
    path.write_text("machine python.example.test login me passwort s3cret\n")
    with pytest.raises(UsageError, match="line 1 is invalid") as caught:
        logins.find_login(index(), home)
    assert str(path) in str(caught.value)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


class Keyring:
    """Stands in for the program `keyring`, with one password."""

    def __init__(self, service: str, user: str) -> None:
        self.calls: list[Sequence[str]] = []
        self._known = service, user

    def __call__(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.calls.append(command)
        is_known = tuple(command[2:]) == self._known
        return subprocess.CompletedProcess(command, 0 if is_known else 1, b"of-keyring\n" if is_known else b"")


def test_the_keyring_is_used_only_if_the_matrix_names_it(home: dict[str, str]) -> None:
    keyring = Keyring("python.example.test", "__token__")
    assert logins.find_login(index("keyring"), home, run=keyring) == ("__token__", "of-keyring")
    assert keyring.calls == [["keyring", "get", service, "__token__"] for service in (URL, "python.example.test")]
    keyring = Keyring(URL, "me")
    user = {"UV_INDEX_MY_TEAM_USERNAME": "me"}
    assert logins.find_login(index("keyring"), home | user, run=keyring) == ("me", "of-keyring")
    with pytest.raises(UsageError, match="has no login") as caught:
        logins.find_login(index("keyring"), home, run=keyring)
    assert f"keyring set {URL} __token__" in caught.value.hint
    with pytest.raises(UsageError, match="has no login") as caught:
        logins.find_login(index("keyring", "https://[::1]/simple"), home, run=keyring)
    assert "keyring set 'https://[::1]/simple' __token__" in caught.value.hint
    keyring.calls.clear()
    logins.find_login(index(), home, run=keyring)
    assert keyring.calls == []


def test_a_keyring_that_cannot_run() -> None:
    def absent(*_: object, **__: object) -> Any:
        raise FileNotFoundError

    with pytest.raises(UsageError, match="the program `keyring` failed"):
        logins.find_login(index("keyring"), {}, run=absent)


def test_a_netrc_file_for_build_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX_MY_TEAM_PASSWORD", "one")
    monkeypatch.setenv("UV_INDEX_OTHER_PASSWORD", "two")
    monkeypatch.setenv("NETRC", "/nonexistent")
    public = IndexSettings().with_index("public", "https://public.example.test", "").of("public")
    other = IndexSettings().with_index("other", "https://other.example.test", "").of("other")
    assert logins.netrc_of([public]) == ""
    assert logins.netrc_of([public, index(), other]) == (
        "machine python.example.test login __token__ password one\n"
        "machine other.example.test login __token__ password two\n"
    )
    numbered = IndexSettings().with_index("other", "https://[::1]:8443/a@b", "").of("other")
    assert logins.netrc_of([numbered]) == "machine [::1] login __token__ password two\n", "as uv looks it up"
    same_host = IndexSettings().with_index("other", URL, "").of("other")
    with pytest.raises(UsageError, match="two indexes on one host"):
        logins.netrc_of([index(), same_host])
    monkeypatch.setenv("UV_INDEX_OTHER_PASSWORD", "with space")
    with pytest.raises(UsageError, match="characters that a netrc file cannot have"):
        logins.netrc_of([other])
