"""Which index is used: pip's files and environment, uv's environment, and their order."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from builder.index import settings as index
from builder.index.settings import IndexSettings

A, B, C = (f"https://{name}.example.test/simple" for name in "abc")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home; the system's files are in its folder `etc`."""
    monkeypatch.setattr(index, "ETC", tmp_path / "etc")
    return tmp_path


def read(environ: Mapping[str, str], home: Path) -> IndexSettings:
    return index.read_index_settings(environ, home)


def conf(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


USER, OLD, UV = ".config/pip/pip.conf", ".pip/pip.conf", ".config/uv/uv.toml"


def test_without_configuration_nothing_is_set(home: Path) -> None:
    settings = read({}, home)
    assert settings == IndexSettings()
    assert settings.environment() == {}


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, C),
        ({"PIP_INDEX_URL": B}, B),
        ({"UV_DEFAULT_INDEX": A, "PIP_INDEX_URL": B}, A),
        ({"UV_INDEX_URL": A, "PIP_INDEX_URL": B}, A),
        ({"UV_DEFAULT_INDEX": A, "UV_INDEX_URL": B}, A),
        ({"UV_DEFAULT_INDEX": "", "PIP_INDEX_URL": ""}, C),
        ({"PIP_CONFIG_FILE": "/dev/null"}, ""),
    ],
)
def test_environment_before_files_and_uv_before_pip(home: Path, environ: dict[str, str], url: str) -> None:
    conf(home / USER, f"[global]\nindex-url = {C}\n")
    assert read(environ, home).url == url


def test_a_later_file_of_pip_overrides_an_earlier_one(home: Path) -> None:
    conf(home / OLD, f"[global]\nindex-url = {A}\ncert = /a.pem\n")
    assert read({}, home).url == A
    conf(home / USER, f"[global]\nindex-url = {B}\n")
    assert read({}, home) == IndexSettings(url=B, ca_bundle="/a.pem")
    own = conf(home / "own.conf", f"[global]\nindex-url = {C}\n")
    assert read({"PIP_CONFIG_FILE": own}, home).url == C


def test_files_of_the_user_come_before_those_of_the_system(home: Path) -> None:
    conf(home / "etc/xdg/pip/pip.conf", f"[global]\nindex-url = {A}\ncert = /a.pem\n")
    assert read({}, home) == IndexSettings(url=A, ca_bundle="/a.pem")
    conf(home / "etc/pip.conf", f"[global]\nindex-url = {B}\n")
    assert read({}, home) == IndexSettings(url=B, ca_bundle="/a.pem")
    conf(home / USER, f"[global]\nindex-url = {C}\n")
    assert read({}, home) == IndexSettings(url=C, ca_bundle="/a.pem")
    conf(home / "etc/uv/uv.toml", f'index-url = "{B}"\n')
    assert read({}, home).url == B, "uv precedes pip"
    conf(home / ".config/uv/uv.toml", f'index-url = "{A}"\n')
    assert read({}, home).url == A


def test_another_place_for_configuration(home: Path) -> None:
    conf(home / "xdg/pip/pip.conf", f"[global]\nindex-url = {A}\n")
    conf(home / USER, f"[global]\nindex-url = {B}\n")
    assert read({"XDG_CONFIG_HOME": str(home / "xdg")}, home).url == A


@pytest.mark.parametrize(
    ("name", "text", "url"),
    [
        (USER, f"[install]\nindex-url = {A}\n[global]\nindex-url = {B}\n", A),
        (USER, f"[global]\nindex-url = {B}\n[install]\nindex-url = {A}\n", A),
        (USER, f"[global]\nindex_url = {A}\n", A),
        (USER, f"[global]\nindex-url: {A}\n", A),
        (USER, f"[global]\nindex-url =   {A}  \n", A),
        (USER, f"[search]\nindex-url = {B}\n[global]\nindex-url = {A}\n", A),
        (UV, f'index-url = "{A}"\n', A),
        (UV, f'[pip]\nindex-url = "{A}"\n', A),
        (UV, f'[[index]]\nurl = "{B}"\n[[index]]\nurl = "{A}"\ndefault = true\n', A),
        (UV, f'[[index]]\nurl = "{A}"\n', ""),
        (UV, "", ""),
    ],
    ids=[
        "install first",
        "install last",
        "underscore",
        "colon",
        "spaces",
        "other section",
        "old setting of uv",
        "of uv pip",
        "default index of uv",
        "an extra index of uv",
        "nothing",
    ],
)
def test_as_pip_and_uv_read_it(home: Path, name: str, text: str, url: str) -> None:
    conf(home / name, text)
    assert read({}, home).url == url


@pytest.mark.parametrize("environ", [{}, {"PIP_EXTRA_INDEX_URL": B, "UV_INDEX": B, "UV_EXTRA_INDEX_URL": B}])
def test_extra_indexes_are_ignored(home: Path, environ: dict[str, str]) -> None:
    conf(home / USER, f"[global]\nextra-index-url = {B}\nindex-url = {A}\n")
    settings = read(environ, home)
    assert settings.environment() == {"UV_DEFAULT_INDEX": A, "PIP_INDEX_URL": A}


