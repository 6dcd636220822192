"""Where the login of a named index comes from, and what is not said about it."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from builder.common.errors import UsageError
from builder.index import logins
from builder.index.settings import IndexSettings

URL = "https://python.example.test/team/simple"
ENVIRON = {"UV_INDEX_MY_TEAM_USERNAME": "env", "UV_INDEX_MY_TEAM_PASSWORD": "of-env"}


def index(url: str = URL) -> IndexSettings:
    return IndexSettings().with_index("my-team", url).of("my-team")


def set_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user with a netrc."""
    for name in (*ENVIRON, "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text(
        "machine other.example.test login x password y\n"
        "machine python.example.test login net password of-netrc\n"
        "default login d password of-default\n"
    )
    return tmp_path


def test_the_first_of_environment_and_netrc(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert logins.find_login(index()) == ("net", "of-netrc")
    (home / ".netrc").unlink()
    assert logins.find_login(index()) is None
    set_environ(monkeypatch)
    assert logins.find_login(index()) == ("env", "of-env")


def test_a_folder_has_no_login(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environ(monkeypatch)
    assert logins.find_login(IndexSettings().with_index("my-team", "", folder=home).of("my-team")) is None


@pytest.mark.parametrize("url", [URL.replace("/team", ":443/team"), URL.replace("python.example", "PYTHON.Example")])
def test_a_host_is_the_same_in_all_its_spellings(home: Path, url: str) -> None:
    assert logins.find_login(index(url)) == ("net", "of-netrc")


@pytest.mark.parametrize("machine", ["::1", "[::1]"])
def test_the_entry_of_an_ipv6_address(home: Path, machine: str) -> None:
    """uv looks it up in brackets, other programs without them."""
    (home / ".netrc").write_text(f"machine {machine} login net password of-v6\n")
    assert logins.find_login(index("https://[::1]:8443/simple")) == ("net", "of-v6")
    assert logins.find_login(index("https://[::2]:8443/simple")) is None


def test_a_token_needs_no_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX_MY_TEAM_PASSWORD", "t")
    assert logins.find_login(index()) == ("__token__", "t")


def test_the_default_entry_of_netrc_belongs_to_no_index(home: Path) -> None:
    assert logins.find_login(index("https://third.example.test/simple")) is None


def test_no_login_is_sent_unencrypted_except_to_this_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="would be sent unencrypted"):
        logins.find_login(index("http://python.example.test/simple"))
    set_environ(monkeypatch)
    assert logins.find_login(index("http://127.0.0.1:3141/simple")) == ("env", "of-env")


def test_a_broken_netrc_is_named_without_its_contents(home: Path) -> None:
    path = home / ".netrc"
    path.write_text("machine python.example.test login me passwort s3cret\n")
    with pytest.raises(UsageError, match="line 1 is invalid") as caught:
        logins.find_login(index())
    assert str(path) in str(caught.value)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_a_netrc_file_for_build_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX_MY_TEAM_PASSWORD", "one")
    monkeypatch.setenv("UV_INDEX_OTHER_PASSWORD", "two")
    monkeypatch.setenv("NETRC", "/nonexistent")
    public = IndexSettings().with_index("public", "https://public.example.test").of("public")
    other = IndexSettings().with_index("other", "https://other.example.test").of("other")
    assert logins.netrc_of([public]) == ""
    assert logins.netrc_of([public, index(), other]) == (
        "machine python.example.test login __token__ password one\n"
        "machine other.example.test login __token__ password two\n"
    )
    numbered = IndexSettings().with_index("other", "https://[::1]:8443/a@b").of("other")
    assert logins.netrc_of([numbered]) == "machine [::1] login __token__ password two\n", "as uv looks it up"
    same_host = IndexSettings().with_index("other", URL).of("other")
    with pytest.raises(UsageError, match="two indexes on one host"):
        logins.netrc_of([index(), same_host])
    monkeypatch.setenv("UV_INDEX_OTHER_PASSWORD", "with space")
    with pytest.raises(UsageError, match="characters that a netrc file cannot have"):
        logins.netrc_of([other])
