"""What changed between two images, or between the locks of two revisions, by package and bytes. Pure.

A side is a lock or an image as manifest and configuration describe it. The history of an image names its wheels but not
their sizes; those come from locks that have the same wheels, or from a layer of one wheel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeVar

from packaging.utils import canonicalize_name
from pydantic import BaseModel, Field, ValidationError

from builder import oci
from builder.cells import CUDA
from builder.errors import VerifyError
from builder.lock import Lock
from builder.view import size as size_of

Kind = Literal["added", "removed", "changed", "other file", "other bytes"]
_Model = TypeVar("_Model", bound=BaseModel)
_Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class Package:
    """A wheel as installed; `python` is the tag of the one it is installed for, empty for CUDA's; `size` if known."""

    name: str
    version: str
    file: str
    sha256: str
    size: int | None
    python: str


@dataclass(frozen=True, kw_only=True)
class Side:
    """One image; `blobs` are its layers with their sizes, None if only its lock is known."""

    label: str
    packages: Mapping[str, Package]
    blobs: Mapping[str, int] | None = None

    @property
    def bytes(self) -> int:
        """Of its layers, or else of its wheels, as `of` says."""
        return sum(size or 0 for size in self.parts(layers=True).values())

    @property
    def of(self) -> Literal["layers", "wheels"]:
        return "wheels" if self.blobs is None else "layers"

    def parts(self, *, layers: bool) -> dict[str, int | None]:
        """What is pulled as one: layers by digest, or wheels by digest and the Python that they are installed for."""
        if layers and self.blobs is not None:
            return dict(self.blobs)
        return {f"{package.python} {package.sha256}": package.size for package in self.packages.values()}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A package that is not the same on both sides."""

    name: str
    old: Package | None
    new: Package | None

    @property
    def kind(self) -> Kind:
        if self.old is None or self.new is None:
            return "added" if self.old is None else "removed"
        if self.old.version != self.new.version:
            return "changed"
        return "other file" if self.old.file != self.new.file else "other bytes"

    def __str__(self) -> str:
        """`2.9.0 -> 2.9.1`, and what differs if not the version."""
        old, new = (one.version if one else "none" for one in (self.old, self.new))
        return f"{new} ({self.kind})" if self.kind.startswith("other") else f"{old} -> {new}"

    @property
    def difference(self) -> int | None:
        """Bytes that were gained; None if a size is not known."""
        old, new = (0 if one is None else one.size for one in (self.old, self.new))
        return None if old is None or new is None else new - old


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Layers or wheels; `unknown` is how many have a size that is not known, which `bytes` leaves out."""

    count: int
    bytes: int
    unknown: int

    @classmethod
    def of(cls, sizes: Iterable[int | None]) -> Amount:
        listed = list(sizes)
        known = [one for one in listed if one is not None]
        return cls(count=len(listed), bytes=sum(known), unknown=len(listed) - len(known))


@dataclass(frozen=True, kw_only=True)
class Diff:
    """`changes`, the largest difference first. `stays` is what a machine that has the old one need not fetch for the
    new, `gone` what only the old one has.
    """

    old: Side
    new: Side
    changes: tuple[Change, ...]
    unit: Literal["layers", "wheels"]
    stays: Amount
    fetched: Amount
    gone: Amount

    @property
    def unchanged(self) -> int:
        """Packages that both have."""
        return len(self.new.packages) - sum(1 for change in self.changes if change.new)

    @property
    def is_empty(self) -> bool:
        return not (self.changes or self.fetched.count or self.gone.count)

    def as_data(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "old": _side(self.old),
            "new": _side(self.new),
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
            "unchanged": self.unchanged,
            "unit": self.unit,
            "stays": asdict(self.stays),
            "fetched": asdict(self.fetched),
            "gone": asdict(self.gone),
        }


@dataclass(frozen=True, kw_only=True)
class Revisions:
    """All cells of two revisions; `unchanged` counts those whose wheels are the same."""

    old: str
    new: str
    changed: Mapping[str, Diff]
    added: tuple[Side, ...]
    removed: tuple[Side, ...]
    unchanged: int

    def as_data(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "old": self.old,
            "new": self.new,
            "cells": {cell: found.as_data() for cell, found in self.changed.items()},
            "added": [_side(side) for side in self.added],
            "removed": [_side(side) for side in self.removed],
            "unchanged": self.unchanged,
        }


def _side(side: Side) -> dict[str, Any]:
    return {"name": side.label, "packages": len(side.packages), "bytes": side.bytes, "of": side.of}


def of_lock(locked: Lock, label: str = "") -> Side:
    """A lock; its label is the cell's id if none is given."""
    python = next((part for part in locked.cell.split("-") if part.startswith("py")), "")
    return Side(
        label=label or locked.cell,
        packages={
            wheel.name: Package(
                name=wheel.name,
                version=wheel.version,
                file=wheel.file,
                sha256=wheel.sha256,
                size=wheel.size,
                python="" if wheel.component == CUDA else python,
            )
            for wheel in locked.wheels
        },
    )


