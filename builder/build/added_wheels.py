"""The wheels of an addition: those that the requested packages need, as `uv pip install` in the parent would choose."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from packaging.version import Version

from builder.common.errors import LockError, RefusedError, UsageError
from builder.common.files import digest_of_bytes, short_digest
from builder.common.text import listed
from builder.index.releases import applies
from builder.index.settings import IndexSettings, has_credentials
from builder.index.wheels import LockedWheel, is_cuda_wheel
from builder.lock import checks, requirements, uv
from builder.lock.requirements import Requested
from builder.lock.uv import ListedWheels, Target, Uv
from builder.matrix import facts
from builder.matrix.tags import CUDA_LABEL
from builder.release.additions import Addition
from builder.release.parent import Parent

CONFLICT = (
    "Choose versions that fit, or another parent: its framework and CUDA stay as they are, and with --keep all "
    "of its packages. If the index lacks a package, name an index that has it with --index. A Dockerfile with FROM can "
    "replace anything."
)
SHOWN = 8  # packages in a line
YEAR = timedelta(days=365)
_DEPENDS = re.compile(
    r"(?:all versions of )?([A-Za-z0-9._-]+)\S* depends? on ([A-Za-z0-9._-]+)(?:\[\S*\])?([<>=!~]\S*|)"
)


def with_indexes(settings: IndexSettings, additions: Sequence[Addition]) -> IndexSettings:
    """The settings with the indexes of the additions. Raises UsageError for an index that does not exist."""
    requests = [addition.request for addition in additions]
    for place in dict.fromkeys(
        request.index for request in requests if request.index and request.index not in settings.named
    ):
        is_address = re.match("https?://", place)
        is_secret = has_credentials(place) or re.search("://.*[?#]", place)
        if is_secret or not (is_address or Path(place).is_dir()):
            raise UsageError(
                "the address of the index has a login, a query or a fragment" if is_secret else f"no index {place!r}",
                hint="Use an address alone, the path of a folder of wheels from here, or a name in matrix.yaml: "
                f"{', '.join(settings.named) or 'there is none here'}.",
            )
        folder = None if is_address else Path(place).resolve()
        settings = settings.with_index(_index_name(place), place if is_address else "", folder)
    return settings


def _index_name(place: str) -> str:
    """A name that no index of matrix.yaml has, for an address or a folder."""
    return f"added-{short_digest(digest_of_bytes(place.encode()))}"


def choose_wheels(
    program: Uv, settings: IndexSettings, parent: Parent, addition: Addition
) -> tuple[list[LockedWheel], list[str]]:
    """Resolves the requested packages as `uv pip install` in the parent, then makes sure that all its packages fit.

    Returns the wheels that are new or replace one of the parent, and a line about each requested package. `settings`
    are those of `with_indexes`. Raises LockError, and RefusedError for what does not fit the parent.
    """
    request = addition.request
    requested = [
        package for package in request.requirements if applies(package.requirement, parent.python, parent.arch)
    ]
    if not requested:
        return [], []
    held = parent.held(keep=request.keep)
    index = request.index if request.index in settings.named else _index_name(request.index)
    sources = {package.name: index for package in requested if request.index}
    indexes = {name: source for name, source in sources.items() if program.catalogue.files(name, source)}
    if request.index and not indexes:
        raise UsageError(f"{addition.target}: {request.index} has none of {listed(sorted(sources), SHOWN)}")
    for package in (package for package in requested if package.name in indexes and package.name in held):
        wheel = parent.packages[package.name]
        files = program.catalogue.files(package.name, indexes[package.name])
        offered = {file.filename: file.digests.get("sha256") for file in files}
        if offered.get(wheel.file, wheel.sha256) != wheel.sha256:
            raise RefusedError(
                f"{addition.target}: another {wheel.file} is requested than the parent has", hint=CONFLICT
            )
    # Of a package that is requested from an index, the wheel of the parent is no candidate, unless it is held.
    others = {name: wheel for name, wheel in parent.packages.items() if name in held or name not in indexes}
    kept = parent.kept if len(others) == len(parent.packages) else replace(parent, packages=others).kept
    target = Target(
        name=str(addition.target),
        python=parent.python,
        arch=parent.arch,
        glibc=parent.glibc,
        indexes=indexes,
        kept=kept,
        held=held,
        conflict=CONFLICT,
    )
    earlier = addition.earlier.get(parent.arch)
    before = {**(earlier.packages if earlier else {}), **parent.packages}
    preferred = {name: wheel.version for name, wheel in before.items()}
    packages, constraints = [str(package.requirement) for package in requested], parent.constraints
    try:
        versions = uv.parse_versions(program.compile(target, packages, constraints, preferred))
        had = {(wheel.name, wheel.version) for image in (earlier, parent) if image for wheel in image.packages.values()}
        lines = [
            _describe(
                program,
                target,
                parent,
                package,
                versions[package.name],
                is_new=(package.name, versions[package.name]) not in had,
            )
            for package in requested
            if package.name in versions
        ]
        try:
            chosen = _wheels(program, target, parent, versions)
        except LockError:
            # A package of the parent does not fit the new versions: it may move too. Requested packages stay.
            pins = uv.pinned(
                {package.name: versions[package.name] for package in requested if package.name in versions}
            )
            packages += parent.packages
            versions = uv.parse_versions(program.compile(target, packages, [*constraints, *pins], preferred))
            chosen = _wheels(program, target, parent, versions)
    except LockError as error:
        words = set(str(error).replace("==", " ").split())
        named = [f"{name} {wheel.version}" for name, wheel in parent.packages.items() if name in words]
        about = f"The parent has {listed(named, 5)}. " if named else ""
        raise LockError(str(error), hint=f"{about}{error.hint}") from error
    had_files = {wheel.sha256 for wheel in parent.packages.values()}
    new = {name: listing for name, listing in chosen.items() if listing[0].sha256 not in had_files}
    unknown = {name: listing for name, listing in new.items() if not listing[0].size}
    sizes = program.sizes(target, unknown) if unknown else {}
    wheels = {name: replace(wheel, size=sizes.get(name, wheel.size)) for name, (wheel, _) in sorted(new.items())}
    hashed = {
        package.name: chosen[package.name][0] for package in requested if package.hashes and package.name in chosen
    }
    requirements.check_hashes(requested, hashed | wheels)
    check_cuda(addition, parent, wheels)
    return list(wheels.values()), lines


def _wheels(program: Uv, target: Target, parent: Parent, versions: Mapping[str, str]) -> ListedWheels:
    """The wheels of these versions. Raises LockError if the rest of the parent does not fit those that move."""
    kept = set(target.kept)
    moved = {
        name
        for name, wheel in parent.packages.items()
        if name not in kept or versions.get(name, wheel.version) != wheel.version
    }
    others = [name for name in parent.packages if moved and name not in versions]
    target = replace(target, held=parent.packages.keys() - moved)
    return program.wheels(target, program.compile(target, [*uv.pinned(versions), *others], [], None))


def _describe(program: Uv, target: Target, parent: Parent, requested: Requested, version: str, *, is_new: bool) -> str:
    """A line about a requested package: its version and day, the newest version, and what keeps a new one from it.

    Raises RefusedError for a new version that is a year older than the newest one, unless the request has a limit.
    """
    listing = program.catalogue.package(requested.name, target.indexes.get(requested.name, ""))
    release, newest = listing.release(Version(version)), listing.newest
    notes = [str(release.day)] if release and release.day else []
    line, specifier = f"{requested.name} {version}", requested.requirement.specifier
    if is_new and newest and newest.version > Version(version):
        notes.append(f"the newest is {newest.version}")
        if specifier.contains(newest.version):
            pin = f"{requested.name}=={newest.version}"
            try:
                program.compile(target, [pin], parent.constraints, {})
            except LockError as error:
                notes[-1] = f"the newest, {newest.version}, {_reason(str(error), requested.name)}"
        is_old = release and release.day and newest.day and newest.day - release.day > YEAR
        if is_old and all(clause.operator in (">", ">=", "!=") for clause in specifier):
            raise RefusedError(
                f"{target.name}: {line} is more than a year older than the newest one ({'; '.join(notes)})",
                hint="Choose a parent that the newest fits. If it has no wheel, build one (docs/matrix.md), and give "
                f"its folder with --index. To have this one: {line.replace(' ', '==')}",
            )
    return f"{line} ({'; '.join(notes)})" if notes else line


def _reason(error: str, package: str) -> str:
    """What uv names first for a version that does not fit, such as `needs torch 2.14.0`."""
    if not (match := _DEPENDS.search(" ".join(error.split()))):
        return "has no wheel that fits" if "usable wheels" in error else "does not fit"
    needs = f"needs {match[2]} {match[3].removeprefix('==')}".rstrip(" ,")
    return needs if match[1] == package else f"does not fit: {match[1]} {needs}"


def check_cuda(addition: Addition, parent: Parent, wheels: Mapping[str, LockedWheel]) -> None:
    """Raises RefusedError for CUDA libraries that do not fit the CUDA of the parent, and for known conflicts."""
    label = re.match(r"[0-9]+", parent.image.labels.get(CUDA_LABEL, ""))
    expected = int(label[0]) if label else 0  # the CPU
    new = [wheel for wheel in wheels.values() if is_cuda_wheel(wheel.file)]
    others = sorted({name for major, name in checks.cuda_majors(new, expected).items() if major != expected})
    if others := others if expected else [wheel.name for wheel in new]:
        fits = f"CUDA {expected}" if expected else "the CPU"
        raise RefusedError(
            f"{addition.target}: not for {fits}, as the parent is: {listed(others, SHOWN)}",
            hint=f"Find the package that requires it, or choose a parent that fits. {CONFLICT}",
        )
    before = {name: package.version for name, package in parent.packages.items()}
    after = before | {name: wheel.version for name, wheel in wheels.items()}
    known = facts.load_facts()
    if conflicts := [conflict for conflict in known.violations(after) if conflict not in known.violations(before)]:
        raise RefusedError(f"{addition.target}: {'; '.join(conflicts)}", hint=CONFLICT)
