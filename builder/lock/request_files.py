"""Reads files of requests: requirements, a pyproject.toml with its uv.lock, or an environment.yml with a pip list.

Source: PEP 621; uv.lock as uv 0.13 writes it; conda documentation, "Creating an environment file manually".
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import AliasPath, BaseModel, Field, ValidationError

from builder.common import strict_yaml, validation
from builder.common.errors import MatrixError, UsageError
from builder.common.files import SHA256_HEX
from builder.common.text import one_line, size
from builder.index.wheels import PLATFORMS
from builder.lock.requirements import PYTHON, Requested, parse_requirement, read_requirements

LARGEST = 8_000_000  # bytes; uv.lock has some 5 kB for a package
# Wheels that an image can have, in their address: the hashes of the others would double the label of the image.
_FITTING = re.compile(rf"-any\.whl|(?<!musl)linux\w*_({'|'.join(PLATFORMS.values())})")
# pip, and python=3.11, python==3.11.*, conda-forge::python 3.11, python=3.11.5=h955ad1f_0, python >=3.10
_CONDA = re.compile(
    r"(?:[\w.-]+::)?(?:pip(?:[ =<>!~].*)?|python(?:(?: *==? *| +)([0-9.]*[0-9])(?:\.?\*)?(?:=\S*)?| *([<>!~].*))?)"
)
_ON_INDEX = "Publish its wheel on the index of this machine, or write other requirements into a file of their own."
_Source = dict[str, Any]
_Table = TypeVar("_Table", bound=BaseModel)


class _Project(BaseModel, frozen=True):
    name: str = Field(validation_alias=AliasPath("project", "name"))
    python: str = Field("", validation_alias=AliasPath("project", "requires-python"))
    dependencies: list[str] = Field([], validation_alias=AliasPath("project", "dependencies"))
    dynamic: list[str] = Field([], validation_alias=AliasPath("project", "dynamic"))
    sources: dict[str, _Source | list[_Source]] = Field({}, validation_alias=AliasPath("tool", "uv", "sources"))


class _Locked(BaseModel, frozen=True):
    """A package; or as a dependency, its name alone."""

    name: str
    version: str = ""
    source: dict[str, Any] = {}
    markers: list[str] = Field([], alias="resolution-markers")
    dependencies: list[_Locked] = []
    optional: dict[str, list[_Locked]] = Field({}, alias="optional-dependencies")
    wheels: list[dict[str, Any]] = []


class _UvLock(BaseModel, frozen=True):
    version: Literal[1]
    package: list[_Locked] = []


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
    project, place = _read_toml(path, _Project), f"{path}: project.dependencies"
    if "dependencies" in project.dynamic:
        raise UsageError(f"{place} is dynamic", hint="Only a build knows it: write it into a file of requirements.")
    requested = [parse_requirement(text, place) for text in project.dependencies]
    python = [f"{PYTHON} {project.python}"] if project.python else []
    constraints = [parse_requirement(text, f"{path}: project.requires-python") for text in python]
    if (lock := path.with_name("uv.lock")).exists():
        constraints += _read_uv_lock(lock, canonicalize_name(project.name), requested)
    # Without hashes, the index of this machine could have another package of the name.
    # Projects with torch often name its index.
    is_compared, direct = any(each.hashes for each in constraints), {each.name for each in requested}
    for name, source in project.sources.items():
        is_index = all("index" in each for each in (source if isinstance(source, list) else [source]))
        if canonicalize_name(name) in direct and not (is_index and is_compared):
            raise UsageError(f"{path}: tool.uv.sources has a source of {name[:100]!a}", hint=_ON_INDEX)
    return requested, constraints


def _read_uv_lock(path: Path, project: str, requested: list[Requested]) -> list[Requested]:
    """The version of everything that the project needs, with the SHA-256 of the wheels that fit."""
    packages: dict[str, list[_Locked]] = defaultdict(list)  # versions of a package have different markers
    for package in _read_toml(path, _UvLock).package:
        packages[package.name].append(package)
    waiting = [each.name for root in packages.pop(project, []) for each in root.dependencies]
    locked, pins = [], []
    while waiting:
        for package in packages.pop(waiting.pop(), []):
            place = f"{path}: {package.name[:100]!a}"
            if "registry" not in package.source:
                raise UsageError(f"{place} is not from an index", hint=_ON_INDEX)
            waiting += [each.name for each in chain(package.dependencies, *package.optional.values())]
            marker = " or ".join(f"({each})" for each in package.markers)
            pin = parse_requirement(f"{package.name}=={package.version}{marker and f' ; {marker}'}", place)
            hashes = [str(each.get("hash")) for each in package.wheels if _FITTING.search(str(each.get("url")))]
            known = frozenset(each[7:] for each in hashes if re.fullmatch(f"sha256:{SHA256_HEX}", each))
            locked.append(replace(pin, hashes=known))
            pins.append((package.name, package.version))
    for each in requested:  # uv.lock may lack what is for another Python or system
        if not Requirement(each.text).marker and not any(each.allows(*pin) for pin in pins):
            raise UsageError(f"{path} has no version for {each.text[:100]!a} of pyproject.toml", hint="Run `uv lock`.")
    return sorted(locked, key=str)


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