def sizes(locks: Iterable[Lock]) -> dict[str, int]:
    """SHA-256 of a wheel -> its bytes."""
    return {wheel.sha256: wheel.size for locked in locks for wheel in locked.wheels}


class _Blob(BaseModel):
    digest: _Digest
    size: Annotated[int, Field(ge=0)]


class _Manifest(BaseModel):
    config: _Blob
    layers: list[_Blob]


class _Line(BaseModel):
    created_by: str = ""
    empty_layer: bool = False


class _Config(BaseModel):
    history: list[_Line]


def config_of(label: str, manifest: bytes) -> str:
    """The digest of an image's configuration. Raises VerifyError for a manifest of something else."""
    return _read(_Manifest, manifest, f"{label}: its manifest").config.digest


def of_image(label: str, manifest: bytes, config: bytes, known: Mapping[str, int]) -> Side:
    """An image; `known` are sizes of wheels. Raises VerifyError for one that does not hold together."""
    blobs = _read(_Manifest, manifest, f"{label}: its manifest").layers
    history = _read(_Config, config, f"{label}: its configuration").history
    lines = [line.created_by for line in history if not line.empty_layer]
    if len(lines) != len(blobs):
        raise VerifyError(f"{label}: it has {len(blobs)} layers and {len(lines)} lines of history")
    packages: dict[str, Package] = {}
    for line, blob in zip(lines, blobs, strict=True):
        try:
            of = oci.parse_history(line)
        except ValueError as error:  # its words are of the image, and not to be shown as they are
            raise VerifyError(f"{label}: its history names the wheels of a layer in no way that is known") from error
        for file, sha256 in of.wheels if of else ():
            name, version = (*file.split("-", 2), "")[:2]
            packages[canonicalize_name(name)] = Package(
                name=canonicalize_name(name),
                version=version,
                file=file,
                sha256=sha256,
                size=known.get(sha256, blob.size if of and len(of.wheels) == 1 else None),
                python="py" + of.python.replace(".", "") if of and of.python else "",
            )
    return Side(label=label, packages=packages, blobs={blob.digest: blob.size for blob in blobs})


def _read(model: type[_Model], data: bytes, what: str) -> _Model:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise VerifyError(
            f"{what} is not that of an image for one platform: {place or 'all of it'}: {first['msg'].lower()}",
            hint="Images that this builder made can be compared.",
        ) from error


def compare(old: Side, new: Side) -> Diff:
    """By package; layers are compared if both sides have them, else wheels."""
    pairs = {name: (old.packages.get(name), new.packages.get(name)) for name in {*old.packages, *new.packages}}
    changes = [
        Change(name=name, old=before, new=after)
        for name, (before, after) in pairs.items()
        if before is None or after is None or before.sha256 != after.sha256
    ]
    changes.sort(key=lambda change: (change.difference is None, -abs(change.difference or 0), change.name))
    layers = old.blobs is not None and new.blobs is not None
    had, wanted = old.parts(layers=layers), new.parts(layers=layers)
    return Diff(
        old=old,
        new=new,
        changes=tuple(changes),
        unit="layers" if layers else "wheels",
        stays=Amount.of(size for part, size in wanted.items() if part in had),
        fetched=Amount.of(size for part, size in wanted.items() if part not in had),
        gone=Amount.of(size for part, size in had.items() if part not in wanted),
    )


def compare_all(old_name: str, old: Mapping[str, Lock], new_name: str, new: Mapping[str, Lock]) -> Revisions:
    """All cells of two revisions, as cell id -> lock."""
    found = {cell: compare(of_lock(old[cell]), of_lock(locked)) for cell, locked in new.items() if cell in old}
    changed = {cell: one for cell, one in found.items() if not one.is_empty}
    return Revisions(
        old=old_name,
        new=new_name,
        changed=changed,
        added=tuple(of_lock(locked) for cell, locked in new.items() if cell not in old),
        removed=tuple(of_lock(locked) for cell, locked in old.items() if cell not in new),
        unchanged=len(found) - len(changed),
    )


def upgrades(old: Mapping[str, Lock | None], new: Iterable[Lock]) -> list[str]:
    """What `new` changes in the locks of its cells, as lines: `old version -> new version`, once for cells alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    lines = []
    for locked in new:
        before, after = old.get(locked.cell), of_lock(locked)
        if before is None:
            lines.append(f"{locked.cell}: new, {len(after.packages)} packages, {size_of(after.bytes)}")
            continue
        changes = sorted(compare(of_lock(before), after).changes, key=lambda change: change.name)
        if changes:
            alike.setdefault(tuple(f"  {change.name} {change}" for change in changes), []).append(locked.cell)
    for told, cells in alike.items():
        lines += [f"{', '.join(cells)}:", *told]
    return lines
