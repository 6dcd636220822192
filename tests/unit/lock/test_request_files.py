"""A pyproject.toml and an environment.yml: names of packages; everything else is refused.

With a uv.lock: tests/local/test_uv_lock.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.common.errors import UsageError
from builder.lock.request_files import read_request

PROJECT = """\
[project]
name = "Vision.X"
requires-python = ">=3.11"
dependencies = ["einops>=0.7", "Polars[GPU]<2", "six; python_version < '3.9'"]
optional-dependencies.dev = ["pytest"]
"""


def read(folder: Path, text: str) -> tuple[list[str], list[str]]:
    (folder / "pyproject.toml").write_text(text)
    requested, constraints = read_request(folder / "pyproject.toml")
    return [str(each) for each in requested], [str(each) for each in constraints]


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_request(path)
    assert str(caught.value).startswith(str(path.parent)), "the place"
    return f"{caught.value} -> {caught.value.hint}"


def test_the_dependencies_of_a_project(tmp_path: Path) -> None:
    requested, constraints = read(tmp_path, PROJECT)
    assert requested == ["einops>=0.7", "Polars[GPU]<2", "six; python_version < '3.9'"]
    assert constraints == ["python >=3.11"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (PROJECT, "project = 1", "project.name: field required"),
        (PROJECT, "[project", "invalid TOML: Expected"),
        (PROJECT, "a = " + "[" * 100_000, "invalid TOML: maximum recursion depth"),
        (PROJECT, "a = " + "1" * 5000, "invalid TOML: Exceeds the limit"),
        ("dependencies =", 'dynamic = ["dependencies"] #', "project.dependencies is dynamic -> Only a build knows it"),
        ('"einops>=0.7"', "1", "project.dependencies.0: input should be a valid string"),
        ("einops>=0.7", "einops @ https://a:secret@example.test/e", "project.dependencies: einops is at an address"),
        ("einops>=0.7", "e\\u001b[31m", r"project.dependencies: 'e\x1b[31m' is not a requirement"),
        ("einops>=0.7", "e==" + "1" * 5000, "is not a requirement"),
        ("einops>=0.7", "e;" + "(" * 3000, "is not a requirement"),
        (">=3.11", "3.11", "project.requires-python: 'python 3.11' is not a requirement"),
        ("[project]", "[tool.uv]\nsources.b = [1]\n[project]", "tool.uv.sources.b"),
        (
            "[project]",
            "[tool.uv.sources]\nEinops.path='x'\nother.path='x'\n[project]",
            "a source of 'Einops' -> Publish",
        ),
    ],
)
def test_a_project_that_is_refused_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in PROJECT
    (tmp_path / "pyproject.toml").write_text(PROJECT.replace(old, new))
    assert message in refusal(tmp_path / "pyproject.toml")


@pytest.mark.parametrize("name", ["environment.yml", "environment.yaml"])
def test_the_pip_list_of_an_environment(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(
        "name: vision\nchannels: [conda-forge]\n"
        "dependencies:\n  - python=3.11\n  - conda-forge::pip>=23\n  - pip:\n    - einops>=0.8\n    - tqdm\n"
    )
    requested, constraints = read_request(tmp_path / name)
    assert [(str(each), each.place) for each in requested] == [
        ("einops>=0.8", f"{tmp_path}/{name}:7:7"),
        ("tqdm", f"{tmp_path}/{name}:8:7"),
    ]
    assert [(str(each), each.place) for each in constraints] == [("python ==3.11.*", f"{tmp_path}/{name}:4:5")]


@pytest.mark.parametrize(
    ("entry", "constraint"),
    [
        ("python", []), ("pip", []), ("pip=24.0=pyhd", []),
        ("python 3.11", ["python ==3.11.*"]), ("python==3.11.*", ["python ==3.11.*"]),
        ("python=3.11.5=h955_0", ["python ==3.11.5.*"]), ("python = 3", ["python ==3.*"]),
        ("python >=3.10,<4", ["python >=3.10,<4"]), ("conda-forge::python>=3.10", ["python >=3.10"]),
    ],
)  # fmt: skip
def test_the_python_of_an_environment(tmp_path: Path, entry: str, constraint: list[str]) -> None:
    (tmp_path / "environment.yml").write_text(f"dependencies: ['{entry}']\n")
    assert [str(each) for each in read_request(tmp_path / "environment.yml")[1]] == constraint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dependencies: [numpy=1.26, python=3.11, 'a::torch>=2', pip, python-dateutil]",
         "packages of conda cannot be added: numpy=1.26, a::torch>=2, python-dateutil -> Write their names on PyPI"),
        ("dependencies:\n- pip:\n  - einops\n  - -r other.txt", "yml:4:5: the option -r is not supported"),
        ("dependencies: ['python>=x']", "yml:1:16: 'python >=x' is not a requirement"),
        ("dependencies: 1", "yml:1:15: `dependencies` is not a list of packages"),
        ("dependencies: [a, {pip: [1]}]", "yml:1:19: `dependencies` is not a list of packages"),
        ("dependencies: [{conda: [a]}]", "yml:1:16: `dependencies` is not a list of packages"),
        ("", "yml:1:1: `dependencies` is not a list of packages"),
        ("dependencies: [a\x1b]", "yml:1:17: character U+001B is not allowed"),
        ("[" * 5000, "nested more than 12 levels deep"),
    ],
)  # fmt: skip
def test_an_environment_that_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "environment.yml").write_text(text)
    assert message in refusal(tmp_path / "environment.yml")


@pytest.mark.parametrize("name", ["pylock.toml", "conda.yml", "env.yaml"])
def test_files_of_another_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("einops\n")
    assert "files of this kind are not supported -> Name a pyproject.toml" in refusal(tmp_path / name)


def test_other_files_are_requirements(tmp_path: Path) -> None:
    (tmp_path / "vision.in").write_text("einops\n")
    assert [str(each) for each in read_request(tmp_path / "vision.in")[0]] == ["einops"]
