"""Which cosign is installed, and warnings about it."""

from __future__ import annotations

import json
import subprocess
import warnings
from collections.abc import Callable

import pytest

from builder.common.errors import BuilderWarning
from builder.evidence import cosign
from builder.evidence.cosign import Cosign, find_cosign, run_cosign
from tests.fakes.engine import Programs

Install = Callable[..., Programs]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a cosign with a version, as an upstream release or from Debian's package."""

    def install(release: str = "devel", package: str = "") -> Programs:
        def answer(command: list[str]) -> tuple[int, str, str]:
            match command[:2]:
                case ["cosign", "version"]:
                    return 0, json.dumps({"gitVersion": release}), ""
                case ["dpkg-query", "--search"]:
                    return (0, "cosign: /usr/bin/cosign\n", "") if package else (1, "", "no path found")
                case ["dpkg-query", "--show"]:
                    return 0, package, ""
            return 0, "", ""

        programs = Programs(answer)
        monkeypatch.setattr(subprocess, "run", programs)
        monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/cosign")
        cosign.warn_of_vulnerabilities.cache_clear()
        return programs

    return install


@pytest.mark.parametrize(
    ("release", "package", "expected"),
    [
        ("v3.1.4", "", ("3.1.4", "")),
        ("2.6.5", "2.5.0-2", ("2.6.5", "")),
        ("devel", "2.5.0-2+b5", ("2.5.0", "2.5.0-2+b5")),
        ("devel", "1:3.1.1~rc1+dfsg-2", ("3.1.1", "1:3.1.1~rc1+dfsg-2")),
        ("devel", "", ("", "")),
        ("devel", "unknown", ("", "")),
        ("v3.1.4-dirty", "", ("3.1.4", "")),
    ],
)
def test_the_version_of_cosign(install: Install, release: str, package: str, expected: tuple[str, str]) -> None:
    install(release, package)
    version, debian = expected
    assert find_cosign() == Cosign(path="/usr/bin/cosign", version=version, package=debian)


@pytest.mark.parametrize("printed", ["", "no JSON", "[]", "{}", "null"])
def test_a_cosign_that_prints_no_version(install: Install, monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    install()
    monkeypatch.setattr(subprocess, "run", Programs(lambda command: (int(command[0] != "cosign"), printed, "")))
    assert find_cosign() == Cosign(path="/usr/bin/cosign")
    assert Cosign(path="/usr/bin/cosign").danger == ""


def test_programs_that_do_not_exist(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()

    def run(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", run)
    assert find_cosign() == Cosign(path="/usr/bin/cosign")
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert find_cosign() is None


def test_a_vulnerable_version_is_warned_of_once(install: Install) -> None:
    install(package="2.5.0-2+b5")
    with pytest.warns(BuilderWarning) as caught:
        run_cosign("sign-blob", "x")
    with warnings.catch_warnings(action="error"):
        run_cosign("verify-blob", "x")
    [warning] = caught
    text = str(warning.message)
    assert text.startswith("cosign 2.5.0 (Debian's 2.5.0-2+b5) has known vulnerabilities: CVE-2026-22703 (")
    assert "CVE-2026-39395 (" in text
    assert "-> Install cosign 2.6.5, or 3.1.3 or newer: https://" in text
    assert "changelog" not in text


def test_an_update_of_a_stable_debian_may_have_the_fix(install: Install) -> None:
    install(package="2.5.0-2+deb13u1")
    assert (found := find_cosign())
    assert "Debian may have fixed them" in found.danger


@pytest.mark.parametrize("release", ["v2.6.5", "v3.1.3", "v4.0.0", "devel"])
def test_other_versions_are_not_warned_of(install: Install, release: str) -> None:
    install(release)
    with warnings.catch_warnings(action="error"):
        run_cosign("sign-blob", "x")
