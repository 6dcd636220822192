"""The command that creates a repository before the first push to it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from builder.common.errors import RegistryError
from builder.index.host import Apt, AptSource, Host, RegistrySettings
from builder.layers.oci import Manifest
from builder.registry import client, transfer
from tests.fakes.wire import HOST, Reply, Sent, Wire, connect, errors
from tests.unit.registry.fixtures import Lay

IMAGE = Manifest.of(b"{}", "application/vnd.oci.image.manifest.v1+json")
COMMAND = ("/usr/bin/aws", "create", "--name={repository}", "{registry}", "{other}", "$(id) {{repository}}")
MACHINE = Host(
    registries=RegistrySettings(create=COMMAND),
    archives=Apt(sources=(AptSource(kind="main", uri="http://mirror.example.test/debian"),)),
)


@dataclass
class CreatingService:
    """A registry whose repositories must be created, and the program for it, which ends as `outcome` says."""

    outcome: tuple[int, str] | Exception = (0, "")
    creates: bool = True
    repositories: set[str] = field(default_factory=set)
    commands: list[Sequence[str]] = field(default_factory=list)

    def answer(self, sent: Sent) -> Reply:
        repository = sent.path.removeprefix("/v2/").partition("/tags/")[0].partition("/manifests/")[0]
        if repository not in self.repositories:
            return Reply(status=404, body=errors({"code": "NAME_UNKNOWN"}))
        return Reply(status=201 if sent.method == "PUT" else 200, body=b'{"tags": null}')

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert options["timeout"]
        assert "shell" not in options
        self.commands.append(command)
        if self.creates:
            self.repositories.add(command[2].partition("=")[2])
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert options["text"]
        stderr = self.outcome[1].encode(errors="surrogateescape").decode(errors=options.get("errors", "strict"))
        return subprocess.CompletedProcess(command, self.outcome[0], "", stderr)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[CreatingService]:
    service = CreatingService()
    monkeypatch.setattr(subprocess, "run", service.run)
    client.run_creation.cache_clear()
    yield service
    client.run_creation.cache_clear()


def send(wire: Lay, service: CreatingService, repository: str = "a/b", host: Host = MACHINE) -> Wire:
    """Pushes a manifest."""
    laid = wire(service.answer)
    transfer.send_image(connect(repository=repository, host=host), IMAGE, {})
    return laid


def test_a_missing_repository_is_created_before_the_push(lay: Lay, service: CreatingService) -> None:
    wire = send(lay, service)
    assert service.commands == [("/usr/bin/aws", "create", "--name=a/b", HOST, "{other}", "$(id) {a/b}")]
    assert wire.lines == ["GET /v2/a/b/tags/list?n=1", f"PUT /v2/a/b/manifests/{IMAGE.digest}"]
    send(lay, service)
    assert len(service.commands) == 1


def test_once_for_each_repository_in_a_run(lay: Lay, service: CreatingService) -> None:
    """Some registries report no repository until it has a manifest."""
    service.creates = False
    for repository in ("a/b", "a/b", "a/c"):
        with pytest.raises(RegistryError):
            send(lay, service, repository)
    assert [command[2] for command in service.commands] == ["--name=a/b", "--name=a/c"]


def test_no_command_is_run_for_a_repository_that_exists_or_without_the_setting(
    lay: Lay, service: CreatingService
) -> None:
    service.repositories = {"a/b"}
    send(lay, service)
    assert send(lay, service, host=Host()).lines == [f"PUT /v2/a/b/manifests/{IMAGE.digest}"]
    assert not service.commands


FAILURES = [
    ((254, "\n\x1b[31mdenied by http://me:pw@mirror.example.test/x\nmore"), "254: denied by http://<mirror>/x"),
    ((1, "denied by \x1b[1mmirror.example.test\x1b[0m"), "1: denied by <mirror>"),
    ((1, "no \udcff"), "aws: exit status 1: no \ufffd"),
    ((-9, ""), "aws: exit status -9: no message"),
    (subprocess.TimeoutExpired("x", 1), "aws timed out after 120 s"),
    (FileNotFoundError(2, "No such file or directory"), "aws cannot run: no such file or directory"),
]


@pytest.mark.parametrize(("outcome", "message"), FAILURES)
def test_a_failing_command(
    lay: Lay, service: CreatingService, outcome: tuple[int, str] | Exception, message: str
) -> None:
    service.outcome, service.creates = outcome, False
    with pytest.raises(RegistryError) as caught:
        send(lay, service)
    assert str(caught.value).startswith(f"{HOST}: creating a/b: aws")
    assert str(caught.value).endswith(message)
    assert caught.value.hint.startswith("Check `create_repository` in matrix.yaml")


@pytest.mark.parametrize("outcome", [outcome for outcome, _ in FAILURES])
def test_another_machine_created_it(lay: Lay, service: CreatingService, outcome: tuple[int, str] | Exception) -> None:
    service.outcome = outcome
    assert send(lay, service).lines[-1].startswith("PUT ")


def test_a_registry_that_does_not_answer_runs_nothing(lay: Lay, service: CreatingService) -> None:
    lay(lambda _: Reply(status=403))
    with pytest.raises(RegistryError):
        connect(host=MACHINE).create_missing()
    assert not service.commands
