"""Setting up an engine: what is installed, and when setup is refused. Every program is a fake."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import EngineError, NoEngineError
from builder.engine import setup as engine_setup
from builder.engine.client import Engine
from builder.engine.setup import parse_version
from builder.index.host import Apt, AptSource, Host
from tests.fakes.engine import FakeEngine, Programs

DEBIAN = {"ID": "debian", "PRETTY_NAME": "Debian GNU/Linux 12", "VERSION_CODENAME": "bookworm"}
MINT = {"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}
FEDORA = {"ID": "fedora", "PRETTY_NAME": "Fedora Linux 41"}
ABSENT = NoEngineError("no Docker Engine answers at tcp://build.example.test")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("26.1.5+dfsg1-9+b7", (26, 1)),
        ("5:27.5.1-1~debian.12~bookworm", (27, 5)),
        ("20.10.24+dfsg1-1+deb12u1", (20, 10)),
        ("23.0", (23, 0)),
        ("(none)", (0, 0)),
        ("", (0, 0)),
        ("dev", (0, 0)),
    ],
)
def test_a_version_is_compared_by_its_first_two_numbers(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("environ", "uid", "release", "message", "hint"),
    [
        ({"DOCKER_HOST": "tcp://build.example.test"}, 0, DEBIAN, "build.example.test", "unset DOCKER_HOST"),
        ({"DOCKER_HOST": "tcp://build.example.test"}, 1000, FEDORA, "build.example.test", "unset DOCKER_HOST"),
        ({}, 0, FEDORA, "cannot install one on Fedora Linux 41", "Docker Engine 23 or newer"),
        ({}, 1000, FEDORA, "cannot install one on Fedora Linux 41", "Docker Engine 23 or newer"),
        ({}, 0, {}, "cannot install one on this system", "package manager"),
        ({}, 1000, DEBIAN, "needs root", "sudo .venv/bin/builder engine"),
        ({"DOCKER_HOST": ""}, 1000, MINT, "needs root", "sudo .venv/bin/builder engine"),
    ],
)
def test_an_engine_is_only_installed_where_that_is_possible(
    environ: dict[str, str], uid: int, release: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(EngineError) as caught:
        engine_setup.require_installable(environ, uid, release, ABSENT)
    assert message in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.__cause__ is ABSENT


@pytest.mark.parametrize("release", [DEBIAN, MINT, {"ID": "ubuntu"}])
def test_possible_as_root_on_debian_and_derivatives(release: dict[str, str]) -> None:
    assert engine_setup.require_installable({}, 0, release, ABSENT) is None  # type: ignore[func-returns-value]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A Debian machine without an engine, as root; `calls` records what was started."""
    calls: list[str] = []

    def connect() -> FakeEngine:
        if "start" not in calls:
            raise ABSENT
        return FakeEngine()

    monkeypatch.setattr(Engine, "connect", connect)
    monkeypatch.setattr(engine_setup, "SETUP_LOG", tmp_path / "setup.log")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("builder.index.host.os_release", lambda: DEBIAN)
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(engine_setup, "start", lambda _: calls.append("start"))
    return {"calls": calls}


def test_a_running_engine_is_not_changed(machine: dict[str, Any]) -> None:
    machine["calls"].append("start")
    assert isinstance(engine_setup.ensure(pytest.fail), FakeEngine)
    assert machine["calls"] == ["start"]


def apt(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, candidate: str, status: int = 0) -> Programs:
    def answer(command: list[str]) -> tuple[int, str, str]:
        if command[0] == "apt-cache":
            return 0, f"{command[-1]}:\n  Candidate: {candidate}\n", ""
        return (status if "install" in command else 0), "Err: http://mirror.example.test/debian x\n", ""

    programs = Programs(answer)
    monkeypatch.setattr("subprocess.run", programs)
    archives = Apt(sources=(AptSource(kind="main", uri="http://mirror.example.test/debian"),))
    monkeypatch.setattr("builder.index.host.read_host", lambda: machine.get("host", Host(read_apt=lambda: archives)))
    return programs


def test_the_distributions_engine_is_installed_if_new_enough(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = apt(machine, monkeypatch, candidate="26.1.5+dfsg1-9")
    engine_setup.ensure(lambda _: None)
    assert programs.calls[-1] == [
        "apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "-q", "--no-install-recommends",
        *engine_setup.PACKAGES,
    ]  # fmt: skip
    assert not any("Dir::" in word for word in programs.calls[-1])


def test_a_newer_engine_is_installed_without_changing_the_machines_sources(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = apt(machine, monkeypatch, candidate="20.10.24+dfsg1-1")
    engine_setup.ensure(lambda _: None)
    settings = dict(word.split("=", 1) for word in programs.calls[-1] if word.startswith("Dir::"))
    assert settings["Dir::Etc::SourceParts"] == "-"
    suites = [line.split()[3] for line in programs.files[settings["Dir::Etc::SourceList"]].splitlines()]
    assert suites == ["bookworm", "trixie"]
    preferences = programs.files[settings["Dir::Etc::Preferences"]]
    assert "Pin-Priority: 100" in preferences
    assert "Package: docker.io docker-cli docker-buildx docker-compose\n" in preferences
    assert not Path(settings["Dir::State::Lists"]).exists(), "left behind"


def test_an_old_engine_without_an_archive_for_a_newer_one(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine["host"] = Host()
    apt(machine, monkeypatch, candidate="20.10.24+dfsg1-1")
    with pytest.raises(EngineError, match="older than 23, and no Debian archive is configured") as caught:
        engine_setup.ensure(lambda _: None)
    assert "Install Docker Engine 23" in caught.value.hint


def test_a_failure_of_apt_is_reported_without_host_names(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    apt(machine, monkeypatch, candidate="26.1.5", status=100)
    with pytest.raises(EngineError, match="apt-get could not install Docker Engine") as caught:
        engine_setup.ensure(lambda _: None)
    assert "http://<mirror>/debian" in str(caught.value)
    assert "mirror.example.test" not in (tmp_path / "setup.log").read_text()
    assert machine["calls"] == []


@pytest.mark.parametrize(
    ("content", "stays"),
    [(str(os.getpid()), False), ("not a number", False), ("99999999", True)],
    ids=["another process", "damaged", "no process"],
)
def test_the_pid_file_of_a_dockerd_that_was_killed(tmp_path: Path, content: str, stays: bool) -> None:
    file = tmp_path / "docker.pid"
    file.write_text(content)
    engine_setup.remove_stale(file)
    assert file.exists() == stays
    engine_setup.remove_stale(tmp_path / "none")
