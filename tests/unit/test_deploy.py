"""Deploying: what is refused, what a command becomes, how YAML is written, and the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from builder import deploy, deploy_compose
from builder.cli import cli, deploying
from builder.engine import Engine
from builder.errors import BuilderError, NoEngineError, UsageError
from builder.project import Project
from builder.reference import ImageRef
from tests.unit.deployed import HOSTILE, REFERENCE, of_kind, subject, wish
from tests.unit.fakes import FakeEngine

CELL = "em-1.10-cu1210-py311"
FULL_TAG = "registry.example.test:5000/team/ember-cuda:1.10.0-cu1210-py311"
LABELS = {
    "gpu-images.framework": "pytorch",
    "gpu-images.cuda": "12.8",
    "gpu-images.components": "base python cuda pytorch board jupyter",
}


# ---- what is asked for


@pytest.mark.parametrize(
    "name",
    ["", "Train", "9lives", "-a", "a-", "a_b", "a.b", "a\nb", "a b", "a$b", 'a"', "é", "a" * 51, "$(id)", "../x"],
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name") as caught:
        deploy.check(subject(), wish(name=name))
    assert "--name" in caught.value.hint


@pytest.mark.parametrize("name", ["a", "a1", "pt-cuda", "a" * 50])
def test_names_that_are_taken(name: str) -> None:
    deploy.check(subject(), wish(name=name, command=("x",)))


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("org/pt-cuda:2.9", "pt-cuda"),
        ("localhost:5000/a/b__c.d:1", "b-c-d"),
        ("x/9-lives", "9-lives"),
        ("a/" + "b" * 60, "b" * 50),
    ],
)
def test_the_name_of_an_image_that_is_not_named(reference: str, name: str) -> None:
    assert subject(reference=ImageRef.parse(reference)).name == name


@pytest.mark.parametrize(
    ("variant", "cpu", "wanted", "says"),
    [
        ("", True, {"gpus": 1}, "is for the CPU and uses no GPU"),
        ("", False, {"command": ("a\x00b",)}, "cannot be printed"),
        ("", False, {"command": ("\x1b[2J",)}, "cannot be printed"),
        ("", False, {"command": ("\u202etxt",)}, "cannot be printed"),
        ("", False, {"command": ("\udcff",)}, "cannot be printed"),
        ("", False, {"command": ("",)}, "command is empty"),
        ("", False, {"shm": 8 * 10**9, "memory": 8 * 10**9}, "/dev/shm counts as memory"),
        ("jupyter", False, {"nodes": 2}, "several nodes run a command"),
        ("", False, {"nodes": 2, "command": ("bash", "-c", "x")}, "is a Python script"),
        ("", False, {"nodes": 2, "command": ("python",)}, "is a Python script"),
        ("", False, {"nodes": 2, "command": ("python", "-c", "x")}, "is a Python script"),
        ("", False, {"nodes": 2, "command": ("torchrun", "train.py")}, "is a Python script"),
    ],
)
def test_wishes_that_are_refused(variant: str, cpu: bool, wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        deploy.check(subject(variant, cpu=cpu), wish(**wanted))


def test_a_framework_that_nobody_knows_on_several_nodes() -> None:
    with pytest.raises(UsageError, match="nobody knows how ember runs on several nodes"):
        deploy.check(subject(framework="ember"), wish(nodes=2, command=("train.py",)))


@pytest.mark.parametrize(
    ("framework", "gpus", "nodes", "command", "becomes"),
    [
        ("pytorch", 1, 1, "bash -c x", "bash -c x"),
        ("pytorch", 8, 1, "python train.py", "python train.py"),
        ("pytorch", 1, 1, "train.py --a", "python train.py --a"),
        ("pytorch", 0, 1, "-m pkg.train", "python -m pkg.train"),
        ("pytorch", 8, 1, "train.py --a", "torchrun --standalone --nproc-per-node=8 train.py --a"),
        ("pytorch", 8, 2, "train.py --a", "torchrun --nproc-per-node=8 train.py --a"),
        ("pytorch", 8, 2, "python3.11 -m pkg", "torchrun --nproc-per-node=8 -m pkg"),
        ("pytorch", 0, 2, "/opt/venv/bin/python train.py", "torchrun --nproc-per-node=1 train.py"),
        ("tensorflow", 8, 1, "train.py", "python train.py"),
        ("tensorflow", 8, 2, "python train.py", "python train.py"),
        ("jax", 8, 2, "src/train.py", "python src/train.py"),
    ],
)
def test_what_a_command_becomes(framework: str, gpus: int, nodes: int, command: str, becomes: str) -> None:
    wanted = wish(gpus=gpus, nodes=nodes, command=tuple(command.split()))
    assert deploy.training(subject(framework=framework), wanted) == tuple(becomes.split())


@pytest.mark.parametrize("text", ["", "a\nb", "a\0b", "\x1b"])
def test_paths_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--workspace"):
        deploy.path(text, "--workspace")


# ---- YAML


@pytest.mark.parametrize("text", HOSTILE)
def test_no_parser_takes_a_text_for_anything_else(text: str) -> None:
    written = deploy.dump([{"key": [text]}], [])
    assert yaml.safe_load(written) == {"key": [text]}
    assert f'- "{text}"' in written or '- "' in written, "quoted: what plain text is differs between parsers"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1), st.text("ab\n#-: ", max_size=20))
def test_what_is_written_is_what_is_read(texts: list[str], key: str) -> None:
    assert yaml.safe_load(deploy.dump([{key: texts}], ["a comment"])) == {key: texts}


def test_plain_words_are_not_quoted_and_nothing_is_referred_to() -> None:
    shared = ["/dev/shm", "nvidia.com/gpu"]
    assert deploy.dump([{"a": shared, "b": shared}, {"c": "x"}], ["one", ""]) == (
        "# one\n#\na:\n  - /dev/shm\n  - nvidia.com/gpu\nb:\n  - /dev/shm\n  - nvidia.com/gpu\n---\nc: x\n"
    )


# ---- what an image is


def test_labels_tell_what_an_image_is(tiny: Project) -> None:
    found = deploy.of_labels(REFERENCE, LABELS, tiny.matrix.components)
    assert found == subject("jupyter")
    assert deploy.of_labels(REFERENCE, {**LABELS, "gpu-images.cuda": "cpu"}, {}) == subject(cpu=True)


@pytest.mark.parametrize("label", LABELS)
def test_an_image_that_was_not_made_here(label: str) -> None:
    labels = {name: value for name, value in LABELS.items() if name != label}
    with pytest.raises(UsageError, match=f"no label {label}"):
        deploy.of_labels(REFERENCE, labels, {})


def test_an_ssh_server_that_is_no_root_has_another_port() -> None:
    assert subject("full").ports == {"jupyter": 8888, "ssh": 2222}


# ---- the command line

Run = Callable[..., Result]


@pytest.fixture
def run(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `builder deploy ...` in the tiny project, where no engine answers unless a test has one."""

    def connect() -> Engine:
        raise NoEngineError("none")

    monkeypatch.setattr(Engine, "connect", connect)

    def call(*arguments: str, code: int = 0) -> Result:
        done = CliRunner().invoke(cli, ["--root", str(tiny.root), "deploy", *arguments])
        if done.exception and not isinstance(done.exception, BuilderError | SystemExit):
            raise done.exception
        assert getattr(done.exception, "exit_code", done.exit_code) == code, done.output
        return done

    return call


