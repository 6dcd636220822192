"""builder deploy: how IMAGE is found, options, and the output file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from builder.cli import cli
from builder.cli import deploy as deploy_cli
from builder.common.errors import BuilderError, NoEngineError
from builder.deploy import examples
from builder.deploy.examples import Folder
from builder.deploy.request import Image, Request
from builder.engine.client import Engine
from builder.index.host import Host
from builder.matrix.project import Project
from tests.fakes.deployed import LABELS, of_kind
from tests.fakes.engine import FakeEngine

CELL = "em-1.10-cu1210-py311"
FULL_TAG = "registry.example.test:5000/team/ember-cuda:1.10.0-cu1210-py311"
COMMANDS = ["compose", "k8s", "slurm"]
Run = Callable[..., Result]


@pytest.fixture
def run(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `builder deploy ...` in the tiny project; no engine answers unless a test replaces `connect`."""

    def connect() -> Engine:
        raise NoEngineError("none")

    monkeypatch.setattr(Engine, "connect", connect)

    def call(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(cli, ["--root", str(tiny.root), "deploy", *arguments])
        if result.exception and not isinstance(result.exception, BuilderError | SystemExit):
            raise result.exception
        assert getattr(result.exception, "exit_code", result.exit_code) == code, result.output
        return result

    return call


@pytest.fixture
def engine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with an image that is not a tag of the matrix."""
    engine = FakeEngine()
    engine.add_image("other/image:1", labels=LABELS)
    monkeypatch.setattr(Engine, "connect", lambda: engine)


def service_of(result: Result) -> dict[str, Any]:
    (service,) = yaml.safe_load(result.stdout)["services"].values()
    assert isinstance(service, dict)
    return service


def test_a_cell_stands_for_its_full_tag(run: Run) -> None:
    service = service_of(run("compose", f"{CELL}-jupyter"))
    assert service["image"] == f"{FULL_TAG}-jupyter"
    assert service["ports"] == ["127.0.0.1:8888:8888"]


def test_a_tag_of_the_matrix_needs_no_engine(run: Run) -> None:
    reference = "registry.example.test:5000/team/ember-cuda:1.10"
    assert service_of(run("compose", reference))["image"] == reference


@pytest.mark.usefixtures("engine")
def test_labels_from_the_engine(run: Run) -> None:
    assert service_of(run("compose", "other/image:1"))["ports"] == ["127.0.0.1:8888:8888"]


def test_labels_from_a_registry(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def labels_of(registry: SimpleNamespace, name: str) -> dict[str, str]:
        requests.append((str(registry.reference), name))
        return LABELS

    monkeypatch.setattr(deploy_cli, "Registry", lambda reference, **_: SimpleNamespace(reference=reference))
    monkeypatch.setattr(deploy_cli, "labels_of", labels_of)
    monkeypatch.setattr("builder.index.host.read", Host)
    text = run("k8s", "other.example.test/org/x:1").stdout
    assert of_kind(text, "Service")["spec"]["ports"][0]["port"] == 8888
    assert requests == [("other.example.test/org/x:1", "1")]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("em-1.10-cu1210-py312", "no cell 'em-1.10-cu1210-py312'; did you mean"),
        ("nobody/has:this", "is not a tag of matrix.yaml and not in Docker Engine"),
        ("Bad/Name", "is not an image name"),
        ("a/b:c\nd: e", "is not a tag"),
        ("a/b@sha256:short", "is not a digest"),
        ("$(id)", "is not an image name"),
        ('a/b:"x"', "is not a tag"),
    ],
)
def test_invalid_images(run: Run, image: str, message: str) -> None:
    result = run("compose", image, code=2)
    assert message in str(result.exception)
    assert result.stdout == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_is_written_and_not_replaced(run: Run, tmp_path: Path, command: str) -> None:
    target = tmp_path / "out"
    arguments = (command, CELL, "-o", str(target), "--", "train.py")
    assert run(*arguments).stdout == ""
    text = target.read_text(encoding="utf-8")
    assert FULL_TAG in text.replace("#", "/"), "enroot's notation is registry#name"
    target.write_text("mine")
    assert "--force" in run(*arguments, code=2).exception.hint  # type: ignore[union-attr]
    assert target.read_text() == "mine"
    run(command, CELL, "-o", str(target), "--force", "--", "train.py")
    assert target.read_text(encoding="utf-8") == text


def test_the_same_command_writes_the_same_file(run: Run) -> None:
    arguments = ("k8s", f"{CELL}-jupyter", "--namespace", "research")
    assert run(*arguments).stdout == run(*arguments).stdout


def test_a_command_keeps_its_own_options(run: Run) -> None:
    service = service_of(run("compose", CELL, "--gpus", "2", "--", "bash", "-c", "x", "--gpus", "9", "--help"))
    assert service["command"] == ["bash", "-c", "x", "--gpus", "9", "--help"]


def test_a_folder_and_its_owner(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "work here"
    folder.mkdir()
    folders = []
    real = examples.compose

    def compose(image: Image, request: Request, folder: Folder | None) -> str:
        folders.append(folder)
        return real(image, request, folder)

    monkeypatch.setattr(examples, "compose", compose)
    service = service_of(run("compose", CELL, "--workspace", str(folder)))
    assert service["volumes"][0]["source"] == str(folder.resolve())
    assert folders == [Folder(path=str(folder.resolve()), owner=folder.stat().st_uid)]
    assert "does not exist" in run("compose", CELL, "--workspace", str(tmp_path / "none"), code=2).output


@pytest.mark.usefixtures("engine")
def test_a_note_if_a_cluster_would_pull_from_docker_hub(run: Run) -> None:
    for command in ("k8s", "slurm"):
        assert "has no registry" in run(command, "other/image:1").stderr
    assert run("compose", "other/image:1").stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_shared_options(run: Run, command: str) -> None:
    text = run(command, "--help").stdout
    for option in ("--name", "--gpus", "--cpus", "--memory", "--output", "--force", "--workspace"):
        assert option in text
    assert "-- COMMAND" in text
