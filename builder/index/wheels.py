"""Wheels as data: file name, version, size, hash, origin, and whether they contain CUDA libraries. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Literal

from packaging.tags import Tag, compatible_tags, cpython_tags
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as model

from builder.common.files import SHA256_HEX
from builder.matrix.schema import AMD64, ARM64, Arch, IndexName, matches

PLATFORMS: dict[Arch, str] = {AMD64: "x86_64", ARM64: "aarch64"}  # in tags of wheels, and in environment markers
LONGEST = 255  # characters of a file name; parsing one with thousands of tags would take hours


def arch_of(machine: str) -> str:
    """The architecture as in images, of a machine as kernels and engines name it: `arm64` of aarch64."""
    return next((arch for arch, platform in PLATFORMS.items() if platform == machine), machine)


_Word = Annotated[str, matches(r"[A-Za-z0-9][A-Za-z0-9_.+!-]{0,99}", "letters, digits and _.+!-")]
_Line = Annotated[str, Field(max_length=100)]
Sha256 = Annotated[str, matches(SHA256_HEX, "64 hex digits")]  # in hex
STRICT = ConfigDict(extra="forbid", strict=True)


@model(frozen=True, kw_only=True, config=STRICT)
class LockedWheel:
    """A wheel in a lock; `size` in bytes; `index` is the name of its index in matrix.yaml, empty for the default.

    `license` and `supplier` come from METADATA; empty if METADATA names none, or if an older builder made the lock.
    """

    name: _Word
    version: _Word
    file: Annotated[str, matches(r"[A-Za-z0-9_.+!-]{1,200}\.whl", "the file name of a wheel")]
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256
    index: IndexName | Literal[""] = ""
    license: _Line = ""
    supplier: _Line = ""


@dataclass(frozen=True, kw_only=True)
class InstalledWheel:
    """A wheel of an image that another one is made from. `read` reads its METADATA."""

    wheel: LockedWheel
    read: Callable[[], bytes]

    @cached_property
    def metadata(self) -> bytes:
        """Read when uv asks for it: most packages of an image are never asked for."""
        return self.read()


@dataclass(frozen=True, kw_only=True)
class Wheel(LockedWheel):
    """A wheel of a cell. `component` is the first of the cell's components that needs it.

    CUDA wheels that the framework or its line needs belong to the component `cuda`.
    """

    component: str

    @property
    def is_cuda(self) -> bool:
        """True if it is installed for all Pythons."""
        return is_cuda_wheel(self.file)


@cache
def is_cuda_wheel(file: str) -> bool:
    """True if a wheel contains CUDA libraries: from NVIDIA, for any Python, for one platform.

    nvidia-ml-py is from NVIDIA too, but it is plain Python (py3-none-any).
    """
    return file.startswith("nvidia_") and "-none-" in file and not file.endswith("-none-any.whl")


@cache
def tag_ranks(python: str, glibc: str, platform: str) -> dict[Tag, int]:
    """Wheel tags that CPython `python` on glibc `glibc` accepts, 0 the most specific.

    Source: PEP 425, PEP 600 (manylinux_x_y) and its legacy aliases.
    """
    version = tuple(int(part) for part in python.split("."))
    newest = int(glibc.split(".")[1])
    aliases = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms = []
    for minor in range(newest, 4, -1):
        platforms.append(f"manylinux_2_{minor}_{platform}")
        if minor in aliases:
            platforms.append(f"{aliases[minor]}_{platform}")
    platforms.append(f"linux_{platform}")
    interpreter = "cp" + python.replace(".", "")
    accepted = [*cpython_tags(version, [interpreter], platforms), *compatible_tags(version, interpreter, platforms)]
    return {tag: rank for rank, tag in reversed(list(enumerate(accepted)))}