def compose_of(done: Result) -> dict[str, Any]:
    data = yaml.safe_load(done.stdout)
    assert isinstance(data, dict)
    (service,) = data["services"].values()
    assert isinstance(service, dict)
    return service


def test_a_cell_is_its_full_tag(run: Run) -> None:
    service = compose_of(run("compose", f"{CELL}-jupyter"))
    assert service["image"] == f"{FULL_TAG}-jupyter"
    assert service["ports"] == ["127.0.0.1:8888:8888"]


def test_a_tag_of_the_matrix_needs_no_engine(run: Run) -> None:
    reference = "registry.example.test:5000/team/ember-cuda:1.10"
    assert compose_of(run("compose", reference))["image"] == reference


def test_what_the_engine_has_is_asked_for_its_labels(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.have("other/image:1", labels=LABELS)
    monkeypatch.setattr(Engine, "connect", lambda: engine)
    assert compose_of(run("compose", "other/image:1"))["healthcheck"]["test"] == [
        "CMD",
        "/usr/local/bin/check-services",
    ]


def test_an_image_in_a_registry_is_asked_for_its_labels(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def labels_of(registry: SimpleNamespace, name: str) -> dict[str, str]:
        asked.append((str(registry.reference), name))
        return LABELS

    monkeypatch.setattr(deploying, "Registry", lambda reference, **_: SimpleNamespace(reference=reference))
    monkeypatch.setattr(deploying, "labels_of", labels_of)
    monkeypatch.setattr("builder.host.read", lambda: None)
    text = run("k8s", "other.example.test/org/x:1").stdout
    assert of_kind(text, "Service")["spec"]["ports"][0]["port"] == 8888
    assert asked == [("other.example.test/org/x:1", "1")]


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ("em-1.10-cu1210-py312", "no cell is called 'em-1.10-cu1210-py312'"),
        ("nobody/has:this", "is no tag of matrix.yaml, and Docker Engine does not have it"),
        ("Bad/Name", "is not an image name"),
        ("a/b:c\nd: e", "is not a tag"),
        ("a/b@sha256:short", "is not a digest"),
        ("$(id)", "is not an image name"),
        ('a/b:"x"', "is not a tag"),
    ],
)
def test_images_that_are_refused(run: Run, image: str, says: str) -> None:
    done = run("compose", image, code=2)
    assert says in str(done.exception)
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["compose", "k8s", "slurm"])
def test_a_file_is_written_and_not_replaced(run: Run, tmp_path: Path, command: str) -> None:
    target = tmp_path / "out"
    arguments = (command, CELL, "-o", str(target), "--", "train.py")
    done = run(*arguments)
    assert done.stdout == ""
    text = target.read_text(encoding="utf-8")
    assert FULL_TAG in text.replace("#", "/"), "enroot writes registry#name"
    target.write_text("mine")
    assert "--force" in run(*arguments, code=2).exception.hint  # type: ignore[union-attr]
    assert target.read_text() == "mine"
    run(command, CELL, "-o", str(target), "--force", "--", "train.py")
    assert target.read_text(encoding="utf-8") == text


