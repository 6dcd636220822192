"""Invented locks of the tiny project, computed from its matrix; stored in tiny/locks/.

`UPDATE_SNAPSHOTS=1 pytest tests/unit` writes them, like the snapshots.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from builder.common.errors import FetchError, LockError
from builder.debian import os_lock
from builder.debian.archives import HERE, Archives, PackageAvailability
from builder.debian.os_lock import OS_LOCKS, DebianPackage, OsLock, OsRequest
from builder.index.host import Host
from builder.index.wheels import PLATFORMS, LockedWheel, Wheel
from builder.lock import lockfile
from builder.lock.lockfile import Lock, LockedComponent
from builder.lock.python_lock import PYTHON_LOCKS, LockedPython
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import AMD64, Arch, Matrix
from tests.fakes.run import FakeApt

GROUPS = ("em-1.10-cu1210-py311", "qz-0.5-cu129-py311")
LOCKED = ("em-1.10-cu1210-py311", "em-1.10-cu1210-py311-jupyter", "qz-0.5-cu129-py311", "qz-0.5-cu129-py311-board")
TIME = "20261122T210000Z"
PYTHON = "3.11.2-6"  # version of the Debian package
CUDA = ("nvidia-cuda-runtime-cu12", "nvidia-sums-cu12")


def entry(name: str, version: str, size: int, tag: str = "py3-none-any") -> LockedWheel:
    """A wheel; its digest is that of its file name."""
    file = f"{name.replace('-', '_')}-{version}-{tag}.whl"
    return LockedWheel(
        name=name, version=version, file=file, size=size, sha256=hashlib.sha256(file.encode()).hexdigest()
    )


def wheel(component: str, name: str, version: str, size: int, tag: str = "py3-none-any") -> Wheel:
    """The same as a wheel of a cell."""
    return Wheel(component=component, **entry(name, version, size, tag).__dict__)


def lock_of(project: Project, group: Iterable[Cell]) -> Lock:
    """The lock of a group: CUDA's wheels for the framework, and a wheel for each requirement of a component."""
    members = list(group)
    first = members[0]
    parts: dict[str, LockedComponent] = {}
    wheels: dict[str, LockedWheel] = {}
    for component, requirements in lockfile.group_requirements(project.matrix, members).items():
        own = []
        if component == first.framework and not first.is_cpu:
            tag = f"py3-none-manylinux_2_28_{PLATFORMS[first.arch]}"
            own = [entry(name, f"{first.cuda}.7", 1_000_000, tag) for name in CUDA]
        for text in requirements:
            name = re.split(r"==|>|\[", text, maxsplit=1)[0]
            version = first.release if "==" in text else "2.0"
            own.append(entry(name, version, 1000 + len(name)))
        parts[component] = LockedComponent(requirements=requirements, wheels=sorted(wheel.name for wheel in own))
        wheels = {wheel.name: wheel for wheel in own} | wheels
    return Lock(
        group=first.group,
        basis=lockfile.basis(project.matrix, first),
        held=sorted(re.split(r"==|\[", text)[0] for text in parts[first.framework].requirements if "==" in text),
        toolkit={},
        components=parts,
        wheels=tuple(wheels[name] for name in sorted(wheels)),
    )


def locks(project: Project) -> dict[str, Lock]:
    """Group -> lock, for the groups in GROUPS."""
    return {group: lock_of(project, project.groups[group]) for group in GROUPS if group in project.groups}


def os_lock_of(request: OsRequest, version: str = "1.0-1", python: str = PYTHON) -> OsLock:
    """The lock of an operating system: the release's `libc6`, the requested packages, and a part of its Python."""
    glibc, minor = ("2.31", "3.9") if request.debian == "oldbird" else ("2.36", "3.11")
    requested = dict.fromkeys(request.packages, version)
    versions = {"libc6": f"{glibc}-{version}", **requested, f"python{minor}-minimal": python}
    packages = tuple(
        DebianPackage(
            name=name,
            version=versions[name],
            architecture=request.arch,
            size=1000 + len(name),
            sha256=hashlib.sha256(f"{request.name} {name} {versions[name]}".encode()).hexdigest(),
        )
        for name in sorted(versions)
    )
    return OsLock(debian=request.debian, time=TIME, requested=request.packages, packages=packages)


def python_lock_of(release: str) -> LockedPython:
    """The lock of uv's build of a Python; its digest is that of its file name."""
    file = f"cpython-{release}+20261110-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"
    return LockedPython(release=release, file=file, sha256=hashlib.sha256(file.encode()).hexdigest())


def write_os_locks(project: Project, version: str = "1.0-1", python: str = PYTHON) -> Project:
    """Writes the locks of the operating systems of all cells, and of uv's Pythons; returns the project."""
    for release in filter(None, (each.uv for each in project.matrix.python.values())):
        lock = python_lock_of(release)
        PYTHON_LOCKS.write(project.root, lock.release, lock)
    for cell in project.cells:
        request = os_lock.request_of_cell(project.matrix, cell)
        system = os_lock_of(request, version, python)
        (project.root / request.path).write_text(OS_LOCKS.dump(system), encoding="utf-8")
    return project


@dataclass
class FakeArchive:
    """Stands in for `apt.open_archive`: Debian releases with one version of every package.

    `broken` is a release that cannot be looked up, `unknown` a package that no release has.
    """

    versions: dict[str, str] = field(default_factory=lambda: {"newbird": "2.0-1", "oldbird": "2.0-1"})
    broken: str = ""
    unknown: str = ""
    release: str = ""
    arch: Arch = AMD64
    sources: str = ""
    resolved: list[str] = field(default_factory=list)
    looked_up: list[str] = field(default_factory=list)

    @contextmanager
    def __call__(self, release: str, host: Host, _: object, arch: Arch = AMD64) -> Iterator[FakeArchive]:
        if release == self.broken:
            raise FetchError(f"Debian {release}: apt-get update failed")
        self.release, self.arch, self.sources = release, arch, host.sources_list(release)
        yield self

    def resolve(self, request: OsRequest, time: str) -> OsLock:
        assert (request.debian, request.arch) == (self.release, self.arch)
        if self.unknown in request.packages:
            raise LockError(f"Unable to locate package {self.unknown}")
        self.resolved.append(request.path)
        return replace(os_lock_of(request, self.versions[request.debian]), time=time)


class FakeArchives(Archives):
    """Places in memory: `versions` is the one version that each release has, `broken` is one that cannot be looked up.

    `different` are packages of which an archive has another file.
    """

    def __init__(
        self, matrix: Matrix, versions: Mapping[str, str], *, broken: str = "", different: Sequence[str] = ()
    ) -> None:
        super().__init__(matrix, Host(), FakeApt())
        self.versions, self.broken, self.different = versions, broken, different

    def locate(self, lock: OsLock, blobs: Path | None) -> PackageAvailability:
        request = OsRequest(debian=lock.debian, packages=lock.requested, arch=lock.arch)
        current = {package.sha256 for package in os_lock_of(request, self.versions[lock.debian]).packages}
        stored = {path.name for path in blobs.iterdir()} if blobs and blobs.exists() else set()
        return PackageAvailability(
            missing=[package for package in lock.packages if package.sha256 not in current | stored],
            different=[package for package in lock.packages if package.name in self.different],
            doubts=f"{HERE}: the archive timed out" if lock.debian == self.broken else "",
        )
