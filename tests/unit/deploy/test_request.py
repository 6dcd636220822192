"""The request: what is refused, the command that starts a script, and how text is quoted in YAML."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from builder.common.errors import UsageError
from builder.common.reference import ImageRef
from builder.deploy import request
from builder.deploy.examples import yaml_scalar
from builder.matrix.project import Project
from tests.fakes.deployed import HOSTILE, LABELS, REFERENCE, image_of, request_of


@pytest.mark.parametrize(
    "name",
    ["", "Train", "9lives", "-a", "a-", "a_b", "a.b", "a\nb", "a b", "a$b", 'a"', "é", "a" * 51, "$(id)", "../x"],
)
def test_invalid_names(name: str) -> None:
    with pytest.raises(UsageError, match="invalid name") as caught:
        request.check(image_of(), request_of(name=name))
    assert "--name" in caught.value.hint


@pytest.mark.parametrize("name", ["a", "a1", "pt-cuda", "a" * 50])
def test_valid_names(name: str) -> None:
    request.check(image_of(), request_of(name=name, command=("x",)))


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("org/pt-cuda:2.9", "pt-cuda"),
        ("localhost:5000/a/b__c.d:1", "b-c-d"),
        ("x/9-lives", "9-lives"),
        ("a/" + "b" * 60, "b" * 50),
    ],
)
def test_the_default_name(reference: str, name: str) -> None:
    assert image_of(reference=ImageRef.parse(reference)).name == name


@pytest.mark.parametrize(
    ("variant", "cpu", "changes", "message"),
    [
        ("", True, {"gpus": 1}, "is a CPU image"),
        ("", False, {"command": ("a\x00b",)}, "unprintable character"),
        ("", False, {"command": ("\x1b[2J",)}, "unprintable character"),
        ("", False, {"command": ("\u202etxt",)}, "unprintable character"),
        ("", False, {"command": ("\udcff",)}, "unprintable character"),
        ("", False, {"command": ("",)}, "command is empty"),
        ("", False, {"shm": 8 * 10**9, "memory": 8 * 10**9}, "/dev/shm counts as memory"),
        ("jupyter", False, {"nodes": 2}, "--nodes needs a command"),
        ("", False, {"nodes": 2, "command": ("bash", "-c", "x")}, "--nodes needs a Python script"),
        ("", False, {"nodes": 2, "command": ("python",)}, "--nodes needs a Python script"),
        ("", False, {"nodes": 2, "command": ("python", "-c", "x")}, "--nodes needs a Python script"),
        ("", False, {"nodes": 2, "command": ("torchrun", "train.py")}, "--nodes needs a Python script"),
    ],
)
def test_invalid_requests(variant: str, cpu: bool, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        request.check(image_of(variant, cpu=cpu), request_of(**changes))


def test_a_framework_without_support_for_several_nodes() -> None:
    with pytest.raises(UsageError, match="ember is not supported on several nodes"):
        request.check(image_of(framework="ember"), request_of(nodes=2, command=("train.py",)))


@pytest.mark.parametrize(
    ("framework", "gpus", "nodes", "command", "launched"),
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
def test_how_a_command_is_launched(framework: str, gpus: int, nodes: int, command: str, launched: str) -> None:
    options = request_of(gpus=gpus, nodes=nodes, command=tuple(command.split()))
    assert request.launch_command(image_of(framework=framework), options) == tuple(launched.split())


@pytest.mark.parametrize("text", ["", "a\nb", "a\0b", "\x1b"])
def test_invalid_paths(text: str) -> None:
    with pytest.raises(UsageError, match="--workspace"):
        request.check_path(text, "--workspace")


# ---- YAML


@pytest.mark.parametrize("text", HOSTILE)
def test_text_is_quoted_in_yaml(text: str) -> None:
    """Parsers differ on which plain text is a number or a boolean."""
    scalar = yaml_scalar(text)
    assert yaml.safe_load(scalar) == text
    assert (scalar[0], scalar[-1]) == ('"', '"')


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_one_line_of_yaml(text: str) -> None:
    scalar = yaml_scalar(text)
    assert len(scalar.splitlines()) == 1
    assert yaml.safe_load(f"key:\n  - {scalar}\n  - x\n") == {"key": [text, "x"]}


# ---- the image


def test_an_image_from_its_labels(tiny: Project) -> None:
    image = request.image_of_labels(REFERENCE, LABELS, tiny.matrix.components)
    assert image == image_of("jupyter")
    assert request.image_of_labels(REFERENCE, {**LABELS, "gpu-images.cuda": "cpu"}, {}) == image_of(cpu=True)


@pytest.mark.parametrize("label", LABELS)
def test_an_image_from_another_builder(label: str) -> None:
    labels = {name: value for name, value in LABELS.items() if name != label}
    with pytest.raises(UsageError, match=f"no label {label}"):
        request.image_of_labels(REFERENCE, labels, {})


def test_sshd_without_root_has_another_port() -> None:
    assert image_of("full").ports == {"jupyter": 8888, "ssh": 2222}