@pytest.mark.parametrize(
    ("environ", "ca"),
    [({}, "/c"), ({"PIP_CERT": "/b"}, "/b"), ({"SSL_CERT_FILE": "/a", "PIP_CERT": "/b"}, "/a")],
)
def test_the_certificates_of_uv_precede_those_of_pip(home: Path, environ: dict[str, str], ca: str) -> None:
    conf(home / USER, "[global]\ncert = /c\n")
    settings = read(environ, home)
    assert settings.environment() == {"SSL_CERT_FILE": ca, "PIP_CERT": ca}


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        (USER, "no section = 1", "a pip"),
        (USER, "[global\n", "a pip"),
        (USER, "[global]\nx\n", "a pip"),
        (USER, "[global]\nx = 1\nx = 2\n", "a pip"),
        (UV, "index-url = ", "a uv"),
    ],
)
def test_a_broken_file_is_named(home: Path, name: str, text: str, kind: str) -> None:
    path = conf(home / name, text)
    with pytest.raises(ValueError, match=rf"^{re.escape(path)} is not {kind} configuration file"):
        read({}, home)


@pytest.mark.parametrize("text", ["[global]\nindex-url https;me;secret\n", "index-url = https://me:secret@e.test\n"])
def test_a_line_of_a_broken_file_is_not_shown(home: Path, text: str) -> None:
    conf(home / USER, text)
    with pytest.raises(ValueError, match=r": line [12] is invalid$") as caught:
        read({}, home)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_a_named_index_has_the_certificates_and_the_proxy_of_this_machine() -> None:
    machine = IndexSettings(url=A, ca_bundle="/a.pem", proxy="http://p.test:1")
    settings = machine.with_index("one", B).with_index("two", C)
    assert (settings.url, settings.of("")) == (A, settings)
    assert settings.of("two") == replace(machine, name="two", url=C)
    assert settings.of("one").label == "the index one"
    with pytest.raises(LookupError):
        settings.of("three")


@pytest.mark.parametrize(
    ("url", "credentials", "loopback"),
    [
        ("", False, False),
        (A, False, False),
        ("https://me:pw@e.test/", True, False),
        ("https://token@e.test/", True, False),
        ("https://e.test/@scope/", False, False),
        ("http://localhost:1/", False, True),
        ("http://127.1.2.3/", False, True),
        ("http://[::1]/", False, True),
        ("http://127.e.test/", False, False),
        ("file:///srv/wheels", False, False),
    ],
)
def test_an_address_has_credentials_or_is_on_the_loopback(url: str, credentials: bool, loopback: bool) -> None:
    assert (index.has_credentials(url), index.is_loopback(url)) == (credentials, loopback)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://E.test/a@b/c%2Fd", "https://e.test"),
        ("https://me:p@w@e.test:443/", "https://e.test"),
        ("https://e.test:/x", "https://e.test"),
        ("http://e.test:80", "http://e.test"),
        ("http://e.test:443/", "http://e.test:443"),
        ("https://e.test:80/", "https://e.test:80"),
        ("https://[2001:DB8::1]:443/x", "https://[2001:db8::1]"),
        ("http://[::1]:8080/x", "http://[::1]:8080"),
        ("http://[::1:8080]/x", "http://[::1:8080]"),
        ("file:///srv/wheels", ""),
        ("https:e.test", ""),
        ("https://e.test:99999/", ""),
        ("http://[::1/", ""),
        ("", ""),
    ],
)
def test_one_origin_in_all_its_spellings(url: str, origin: str) -> None:
    assert index.origin_of(url) == origin


def test_main_prints_shell_lines(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = (*index.UV_INDEX_VARIABLES, *index.CA_VARIABLES)
    for name in ("PIP_CONFIG_FILE", "XDG_CONFIG_HOME", "UV_CONFIG_FILE", *variables):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PIP_INDEX_URL", "https://a.example.test/$(id)")
    monkeypatch.setattr(sys, "argv", ["index.py"])
    assert index.main() == 0
    assert capsys.readouterr().out == (
        "export UV_DEFAULT_INDEX='https://a.example.test/$(id)'\nexport PIP_INDEX_URL='https://a.example.test/$(id)'\n"
    )
    conf(home / USER, "broken")
    assert index.main() == 1
    assert capsys.readouterr().err


def test_the_mirror_of_pythons(home: Path) -> None:
    conf(home / "etc/uv/uv.toml", f'python-install-mirror = "{B}"\n')
    conf(home / UV, f'index-url = "{A}"\n')
    assert read({}, home) == IndexSettings(url=A, python_mirror=B)
    conf(home / UV, f'python-install-mirror = "{A}"\n')
    assert read({}, home).python_mirror == A, "the user's file precedes that of the system"
    settings = read({"UV_PYTHON_INSTALL_MIRROR": C}, home)
    assert settings.python_mirror == C
    assert settings.for_builds() == {"UV_PYTHON_INSTALL_MIRROR": C}, "also in Dockerfiles"
