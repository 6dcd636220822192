"""Locks: the exact wheels of each cell, as files in locks/. Reading, writing and staleness; no network.

`builder.resolve` makes them. A lock has no index address, so it is good with any mirror.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as model

from builder import cells, digest
from builder.cells import Cell
from builder.errors import LockError
from builder.matrix import Matrix

FORMAT: Literal[1] = 1
PLATFORM = "x86_64"
TOOLKIT = "cuda-toolkit"  # NVIDIA's metapackage: each release pins the libraries of one CUDA


def _check_file(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.+!-]{1,200}\.whl", value, re.ASCII):
        raise ValueError("expected the file name of a wheel")
    return value


def _check_hash(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value, re.ASCII):
        raise ValueError("expected 64 hex digits")
    return value


def _check_word(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+!-]{0,99}", value, re.ASCII):
        raise ValueError("expected one plain word")
    return value


_Word = Annotated[str, AfterValidator(_check_word)]


@model(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True))
class Wheel:
    """One locked wheel. `component` is the first component of the cell that needs it; `size` in bytes."""

    component: _Word
    name: _Word
    version: _Word
    file: Annotated[str, AfterValidator(_check_file)]
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, AfterValidator(_check_hash)]


@model(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True))
class Lock:
    """`inputs` is the digest of all that was asked for; `requirements` is that by component, for readers."""

    cell: str
    inputs: str
    requirements: dict[str, list[str]]
    wheels: tuple[Wheel, ...]
    format: Literal[1] = FORMAT

    @property
    def digest(self) -> str:
        return digest.of_data([asdict(wheel) for wheel in self.wheels])

    def of_component(self, component: str) -> tuple[Wheel, ...]:
        return tuple(wheel for wheel in self.wheels if wheel.component == component)


def is_cuda_wheel(file: str) -> bool:
    """Whether a wheel holds CUDA libraries: NVIDIA's, for any Python, for one platform.

    nvidia-ml-py is NVIDIA's too but plain Python (py3-none-any), so it is no CUDA wheel.
    """
    return file.startswith("nvidia_") and "-none-" in file and not file.endswith("-none-any.whl")


def requirements(matrix: Matrix, cell: Cell) -> dict[str, list[str]]:
    """Component -> what it asks for, in the order of the cell's components; only those that ask for something."""
    framework = matrix.frameworks[cell.framework]
    result = {}
    for component in cells.components(matrix, cell):
        wanted = list(matrix.components[component].packages)
        if component == cell.framework:
            wanted = [
                f"{framework.package_for(cell.cuda)}=={cell.release}",
                *wanted,
                *framework.versions[cell.line].packages,
            ]
        if wanted:
            result[component] = wanted
    return result


def joint_requirements(matrix: Matrix, together: Iterable[Cell]) -> list[str]:
    """What these cells ask for together, the pins of their CUDA included; resolved at once, so that they share every
    common wheel.
    """
    wanted = set()
    for cell in together:
        wanted |= {want for wants in requirements(matrix, cell).values() for want in wants}
        if toolkit := matrix.cuda[cell.cuda].toolkit:
            wanted.add(f"{TOOLKIT}[all]=={toolkit}")
    return sorted(wanted)


def joint_constraints(matrix: Matrix, together: Iterable[Cell]) -> list[str]:
    """Bounds on what may come along with any of these cells."""
    lines = {(cell.framework, cell.line) for cell in together}
    return sorted({one for name, line in lines for one in matrix.frameworks[name].versions[line].constraints})


def inputs(matrix: Matrix, cell: Cell, together: Sequence[Cell]) -> str:
    """Digest of everything that a resolution of `cell` depends on, but for the index.

    `together` are the cells that are resolved with it, itself among them.
    """
    return digest.of_data(
        {
            "format": FORMAT,
            "requirements": list(requirements(matrix, cell).items()),
            "joint": joint_requirements(matrix, together),
            "constraints": joint_constraints(matrix, together),
            "python": cell.python,
            "cuda": cell.cuda,
            "platform": PLATFORM,
            "glibc": matrix.debian[matrix.python[cell.python].debian].glibc,
        }
    )


def path(root: Path, cell_id: str) -> Path:
    return root / "locks" / f"{cell_id}.json"


def dump(lock: Lock) -> str:
    """The file's text: one line a wheel, so that a diff shows wheels."""
    head = {"format": FORMAT, "cell": lock.cell, "inputs": lock.inputs, "requirements": lock.requirements}
    lines = [json.dumps(asdict(wheel)) for wheel in lock.wheels]
    return json.dumps(head, indent=1)[:-2] + ',\n "wheels": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def read(root: Path, cell_id: str) -> Lock | None:
    """The cell's lock, or None if it has none; raises LockError for a damaged file."""
    file = path(root, cell_id)
    try:
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"{file.name}: {error}", hint=_again(cell_id)) from error
    try:
        lock = _LOCK.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise LockError(f"locks/{file.name} is damaged: {place}: {first['msg']}", hint=_again(cell_id)) from error
    if dump(lock) != text or lock.cell != cell_id:
        raise LockError(f"locks/{file.name} was edited by hand or is not whole", hint=_again(cell_id))
    return lock


_LOCK = TypeAdapter(Lock)


def _again(cell_id: str) -> str:
    return f"Make it again: builder lock {cell_id}"
