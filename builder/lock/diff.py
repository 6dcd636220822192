"""The packages that differ between locks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from builder.common.text import counted, listed
from builder.debian.os_lock import DebianPackage
from builder.index.wheels import LockedWheel

MOST_LOCKS = 3  # locks that are named with a change; the others are counted
LockedPackage = LockedWheel | DebianPackage


def package_changes(old: Iterable[LockedPackage], new: Iterable[LockedPackage]) -> list[str]:
    """A line for each package that differs, by name: `torch 2.9.0 -> 2.9.1`, with `none` for no package."""
    before, after = ({package.name: package for package in packages} for packages in (old, new))
    changes = []
    for name in sorted({*before, *after}):
        versions = [packages[name].version if name in packages else "none" for packages in (before, after)]
        if versions[0] != versions[1]:
            changes.append(f"{name} {versions[0]} -> {versions[1]}")
        elif before[name].sha256 != after[name].sha256:
            changes.append(f"{name} {versions[1]} (another file)")
    return changes


def lock_changes(old: Mapping[str, Sequence[LockedPackage]], new: Mapping[str, Sequence[LockedPackage]]) -> list[str]:
    """Lines for the locks that differ, by name: new locks, then each change with its locks."""
    lines = [f"{name}: new, {counted(len(new[name]), 'package')}" for name in new if name not in old]
    locks: dict[str, list[str]] = {}
    for name, packages in new.items():
        for change in package_changes(old[name], packages) if name in old else ():
            locks.setdefault(change, []).append(name)
    return [*lines, *(f"{change} ({listed(names, MOST_LOCKS)})" for change, names in sorted(locks.items()))]
