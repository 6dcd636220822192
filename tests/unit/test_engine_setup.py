"""Setting up an engine: when it is refused, and what is said then. Nothing is installed here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from builder import engine_setup
from builder.engine import Engine
from builder.engine_setup import parse_version
from builder.errors import EngineError, NoEngineError
from builder.host import AptSource, Host
from tests.unit.fakes import FakeEngine, Programs

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
def test_parse_version(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


def test_versions_compare_as_numbers() -> None:
    assert parse_version("9.1") < engine_setup.MINIMUM <= parse_version("100.0")


@pytest.mark.parametrize(
    ("environ", "uid", "release", "says", "hint"),
    [
        ({"DOCKER_HOST": "tcp://build.example.test"}, 0, DEBIAN, "build.example.test", "unset DOCKER_HOST"),
        ({"DOCKER_HOST": "tcp://build.example.test"}, 1000, FEDORA, "build.example.test", "unset DOCKER_HOST"),
        ({}, 0, FEDORA, "on Fedora Linux 41 it has to be installed by hand", "Docker Engine 23 or newer"),
        ({}, 1000, FEDORA, "on Fedora Linux 41 it has to be installed by hand", "Docker Engine 23 or newer"),
        ({}, 0, {}, "on this system it has to be installed by hand", "package manager"),
        ({}, 1000, DEBIAN, "needs root", "sudo .venv/bin/builder engine"),
        ({"DOCKER_HOST": ""}, 1000, MINT, "needs root", "sudo .venv/bin/builder engine"),
    ],
)
def test_refused(environ: dict[str, str], uid: int, release: dict[str, str], says: str, hint: str) -> None:
    with pytest.raises(EngineError) as caught:
        engine_setup.refuse_unless_possible(environ, uid, release, ABSENT)
    assert says in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.__cause__ is ABSENT


@pytest.mark.parametrize("release", [DEBIAN, MINT, {"ID": "ubuntu"}])
def test_possible_as_root_on_debian_and_its_like(release: dict[str, str]) -> None:
    assert engine_setup.refuse_unless_possible({}, 0, release, ABSENT) is None  # type: ignore[func-returns-value]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A Debian machine without an engine, as root; `calls` keeps what was started on it."""
    calls: list[str] = []

    def connect() -> FakeEngine:
        if "start" not in calls:
            raise ABSENT
        return FakeEngine()

    monkeypatch.setattr(Engine, "connect", connect)
    monkeypatch.setattr(engine_setup, "SETUP_LOG", tmp_path / "setup.log")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("builder.host.os_release", lambda: DEBIAN)
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(engine_setup, "start", lambda _: calls.append("start"))
    return {"calls": calls}


def test_one_that_answers_is_left_alone(machine: dict[str, Any]) -> None:
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
    archive = AptSource(kind="main", uri="http://mirror.example.test/debian")
    monkeypatch.setattr("builder.host.read", lambda: machine.get("host", Host(apt_sources=(archive,))))
    return programs


