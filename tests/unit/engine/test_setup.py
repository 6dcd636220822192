"""Setting up an engine: what is installed, and when setup is refused. Every program is a fake."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from builder.common.console import View
from builder.common.errors import EngineError, NoEngineError
from builder.engine import setup as engine_setup
from builder.engine.client import Engine
from builder.engine.setup import parse_version
from builder.index.host import Apt, AptSource, Host
from tests.fakes.engine import FakeEngine, MemoryConsole, Programs

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
    ],
)
def test_a_version_is_compared_by_its_first_two_numbers(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("environ", "uid", "release", "message", "hint"),
    [
        ({"DOCKER_HOST": "tcp://build.example.test"}, 0, DEBIAN, "build.example.test", "unset DOCKER_HOST"),
        ({"DOCKER_HOST": "unix:///var/run/docker.sock"}, 1000, DEBIAN, "needs root", "sudo .venv/bin/builder engine"),
        ({}, 0, FEDORA, "cannot install one on Fedora Linux 41", "Docker Engine 23 or newer"),
        ({}, 0, {}, "cannot install one on this system", "package manager"),
        ({"DOCKER_HOST": ""}, 1000, MINT, "needs root", "sudo .venv/bin/builder engine"),
    ],
)
def test_an_engine_is_only_installed_where_that_is_possible(
    environ: dict[str, str], uid: int, release: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(EngineError) as caught:
        engine_setup.require_installable({"DOCKER_CONFIG": "/nonexistent", **environ}, uid, release, ABSENT)
    assert message in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.__cause__ is ABSENT
    engine_setup.require_installable({}, 0, MINT, ABSENT)


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
    assert isinstance(engine_setup.ensure(View(MemoryConsole())), FakeEngine)
    assert machine["calls"] == ["start"]


def apt(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, candidate: str, status: int = 0) -> Programs:
    """`candidate` is the version of every package in this machine's release; trixie has 26.1.5+dfsg1-9."""

    def answer(command: list[str]) -> tuple[int, str, str]:
        if command[0] == "apt-cache":
            settings = dict(word.split("=", 1) for word in command if word.startswith("Dir::"))
            sources = Path(settings.get("Dir::Etc::SourceList", os.devnull)).read_text()
            version = "26.1.5+dfsg1-9" if " trixie " in sources else candidate
            return 0, f"{command[-1]}:\n  Candidate: {version}\n", ""
        return (status if "install" in command else 0), "Err: http://mirror.example.test/debian x\n", ""

    programs = Programs(answer)
    monkeypatch.setattr("subprocess.run", programs)
    archives = Apt(
        sources=(
            AptSource(kind="main", uri="http://mirror.example.test/debian"),
            AptSource(kind="security", uri="http://mirror.example.test/debian-security"),
        )
    )
    monkeypatch.setattr("builder.index.host.read_host", lambda: machine.get("host", Host(archives=archives)))
    return programs


def suites(programs: Programs) -> list[str]:
    """The suites that the last call of apt could use."""
    settings = dict(word.split("=", 1) for word in programs.calls[-1] if word.startswith("Dir::"))
    assert settings["Dir::Etc::SourceParts"] == "-"
    assert "Pin-Priority: 100" in programs.files[settings["Dir::Etc::Preferences"]]
    assert not Path(settings["Dir::State::Lists"]).exists(), "left behind"
    return [line.split()[3] for line in programs.files[settings["Dir::Etc::SourceList"]].splitlines()]


@pytest.mark.parametrize(
    ("candidate", "used", "text"),
    [
        ("26.1.6", [], "docker.io 26.1.6 from Debian bookworm"),
        (
            "20.10.24+dfsg1-1",
            ["trixie"],
            "docker.io 26.1.5+dfsg1-9 from Debian trixie, because Debian bookworm has 20.10.24+dfsg1-1",
        ),
    ],
    ids=["the release's own", "a newer one"],
)
def test_an_engine_is_installed_without_the_machines_other_sources(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, candidate: str, used: list[str], text: str
) -> None:
    """A third-party source that was broken, or slow, stopped the installation."""
    programs, console = apt(machine, monkeypatch, candidate=candidate), MemoryConsole()
    engine_setup.ensure(View(console))
    assert programs.calls[-1][-4:] == list(engine_setup.PACKAGES)
    assert suites(programs) == ["bookworm", "bookworm-security", *used]
    assert console.text.splitlines() == [f"engine: installing {text} (about a minute)"]


def test_another_distributions_engine_is_installed_from_its_sources(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.index.host.os_release", lambda: {"ID": "ubuntu", "VERSION_CODENAME": "noble"})
    programs = apt(machine, monkeypatch, candidate="27.5.1")
    engine_setup.ensure(View(MemoryConsole()))
    assert programs.calls[-1][-4:] == list(engine_setup.PACKAGES)
    assert not any("Dir::" in word for word in programs.calls[-1])


def test_an_old_engine_without_an_archive_for_a_newer_one(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["host"] = Host()
    apt(machine, monkeypatch, candidate="20.10.24+dfsg1-1")
    with pytest.raises(EngineError):
        engine_setup.ensure(View(MemoryConsole()))
    assert machine["calls"] == []


def test_a_failure_of_apt_is_reported_without_host_names(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    apt(machine, monkeypatch, candidate="26.1.5", status=100)
    with pytest.raises(EngineError, match="apt-get could not install Docker Engine") as caught:
        engine_setup.ensure(View(MemoryConsole()))
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