def test_what_is_written_does_not_change_from_run_to_run(run: Run) -> None:
    arguments = ("k8s", f"{CELL}-jupyter", "--namespace", "research")
    assert run(*arguments).stdout == run(*arguments).stdout


def test_a_command_keeps_its_own_options(run: Run) -> None:
    service = compose_of(run("compose", CELL, "--gpus", "2", "--", "bash", "-c", "x", "--gpus", "9", "--help"))
    assert service["command"] == ["bash", "-c", "x", "--gpus", "9", "--help"]


def test_a_folder_of_the_machine_is_mounted_with_its_owner(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work here"
    folder.mkdir()
    seen = {}
    real = deploy_compose.render

    def render(subject_: Any, wish_: Any, given: Any) -> str:
        seen["folder"] = given
        return real(subject_, wish_, given)

    monkeypatch.setattr(deploy_compose, "render", render)
    service = compose_of(run("compose", CELL, "--workspace", str(folder)))
    assert service["volumes"][0]["source"] == str(folder.resolve())
    assert seen["folder"].owner == folder.stat().st_uid
    assert "does not exist" in run("compose", CELL, "--workspace", str(tmp_path / "none"), code=2).output


def test_an_image_without_a_registry_is_one_of_docker_hub_for_a_cluster(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    engine.have("other/image:1", labels=LABELS)
    monkeypatch.setattr(Engine, "connect", lambda: engine)
    for command in ("k8s", "slurm"):
        assert "names no registry" in run(command, "other/image:1").stderr
    assert "registry" not in run("compose", "other/image:1").stderr


@pytest.mark.parametrize("command", ["compose", "k8s", "slurm"])
def test_help_has_every_option_explained(run: Run, command: str) -> None:
    told = run(command, "--help").stdout
    for option in ("--name", "--gpus", "--cpus", "--memory", "--output", "--force", "--workspace"):
        assert option in told
    assert "-- COMMAND" in told
