"""Settings of the build host for its builds, and those that must not be passed on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from builder.common.errors import UsageError
from builder.index import host
from builder.index.host import Apt, AptSource, Host
from builder.index.settings import IndexSettings

TARGETS = """\
http://mirror.example.test/debian/ Debian bookworm main
http://mirror.example.test/debian/ Debian bookworm main
http://mirror.example.test/debian/ Debian bookworm contrib
http://mirror.example.test/debian/ Debian bookworm-updates main
http://security.example.test/debian-security/ Debian bookworm-security main
http://mirror.example.test/debian/ Debian bookworm-backports main
http://other.example.test/debian/ Debian bookworm main
http://vendor.example.test/ Vendor bookworm main
http://backports.example.test/ Debian Backports bookworm-updates main
file:/srv/debian/ Debian trixie main

nonsense
"""
MAIN = AptSource(kind="main", uri="http://mirror.example.test/debian/")
UPDATES = AptSource(kind="updates", uri="http://mirror.example.test/debian/")
SECURITY = AptSource(kind="security", uri="http://security.example.test/debian-security/")


def test_one_archive_of_each_kind() -> None:
    assert host.parse_targets(TARGETS) == (MAIN, UPDATES, SECURITY)


def test_sources_for_another_release() -> None:
    text = Host(archives=Apt(sources=(MAIN, SECURITY))).sources_list("trixie")
    assert text.splitlines() == [
        f"deb [signed-by={host.KEYRING}] http://mirror.example.test/debian/ trixie main",
        f"deb [signed-by={host.KEYRING}] http://security.example.test/debian-security/ trixie-security main",
    ]
    assert Host().sources_list("trixie") == ""


def test_all_files() -> None:
    files = Host(
        index=IndexSettings(url="https://index.example.test/o'hara/simple"),
        ca=b"pem",
        archives=Apt(sources=(MAIN,), proxy="http://proxy.example.test:3142"),
    ).files("trixie")
    assert {name: content.decode() for name, content in files.items()} == {
        "templates/host/ca.crt": "pem",
        "templates/host/index.env": (
            "export PIP_INDEX_URL='https://index.example.test/o'\"'\"'hara/simple'\n"
            "export UV_DEFAULT_INDEX='https://index.example.test/o'\"'\"'hara/simple'\n"
        ),
        "templates/host/sources.list": f"deb [signed-by={host.KEYRING}] {MAIN.uri} trixie main\n",
        "templates/host/apt.conf": (
            'Dir::Etc::SourceList "/mnt/host/sources.list";\n'
            'Dir::Etc::SourceParts "-";\n'
            'Acquire::http::Proxy "http://proxy.example.test:3142";\n'
            'Acquire::https::CAInfo "/mnt/host/ca.crt";\n'
        ),
    }


def test_expired_release_files_are_accepted_for_one_release_only() -> None:
    settings = Host(expired=frozenset({"bullseye"}))
    assert settings.files("bullseye")["templates/host/apt.conf"] == b'Acquire::Check-Valid-Until "false";\n'
    assert settings.files("trixie") == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"index": IndexSettings(url="https://me:pw@index.example.test/simple")},
        {"index": IndexSettings(url="https://token@index.example.test/simple")},
        {"index": IndexSettings(python_mirror="https://me:pw@pythons.example.test")},
        {"archives": Apt(proxy="http://me:pw@proxy.example.test:3142")},
        {"archives": Apt(sources=(AptSource(kind="main", uri="https://me:pw@mirror.example.test/debian"),))},
    ],
    ids=["index", "token", "mirror of Pythons", "apt proxy", "apt source"],
)
def test_credentials_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="user name or password") as caught:
        Host(**settings).files("trixie")
    assert "pw" not in str(caught.value).replace("password", "")
    assert "token" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("settings", "network"),
    [
        ({}, ""),
        ({"index": IndexSettings(url="https://index.example.test/")}, ""),
        ({"index": IndexSettings(url="http://127.0.0.1:3141/simple")}, "host"),
        ({"index": IndexSettings(url="http://localhost/simple")}, "host"),
        ({"index": IndexSettings(url="http://[::1]:1/simple")}, "host"),
        ({"index": IndexSettings(url="http://127.example.test/simple")}, ""),
        ({"proxies": {"HTTP_PROXY": "http://proxy.example.test:1"}}, ""),
        ({"proxies": {"https_proxy": "http://127.0.0.1:3128"}}, "host"),
        ({"proxies": {"HTTP_PROXY": "localhost:3128"}}, "host"),
        ({"proxies": {"HTTP_PROXY": "127.0.0.1:3128"}}, "host"),
        ({"proxies": {"NO_PROXY": "127.0.0.1,localhost"}}, ""),
        ({"proxies": {"NO_PROXY": "127.0.0.1"}}, ""),
        ({"archives": Apt(proxy="http://localhost:3142")}, "host"),
        ({"archives": Apt(sources=(AptSource(kind="main", uri="http://127.0.0.1/debian"),))}, "host"),
    ],
)
def test_the_network_of_the_host_is_used_for_its_loopback(settings: dict[str, Any], network: str) -> None:
    assert Host(**settings).network == network


def test_hosts_are_hidden() -> None:
    build_host = Host(
        index=IndexSettings(url="https://index.example.test/simple"),
        proxies={
            "HTTP_PROXY": "proxy.example.test:1",
            "HTTPS_PROXY": "http://tls.example.test",
            "NO_PROXY": "corp.example.test",
        },
        archives=Apt(sources=(MAIN, SECURITY), proxy="http://cacher.example.test:3142"),
    )
    names = ["index", "proxy", "tls", "mirror", "security", "cacher"]
    assert build_host.hide(" ".join(f"{name}.example.test" for name in names)) == " ".join(["<mirror>"] * len(names))
    assert build_host.hide("corp.example.test") == "corp.example.test"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without apt and without settings of its own; returns a folder on it."""
    monkeypatch.setattr(host, "is_debian", lambda: False)
    monkeypatch.setattr(host, "LOCAL_AUTHORITIES", tmp_path / "authorities")
    monkeypatch.setattr(host, "SYSTEM_BUNDLE", tmp_path / "bundle")
    (tmp_path / "authorities").mkdir()
    (tmp_path / "bundle").write_bytes(b"system")
    return tmp_path


