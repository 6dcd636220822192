"""Locks of operating systems: the exact Debian packages of a release and a set of requested ones.

Cells that request the same packages of the same release share a lock. No lock depends on another, so a new variant
changes the packages of no other image. `builder.debian.apt` makes locks. They contain no address: any mirror works.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter
from pydantic.dataclasses import dataclass as model

from builder.common import lock_text
from builder.common.files import digest_of_data, short_digest
from builder.common.lock_text import LockFiles
from builder.debian import control_files
from builder.debian.control_files import SourcePackage
from builder.index.wheels import STRICT, Sha256
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.schema import AMD64, AptPackage, Arch, Matrix, matches

FORMAT: Literal[1] = 1
PREFIX = "os-"  # begins the file name; groups begin with a framework and a version
Architecture = Literal["amd64", "arm64", "all"]


def _time(value: str) -> datetime:
    return datetime.strptime(value, "%Y%m%dT%H%M%S%z")


def _check_time(value: str) -> str:
    _time(value)
    return value


def _check_source(value: str) -> str:
    if value:  # empty: the binary package's own name and version
        control_files.source_package(value, "", "")
    return value


@model(frozen=True, kw_only=True, config=STRICT)
class DebianPackage:
    """A Debian package; `size` (in bytes) and `sha256` describe the .deb file.

    `source` is the field `Source`: empty if the source package has the same name and version. No layer depends on
    `source`. `packages.sh` needs `sha256` to be last.
    """

    name: AptPackage
    # Source: Debian Policy, section 5.6.12.
    version: Annotated[str, matches(r"[A-Za-z0-9][A-Za-z0-9.+~:-]{0,99}", "the version of a Debian package")]
    architecture: Architecture
    source: Annotated[str, AfterValidator(_check_source)] = ""
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256

    @property
    def source_package(self) -> SourcePackage:
        return control_files.source_package(self.source, self.name, self.version)

    @property
    def file(self) -> str:
        """The name of its .deb file in an archive: without the epoch of the version."""
        return f"{self.name}_{self.version.partition(':')[2] or self.version}_{self.architecture}.deb"

    @property
    def pool_path(self) -> str:
        """The path of its .deb file below `pool/main` of an archive. Source: layout of Debian's archives, observed."""
        source = self.source_package.name
        return f"{source[:4] if source.startswith('lib') else source[0]}/{source}/{self.file}"


@model(frozen=True, kw_only=True, config=STRICT)
class OsLock:
    """The lock of an operating system: all packages, including the packages of the release itself, sorted by name.

    `time` is when the lock was made (UTC), in the form of snapshot archives: 20261122T210000Z.
    """

    debian: str
    time: Annotated[str, matches(r"[0-9]{8}T[0-9]{6}Z", "a time such as 20261122T210000Z"), AfterValidator(_check_time)]
    requested: tuple[AptPackage, ...]
    packages: tuple[DebianPackage, ...]
    format: Literal[1] = FORMAT

    @cached_property
    def versions(self) -> dict[str, str]:
        return {package.name: package.version for package in self.packages}

    @cached_property
    def arch(self) -> Arch:
        """The architecture of its packages."""
        return next((package.architecture for package in self.packages if package.architecture != "all"), AMD64)

    def age(self, now: datetime) -> int:
        """Days since it was made."""
        return (now - _time(self.time)).days

    def interpreter(self, python: str) -> list[str]:
        """The versions of Debian's packages that make bytecode and compress it; "" for a package that is not locked."""
        return [self.versions.get(name, "") for name in (f"python{python}-minimal", "zlib1g")]


@dataclass(frozen=True, order=True, kw_only=True)
class OsRequest:
    """A cell's request for its operating system: a Debian release, the sorted names of packages, an architecture."""

    debian: str
    packages: tuple[str, ...]
    arch: Arch = AMD64

    @property
    def name(self) -> str:
        """The release in names and messages: `trixie`, `trixie-arm64`."""
        return self.debian if self.arch == AMD64 else f"{self.debian}-{self.arch}"

    @property
    def path(self) -> str:
        """The path of its lock in a checkout."""
        return f"locks/{PREFIX}{self.name}-{short_digest(digest_of_data(list(self.packages)))[:8]}.json"


def request_of_cell(matrix: Matrix, cell: Cell) -> OsRequest:
    """The packages that the cell's Python and all its components request, without duplicates."""
    return request_of(matrix, cell.python, cells.components(matrix, cell), cell.arch)


def requests_of_cells(matrix: Matrix, chosen: Iterable[Cell]) -> list[OsRequest]:
    """The requests of cells, without duplicates, in their order."""
    return list(dict.fromkeys(request_of_cell(matrix, cell) for cell in chosen))


def request_of(matrix: Matrix, version: str, components: tuple[str, ...], arch: Arch = AMD64) -> OsRequest:
    """The request for a Python version, components and an architecture."""
    python = matrix.python[version]
    requested = {*python.packages, *(package for name in components for package in matrix.components[name].apt)}
    return OsRequest(debian=python.debian, packages=tuple(sorted(requested)), arch=arch)


def _dump(lock: OsLock) -> str:
    """The file's text, with one line for each package. `templates/steps/packages.sh` reads these lines."""
    head = {"format": FORMAT, "debian": lock.debian, "time": lock.time, "requested": list(lock.requested)}
    lines = [
        json.dumps({name: value for name, value in vars(package).items() if name != "source" or value})
        for package in lock.packages
    ]
    return f'{json.dumps(head, indent=1)[:-2]},\n "packages": {lock_text.json_block("[", lines, "]")}\n}}\n'


def _faults(lock: OsLock, key: OsRequest) -> Iterator[str]:
    if (lock.debian, lock.requested) != (key.debian, key.packages):
        yield "it is the lock of another request"
    names = [package.name for package in lock.packages]
    if names != sorted(set(names)):
        yield "packages are not sorted, or one is duplicated"
    if others := [package.file for package in lock.packages if package.architecture not in (key.arch, "all")]:
        yield f"{others[0]} is not for {key.arch}"
    if missing := [name for name in lock.requested if name not in lock.versions]:
        yield f"missing package {missing[0]}"


OS_LOCKS = LockFiles[OsRequest, OsLock](
    adapter=TypeAdapter(OsLock),
    version=FORMAT,
    path=lambda request: request.path,
    hint=lambda _: "Restore it with git, or make it again: builder lock --os",
    dump=_dump,
    faults=_faults,
)
