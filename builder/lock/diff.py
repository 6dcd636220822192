"""The changes between two images, or between the locks of two revisions, by package and bytes.

Pure, except for `locked_contents`, which reads the locks.

Compares locks, and images by their manifest and configuration. The history of an image has the names of its wheels but
not their sizes; those come from locks that have the same wheels, or from a layer of one wheel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from builder.common.errors import StaleError
from builder.common.text import counted
from builder.common.text import size as size_text
from builder.debian import os_lock
from builder.debian.os_lock import DebianChange
from builder.index.wheels import is_cuda_wheel
from builder.lock import lockfile
from builder.lock.lockfile import CellLock, Lock
from builder.matrix.project import Project

Kind = Literal["added", "removed", "changed", "other file", "other bytes"]
Unit = Literal["layers", "wheels"]


@dataclass(frozen=True, kw_only=True)
class InstalledWheel:
    """An installed wheel; `python` is the tag of its Python, empty for CUDA wheels; `size` is None if not known."""

    name: str
    version: str
    file: str
    sha256: str
    size: int | None
    python: str


@dataclass(frozen=True, kw_only=True)
class ImageContents:
    """One image; `blobs` are its layers with their sizes, None if only its lock is known.

    `debian` is the version of each Debian package, None if they are not known.
    """

    label: str
    packages: Mapping[str, InstalledWheel]
    blobs: Mapping[str, int] | None = None
    debian: Mapping[str, str] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of its layers or wheels, according to `unit`."""
        return sum(size or 0 for size in self.parts(self.unit).values())

    @property
    def unit(self) -> Unit:
        return "wheels" if self.blobs is None else "layers"

    def parts(self, unit: Unit) -> Mapping[str, int | None]:
        """Its parts: layers by digest, or wheels by digest and the Python that they are installed for."""
        if unit == "layers":
            return dict(self.blobs or {})
        return {f"{package.python} {package.sha256}": package.size for package in self.packages.values()}

    def as_data(self) -> dict[str, Any]:
        return {"name": self.label, "packages": len(self.packages), "bytes": self.bytes, "of": self.unit}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A package that differs."""

    name: str
    old: InstalledWheel | None
    new: InstalledWheel | None

    @property
    def kind(self) -> Kind:
        if self.old is None or self.new is None:
            return "added" if self.old is None else "removed"
        if self.old.version != self.new.version:
            return "changed"
        return "other file" if self.old.file != self.new.file else "other bytes"

    def __str__(self) -> str:
        """`2.9.0 -> 2.9.1`, or the version and the kind of change if the versions are equal."""
        old, new = (package.version if package else "none" for package in (self.old, self.new))
        return f"{new} ({self.kind})" if self.kind.startswith("other") else f"{old} -> {new}"

    @property
    def difference(self) -> int | None:
        """Bytes gained; None if a size is not known."""
        old, new = (package.size if package else 0 for package in (self.old, self.new))
        return None if old is None or new is None else new - old


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Layers or wheels; `unknown` is the number of those whose size is not known, which `bytes` leaves out."""

    count: int
    bytes: int
    unknown: int

    @classmethod
    def of(cls, sizes: Iterable[int | None]) -> Amount:
        every = list(sizes)
        known = [size for size in every if size is not None]
        return cls(count=len(every), bytes=sum(known), unknown=len(every) - len(known))


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The difference between two images. `changes` are sorted, the largest first. `stays` are layers or wheels of both.

    `fetched` are those that only `new` has, `gone` those that only `old` has.
    """

    old: ImageContents
    new: ImageContents
    changes: tuple[Change, ...]
    unit: Unit
    stays: Amount
    fetched: Amount
    gone: Amount
    debian: tuple[DebianChange, ...]

    @property
    def unchanged(self) -> int:
        """The number of packages that are the same in both."""
        return len(self.new.packages) - sum(1 for change in self.changes if change.new)

    @property
    def is_empty(self) -> bool:
        return not (self.changes or self.debian or self.fetched.count or self.gone.count)

    def as_data(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "old": self.old.as_data(),
            "new": self.new.as_data(),
            "packages": [
                {
                    "name": change.name,
                    "change": change.kind,
                    "old": change.old and asdict(change.old),
                    "new": change.new and asdict(change.new),
                    "bytes": change.difference,
                }
                for change in self.changes
            ],
            "debian": [asdict(change) for change in self.debian],
            "unchanged": self.unchanged,
            "unit": self.unit,
            "stays": asdict(self.stays),
            "fetched": asdict(self.fetched),
            "gone": asdict(self.gone),
        }


@dataclass(frozen=True, kw_only=True)
class Revisions:
    """All cells of two revisions; `unchanged` counts those with the same wheels and Debian packages."""

    old: str
    new: str
    changed: Mapping[str, Diff]
    added: tuple[ImageContents, ...]
    removed: tuple[ImageContents, ...]
    unchanged: int

    def as_data(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "old": self.old,
            "new": self.new,
            "cells": {cell: diff.as_data() for cell, diff in self.changed.items()},
            "added": [image.as_data() for image in self.added],
            "removed": [image.as_data() for image in self.removed],
            "unchanged": self.unchanged,
        }


def contents_of_lock(lock: Lock | CellLock, debian: Mapping[str, str] | None = None) -> ImageContents:
    """The wheels of a cell or group, and the versions of its Debian packages if they are known."""
    name = lock.group if isinstance(lock, Lock) else lock.cell
    python = next((part for part in name.split("-") if part.startswith("py")), "")
    packages = {
        wheel.name: InstalledWheel(
            name=wheel.name,
            version=wheel.version,
            file=wheel.file,
            sha256=wheel.sha256,
            size=wheel.size,
            python="" if is_cuda_wheel(wheel.file) else python,
        )
        for wheel in lock.wheels
    }
    return ImageContents(label=name, packages=packages, debian=debian)


def sizes(images: Iterable[ImageContents]) -> dict[str, int]:
    """SHA-256 of a wheel -> its bytes, if they are known."""
    packages = (package for image in images for package in image.packages.values())
    return {package.sha256: package.size for package in packages if package.size is not None}


def compare(old: ImageContents, new: ImageContents) -> Diff:
    """Compares two images by package. Amounts are those of layers if both have layers, else of wheels."""
    pairs = {name: (old.packages.get(name), new.packages.get(name)) for name in {*old.packages, *new.packages}}
    changes = [
        Change(name=name, old=before, new=after)
        for name, (before, after) in pairs.items()
        if before is None or after is None or before.sha256 != after.sha256
    ]
    changes.sort(key=lambda change: (change.difference is None, -abs(change.difference or 0), change.name))
    unit: Unit = "layers" if old.unit == new.unit == "layers" else "wheels"
    had, needed = old.parts(unit), new.parts(unit)
    return Diff(
        old=old,
        new=new,
        changes=tuple(changes),
        unit=unit,
        stays=Amount.of(size for part, size in needed.items() if part in had),
        fetched=Amount.of(size for part, size in needed.items() if part not in had),
        gone=Amount.of(size for part, size in had.items() if part not in needed),
        debian=() if old.debian is None or new.debian is None else tuple(os_lock.compare(old.debian, new.debian)),
    )


def compare_all(
    old_name: str, old: Mapping[str, ImageContents], new_name: str, new: Mapping[str, ImageContents]
) -> Revisions:
    """All cells of two revisions, by id."""
    diffs = {cell: compare(old[cell], image) for cell, image in new.items() if cell in old}
    changed = {cell: diff for cell, diff in diffs.items() if not diff.is_empty}
    return Revisions(
        old=old_name,
        new=new_name,
        changed=changed,
        added=tuple(image for cell, image in new.items() if cell not in old),
        removed=tuple(image for cell, image in old.items() if cell not in new),
        unchanged=len(diffs) - len(changed),
    )


def upgrades(old: Mapping[str, Lock | None], new: Iterable[Lock]) -> list[str]:
    """The changes of `new` to the locks of groups, as lines: `old version -> new version`, once for equal changes."""
    groups: dict[tuple[str, ...], list[str]] = {}
    lines = []
    for lock in new:
        image = contents_of_lock(lock)
        if (before := old.get(lock.group)) is None:
            lines.append(f"{lock.group}: new, {counted(len(image.packages), 'package')}, {size_text(image.bytes)}")
        elif changes := sorted(compare(contents_of_lock(before), image).changes, key=lambda change: change.name):
            groups.setdefault(tuple(f"  {change.name} {change}" for change in changes), []).append(lock.group)
    for texts, names in groups.items():
        lines += [f"{', '.join(names)}:", *texts]
    return lines


def locked_contents(project: Project) -> dict[str, ImageContents]:
    """Cell id -> its wheels and Debian packages, for all cells whose components are locked. Raises LockError."""
    locks = {group: lock for group in project.groups if (lock := lockfile.read_lock(project.root, group))}
    requests = {cell.id: os_lock.request_of_cell(project.matrix, cell) for cell in project.cells}
    systems = {request: os_lock.read_os_lock(project.root, request) for request in set(requests.values())}
    contents = {}
    for cell in project.cells:
        if cell.group in locks:
            with suppress(StaleError):  # the lock lacks wheels that the cell's variant needs now
                locked = lockfile.of_cell(project.matrix, cell, locks[cell.group])
                system = systems[requests[cell.id]]
                contents[cell.id] = contents_of_lock(locked, system.versions if system else None)
    return contents