def read(**environ: str) -> Host:
    with patch.dict(os.environ, {"PIP_CONFIG_FILE": "/dev/null", **environ}, clear=True):
        return host.read_host()


@pytest.mark.usefixtures("elsewhere")
def test_proxies_are_read_in_both_spellings() -> None:
    settings = read(http_proxy="http://p:1", HTTPS_PROXY="http://q:1", no_proxy="x", HTTP_PROXY="", OTHER_PROXY="y")
    assert settings.proxies == {"http_proxy": "http://p:1", "HTTPS_PROXY": "http://q:1", "no_proxy": "x"}
    assert (settings.ca, settings.apt.sources, settings.apt.proxy) == (b"", (), "")


@pytest.mark.usefixtures("elsewhere")
def test_apt_runs_only_if_its_settings_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 0.5 s, a third of a run with nothing to do."""
    calls: list[Apt] = []

    def apt() -> Apt:
        calls.append(Apt(sources=(MAIN,)))
        return calls[0]

    monkeypatch.setattr(host, "_apt", apt)
    settings = read()
    hide = settings.hide
    assert calls == []
    assert hide(f"from {MAIN.uri}") == "from http://<mirror>/debian/"
    assert settings.apt.sources == (MAIN,)
    assert len(calls) == 1


def test_the_system_bundle_is_used_if_a_ca_was_added(elsewhere: Path) -> None:
    assert read().ca == b""
    (elsewhere / "authorities/corp").mkdir()
    (elsewhere / "authorities/corp/ca.crt").write_text("x")
    assert read().ca == b"system"
    (elsewhere / "own.pem").write_bytes(b"own")
    assert read(SSL_CERT_FILE=str(elsewhere / "own.pem")).ca == b"own"


def test_a_missing_bundle_is_an_error(elsewhere: Path) -> None:
    with pytest.raises(UsageError):
        read(PIP_CERT=str(elsewhere / "absent.pem"))
