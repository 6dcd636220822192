"""Reads files of requests: requirements, a pyproject.toml with its uv.lock, or an environment.yml with a pip list.

Source: PEP 621; conda documentation, "Creating an environment file manually".
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from textwrap import indent
from typing import Any, Literal, TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import AliasPath, BaseModel, Field, ValidationError

from builder.common import strict_yaml, validation
from builder.common.errors import MatrixError, UsageError
from builder.common.text import one_line, printable, size
from builder.lock.python_builds import uv_program
from builder.lock.requirements import PYTHON, Requested, joined_lines, parse_requirement, read_requirements

LARGEST = 8_000_000  # bytes of a pyproject.toml
# pip, and python=3.11, python==3.11.*, conda-forge::python 3.11, python=3.11.5=h955ad1f_0, python >=3.10
_CONDA = re.compile(
    r"(?:[\w.-]+::)?(?:pip(?:[ =<>!~].*)?|python(?:(?: *==? *| +)([0-9.]*[0-9])(?:\.?\*)?(?:=\S*)?| *([<>!~].*))?)"
)
_ON_INDEX = "Publish its wheel on the index of this machine, or write other requirements into a file of their own."
_RELOCK = "Run `uv lock`."
_Source = dict[str, Any]
_Table = TypeVar("_Table", bound=BaseModel)


class _Pyproject(BaseModel, frozen=True):
    name: str = Field(validation_alias=AliasPath("project", "name"))
    python: str = Field("", validation_alias=AliasPath("project", "requires-python"))
    dependencies: list[str] = Field([], validation_alias=AliasPath("project", "dependencies"))
    dynamic: list[str] = Field([], validation_alias=AliasPath("project", "dynamic"))
    sources: dict[str, _Source | list[_Source]] = Field({}, validation_alias=AliasPath("tool", "uv", "sources"))


class _Environment(BaseModel, frozen=True):
    dependencies: list[str | dict[Literal["pip"], list[str]]]


def read_request(path: Path) -> tuple[list[Requested], list[Requested]]:
    """The requirements in a file, and constraints on Python and on packages. Raises UsageError, with the place."""
    if path.name == "pyproject.toml":
        return _read_project(path)
    if path.name in ("environment.yml", "environment.yaml"):
        return _read_environment(path)
    if path.suffix in (".toml", ".yml", ".yaml"):
        hint = "Name a pyproject.toml, an environment.yml, or a file of requirements as for pip."
        raise UsageError(f"{path}: files of this kind are not supported", hint=hint)
    return read_requirements(path), []


def _read_project(path: Path) -> tuple[list[Requested], list[Requested]]:
    project, place = _read_toml(path, _Pyproject), f"{path}: project.dependencies"
    if "dependencies" in project.dynamic:
        raise UsageError(f"{place} is dynamic", hint="Only a build knows it: write it into a file of requirements.")
    requested = [parse_requirement(text, place) for text in project.dependencies]
    python = [f"{PYTHON} {project.python}"] if project.python else []
    constraints = [parse_requirement(text, f"{path}: project.requires-python") for text in python]
    if (lock := path.with_name("uv.lock")).exists():
        constraints += _read_uv_lock(lock, requested)
    # Without hashes, the index of this machine could have another package of the name.
    # Projects with torch often name its index.
    is_compared, direct = any(each.hashes for each in constraints), {each.name for each in requested}
    for name, source in project.sources.items():
        is_index = all("index" in each for each in (source if isinstance(source, list) else [source]))
        if canonicalize_name(name) in direct and not (is_index and is_compared):
            raise UsageError(f"{path}: tool.uv.sources has a source of {name[:100]!a}", hint=_ON_INDEX)
    return requested, constraints


def _read_uv_lock(path: Path, requested: list[Requested]) -> list[Requested]:
    """The version of everything that the project needs, with the SHA-256 of its files."""
    command = [
        uv_program(),
        "export",
        "--frozen",
        "--offline",
        "--no-config",
        "--no-emit-project",
        "--no-default-groups",
    ]
    done = subprocess.run(
        [*command, "--no-annotate", "--no-header", "--quiet"], cwd=path.parent, capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("UV_")}, check=False,
    )  # fmt: skip
    if done.returncode:
        raise UsageError(f"{path}: uv cannot read it\n{indent(printable(done.stderr.strip()), '  | ')}", hint=_RELOCK)
    locked = [parse_requirement(text, str(path)) for _, text in joined_lines(done.stdout.splitlines())]
    for each in requested:  # uv.lock may lack what is for another Python or system
        pins = [pin.text.partition(" ")[0].partition("==")[2] for pin in locked if pin.name == each.name]
        if not Requirement(each.text).marker and not any(each.allows(each.name, version) for version in pins):
            raise UsageError(f"{path} has no version for {each.text[:100]!a} of pyproject.toml", hint=_RELOCK)
    return locked


def _read_environment(path: Path) -> tuple[list[Requested], list[Requested]]:
    try:
        located = strict_yaml.load_yaml(path, str(path))
        entries = _Environment.model_validate(located.data).dependencies
    except MatrixError as error:
        raise UsageError(str(error), hint=error.hint) from error
    except ValidationError as error:
        place = located.where(error.errors()[0]["loc"])
        raise UsageError(f"{place}: `dependencies` is not a list of packages, with a list `pip` in it") from None
    requested, constraints, others = [], [], []
    for number, entry in enumerate(entries):
        if isinstance(entry, dict):
            for index, text in enumerate(entry.get("pip", ())):
                requested.append(parse_requirement(text, located.where(("dependencies", number, "pip", index))))
        elif not (match := _CONDA.fullmatch(entry)):
            others.append(entry[:100])
        elif wanted := match[2] or (match[1] and f"=={match[1]}.*"):
            constraints.append(parse_requirement(f"{PYTHON} {wanted}", located.where(("dependencies", number))))
    if others:
        hint = "Write their names on PyPI into the list `pip`, or use a Dockerfile with FROM."
        raise UsageError(f"{path}: packages of conda cannot be added: {', '.join(others)}", hint=hint)
    return requested, constraints


def _read_toml(path: Path, model: type[_Table]) -> _Table:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UsageError(f"{path} is larger than {size(LARGEST)}")
        return model.model_validate(tomllib.loads(content.decode()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ascii(".".join(map(str, first["loc"]))[:100])[1:-1]
        raise UsageError(f"{path}: {where}: {validation.message_of(first).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: invalid TOML: {one_line(str(error))}") from error