def test_the_distributions_own_engine_if_it_is_new_enough(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = apt(machine, monkeypatch, candidate="26.1.5+dfsg1-9")
    engine_setup.ensure(lambda _: None)
    assert programs.calls[-1] == [
        "apt-get", "install", "-y", "-q", "--no-install-recommends", *engine_setup.PACKAGES,
    ]  # fmt: skip
    assert not any("Dir::" in word for word in programs.calls[-1])


def test_a_newer_one_is_taken_without_touching_the_machines_sources(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = apt(machine, monkeypatch, candidate="20.10.24+dfsg1-1")
    engine_setup.ensure(lambda _: None)
    settings = dict(word.split("=", 1) for word in programs.calls[-1] if word.startswith("Dir::"))
    assert settings["Dir::Etc::SourceParts"] == "-"
    suites = [line.split()[3] for line in programs.files[settings["Dir::Etc::SourceList"]].splitlines()]
    assert suites == ["bookworm", "trixie"]
    assert "Pin-Priority: 100" in programs.files[settings["Dir::Etc::Preferences"]]
    assert not Path(settings["Dir::State::Lists"]).exists(), "it is left behind"


def test_too_old_and_no_archive_to_take_a_newer_one_from(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine["host"] = Host()
    apt(machine, monkeypatch, candidate="20.10.24+dfsg1-1")
    with pytest.raises(EngineError, match="older than 23, and no Debian archive is configured") as caught:
        engine_setup.ensure(lambda _: None)
    assert "by hand" in caught.value.hint


def test_apt_fails(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apt(machine, monkeypatch, candidate="26.1.5", status=100)
    with pytest.raises(EngineError, match="apt-get could not install Docker Engine") as caught:
        engine_setup.ensure(lambda _: None)
    assert "http://<mirror>/debian" in str(caught.value)
    assert "mirror.example.test" not in (tmp_path / "setup.log").read_text()
    assert machine["calls"] == []


# ---- Compose


def compose(
    machine: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    answers: str = "",
    candidates: dict[str, str] | None = None,
    installs: str = "2.26.1-4",
) -> Programs:
    """A machine where `docker compose` has the version `answers`, and after an installation `installs`."""
    state = {"version": answers}

    def answer(command: list[str]) -> tuple[int, str, str]:
        if command[:2] == ["docker", "compose"]:
            return (0, f"{state['version']}\n", "") if state["version"] else (1, "", "unknown command: docker compose")
        if command[0] == "apt-cache":
            return 0, f"{command[-1]}:\n  Candidate: {(candidates or {}).get(command[-1], '(none)')}\n", ""
        if "install" in command:
            state["version"] = installs
        return 0, "", ""

    programs = Programs(answer)
    monkeypatch.setattr("subprocess.run", programs)
    archive = AptSource(kind="main", uri="http://mirror.example.test/debian")
    monkeypatch.setattr("builder.host.read", lambda: machine.get("host", Host(apt_sources=(archive,))))
    return programs


@pytest.mark.parametrize(
    ("text", "version"), [("2.26.1-4", (2, 26)), ("v2.40.3", (2, 40)), ("", (0, 0)), ("?", (0, 0))]
)
def test_the_version_of_compose(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, text: str, version: tuple[int, int]
) -> None:
    compose(machine, monkeypatch, answers=text)
    assert engine_setup.compose_version() == version


def test_without_docker_there_is_no_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("docker")

    monkeypatch.setattr("subprocess.run", absent)
    assert engine_setup.compose_version() == (0, 0)


def test_compose_that_is_there_is_left_alone(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    programs = compose(machine, monkeypatch, answers="2.30.0")
    assert engine_setup.ensure_compose(pytest.fail) == (2, 30)
    assert [call[0] for call in programs.calls] == ["docker"]


@pytest.mark.parametrize(
    ("candidates", "package"),
    [
        ({"docker-compose-v2": "2.24.6-0ubuntu1", "docker-compose": "1.29.2-6"}, "docker-compose-v2"),
        ({"docker-compose": "2.26.1-4"}, "docker-compose"),
    ],
)
def test_compose_of_the_distribution(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, candidates: dict[str, str], package: str
) -> None:
    programs = compose(machine, monkeypatch, candidates=candidates)
    assert engine_setup.ensure_compose(lambda _: None) == (2, 26)
    (install,) = [call for call in programs.calls if "install" in call]
    assert install == ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]


def test_compose_of_trixie_where_the_distribution_has_the_old_program(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = compose(machine, monkeypatch, candidates={"docker-compose": "1.29.2-3"})
    engine_setup.ensure_compose(lambda _: None)
    (install,) = [call for call in programs.calls if "install" in call]
    assert install[-1] == "docker-compose"
    settings = dict(word.split("=", 1) for word in install if word.startswith("Dir::"))
    assert "trixie" in programs.files[settings["Dir::Etc::SourceList"]]
    pinned = programs.files[settings["Dir::Etc::Preferences"]].split("\n\n")[1]
    assert pinned.startswith("Package: docker.io docker-cli docker-buildx docker-compose\n")


@pytest.mark.parametrize(("uid", "release"), [(1000, DEBIAN), (0, FEDORA)])
def test_compose_that_cannot_be_installed(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, uid: int, release: dict[str, str]
) -> None:
    programs = compose(machine, monkeypatch, candidates={"docker-compose": "2.26.1-4"})
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr("builder.host.os_release", lambda: release)
    with pytest.raises(EngineError, match="`docker compose` is not installed") as caught:
        engine_setup.ensure_compose(pytest.fail)
    assert "version 2 or newer" in caught.value.hint
    assert not any("apt" in call[0] for call in programs.calls)


def test_compose_that_does_not_answer_after_its_installation(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compose(machine, monkeypatch, candidates={"docker-compose": "2.26.1-4"}, installs="")
    with pytest.raises(EngineError, match="was installed but does not answer"):
        engine_setup.ensure_compose(lambda _: None)


@pytest.mark.parametrize(
    ("content", "stays"),
    [(str(os.getpid()), False), ("not a number", False), ("99999999", True)],
    ids=["another process", "damaged", "no process"],
)
def test_the_pid_file_of_a_dockerd_that_was_killed(tmp_path: Path, content: str, stays: bool) -> None:
    file = tmp_path / "docker.pid"
    file.write_text(content)
    engine_setup.forget_dead(file)
    assert file.exists() == stays
    engine_setup.forget_dead(tmp_path / "none")
