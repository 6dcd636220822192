"""Locks: the exact wheels of each cell, as files in locks/. Reading, writing and staleness; no network.

`builder.resolve` makes them. A lock has no index address, so it is good with any mirror.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
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
            wanted = [f"{framework.package}=={cell.release}", *wanted, *framework.versions[cell.line].packages]
        if wanted:
            result[component] = wanted
    return result


def group_requirements(matrix: Matrix, group: Sequence[Cell]) -> list[str]:
    """What all cells of a group ask for together; resolved at once, so that they share every common wheel."""
    return sorted({want for cell in group for wants in requirements(matrix, cell).values() for want in wants})


def inputs(matrix: Matrix, cell: Cell, group: Sequence[Cell]) -> str:
    """Digest of everything that a resolution of `cell` depends on, but for the index."""
    return digest.of_data(
        {
            "format": FORMAT,
            "requirements": list(requirements(matrix, cell).items()),
            "group": group_requirements(matrix, group),
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
